"""All that only a GPU can tell: the bytes of codecs, copies, all-reduces, and a run of two GPT-2-sized loops on it.

    python bench/gpu.py [--only bytes,copies,allreduce,loops] [--device cuda] [--quick] [--json]
                        [--model gpt:d=768,l=12,h=12,t=1024,v=50257] [--batch 4] [--rounds 5] [--steps 20]

`make gpu` runs it behind the tests that need a GPU. Without a GPU it says so and ends well. `--device cpu --quick`
runs the same code with a small model on a CPU, to see that it works; its figures say nothing about GPUs.

    bytes      every codec encodes and decodes the same vector on the CPU and on the device; GB/s of fp32
    copies     the model's values to the host and back, in GB/s; `pinned`: the shared memory of peer and loop
    allreduce  two members, one GPU: bench/allreduce.py beside gloo; NCCL needs a GPU for each
    loops      two attached loops share the GPU: DiLoCo, int8 both ways, bf16, random weights and tokens. Memory in
               MB at the end of each stage and at its peak; `host` is the loop with its peer process. `exchange_s`
               is the time of the step that ends a round, the wait for the other loop included.

Ends with 1 if bytes differ, if both loops do not end with the same bits, or if a part fails; the others run on.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch
from form import asking, report, versions
from systems import probe
from systems.peer import own_answers
from torch import Tensor

import atoll
from atoll.crypto.digest import digest
from atoll.runtime.system import anonymous_file
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.codec import CODECS, codec_named
from atoll.training.codec.compiled.device import is_supported_on
from atoll.training.exchange.layout import flatten, layout_of, unflatten
from atoll.training.models import build_model, loss_of, spec_of

HERE = Path(__file__).resolve()
PARTS = ("bytes", "copies", "allreduce", "loops")
GPT2, SMALL = "gpt:d=768,l=12,h=12,t=1024,v=50257", "gpt:d=32,l=1,h=2,t=32,v=300"
CHAINS = ("topk:0.1+int8", "dct+int8", "2bit+zstd:3")  # beside all plain codecs
PEERS, REPEAT, MB, GB = 2, 3, 1e6, 1e9
SECONDS_MAX = 400  # of one part that runs in processes of its own


# ---- the same bytes ----------------------------------------------------------------------------------------


def bytes_of_codecs(device: str, quick: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    here_N = torch.randn(2**17 + 77 if quick else 2**23 + 77, generator=generator).pow_(3).mul_(1e-3)
    there_N, out_N = here_N.to(device), torch.empty_like(here_N, device=device)
    rows = []
    for name in (*CODECS, *CHAINS):
        codec = codec_named(name)
        on_device = is_supported_on(codec, there_N)  # the first call tries the device
        wire, cpu_s = timed(lambda codec=codec: codec.encode(here_N))
        wire_there, encode_s = timed(lambda codec=codec: codec.encode(there_N))
        _, decode_s = timed(lambda codec=codec, wire=wire: codec.decode_into(wire, out_N))
        same_values = torch.equal(bits(out_N.cpu()), bits(codec.decode(wire, len(here_N))))
        rate = [round(4 * len(here_N) / GB / seconds, 2) for seconds in (cpu_s, encode_s, decode_s)]
        rows.append(
            {
                "codec": name,
                "on_device": on_device,
                "same_bytes": bytes(wire_there) == bytes(wire),
                "same_values": same_values,
                **dict(zip(("cpu_encode_gb_s", "encode_gb_s", "decode_gb_s"), rate, strict=True)),
            }
        )
    return rows


def bits(x_N: Tensor) -> Tensor:
    return x_N.view(torch.int32)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What the work returns, and its median time; the first call is not counted."""
    seconds, answer = [], work()
    for _ in range(REPEAT):
        wait_for_device()
        began = time.monotonic()
        answer = work()
        wait_for_device()
        seconds.append(time.monotonic() - began)
    return answer, statistics.median(seconds)


def wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ---- copies ------------------------------------------------------------------------------------------------


def copies(device: str, model_name: str) -> list[dict[str, Any]]:
    model = build_model(model_name, 0).to(device)
    layout = layout_of(model)
    (values_F, counters_K), x_F, rows = flatten(model, layout), torch.zeros(layout.floats, device=device), []

    def row(what: str, pinned: bool, work: Callable[[], Any]) -> None:
        _, seconds = timed(work)
        rate = round(4 * layout.floats / GB / seconds, 2)
        rows.append({"copy": what, "pinned": pinned, "seconds": float(f"{seconds:.3g}"), "gb_s": rate})

    for wanted in (False, True):
        fd = anonymous_file()
        mailbox = SharedMailbox(fd, layout.floats, 8)
        os.close(fd)
        if wanted:
            mailbox.pin(x_F.device)
        shared_F, pinned = mailbox.x_F, bool(device != "cpu" and mailbox.x_F.is_pinned())
        row("vector to shared memory", pinned, lambda shared_F=shared_F: shared_F.copy_(x_F))
        row("shared memory to vector", pinned, lambda shared_F=shared_F: x_F.copy_(shared_F))
        row("shared memory to model", pinned, lambda s=shared_F: unflatten(s, counters_K, model, layout))
    row("model to vector of the host", device != "cpu" and values_F.is_pinned(), lambda: flatten(model, layout))
    return rows


# ---- all-reduces -------------------------------------------------------------------------------------------


def all_reduces(device: str, quick: bool) -> list[dict[str, Any]]:
    words = ["--device", device, "--peers", str(PEERS), "--against", "gloo", "--json"]
    words += ["--codec", "fp32,int8" if quick else "fp32,fp16,int8,2bit"]
    words += ["--megabytes", "4" if quick else "100", "--repeat", "1" if quick else "5"]
    rows = json.loads(answer_of([str(HERE.with_name("allreduce.py")), *words]))["figures"]
    count = torch.cuda.device_count()
    if device != "cpu" and count < PEERS:
        return [*rows, {"system": "nccl", "trouble": f"needs {PEERS} GPUs, and {count} is here"}]
    backend, values = "gloo" if device == "cpu" else "nccl", (4 if quick else 100) * 10**6 // 4
    with tempfile.TemporaryDirectory() as folder:
        told = [str(HERE), "--rank", json.dumps({"backend": backend, "values": values, "store": f"{folder}/store"})]
        ranks = [started([*told, "--peer", str(rank)]) for rank in range(PEERS)]
        seconds = [float(output_of(rank)) for rank in ranks]
    return [*rows, {"system": f"{backend} (torch)", "codec": "fp32", "seconds_median": round(max(seconds), 4)}]


def collective(rank: int, backend: str, values: int, store: str) -> float:
    """Median time of an all-reduce of torch.distributed, with a GPU for each rank if there is one."""
    import torch.distributed as dist

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, store=dist.FileStore(store, PEERS), rank=rank, world_size=PEERS)
    x_N = torch.ones(values, device=device)
    _, seconds = timed(lambda: dist.all_reduce(x_N))
    dist.destroy_process_group()
    return seconds


def started(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    try:
        answer, _ = process.communicate(timeout=SECONDS_MAX)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, process.args))[:200]} ended with {process.returncode}")
    return answer


def answer_of(words: list[str]) -> str:
    return output_of(started(words))


# ---- two loops ---------------------------------------------------------------------------------------------


def loops(device: str, settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as base:
        words = json.dumps(settings | {"device": device, "out": base})
        atoll.local(HERE, "--loop", words, peers=PEERS, folder=Path(base) / "swarm")
        ends = [json.loads(file.read_text()) for file in sorted(Path(base).glob("*.json"))]
    tokens = PEERS * settings["steps"] * settings["batch"] * spec_of(settings["model"]).numbers["t"]
    rounds_s = [second for end in ends for second in end["rounds_s"]]
    return {
        "parameters": ends[0]["parameters"],
        "rounds": ends[0]["trained"],
        "round_s": round(statistics.median(rounds_s), 3),
        "exchange_s": round(statistics.median(s for end in ends for s in end["exchanges_s"]), 3),
        "step_s": round(statistics.median(end["step_s"] for end in ends), 4),
        "tokens_per_s": round(tokens / statistics.median(rounds_s)),
        "same_bits": len({end["digest"] for end in ends}) == 1,
        "stages": [{"loop": end["name"], **stage} for end in ends for stage in end["stages"]],
    }


class LoopMemory:
    """Memory of one loop by stage, in MB: of the device by torch's allocator, of the host with the peer process."""

    def __init__(self, device: str) -> None:
        self.on_gpu, self.stages = device != "cpu", list[dict[str, Any]]()
        self._forget()

    def end(self, stage: str) -> None:
        row: dict[str, Any] = {"stage": stage}
        if self.on_gpu:
            row |= {"device": torch.cuda.memory_allocated(), "device_peak": torch.cuda.max_memory_allocated()}
        row |= {name: probe.memory_bytes(os.getpid(), name == "host_peak") for name in ("host", "host_peak")}
        self.stages.append({key: value if key == "stage" else round(value / MB) for key, value in row.items()})
        self._forget()

    def _forget(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        probe.forget_peak(os.getpid())


def loop(device: str, model: str, batch: int, rounds: int, steps: int, out: str) -> None:
    """One member of the run: a loop as a user writes it, with clocks."""
    from atoll.runtime.embed.options import RunOptions

    torch.manual_seed(1)
    memory, numbers = LoopMemory(device), spec_of(model).numbers
    network = build_model(model, 0).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=device != "cpu")
    memory.end("model")

    def step() -> float:
        """Forward, backward and the optimizer; seconds in the optimizer, where rounds end."""
        tokens = torch.randint(numbers["v"], (batch, numbers["t"] + 1), device=device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            loss = loss_of(network, (tokens[:, :-1], tokens[:, 1:]))
        loss.backward()
        wait_for_device()
        began = time.monotonic()
        optimizer.step()
        wait_for_device()
        took_s = time.monotonic() - began
        optimizer.zero_grad(set_to_none=True)
        return took_s

    for _ in range(3):  # moments come into being; nothing is compiled later
        step()
    memory.end("steps alone")
    options = RunOptions(up="int8", down="int8")
    run = atoll.join(or_found={"rounds": rounds, "inner_steps": steps, "options": options})
    with run:
        run.attach(network, optimizer, batch=batch)
        memory.end("attach")
        closed, exchanges, step_s = [time.monotonic()], [], []
        while not run.done:
            before, began = run.trained, time.monotonic()
            took_s = step()
            if run.trained > before:
                exchanges.append(took_s)
                closed.append(time.monotonic())
                memory.end(f"round {run.trained}")
            else:
                step_s.append(time.monotonic() - began)
        end = {
            "name": os.environ["ATOLL_NAME"],
            "parameters": sum(p.numel() for p in network.parameters()),
            "trained": run.trained,
            "rounds_s": [after - before for before, after in pairwise(closed)],
            "exchanges_s": exchanges,
            "step_s": statistics.median(step_s),
            "digest": digest(flatten(network, layout_of(network))[0].numpy().data.cast("B")).hex(),
            "stages": memory.stages,
        }
    Path(out, f"{end['name']}.json").write_text(json.dumps(end))


# ---- all together ------------------------------------------------------------------------------------------


def is_wrong(part: str, figures: Any) -> bool:
    match part:
        case "bytes":
            return not all(row["same_bytes"] and row["same_values"] for row in figures)
        case "loops":
            return not figures["same_bits"]
        case _:
            return False


def measure(
    parts: list[str], device: str, settings: dict[str, Any], quick: bool, out: TextIO
) -> tuple[dict[str, Any], bool]:
    """(figures of each part, whether all is as it should be); writes a table as soon as a part is over."""
    work: dict[str, Callable[[], Any]] = {
        "bytes": lambda: bytes_of_codecs(device, quick),
        "copies": lambda: copies(device, settings["model"]),
        "allreduce": lambda: all_reduces(device, quick),
        "loops": lambda: loops(device, settings),
    }
    figures, fine = dict[str, Any](), True
    for part in parts:
        try:
            figures[part] = work[part]()
            fine &= not is_wrong(part, figures[part])
        except Exception as trouble:  # one run on a GPU has to tell as much as it can
            figures[part], fine = {"trouble": f"{type(trouble).__name__}: {trouble}"[:500]}, False
        print(text_of(part, figures[part]), file=out, flush=True)
    return figures, fine


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([str(row.get(key, "-")) for key in columns] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join("  ".join(word.rjust(w) for word, w in zip(line, widths, strict=True)) for line in cells)


def text_of(part: str, found: Any) -> str:
    rows = found if isinstance(found, list) else [{k: v for k, v in found.items() if k != "stages"}]
    stages = found.get("stages", []) if isinstance(found, dict) else []
    return "\n".join([f"{part}:", table(rows), *([table(stages)] if stages else [])])


def main() -> None:
    asked = asking(__doc__, "small sizes; on a CPU a small model, too")
    asked.add_argument("--only", default=",".join(PARTS), help="comma between several parts")
    asked.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try the code")
    asked.add_argument("--model", help=f"of the loops and the copies; {GPT2}")
    asked.add_argument("--batch", type=int, help="samples per step of a loop; 4")
    asked.add_argument("--rounds", type=int, help="5, with --quick 2")
    asked.add_argument("--steps", type=int, help="per round; 20, with --quick 4")
    asked.add_argument("--loop", help="internal: one loop of the run")
    asked.add_argument("--rank", help="internal: one rank of torch.distributed")
    asked.add_argument("--peer", type=int, default=0, help="internal: its number")
    options = asked.parse_args()
    if unknown := set(options.only.split(",")) - set(PARTS):
        asked.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    if options.loop:
        return loop(**json.loads(options.loop))
    if options.rank:
        print(collective(options.peer, **json.loads(options.rank)))
        return None
    if options.device != "cpu" and not torch.cuda.is_available():
        why = f"no GPU here: PyTorch {torch.__version__} finds none"
        print(json.dumps({"bench": "gpu", "skipped": why}) if options.json else why)
        return None
    answers = own_answers()
    is_small = options.quick and options.device == "cpu"
    settings = {
        "model": options.model or (SMALL if is_small else GPT2),
        "batch": options.batch or 4,
        "rounds": options.rounds or (2 if options.quick else 5),
        "steps": options.steps or (4 if options.quick else 20),
    }
    gpu = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "none"
    said = settings | {"device": options.device, "gpu": gpu, "peers": PEERS}
    out = sys.stderr if options.json else answers
    print(f"GPU: {gpu}", file=out, flush=True)
    figures, fine = measure(options.only.split(","), options.device, settings, options.quick, out)
    if options.json:
        print(report("gpu", said, figures, versions("torch")), file=answers, flush=True)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
