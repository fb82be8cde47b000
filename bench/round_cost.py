"""What a round costs besides its steps: processor seconds of a peer and of its trainer, stage by stage.

    python bench/round_cost.py [--json] [--quick] [--model gpt-10m] [--members 2] [--rounds 8]

One island on a real folder and its real trainer do what a round asks of them, one thing after another; the other
members' rows are copies of its own. Networks, encryption and votes are left out (bench/transport.py, agreement.py
have them). Processor seconds are those of all threads, so other load on the computer changes them little; what
the kernel does later with pages that were written is in nobody's. Medians over the rounds, the first six left out.
`wait_s` is the time a stage took, `peer_s` and `trainer_s` are processor seconds.
Linux alone: /proc has a trainer's nanoseconds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import psutil
import torch
from form import asking, report, versions

from atoll.base.ids import Digest, PeerId
from atoll.peer.config.sections import KeepSection
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import AdoptState, AdvanceState, EncodeUpdate, RestoreState, TrainRound
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.runtime.storage import blob_retention
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.training.codec.compiled import native
from atoll.training.recipe.recipes import diloco, with_overlap

STAGES = ("hand over", "encode", "combine", "advance", "adopt", "take in")
WARM_UP = 6  # rounds: files and memory are made in them that later ones use again


class Clock:
    """Seconds, of the wall and of both processors, by stage."""

    def __init__(self, trainer_pid: int) -> None:
        self._schedstat = Path(f"/proc/{trainer_pid}/schedstat")
        self.spent: dict[str, list[tuple[float, float, float]]] = {stage: [] for stage in STAGES}

    def now(self) -> tuple[float, float, float]:
        trainer_ns = int(self._schedstat.read_text().split()[0])
        return time.monotonic(), time.process_time(), trainer_ns / 1e9

    async def over(self, stage: str, work: Awaitable[Any]) -> Any:
        before = self.now()
        answer = await work
        self.spent[stage].append(tuple(b - a for a, b in zip(before, self.now(), strict=True)))
        return answer


async def play(island: TrainingWorker, clock: Clock, state: Digest, members: int, rounds: int) -> None:
    shares = (1,) * members
    peers = [PeerId(str(k)) for k in range(members)]
    draw = torch.Generator().manual_seed(1)
    for number in range(rounds):
        assert island.head is not None
        moved_F = island.head.anchor_F + torch.randn(len(island.head.anchor_F), generator=draw) * 1e-3
        await island.trainer.write_x(moved_F)  # as if it had trained
        await clock.over("hand over", island.run(TrainRound(number, 0, 600.0, 0, members)))
        encoded = await clock.over("encode", island.run(EncodeUpdate(number, shares)))
        answers = []
        for part, payload in enumerate(encoded.parts):
            rows = tuple(TaskRow(peer, 128, payload, (peer,)) for peer in peers)
            combine = island.run(CombineRows(number, part, shares, rows))
            answers.append((await (combine if part else clock.over("combine", combine))).payload)
        advance = AdvanceState(number, state, tuple(answers), 32, 128 * members, members, shares)
        state = (await clock.over("advance", island.run(advance))).state
        vertex = Digest(number.to_bytes(32, "big"))
        await clock.over("adopt", island.run(AdoptState(number, vertex, state, (True,) * members)))
        await clock.over("take in", island.live.wait_merged())


def measure(model: str, members: int, rounds: int) -> dict[str, dict[str, float]]:
    recipe = with_overlap(diloco(model, rounds=99, inner_steps=32, batch=4, seq_len=64), 8, None)
    native.load()  # compiling is no round's business
    blob_retention.STATES_KEPT_S = (
        0.0  # rounds follow each other at once here: as if each took as long as states are kept
    )

    async def told(base: Path) -> Clock:
        founded = founding_blobs(start_of_built_in(recipe, "stdlib"), RunSettings())
        store = PeerStore(base)
        island = TrainingWorker(store, 1, keep=KeepSection(newest=2))
        island.learning = parse_training_spec(founded.settings)
        island.equip("stdlib")
        try:
            state = store.put_blob(founded.state)
            assert await island.run(RestoreState(-1, Digest(bytes(32)), state))
            await island.warm_up()
            (trainer,) = psutil.Process().children()
            clock = Clock(trainer.pid)
            await play(island, clock, state, members, rounds + WARM_UP)
            return clock
        finally:
            await island.close()
            store.close()

    with tempfile.TemporaryDirectory() as base:
        spent = asyncio.run(told(Path(base))).spent
    middle = {
        stage: [statistics.median(column) for column in zip(*seconds[WARM_UP:], strict=True)]
        for stage, seconds in spent.items()
    }
    middle["all"] = [sum(column) for column in zip(*middle.values(), strict=True)]
    return {
        stage: dict(zip(("wait_s", "peer_s", "trainer_s"), (round(s, 4) for s in seconds), strict=True))
        for stage, seconds in middle.items()
    }


def main() -> None:
    asked = asking(__doc__, "three rounds")
    asked.add_argument("--model", default="gpt-10m")
    asked.add_argument("--members", type=int, default=2)
    asked.add_argument("--rounds", type=int, default=0, help="measured ones; default 8, quick 3")
    options = asked.parse_args()
    rounds = options.rounds or (3 if options.quick else 8)
    found_by_stage = measure(options.model, options.members, rounds)
    if not options.json:
        print(f"{'':12s}{'wait_s':>9s}{'peer_s':>9s}{'trainer_s':>11s}")
        for stage, seconds in found_by_stage.items():
            print(f"{stage:12s}{seconds['wait_s']:9.3f}{seconds['peer_s']:9.3f}{seconds['trainer_s']:11.3f}")
        return
    settings = {"model": options.model, "members": options.members, "rounds": rounds}
    print(report("round_cost", settings, found_by_stage, versions("torch")))


if __name__ == "__main__":
    main()
