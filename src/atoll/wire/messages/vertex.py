"""The vertex: what one round agreed on, and the genesis that everything grows from.

The id of a vertex is the BLAKE3 digest of its encoded body. Certificates are attached, never hashed, so that
every quorum that agreed on a body names the same vertex.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.fair_draw import CREDIT_MAX
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import PEERS_MAX, SCORE_ONE, TICKETS_MAX, VOTE_ROUNDS_MAX
from atoll.base.workload import WorkloadProgress
from atoll.wire.messages.statements import (
    AgreedWeights,
    ChangedNumbers,
    Finite,
    QuorumCertificate,
    Role,
    SignedStatement,
    TicketBytes,
    TicketEnd,
    TicketUses,
    VoteKeyBytes,
)

Standing = Literal["observer", "new", "member", "away", "expelled", "unaudited"]
Place = Role | Literal["apprentice"]  # a trainer whose vote is not earned yet: policy/votes.py
WEIGHTLESS: frozenset[Standing] = frozenset({"new", "unaudited"})  # of trainers whose updates move nothing
Score = Annotated[int, msgspec.Meta(ge=0, le=SCORE_ONE)]  # of a member's record: policy/reputation.py
Rounds = Annotated[int, msgspec.Meta(ge=0, le=VOTE_ROUNDS_MAX)]
Root = Annotated[int, msgspec.Meta(ge=0, le=PEERS_MAX + TICKETS_MAX)]
Quarters = Annotated[int, msgspec.Meta(ge=0, le=CREDIT_MAX)]  # of turns, of a credit: base/fair_draw.py


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One line of the agreed membership.

    An `observer` downloads the state and owns nothing; a `new` member votes and owns, but its first update has
    weight zero; a `member` is complete; one that is `away` left or was lost, and may come back without a ticket;
    one that is `expelled` was proven a liar, or sent away by the recovery identity, and never comes back as that.
    One that is `unaudited` trains where work is audited and says that its own cannot be replayed: its updates have
    weight zero, it has no vote and earns no record.
    """

    peer: PeerId
    vote_key: VoteKeyBytes
    addresses: tuple[str, ...]
    role: Place
    standing: Standing
    since: int  # round whose vertex admitted it
    step_s: Finite  # seconds per inner step as it last reported; 0 = not yet known
    name: str
    missed: int = 0  # rounds in a row without a counted update
    offset_s: float = 0.0  # of its clock from run time, as it last committed to
    identity: Digest = ZERO_DIGEST  # of the long-lived keys: a forged ML-DSA key cannot take their place
    links: bytes = b""  # uplink and latency to each member, in this order, as it last reported: policy/links

    @property
    def votes(self) -> bool:
        return self.standing in ("new", "member") and self.role == "trainer"

    @property
    def trains(self) -> bool:
        """May contribute updates: those who vote, and clients, whom nobody can dial."""
        return self.standing in ("new", "member", "unaudited") and self.role != "observer"

    @property
    def works(self) -> bool:
        """Trains where others can dial it, and its work can be replayed where work is: it votes, or will."""
        return self.standing in ("new", "member") and self.role in ("trainer", "apprentice")

    @property
    def present(self) -> bool:
        return self.standing not in ("away", "expelled")


class TicketUse(msgspec.Struct, frozen=True, array_like=True):
    """An invitation as the members agreed on it."""

    ticket: TicketBytes
    key: TicketBytes
    role: Literal["trainer", "observer"]
    uses_left: TicketUses  # 0: used up or revoked; the line stays until it expires, so nothing brings it back
    expires_s: TicketEnd


class InvitationRecord(msgspec.Struct, frozen=True, array_like=True):
    """By whom members came, and how often they counted, where votes are earned."""

    roots: tuple[Root, ...]  # of each line of `members`: the invitation by a founder that led to it; 0: a founder
    counted: tuple[Rounds, ...]  # of each line of `members`: rounds in which its update moved the model
    tickets: tuple[Root, ...]  # of each line of `tickets`: the root of a member that comes by it; 0: a new one


class RoundMetrics(msgspec.Struct, frozen=True, array_like=True):
    """Numbers about one round that everybody can recompute from the commitments in the same body."""

    loss: Finite  # mean training loss of the contributors, weighted by this round's samples; 0 if there are none
    steps: int  # inner steps taken by the swarm in this round
    samples: int


class VertexBody(msgspec.Struct, frozen=True, tag="Body"):
    """What is voted on. Everything a plan may depend on stands here."""

    run: Digest  # genesis digest; zero in genesis itself
    round: int  # the round that this body closes; genesis closes round -1
    attempt: int
    parent: Digest
    time_s: Finite  # run time at which it was proposed: the next round's plan counts from here
    proposer: PeerId
    parts: tuple[
        SignedStatement | None, ...
    ]  # the owner's Answered; None: nobody answered, the part counts for nobody
    state: Digest  # blob id of the shared state after this round
    commits: tuple[SignedStatement, ...]  # the commitment of every contributor
    members: tuple[Member, ...]  # the membership that plans the next round
    tickets: tuple[TicketUse, ...]
    reports: tuple[SignedStatement, ...]  # the member reports that changed membership or tickets
    metrics: RoundMetrics
    trained: int = 0  # training rounds so far, this one included; assembling members does not count
    epoch: int = 0  # grows when a recovery key starts over after a quorum was lost for good
    settings: bytes = b""  # genesis only: the run's config, encoded
    weighing: AgreedWeights | UnsetType = (
        UNSET  # where distances weigh rows: the one that all answers in `parts` name
    )
    window_s: Finite | UnsetType = (
        UNSET  # where windows follow the pace: an owner's in the next round, else left out
    )
    reputation: tuple[Score, ...] | UnsetType = UNSET  # where the run has it: of each line of `members`, in order
    credits: tuple[tuple[Quarters, Quarters], ...] | UnsetType = UNSET  # where who trains is drawn: the same
    effort: WorkloadProgress | UnsetType = UNSET  # where a round's work follows losses: what the next one goes by
    paused: int | UnsetType = UNSET  # the round whose vertex holds the word; left out: the run trains
    invited: InvitationRecord | UnsetType = UNSET  # where votes are earned, from the first vertex after genesis on
    tuned: ChangedNumbers | UnsetType = UNSET  # numbers that members changed since genesis; left out: none


class Vertex(msgspec.Struct, frozen=True, array_like=True):
    """A body as its exact bytes, and what makes it final: nothing for genesis, a commit certificate for all others.

    Where a quorum was gone for good, the signature of the run's recovery identity stands instead, and the body
    begins a new epoch, visible for ever.
    """

    body: bytes
    certificate: QuorumCertificate | None
    recovery: bytes = b""
