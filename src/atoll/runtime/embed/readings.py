"""What a loop reads of its run: round, members, loss, model, its slice of the data.

Not responsible for: steps and hand-overs (`run.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.runtime.embed.messages import AgreedReadings


@dataclass
class RunProgress:
    """What a loop knows of its run."""

    ticket: str
    peer: str = ""
    round: int = -1
    trained: int = 0
    members: int = 0
    loss: float = math.nan
    done: bool = False
    model_file: str = ""
    exchanged: int = 0
    base: str = ""
    shard: tuple[int, int] = 0, 1  # index and count
    round_steps: int = 0  # optimizer steps of this member in the round

    def update(self, read: AgreedReadings) -> None:
        """Take over the figures of the last agreed round."""
        self.round, self.trained, self.members = read.round, read.trained, read.members
        self.loss = math.nan if read.loss is None else read.loss


class RunReadings:
    """Properties of `Run` that follow the run."""

    _seen: RunProgress

    @property
    def done(self) -> bool:
        """True once the run is over and the model holds the agreed parameters: `while not run.done`."""
        return self._seen.done

    @property
    def peer(self) -> str:
        """Id of this process in the run; empty before `attach`."""
        return self._seen.peer

    @property
    def round(self) -> int:
        """Number of the last agreed round in the history, as commands take it; -1 before the first one. Rounds in
        which members only assemble count, too: people count `trained`.
        """
        return self._seen.round

    @property
    def trained(self) -> int:
        """Agreed training rounds so far, as progress lines and `atoll status` count: the one for people."""
        return self._seen.trained

    @property
    def round_steps(self) -> int:
        """Optimizer steps that this member takes in a round, as the current round asks for; 0 before `attach`."""
        return self._seen.round_steps

    @property
    def members(self) -> int:
        """Members present in the last agreed membership, this one included."""
        return self._seen.members

    @property
    def loss(self) -> float:
        """Mean training loss that members reported for the last agreed round; nan if no member did."""
        return self._seen.loss

    @property
    def model_file(self) -> str:
        """File with the agreed model, in the folder of this peer; empty before the end of the run."""
        return self._seen.model_file

    @property
    def exchanged(self) -> int:
        """Number of values that travel: all of the model, or its adapters; 0 before `attach`."""
        return self._seen.exchanged

    @property
    def base(self) -> str:
        """Digest of the values that do not travel; empty if all do."""
        return self._seen.base

    @property
    def shard_index(self) -> int:
        """This member's slice of the data in this round, 0 … shard_count - 1; see `shard`."""
        return self._seen.shard[0]

    @property
    def shard_count(self) -> int:
        """Number of slices of the data in this round; see `shard`."""
        return self._seen.shard[1]
