"""Iterator of a user loop over the shards of the run's data set, `run.data(…)`.

What the loop has received before `optimizer.step()` is behind that step, or with `per_step` so many samples, oldest
first. The vertex that counts the step moves the positions of its shards.

Invariants:
- Samples of one shard are given out in order. A shard is read on from where the peer says, or from what the loop
  still holds.
Not responsible for: which shards are read here (policy/data/positions.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from atoll.base.errors import UsageError
from atoll.base.limits import DATA_SHARDS_MAX
from atoll.training.data.shards.sources import ShardSource
from atoll.wire.data_ranges import AssignedShard, DataRange, RoundDataShards, joined

BACKLOG_STEPS = 8  # steps' worth of samples that a loader may read ahead
FEW_SAMPLES = (
    f"a round ended early: {DATA_SHARDS_MAX} shards, the most that one member reads in a round, hold fewer samples "
    "than its steps take; for the next run, pass fewer shards to run.data at all members"
)
log = logging.getLogger("atoll")  # messages for the user of a loop


class AssignedShardsDataset(IterableDataset[Any]):
    """Endless samples of the run's data set for this member; ends when the run is over.

    An `IterableDataset`: give it to a `DataLoader` without workers, or iterate over it.
    """

    def __init__(self, source: ShardSource, per_step: int, wait: Callable[[], bool]) -> None:
        self.name = source.name
        self._source, self._per_step, self._wait = source, per_step, wait
        self._places: dict[int, int] = {}  # shard to read → its next sample
        self._again: tuple[AssignedShard, ...] = ()  # to read if these are too few for one step
        self._assigned = 0  # shards to read in this round; -1: it was reported that they hold too few samples
        self._given: list[DataRange] = []  # given out, and not behind a step
        self._reading: tuple[int, int, Iterator[tuple[Any, bool]]] | None = None  # shard, next sample, samples

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise UsageError(
                "E-DATA-03",
                "run.data(…) is read in a worker of a DataLoader, which cannot know the round",
                fix="use num_workers=0; what takes long can be done in collate_fn or in threads",
            )
        while self._places or self._wait_for_shards():
            if not self._places:
                continue
            shard, at = next(iter(self._places.items()))
            if self._reading is None or self._reading[:2] != (shard, at):
                self._reading = shard, at, self._source.read(shard, at)
            sample, is_last = next(self._reading[2], (None, None))
            if is_last is None:  # an empty shard, or one that the run has read to its end
                self._advance(shard, DataRange(shard, at, at, True))
                continue
            self._advance(shard, DataRange(shard, at, at + 1, is_last))
            yield sample

    def _wait_for_shards(self) -> bool:
        if self._assigned == DATA_SHARDS_MAX:
            log.warning(FEW_SAMPLES)
            self._assigned = -1
        return self._wait()

    def _advance(self, shard: int, given: DataRange) -> None:
        self._given = [*self._given[:-1], *joined((*self._given[-1:], given))]
        if given.ends:
            del self._places[shard]
            self._reading = None
        else:
            assert self._reading is not None
            self._places[shard] = given.until
            self._reading = shard, given.until, self._reading[2]

    # ---- what the run calls --------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether no shard is left to read."""
        return not self._places

    @property
    def has_given(self) -> bool:
        """Whether samples were given out that no step has used."""
        return any(given.until > given.first for given in self._given)

    def assign(self, shards: RoundDataShards, held: Iterable[DataRange]) -> None:
        """Read these shards from now on. `held`: ranges behind steps that were not handed over."""
        unsettled = (*held, *self._given)
        self._places, self._again = {}, shards.again
        for shard, position in shards.ahead:
            mine = [one for one in unsettled if one.shard == shard]
            if not any(one.ends for one in mine):
                self._places[shard] = max([position, *(one.until for one in mine)])
        if self._assigned >= 0:
            self._assigned = len(self._places)

    def read_again(self) -> bool:
        """Go on with shards of an update that was not counted; False if there is none."""
        self._places, self._again = dict(self._again), ()
        return bool(self._places)

    def take_step(self) -> tuple[DataRange, ...]:
        """The samples behind the step that the loop has just taken."""
        if not self._per_step:
            taken, self._given = tuple(self._given), []
            return taken
        taken, self._given = _split(self._given, self._per_step)
        if sum(left.until - left.first for left in self._given) > BACKLOG_STEPS * self._per_step:
            raise UsageError(
                "E-DATA-04",
                f"the loop reads more than the {self._per_step} samples per step that run.data(per_step=) names",
                cause="a step has more samples, or GradScaler left out steps, without a call of optimizer.step()",
                fix="name the samples of one optimizer step, accumulated ones included; with GradScaler, leave "
                "per_step out or make the optimizer with fused=True",
            )
        return taken

    def forget_places(self) -> None:
        """Steps were dropped, or the run is over: the next assignment says where to read on."""
        self._places, self._again, self._assigned = {}, (), min(0, self._assigned)

    # ---- for checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this member reads, for a checkpoint; a run brings its own positions back."""
        return {"name": self.name.hex(), "shards": {str(shard): at for shard, at in self._places.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a checkpoint is of the same data set. Positions come from the run, which may be further."""
        if state.get("name") != self.name.hex():
            raise UsageError(
                "E-DATA-05",
                "the checkpoint was made with other data: another length, number of shards, seed or order",
                fix="pass the data set and the arguments of run.data(…) that it was made with",
            )


def _split(ranges: list[DataRange], samples: int) -> tuple[tuple[DataRange, ...], list[DataRange]]:
    """The first `samples` of these ranges, and the rest."""
    taken: list[DataRange] = []
    left = list(ranges)
    while left and (samples or left[0].first == left[0].until):
        one = left.pop(0)
        if one.until - one.first > samples:
            left.insert(0, one._replace(first=one.first + samples))
            one = DataRange(one.shard, one.first, one.first + samples)
        samples -= one.until - one.first
        taken.append(one)
    return tuple(taken), left
