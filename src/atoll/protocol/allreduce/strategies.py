"""Strategies of the all-reduce engine: weighting of rows, verification of owners, unmasking of sums.

The engine calls each strategy at the points below, and knows no implementation by name. `factory` composes them.
Defaults: a plain mean of the rows (`PlainMean`), trusted owners (`TrustingResultVerification`), rows without masks
(`NoUnmaskingPhase`). A strategy keeps its own state, reads the attempt's state, and acts through
`StrategyEngineActions`.

Invariants:
- `handle_event` returns None for an event of another component; the first strategy that handles an event ends it.
- An engine call may review the attempt at once, so a strategy must be consistent before it makes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar
from weakref import WeakMethod

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.machine import Effect, Event, Payload, Send
from atoll.protocol.allreduce.attempt import AttemptState
from atoll.protocol.allreduce.buffers import GatheredRow, PartRowCollector, ReceivedResult, RemotePartResult
from atoll.protocol.allreduce.tasks import RowsCombined
from atoll.wire.messages.round import PartResult
from atoll.wire.messages.statements import AgreedWeights, Lapse, OwnerResult, SignedStatement

P = ParamSpec("P")
T = TypeVar("T")


def weak_call(method: Callable[P, T]) -> Callable[P, T]:
    """Call a bound method without holding its object.

    A strategy belongs to its engine. A reference back would be a cycle, and rows of w + 1 updates would outlive
    their round until the garbage collector runs.
    """
    weak = WeakMethod(method)

    def call(*args: P.args, **words: P.kwargs) -> T:
        bound = weak()
        assert bound is not None  # only the object itself holds this call
        return bound(*args, **words)

    return call


@dataclass(frozen=True)
class StrategyEngineActions:
    """What a strategy may have the engine do."""

    review: Callable[[Seconds], list[Effect]]  # check all parts for what is due now
    decline: Callable[[int, PeerId, Seconds], list[Effect]]  # (part, owner, now): the owner cannot combine the part
    give_up: Callable[[int, str, Seconds], list[Effect]]  # (part, why, now): the local peer cannot combine the part
    await_rows: Callable[[int, PartRowCollector, int, Seconds], list[Effect] | None]  # None: close the part now
    accept: Callable[[RemotePartResult, Seconds], list[Effect]]  # judge a checked result
    hold: Callable[[ReceivedResult], list[Effect]]  # accept a result as the part's
    publish: Callable[[int, RowsCombined, Seconds], list[Effect]]  # publish a part that `unmask` delayed


class RowWeighting(ABC):
    """How much the rows of a part weigh. Without an override a hook does nothing."""

    changed = False  # turns or weights changed during a review: the engine reviews once more

    def handle_event(self, event: Event, now: Seconds) -> list[Effect] | None:
        return None

    # ---- reviews -------------------------------------------------------------------------------------------

    def begin(self, now: Seconds) -> list[Effect]:
        return []

    def before_review(self, now: Seconds) -> list[Effect]:
        return []

    def review_part(self, part: int) -> list[Effect]:
        return []

    def after_review(self, now: Seconds) -> list[Effect]:
        return []

    def moments(self) -> Iterable[Seconds]:
        """Times at which a review is due although no message arrives."""
        return ()

    def request_again(self, now: Seconds) -> list[Effect]:
        """Request what may have been lost."""
        return []

    def resend(self, to: PeerId) -> list[Effect]:
        """Send what a peer that came back may have missed."""
        return []

    # ---- rows and results ----------------------------------------------------------------------------------

    def late_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Request rows that are late."""
        return []

    def has_requested(self, part: int, author: PeerId) -> bool:
        return False

    @abstractmethod
    def close_part(self, part: int, gather: PartRowCollector, window: int, now: Seconds) -> list[Effect]:
        """Combine a part of the local peer, or what comes before, if it is due."""

    def weights_digest(self) -> Digest | None:
        """The digest of the agreed weights, which the own result names; None without weights."""
        return None

    def admit_result(self, sender: PeerId, message: PartResult, answered: OwnerResult) -> bool:
        """Whether this result is considered. Raises PeerFault if its weights are invalid."""
        return True

    def after_result(self, now: Seconds) -> list[Effect]:
        return []

    def defers_result(self, heard: RemotePartResult, now: Seconds) -> bool:
        """Whether the strategy keeps this result until its signer's turn."""
        return False

    def results_for_body(
        self, answers: dict[int, ReceivedResult]
    ) -> tuple[dict[int, ReceivedResult], AgreedWeights | None]:
        """The results that may stand in one vertex body, and the weights that all of them name."""
        return answers, None


class ResultVerification(ABC):
    """How far owners are trusted: which results the local peer believes, and how results are published.

    Without an override a hook does nothing.
    """

    keeps_rows = False  # combined rows stay in memory until the attempt ends: an update's worth of memory

    def handle_event(self, event: Event, now: Seconds) -> list[Effect] | None:
        return None

    # ---- reviews -------------------------------------------------------------------------------------------

    def before_review(self, now: Seconds) -> None:
        return

    def review_part(self, part: int, now: Seconds) -> list[Effect]:
        return []

    def moments(self) -> Iterable[Seconds]:
        """Times at which a review is due although no message arrives."""
        return ()

    def request_again(self, now: Seconds) -> list[Effect]:
        """Request what may have been lost."""
        return []

    # ---- rows ----------------------------------------------------------------------------------------------

    @abstractmethod
    def row_targets(self, part: int) -> Sequence[PeerId]:
        """Peers that get the local row now, if they have not had it."""

    def late_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Request rows that are late."""
        return []

    @abstractmethod
    def window(self, part: int, gather: PartRowCollector) -> int | None:
        """The owner index with the window in which the local peer gathers this part. None: not its turn."""

    def close_empty(self, part: int, now: Seconds) -> list[Effect]:
        """What to do about an open part of the local peer without any row."""
        return []

    def fetched_row(self, part: int, author: PeerId) -> GatheredRow | None:
        """A row that was fetched to judge a result."""
        return None

    def accept_row(self, part: int, author: PeerId, row: GatheredRow) -> list[Effect]:
        """A row that another peer opened, and that the engine did not request."""
        return []

    # ---- results -------------------------------------------------------------------------------------------

    def commitments_digest(self, names: Iterable[PeerId]) -> Digest:
        """What the own result states about the commitments of its contributors."""
        return ZERO_DIGEST

    @abstractmethod
    def publish_result(self, held: ReceivedResult, now: Seconds) -> list[Effect]:
        """Publish the own result, which is durable before anything that is sent from here on."""

    @abstractmethod
    def accept_result(self, heard: RemotePartResult, now: Seconds) -> list[Effect]:
        """Judge a checked result of another peer."""

    @abstractmethod
    def accept_bytes(self, payload: Payload) -> list[Effect]:
        """Requested bytes of a result; bytes of no known result are ignored."""

    @abstractmethod
    def pass_on(self, held: ReceivedResult) -> list[Send]:
        """Send an accepted result to the peers that get it from the local peer."""

    @abstractmethod
    def results_for(self, to: PeerId) -> list[Send]:
        """Results that a peer which came back may have missed."""

    # ---- what the round asks -------------------------------------------------------------------------------

    def examine(self, signed: SignedStatement, said: OwnerResult, now: Seconds) -> list[Effect]:
        """A result that stands in a proposal, or that another member reports as a lie."""
        return []

    @abstractmethod
    def believes(self, answered: OwnerResult) -> bool | None:
        """Whether the local peer may vote for this result. None: not yet known."""

    def lapses(self, now: Seconds) -> dict[PeerId, Lapse]:
        """Owners that failed this attempt in ways that cannot be proven."""
        return {}

    def seconded(self, answered: OwnerResult) -> tuple[SignedStatement, ...]:
        """Statements of other signers that match this result exactly."""
        return ()

    def made_again(self, answered: OwnerResult) -> bool:
        """Whether the local peer recomputed this result from its rows."""
        return False


class UnmaskingPhase(Protocol):
    """A phase between closing a part and publishing its result, with messages or tasks of its own.

    While it lasts the owner's window runs on: if the window ends first, the next owner takes over.
    """

    def handle_event(self, event: Event, now: Seconds) -> list[Effect] | None: ...
    # Delay the publication of a combined part until `StrategyEngineActions.publish`. None: publish it as it is.
    def unmask(self, part: int, combined: RowsCombined, now: Seconds) -> list[Effect] | None: ...


@dataclass(frozen=True)
class PlainMean(RowWeighting):
    """Weighting by committed sample counts alone: a part is combined as soon as its rows are here."""

    state: AttemptState
    calls: StrategyEngineActions

    def close_part(self, part: int, gather: PartRowCollector, window: int, now: Seconds) -> list[Effect]:
        if not gather.rows:
            return []
        waiting = self.calls.await_rows(part, gather, window, now)
        if waiting is not None:
            return waiting
        gather.closed = True
        return [self.state.combine(part, gather, "own")]


@dataclass(frozen=True)
class TrustingResultVerification(ResultVerification):
    """Verification where each owner is believed: the first result of a part is accepted and passed on."""

    state: AttemptState
    calls: StrategyEngineActions

    def row_targets(self, part: int) -> Sequence[PeerId]:
        return trusted_row_targets(self.state, part)

    def window(self, part: int, gather: PartRowCollector) -> int | None:
        return window_in_turn(self.state, part, gather)

    def publish_result(self, held: ReceivedResult, now: Seconds) -> list[Effect]:
        return self.calls.hold(held)

    def accept_result(self, heard: RemotePartResult, now: Seconds) -> list[Effect]:
        if heard.answered.part in self.state.answers:
            return []
        if heard.payload is None:
            return self.state.recovery.note_holder(heard.holder, heard.statement, heard.answered)
        return self.calls.hold(ReceivedResult(heard.statement, heard.answered, heard.payload))

    def accept_bytes(self, payload: Payload) -> list[Effect]:
        held = self.state.recovery.result_of(payload)
        return self.calls.hold(held) if held is not None else []

    def pass_on(self, held: ReceivedResult) -> list[Send]:
        holders = self.state.recovery.holders(held.result)
        return [self.state.broadcast.give(peer, held) for peer in self.state.broadcast.recipients(held, holders)]

    def results_for(self, to: PeerId) -> list[Send]:
        return self.state.broadcast.serve(self.state.answers, to)

    def believes(self, answered: OwnerResult) -> bool | None:
        return True if self.state.deferred.is_in_turn(answered) else None


@dataclass(frozen=True)
class NoUnmaskingPhase:
    """No unmask phase: combined rows are published as they are."""

    state: AttemptState
    calls: StrategyEngineActions

    def handle_event(self, event: Event, now: Seconds) -> None:
        return None

    def unmask(self, part: int, combined: RowsCombined, now: Seconds) -> None:
        return None


def window_in_turn(state: AttemptState, part: int, gather: PartRowCollector) -> int | None:
    """The owner's own window, in its turn."""
    return gather.owner_index if state.route.turn[part] == gather.owner_index else None


def trusted_row_targets(state: AttemptState, part: int) -> Sequence[PeerId]:
    """The parent or owner in charge, and peers that may be in charge in the view of others."""
    route = state.route
    to, owners, returned = route.target(part), state.plan.owners(part), route.returned_owners(part)
    if route.is_reserves_turn(part):
        return (to, *route.next_after_unheard(part, state.environment.is_unheard), *returned)
    passed = owners[: owners.index(to)] if to in owners else ()
    if to != state.me or not any(map(state.environment.is_unheard, passed)):
        return (to, *returned)
    # others may still hear the owners before: the next owner gets the local row for them, and serves the result
    return (to, *[owner for owner in owners[owners.index(to) + 1 :] if not state.gone(owner)][:1], *returned)
