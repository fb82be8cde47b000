"""The two rounds of a `powersgd` call, one behind the other: what is sent in each, and what comes of both.

    first    the call is in its first half: members agree on mean(P), as they agree on any mean
    second   the same call is sent once more, as mean(Q), and nobody's other call comes between

Members that would start from another Q (`held=`) all start from the one that is drawn; whoever was not in the first
half (it came late, held a NaN, or lost its link) cannot be in the second and passes, and comes in with the next
call: specs/round.md has the rules. Who is named in a result is who is in its second half: the first one only chose
directions. Whoever died between the two has helped to choose them, and nothing else of it is there.
Promises: tensors and what is owed change when the second half is agreed, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from atoll.base.ids import PeerId
from atoll.host.fusing import moved
from atoll.learn.codec import codec_named
from atoll.learn.codec.blocks import largest_of, refuse
from atoll.learn.codec.low_rank import Piece
from atoll.learn.codec.two_phase import Place, Places, basis, first_half, product, second_half

Part = tuple[tuple[int, int], tuple[PeerId, ...]]  # [lo, hi) of the fused values, and who is in it
TRIES = 4  # of a second half that nothing came of, because others were not in it: they wait for the next round


class Start:
    """What the last call of these tensors agreed on, for the next one to search on from."""

    def __init__(self) -> None:
        self._places: Places = ()
        self._agreed_S: Tensor | None = None
        self._name = ""

    def of(self, places: Places) -> tuple[str, Tensor | None]:
        """Its name, and itself; nothing if it is of other tensors, or of another rank."""
        return (self._name, self._agreed_S) if places == self._places else ("", None)

    def take(self, places: Places, agreed_S: Tensor) -> None:
        self._places, self._agreed_S, self._name = places, agreed_S, _named(agreed_S)


class Halves:
    """Of one call. `x_N` are the fused tensors, read until the mean is written over them."""

    def __init__(self, name: str, x_N: Tensor, places: Places, owed_N: Tensor | None, start: Start) -> None:
        self.name, self._inner = name, codec_named(name.partition("+")[2])
        self._x_N, self._owed_N, self._places, self._start = x_N, owed_N, places, start
        self.first_round = -1  # in which the first half was agreed
        self.behind = ""  # the name of what was agreed, once it is read
        self.tries = TRIES
        self._known: tuple[bool, ...] = ()  # by tensor: all of its first half was answered for
        self._basis_F = self._mine_S = torch.empty(0, dtype=torch.float32, device="cpu")

    @property
    def whole(self) -> int:
        """How many values the tensors have."""
        return len(self._x_N)

    @property
    def second(self) -> bool:
        return self.first_round >= 0

    def begin(self, drawn: bool) -> tuple[Tensor, str]:
        """What I send in this half, and the name of what it started from; `drawn`: from what all can draw.
        ValueError for numbers that have no mean."""
        if self.second:
            sent_S = second_half(self._places, self._given, self._basis_F)
            if self._owed_N is not None:  # of which the mean is about to be written over what I sent
                self._mine_S = self._inner.decode(self._inner.encode(sent_S), len(sent_S))
            return sent_S, ""
        refuse(largest_of(self._x_N))
        name, kept_S = ("", None) if drawn else self._start.of(self._places)
        return first_half(self._places, self._given, kept_S), name

    def first_agreed(self, agreed_F: Tensor, cuts: Sequence[tuple[int, int]], answered: Sequence[bool]) -> None:
        """What nobody answered for is zero at all, and a matrix that it is of keeps its values."""
        lost = [cut for cut, known in zip(cuts, answered, strict=True) if not known]
        for lo, hi in lost:
            agreed_F[lo:hi] = 0
        self._known = tuple(
            not any(lo < place.first.stop and place.first.start < hi for lo, hi in lost) for place in self._places
        )
        self._basis_F = basis(self._places, agreed_F)
        self.behind = _named(agreed_F)

    def second_agreed(
        self, agreed_S: Tensor, parts: Sequence[Part], answered: Sequence[bool], counted: Sequence[bool]
    ) -> tuple[Part, ...]:
        """Write the result over the tensors, and what this member's share of it leaves out into what is owed.

        A matrix of which a part has no answer keeps its caller's values, as does any other such value. `parts` are
        those of the vector that was sent; what comes back has those of the tensors.
        """
        for ((lo, hi), _), known, mine in zip(parts, answered, counted, strict=True):
            if not known:
                agreed_S[lo:hi] = 0
            if not (known and mine) and self._owed_N is not None:
                self._mine_S[lo:hi] = 0
        told = list[Part]()
        for place, directed in zip(self._places, self._known, strict=True):
            for (lo, hi), names, known in _of(place, parts, answered):
                if not directed:
                    names = ()
                elif known:
                    self._take(place, lo, hi, agreed_S)
                if told and told[-1][1] == names:
                    (lo, _), _ = told.pop()
                told.append(((lo, hi), names))
        self._start.take(self._places, agreed_S)
        return tuple(told)

    def _take(self, place: Place, lo: int, hi: int, agreed_S: Tensor) -> None:
        """Values lo … hi of the tensors, which lie in this one."""
        at = place.piece.at
        room_M = torch.empty(place.piece.end - at, dtype=torch.float32)
        if self._owed_N is not None:
            product(place, self._basis_F, self._mine_S, room_M)
            x_M = self._x_N[lo:hi]
            self._owed_N[lo:hi] = x_M + moved(self._owed_N[lo:hi], x_M) - room_M[lo - at : hi - at]
        product(place, self._basis_F, agreed_S, room_M)
        self._x_N[lo:hi] = room_M[lo - at : hi - at]

    def _given(self, piece: Piece) -> Tensor:
        values = self._x_N[piece.at : piece.end]
        return values if self._owed_N is None else values + moved(self._owed_N[piece.at : piece.end], values)


def _of(
    place: Place, parts: Sequence[Part], answered: Sequence[bool]
) -> Iterator[tuple[tuple[int, int], tuple[PeerId, ...], bool]]:
    """[lo, hi) of the tensors, who is in all of it, and whether there is an answer. Every value of a matrix needs
    the parts of all its factor; other values lie in one."""
    second, at = place.second, place.piece.at
    touched = [
        (max(lo, second.start), min(hi, second.stop), names, known)
        for ((lo, hi), names), known in zip(parts, answered, strict=True)
        if max(lo, second.start) < min(hi, second.stop)
    ]
    if place.piece.rank == 0:
        for lo, hi, names, known in touched:
            yield (at + lo - second.start, at + hi - second.start), names, known
        return
    in_all = set[PeerId].intersection(*(set(names) for _, _, names, _ in touched))
    names = tuple(name for name in touched[0][2] if name in in_all)
    yield (at, place.piece.end), names, all(known for *_, known in touched)


def _named(values_M: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(values_M.numpy().data)
