"""Vertex: the agreed outcome of one round, and genesis.

The id of a vertex is the BLAKE3 digest of its encoded body. Certificates are attached, never hashed, so every
quorum that agreed on a body names the same vertex.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.fair_draw import CREDIT_MAX
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import PEERS_MAX, SCORE_ONE, TICKETS_MAX, VOTE_ROUNDS_MAX
from atoll.base.workload import ZERO_LOSS, AdaptiveWorkloadState
from atoll.wire.data_ranges import DataPlace
from atoll.wire.messages.statements import (
    AgreedWeights,
    ChangedSettings,
    Extensions,
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
Place = Role | Literal["apprentice"]  # an apprentice is a trainer without an earned vote: policy/votes.py
WEIGHTLESS: frozenset[Standing] = frozenset({"new", "unaudited"})  # standings of trainers with updates of weight 0
Score = Annotated[int, msgspec.Meta(ge=0, le=SCORE_ONE)]  # score of a member's record: policy/reputation.py
Rounds = Annotated[int, msgspec.Meta(ge=0, le=VOTE_ROUNDS_MAX)]
Root = Annotated[int, msgspec.Meta(ge=0, le=PEERS_MAX + TICKETS_MAX)]
Quarters = Annotated[int, msgspec.Meta(ge=0, le=CREDIT_MAX)]  # credit in quarters of a turn: base/fair_draw.py


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One line of the agreed membership.

    Standings:
    - `observer`: downloads the state and owns no part.
    - `new`: votes and owns parts, but its first update has weight zero.
    - `member`: full member.
    - `away`: left or was lost, and may return without a ticket.
    - `expelled`: proven a liar or removed by the recovery identity; this peer id never returns.
    - `unaudited`: trains in an audited run and reports that its work cannot be replayed. Its updates have weight
      zero; it has no vote and earns no record.
    """

    peer: PeerId
    vote_key: VoteKeyBytes
    addresses: tuple[str, ...]
    role: Place
    standing: Standing
    since: int  # round of the vertex that admitted it
    step_s: Finite  # seconds per inner step in its last report; 0: not yet known
    name: str
    missed: int = 0  # rounds in a row without a counted update
    offset_s: float = 0.0  # seconds of its clock from run time in its last commitment
    identity: Digest = ZERO_DIGEST  # digest of its long-lived keys, so a forged ML-DSA key cannot replace them
    links: bytes = b""  # uplink and latency to each member, in member order, in its last report: policy/links

    @property
    def votes(self) -> bool:
        return self.standing in ("new", "member") and self.role == "trainer"

    @property
    def may_train(self) -> bool:
        """Whether it may contribute updates: voters, and clients, which no peer can dial."""
        return self.standing in ("new", "member", "unaudited") and self.role != "observer"

    @property
    def is_auditable_trainer(self) -> bool:
        """Whether it trains, can be dialed, and can be replayed in an audited run: it votes, or will."""
        return self.standing in ("new", "member") and self.role in ("trainer", "apprentice")

    @property
    def is_present(self) -> bool:
        return self.standing not in ("away", "expelled")


class IssuedTicketRecord(msgspec.Struct, frozen=True, array_like=True):
    """An agreed invitation."""

    ticket: TicketBytes
    key: TicketBytes
    role: Literal["trainer", "observer"]
    uses_left: TicketUses  # 0: used up or revoked; the line stays until it expires, so it cannot be invited again
    expires_s: TicketEnd


class EarnedVoteRecord(msgspec.Struct, frozen=True, array_like=True):
    """Invitation roots and counted rounds of members, in runs with earned votes."""

    roots: tuple[Root, ...]  # per line of `members`: the founder's invitation that led to it; 0: a founder
    counted: tuple[Rounds, ...]  # per line of `members`: rounds in which its update moved the model
    tickets: tuple[Root, ...]  # per line of `tickets`: root of a member that joins by it; 0: a new root


class MemberExtensions(NamedTuple):
    """Extensions of one member's record."""

    peer: PeerId
    extensions: Extensions


class UnfinishedShard(NamedTuple):
    """A shard of the data set that is not used up."""

    shard: DataPlace
    position: DataPlace  # samples of it that counted work is past
    reader: Annotated[int, msgspec.Meta(ge=-1, le=PEERS_MAX)]  # line in `members`; -1: none


class SharedDataProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far counted work is in the shared data set: policy/data/positions.py. Samples are summed over the run."""

    name: Digest
    next: DataPlace  # first shard that was never dealt; shards before it that are not in `open` are used up
    open: tuple[UnfinishedShard, ...]  # sorted by shard
    counted: int = 0  # samples in counted updates
    dropped: int = 0  # samples that positions passed and no counted update holds
    repeated: int = 0  # samples in counted updates that their shard's position did not need


class SwarmRoundMetrics(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of one round, recomputable from the commitments in the same body."""

    loss: Finite  # mean training loss of the contributors, weighted by this round's samples; 0: none reported
    steps: int  # inner steps taken by the swarm in this round
    samples: int

    @property
    def reported_loss(self) -> float | None:
        """The loss for people; None if no member reported one, which loops of users need not."""
        if self.loss == 0.0:
            return None
        return 0.0 if abs(self.loss) <= ZERO_LOSS else self.loss


class VertexBody(msgspec.Struct, frozen=True, tag="VertexBody"):
    """The body that is voted on. It holds everything that a plan may depend on."""

    run: Digest  # genesis digest; zero in genesis itself
    round: int  # the round that this body closes; genesis closes round -1
    attempt: int
    parent: Digest
    time_s: Finite  # run time of the proposal, in seconds, from which the next round's plan counts
    proposer: PeerId
    parts: tuple[SignedStatement | None, ...]  # the owner's OwnerResult per part; None: the part has no result
    state: Digest  # blob id of the shared state after this round: the version of the model
    commits: tuple[SignedStatement, ...]  # the commitment of every contributor
    members: tuple[Member, ...]  # the membership that plans the next round
    tickets: tuple[IssuedTicketRecord, ...]
    reports: tuple[SignedStatement, ...]  # the member reports that changed membership or tickets
    metrics: SwarmRoundMetrics
    trained: int = 0  # training rounds so far, this one included; rounds that only assemble members do not count
    epoch: int = 0  # grows when a recovery key starts over after a quorum was lost for good
    settings: bytes = b""  # genesis only: the run's config, encoded
    # each of the following is unset unless the run uses its feature
    weighing: AgreedWeights | UnsetType = UNSET  # distance weights: the ones that all results in `parts` name
    window_s: Finite | UnsetType = UNSET  # adaptive windows: an owner's window in the next round, in seconds
    reputation: tuple[Score, ...] | UnsetType = UNSET  # reputation: score per line of `members`
    credits: tuple[tuple[Quarters, Quarters], ...] | UnsetType = UNSET  # drawn trainers: credits per member line
    effort: AdaptiveWorkloadState | UnsetType = UNSET  # loss-driven workload: input of the next round's workload
    paused: int | UnsetType = UNSET  # pause: round of the vertex with the pause order; unset: the run trains
    invited: EarnedVoteRecord | UnsetType = UNSET  # earned votes, from the first vertex after genesis on
    tuned: ChangedSettings | UnsetType = UNSET  # numbers that members changed since genesis
    extensions: tuple[MemberExtensions, ...] | UnsetType = UNSET  # of members that have some, in member order
    data: SharedDataProgress | UnsetType = UNSET  # shared data set, from the first counted claim on

    @property
    def extensions_by_peer(self) -> dict[PeerId, Extensions]:
        """Extensions of the members that have some."""
        return {} if self.extensions is UNSET else dict(self.extensions)


class Vertex(msgspec.Struct, frozen=True, array_like=True):
    """The exact bytes of a body with the commit certificate that makes it final; genesis has none.

    If a quorum was lost for good, the signature of the recovery identity replaces the certificate. The body then
    begins a new epoch, which stays visible.
    """

    body: bytes
    certificate: QuorumCertificate | None
    recovery: bytes = b""
