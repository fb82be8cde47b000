"""One all-reduce call: its terms, its values while it is in progress, and its result."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.crypto.digest import Buffer, digest
from atoll.peer.round.topology_choice import ASKED, PAIRS
from atoll.runtime.allreduce.delta_reference import DeltaReference
from atoll.runtime.allreduce.flatten import ON_HOST, DeviceStream, moved
from atoll.training.codec import Codec, SharedKnowledge, pack_spans
from atoll.training.codec.blocks import Room, spans_of
from atoll.training.codec.compiled.device import pack_on_device
from atoll.training.recipe.update import TensorPlace
from atoll.worker.downlink_error_feedback import DownlinkErrorFeedback

SAMPLE_VALUES = 2**20
# sample input that shows how long a codec's wires are
SAMPLE = SharedKnowledge(seed=b"sample", shapes=((2**10, 2**10),))
SHAPED = frozenset({"lowrank", "changed"})  # codecs that need the shapes of the tensors
GATHERED = "gathered"  # way back without a codec: results are the rows themselves, and every member combines them
HELD = "held="  # keyword of the delta reference in a commit
Cuts = tuple[tuple[int, int], ...]  # [lo, hi) of every part
Part = tuple[tuple[int, int], tuple[PeerId, ...]]  # [lo, hi) of the fused values, and the contributors


class GroupTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms that genesis fixes for a group. Strict decoding: a training run must not be read as a group."""

    codec: str = "fp32"
    way_back: str = ""  # codec of the combined parts; empty: the same one; or GATHERED
    timeout_s: Seconds = 60.0


def is_shaped(name: str) -> bool:
    return not SHAPED.isdisjoint(stage.partition(":")[0] for stage in name.split("+"))


def asked_for(codec: str, topology: str, tensors: tuple[TensorPlace, ...] = (), held: str = "") -> str:
    """Deviations of a call from its group, as text in which members commit to it; empty: none.

    `tensors` are the shapes if a codec needs them, since rows of other shapes would decode wrongly. `held` is the
    digest of the delta reference.
    """
    shapes = digest(repr([tuple(tensor) for tensor in tensors]).encode()).hex()[:16] if tensors else ""
    words = f"{ASKED}{topology}", f"codec={codec}", f"shapes={shapes}", f"{HELD}{held}"
    return " ".join(word for word in words if not word.endswith("="))


def but_for_held(asked: str) -> str:
    return " ".join(word for word in asked.split(" ") if not word.startswith(HELD))


@dataclass(frozen=True)
class ReduceResult:
    """Outcome of an all-reduce. Peers are ids, in order."""

    round: int
    contributors: tuple[PeerId, ...]  # members in at least one part of the mean
    partly: tuple[PeerId, ...]  # contributors that are missing from a part
    missing: tuple[PeerId, ...]  # members in no part
    parts: tuple[Part, ...]
    """A slice without a result names no contributor, and keeps this member's own values."""
    topology: str = ""  # topology of the reduction

    @property
    def complete(self) -> bool:
        """True if every value is the mean over all contributors."""
        return not self.partly and all(names for (lo, hi), names in self.parts if hi > lo)


@dataclass
class ReduceCall:
    """One slice of one all-reduce: `flat_N` is read during the call and overwritten when it is agreed."""

    flat_N: Tensor  # (N,) fp32, on the host or on a GPU
    weight: int
    codec: str
    owed_N: Tensor | None = None
    """(N,) what earlier calls left out, where this one feeds errors back. May lie elsewhere than the vector."""
    topology: str = ""  # topology that the caller chose instead of the group's
    tensors: tuple[TensorPlace, ...] = ()  # tensors within `flat_N`, for codecs that need shapes
    owing: DownlinkErrorFeedback | None = None  # residuals of local results for these tensors, if owners remember
    at: int = 0  # offset of `flat_N` within the whole call, and size of that call
    whole: int = 0
    held: DeltaReference | None = None  # user's reference mean of these tensors
    lane: DeviceStream = ON_HOST  # stream in which `flat_N` is worked on
    future: Future[ReduceResult] = field(default_factory=Future[ReduceResult])
    written: int = 0  # values of `flat_N` up to here may hold the mean, or an unreadable part of it
    cuts: Cuts = ()
    left_N: Tensor | None = None  # (N,) values that its rows leave out, owed where the agreed mean contains them
    members: int = 1  # in pairs: number of consecutive parts with the same rows
    mixed: int = -1  # round in which another member held another mean or none, so nothing is added up
    sent_whole: bool = False  # True if this attempt sends whole values instead of differences
    from_N: Tensor | None = None  # (N,) reference of the differences in its rows
    from_name: str = ""
    made: dict[tuple[int, Digest], Tensor] = field(default_factory=dict[tuple[int, Digest], Tensor])
    """In pairs: (part, digest of its result) → mean that this member computed. Attempts may differ, and the vertex
    decides which of them counts."""

    @property
    def paired(self) -> bool:
        return self.topology == PAIRS

    def coded_as(self, part: int) -> int:
        """Part that seeds the codec: a row of several parts is encoded once."""
        return part - part % self.members

    def load_reference(self) -> None:
        """Load the reference that an earlier call of the same tensors agreed on."""
        if self.held is not None and not self.sent_whole:
            self.from_name, self.from_N = self.held.slice(self.at, len(self.flat_N))

    def row(self, lo: int, hi: int) -> Tensor:
        """(hi - lo,) values to send: the tensors, or their difference from the reference."""
        return self.flat_N[lo:hi] if self.from_N is None else self.flat_N[lo:hi] - self.from_N[lo:hi]

    def encoded(self, codec: Codec, lo: int, hi: int) -> Buffer:
        x_N = self.row(lo, hi)
        if self.owed_N is None or self.left_N is None:
            return codec.encode(x_N)
        owed_N, left_N = moved(self.owed_N[lo:hi], x_N), self.left_N[lo:hi]
        if x_N.is_cuda:
            return pack_on_device(codec, x_N, owed_N, left_N)
        return pack_spans(codec, (x_N[a:b] for a, b in spans_of(hi - lo)), owed_N, 1.0, left_N)

    def encoded_apart(self, codec: Codec, lo: int, hi: int, room: Room) -> Buffer:
        """Encode into separate memory: the mean overwrites the tensor before rows are shown."""
        if self.owed_N is not None or self.flat_N.is_cuda or codec.spanwise is None:  # copies in any case
            return self.encoded(codec, lo, hi)
        x_N = self.row(lo, hi)
        return codec.encode_spans(hi - lo, (x_N[a:b] for a, b in spans_of(hi - lo)), room)

    def settle(self, lo: int, hi: int, counted: bool) -> None:
        """Settle the residual of an agreed part, before the mean overwrites its values. `counted`: the local row is
        in it.
        """
        if self.owed_N is None or self.left_N is None:
            return
        if counted:
            self.owed_N[lo:hi] = self.left_N[lo:hi]
        else:
            self.owed_N[lo:hi] += moved(self.flat_N[lo:hi], self.owed_N)
