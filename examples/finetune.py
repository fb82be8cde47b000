"""Fine-tuning together: a small Llama learns Python's sources, then four members adapt it to Python's manual.

    python examples/finetune.py pretrain     5 million parameters on text A, modules of the standard library
    python examples/finetune.py tune         LoRA on text B, the topics of pydoc, by four members on this computer
    python examples/finetune.py twin         the same in one data-parallel process: mean gradients of four batches
    python examples/finetune.py single       the same batches in one process, each of them a step
    python examples/finetune.py score        losses and scores of all of them, beside the base
    python examples/finetune.py size         another story: what a base of 100 million parameters costs

A first try takes two minutes and learns little: `pretrain --steps 20`, `tune --rounds 2`, `score --questions 30`.
Needs `pip install transformers peft`; nothing is downloaded. All of it lies in the folder `finetune`: the base and
its tokenizer, and of each stage a PEFT adapter, which `PeftModel.from_pretrained` loads. `--seed` repeats a stage.

The base never travels. Each member loads its own copy, and the run holds the hash of what is frozen: a member with
another base is refused (E-ATT-07). Between computers, copy the folder `base` once. Then the first member prints the
ticket, waits for a second one, and the others join with it:

    ATOLL_START_PEERS=2 ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071 python examples/finetune.py member --part 0
    ATOLL_TICKET=ATOLL1:… python examples/finetune.py member --part 1

The score is not the training loss. A question is 32 tokens of topics that no stage trains on, and four
continuations of 8 tokens: the true one, and three from elsewhere in these topics. The answer is the continuation
whose likelihood gains most by the question, beside that after the most frequent token. Chance is 25 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import atoll

# PEFT 0.21 reads a property that transformers 5 renamed
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

MEMBERS, WINDOW, BATCH, RATE = 4, 64, 4, 3e-3
HELD_OUT = 6  # of the topics, every sixth asks the questions
CONTEXT, CONTINUATION, CHOICES = 32, 8, 4
LARGE = ["--tokens", "16384", "--width", "768", "--layers", "12"]  # 97 million parameters


def text_a(characters: int) -> str:
    """Drawn modules from the top of the standard library. The topics of the manual lie deeper."""
    files, texts = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), list[str]()
    for index in torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist():
        texts.append(files[index].read_text("utf-8", "replace"))
        if sum(map(len, texts)) >= characters:
            break
    return "\n".join(texts)


def text_b(part: int | None) -> str:
    """A member's topics, neighbors in the alphabet; None: those that are held out."""
    texts = [topics[name] for name in sorted(topics)]
    learned = [text for index, text in enumerate(texts) if index % HELD_OUT]
    first, last = ((part or 0) * len(learned) // MEMBERS, ((part or 0) + 1) * len(learned) // MEMBERS)
    return "\n".join(texts[::HELD_OUT] if part is None else learned[first:last])


def numbered(folder: Path, text: str) -> Tensor:
    return torch.tensor(Tokenizer.from_file(str(folder / "base" / "tokenizer.json")).encode(text).ids)


def windows(ids: Tensor, seed: int, size: int) -> Iterator[Tensor]:
    """Batches of windows from drawn places, for ever."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        places = torch.randint(len(ids) - WINDOW, (size,), generator=draw)
        yield torch.stack([ids[place : place + WINDOW] for place in places])


def batches(asked: argparse.Namespace, part: int) -> Iterator[Tensor]:
    """The batches of one member; the twin and the single process draw the same ones."""
    return windows(numbered(asked.folder, text_b(part)), MEMBERS * asked.seed + part, BATCH)


def llama(tokens: int, width: int, layers: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": tokens, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 8 * width // 3, "max_position_embeddings": WINDOW}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None))


def base_in(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / "base", local_files_only=True)


def adapted(base: nn.Module, seed: int) -> PeftModel:
    """The base, frozen, and adapters beside its linear layers: what trains, and all that travels."""
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, *some: Tensor, run: atoll.Run | None = None
) -> float:
    """One step with the mean gradient of these batches; returns their mean loss."""
    total = 0.0
    for ids in some:
        loss = model(input_ids=ids, labels=ids).loss / len(some)
        loss.backward()
        total += loss.item()
    if run is not None:
        run.report(total)
    optimizer.step()
    optimizer.zero_grad()
    return total


def pretrain(asked: argparse.Namespace) -> None:
    """The base and its tokenizer, from text A alone."""
    text = text_a(4 * asked.steps * asked.batch * WINDOW)  # a token is about three characters
    bpe, base = ByteLevelBPETokenizer(), asked.folder / "base"
    bpe.train_from_iterator(text.splitlines(keepends=True), vocab_size=asked.tokens, show_progress=False)
    base.mkdir(parents=True, exist_ok=True)
    bpe.save(str(base / "tokenizer.json"))
    drawn = windows(numbered(asked.folder, text), asked.seed, asked.batch)
    torch.manual_seed(asked.seed)
    model = llama(asked.tokens, asked.width, asked.layers)
    print(f"{model.num_parameters():,} parameters learn {len(text):,} characters of Python", flush=True)
    optimizer = optimizer_of(model)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=asked.steps)
    for step in range(1, asked.steps + 1):
        loss = train_step(model, optimizer, next(drawn))
        rate.step()
        if step % 10 == 0 or step == asked.steps:
            print(f"step {step} loss {loss:.4f}", flush=True)
    model.save_pretrained(base)


def tune(asked: argparse.Namespace) -> None:
    """Four members, each a process of its own."""
    numbers = {"--seed": asked.seed, "--rounds": asked.rounds, "--inner-steps": asked.inner_steps}
    words = [str(word) for pair in ({"--folder": asked.folder} | numbers).items() for word in pair]
    atoll.local(__file__, "member", *words, peers=MEMBERS, folder=asked.folder / f"run-{asked.seed}")


def part_of(asked: argparse.Namespace) -> int:
    """As asked, or by the name that `atoll.local` gives its members: peer-1 to peer-4."""
    return int(os.environ.get("ATOLL_NAME", "peer-1").rpartition("-")[2]) - 1 if asked.part is None else asked.part


def member(asked: argparse.Namespace) -> None:
    """A member of the run, with its part of text B. All members leave the same adapter."""
    torch.set_num_threads(1)
    part = part_of(asked)
    model, drawn = adapted(base_in(asked.folder), asked.seed), batches(asked, part)
    optimizer = optimizer_of(model)
    run = atoll.join(or_found={"rounds": asked.rounds, "inner_steps": asked.inner_steps})
    run.attach(model, optimizer, batch=BATCH)
    print(f"part {part}: {run.exchanged:,} values travel, the base of hash {run.base[:16]} does not", flush=True)
    while not run.done:
        before, _ = run.trained, train_step(model, optimizer, next(drawn), run=run)
        if part == 0 and run.trained > before:
            print(f"round {run.trained} loss {run.loss:.4f}", flush=True)
    model.save_pretrained(f"{os.environ.get('ATOLL_DIR', 'atoll-run')}-adapter")
    run.close()


def twin(asked: argparse.Namespace) -> None:
    """The members' batches, if they agreed on the gradient of each step."""
    alone(asked, "twin", lambda model, optimizer, some: train_step(model, optimizer, *some))


def single(asked: argparse.Namespace) -> None:
    """The members' batches, one after the other."""
    alone(
        asked,
        "single",
        lambda model, optimizer, some: statistics.mean(train_step(model, optimizer, ids) for ids in some),
    )


def alone(asked: argparse.Namespace, name: str, learn: Callable[..., float]) -> None:
    model, drawn = adapted(base_in(asked.folder), asked.seed), [batches(asked, part) for part in range(MEMBERS)]
    optimizer = optimizer_of(model)
    for round in range(1, asked.rounds + 1):
        losses = [learn(model, optimizer, [next(one) for one in drawn]) for _ in range(asked.inner_steps)]
        print(f"round {round} loss {statistics.mean(losses):.4f}", flush=True)
    model.save_pretrained(asked.folder / f"{name}-{asked.seed}-adapter")


def score(asked: argparse.Namespace) -> None:
    """Loss and score of the base, and of every adapter in the folder, on the topics that are held out."""
    held = numbered(asked.folder, text_b(None))
    rows = {"base": [measured(base_in(asked.folder), held, asked.questions)]}
    for name, pattern in {"four members": "run-*/peer-1", "data parallel": "twin-*", "single": "single-*"}.items():
        adapters = sorted(asked.folder.glob(f"{pattern}-adapter"))
        models = (PeftModel.from_pretrained(base_in(asked.folder), adapter) for adapter in adapters)
        rows[name] = [measured(model, held, asked.questions) for model in models]
    print(f"{'':<15}seeds  {'held-out loss':<28}right answers")
    for name, found in rows.items():
        losses, shares = [one[0] for one in found], [one[1] for one in found]
        print(f"{name:<15}{len(found):>5}  {spread(losses, '.3f'):<28}{spread(shares, '.1%')}")


@torch.no_grad()
def measured(model: nn.Module, held: Tensor, questions: int) -> tuple[float, float]:
    """Mean loss of the true continuations in nats per token, and the share of questions with the right answer."""
    model.eval()
    draw, right, losses = torch.Generator().manual_seed(0), 0, list[float]()
    frequent = held.mode().values.expand(CHOICES, 1)
    for question in range(questions):
        at = question * (len(held) - CONTEXT - CONTINUATION) // questions
        others = torch.randint(len(held) - CONTINUATION, (CHOICES - 1,), generator=draw)
        choices = torch.stack([held[one : one + CONTINUATION] for one in (at + CONTEXT, *others.tolist())])
        after = losses_of(model, held[at : at + CONTEXT].expand(CHOICES, -1), choices)
        right += int((after - losses_of(model, frequent, choices)).argmin()) == 0
        losses.append(after[0].item())
    return statistics.mean(losses), right / questions


def losses_of(model: nn.Module, contexts: Tensor, continuations: Tensor) -> Tensor:
    """Mean loss of each continuation after its context."""
    ids = torch.cat([contexts, continuations], 1)
    scores = model(input_ids=ids).logits[:, -CONTINUATION - 1 : -1].transpose(1, 2)
    return nn.functional.cross_entropy(scores, continuations, reduction="none").mean(1)


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the least and the largest of several."""
    if len(values) < 2:
        return "".join(format(value, form) for value in values)
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def size(asked: argparse.Namespace) -> None:
    """Two members, three rounds, a random base."""
    atoll.local(__file__, "large", *LARGE, peers=2, folder=asked.folder / "size")
    print("The first member's bytes include the adapters with which the other one began.")
    print("This shows size only: base and tokens are random, and nothing of use is learned.")


def large(asked: argparse.Namespace) -> None:
    """A member of `size`. All build the base from one seed, so that it need not be copied either."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = adapted(llama(asked.tokens, asked.width, asked.layers), 0)
    optimizer, draw = optimizer_of(model), torch.Generator().manual_seed(part_of(asked))
    run = atoll.join(or_found={"rounds": 3, "inner_steps": 2}).attach(model, optimizer, batch=1)
    while not run.done:
        train_step(model, optimizer, torch.randint(asked.tokens, (1, WINDOW), generator=draw), run=run)
    loop = psutil.Process()
    used = [sum(one.memory_info().rss for one in some) / 2**20 for some in ([loop], loop.children())]
    run.close()
    command = [sys.executable, "-m", "atoll", "status", os.environ["ATOLL_DIR"], "--json"]
    sent = json.loads(subprocess.check_output(command))["bytes_out"] / run.trained  # noqa: S603
    values = sum(p.numel() for p in model.parameters())
    print(
        f"{values:,} values, of which {run.exchanged:,} travel: {sent:,.0f} bytes sent per round; "
        f"{used[0]:,.0f} MiB of memory in the loop, {used[1]:,.0f} MiB in its peer",
        flush=True,
    )


STAGES = {stage.__name__: stage for stage in (pretrain, tune, twin, single, score, size, member, large)}


class DescriptionAndDefaults(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Help with the description as it stands, and the default of each option."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=DescriptionAndDefaults)
    asked.add_argument("stage", choices=STAGES, help="see above")
    asked.add_argument("--folder", type=Path, default=Path("finetune"), help="place of base, run and adapters")
    asked.add_argument("--seed", type=int, default=0, help="of drawn values and batches")
    asked.add_argument("--part", type=int, help=f"of text B, 0 to {MEMBERS - 1}; None: by ATOLL_NAME")
    asked.add_argument("--rounds", type=int, default=8, help="rounds of tune, twin and single")
    asked.add_argument("--inner-steps", type=int, default=10, help="steps of a member in each round")
    asked.add_argument("--questions", type=int, default=300, help="questions of score")
    base = asked.add_argument_group("pretrain")
    base.add_argument("--steps", type=int, default=200, help="steps in all")
    base.add_argument("--batch", type=int, default=16, help=f"windows of {WINDOW} tokens in a step")
    base.add_argument("--tokens", type=int, default=2048, help="tokens of the vocabulary")
    base.add_argument("--width", type=int, default=256, help="values of a hidden state")
    base.add_argument("--layers", type=int, default=6, help="layers of the model")
    options = asked.parse_args()
    disable_progress_bar()
    STAGES[options.stage](options)


if __name__ == "__main__":
    main()
