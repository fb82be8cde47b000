"""Run settings: what genesis fixes, all peers share and plans may depend on.

Members may change some of these numbers later: `governance/settings_change.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

from atoll.base.arguments import Amount, Peers, Whole
from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.limits import CHECK_NAME_MAX, ERA_ROUNDS_MAX, PIECES_MAX, VOTE_ROUNDS_MAX
from atoll.base.workload import effort_problem
from atoll.policy.capability_terms import ErasureParams, PartitionPolicy, StateValidationTerms, SumCheckTerms
from atoll.policy.compatibility import conflicts_among, problem_with
from atoll.policy.fault_tolerance import DISTANCES, StatisticName
from atoll.policy.plan import RoundSettings
from atoll.policy.votes import VoteEligibilityTerms
from atoll.wire.messages.vertex import VertexBody

TopologyName = Literal["auto", "butterfly", "hierarchical", "ring", "tree", "star"]
Pieces = Annotated[int, msgspec.Meta(ge=0, le=PIECES_MAX)]
PIECES_BY_SIZE = 0  # PARTS_AIM parts in all, fewer for a small update
EraRounds = Annotated[int, msgspec.Meta(ge=0, le=ERA_ROUNDS_MAX)]
VoteRounds = Annotated[int, msgspec.Meta(ge=0, le=VOTE_ROUNDS_MAX)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
ERA_ROUNDS = 100  # founders' default: one 5 kB signature per member and this many rounds


RULES = 1  # version of the rules by which vertices follow from each other; a run keeps its version


class CheckShare(NamedTuple):
    """A check that is on, by its name in `verification/registry.py`, and its share of all updates."""

    check: Annotated[str, msgspec.Meta(min_length=1, max_length=CHECK_NAME_MAX)]
    share: Annotated[float, msgspec.Meta(gt=0, le=1)]


class RunSettings(msgspec.Struct, frozen=True):
    name: str = "run"
    rounds: Whole = 0  # training rounds until the run is over; 0 goes on until it is stopped
    # members that vote or will, needed before the first training round; until then members assemble
    start_peers: Peers = 1
    min_peers: Peers = 1  # the same for any training round; keep at or below start_peers
    open_to_all: bool = False  # True: no peer needs a ticket
    recovery: bytes = b""  # public identity that may start over when a quorum is gone for good; empty: none
    round: RoundSettings = RoundSettings()
    topology: TopologyName = "butterfly"  # how updates are reduced: specs/topologies.md
    pieces: Pieces = 1  # pieces per owner's share: while one is combined the next is on its way
    update_bytes: Amount = 0  # largest encoded update, in bytes; large ones are cut into more parts
    statistic: StatisticName = "mean"  # rule for the rows of a part; all but the mean need direct rows
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # share of members that may lie
    witnessed: bool = False  # trust = "open": several owners per part check each other; needs quorum two-thirds
    # rounds after which identities sign the history; 0: never, as in runs before this setting
    era_rounds: EraRounds = 0
    audit_rate: Rate | msgspec.UnsetType = msgspec.UNSET  # share of trainers' rounds that are replayed; unset: none
    score_rate: Rate | msgspec.UnsetType = msgspec.UNSET  # share of updates that others score; unset: none
    twin_rate: Rate | msgspec.UnsetType = msgspec.UNSET  # share of updates made from another's samples; unset: none
    checks: tuple[CheckShare, ...] | msgspec.UnsetType = msgspec.UNSET  # further checks that are on; unset: none
    reputation: bool | msgspec.UnsetType = msgspec.UNSET  # True: reputation decides influence; unset: no
    validation: StateValidationTerms | msgspec.UnsetType = (
        msgspec.UNSET
    )  # how members evaluate agreed states; unset: not at all
    coded: ErasureParams | msgspec.UnsetType = (
        msgspec.UNSET
    )  # older states are stored in pieces; unset: whole at every member
    openings: SumCheckTerms | msgspec.UnsetType = (
        msgspec.UNSET
    )  # how blocks of results are opened; unset: owners are trusted
    captured: Rate | msgspec.UnsetType = msgspec.UNSET
    """Share of parts that liars may own alone, where results are also opened; unset: none."""
    protocol: Literal["raft"] | msgspec.UnsetType = msgspec.UNSET  # agreement protocol; unset: two phases
    apart: PartitionPolicy | msgspec.UnsetType = (
        msgspec.UNSET
    )  # members without a quorum train on; unset: they wait
    public: bool | msgspec.UnsetType = msgspec.UNSET  # True: a peer without a ticket may read; unset: it may not
    # True: the same owners every round, which keep memory; unset: drawn
    steady: bool | msgspec.UnsetType = msgspec.UNSET
    # True: an owner's pieces pass to one member each; unset: all to one
    spread: bool | msgspec.UnsetType = msgspec.UNSET
    vote_after_rounds: VoteRounds | msgspec.UnsetType = msgspec.UNSET
    """Counted rounds before a member that came after the first training round votes; unset: 0."""
    sponsor_rounds: VoteRounds | msgspec.UnsetType = msgspec.UNSET
    """Counted rounds during which all members of one invitation root hold few votes together; unset: no bound."""
    learning: bytes = b""  # model, data and recipe, encoded; read by the training worker
    rules: Whole = RULES

    @property
    def by_raft(self) -> bool:
        """One phase of votes under a stable leader, where no member lies: specs/raft.md."""
        return self.protocol == "raft"

    @property
    def is_public(self) -> bool:
        """True if any peer that knows the run's id may read history, data and model; so in runs open to all."""
        return self.public is True or self.open_to_all

    @property
    def audited_share(self) -> float:
        """Share of all trainers' rounds of which a segment is replayed."""
        return 0.0 if self.audit_rate is msgspec.UNSET else self.audit_rate

    @property
    def scored_share(self) -> float:
        """Share of all updates along which others take a step to measure the loss."""
        return 0.0 if self.score_rate is msgspec.UNSET else self.score_rate

    @property
    def twinned_share(self) -> float:
        """Share of all updates made from another member's samples, unknown to the others before."""
        return 0.0 if self.twin_rate is msgspec.UNSET else self.twin_rate

    def check_share(self, name: str) -> float:
        """Share of all updates that the check of this name reviews, by `run.checks`."""
        return 0.0 if self.checks is msgspec.UNSET else dict(self.checks).get(name, 0.0)

    @property
    def reputed(self) -> bool:
        """True if vertices keep a reputation score of every member."""
        return self.reputation is True

    @property
    def validated(self) -> StateValidationTerms | None:
        """Rule for evaluating agreed states and rolling back bad ones; None: no evaluation."""
        return None if self.validation is msgspec.UNSET else self.validation

    @property
    def kept_coded(self) -> ErasureParams | None:
        """How older states are cut into pieces among members; None: they are whole."""
        return None if self.coded is msgspec.UNSET else self.coded

    @property
    def opened(self) -> SumCheckTerms | None:
        """How much of every result is opened; None: nothing."""
        return None if self.openings is msgspec.UNSET else self.openings

    @property
    def captured_share(self) -> float:
        """Share of all parts with nothing but liars as first owners; openings find what these sign."""
        return 0.0 if self.captured is msgspec.UNSET else self.captured

    @property
    def vote_terms(self) -> VoteEligibilityTerms | None:
        """How votes are earned; None: every trainer votes as soon as it is ready."""
        after, sponsor = self.vote_after_rounds, self.sponsor_rounds
        told = [0 if rounds is msgspec.UNSET else rounds for rounds in (after, sponsor)]
        return VoteEligibilityTerms(*told) if any(told) else None

    @property
    def apart_terms(self) -> PartitionPolicy | None:
        """Terms on which members without a quorum train on; None: they do not."""
        return None if self.apart is msgspec.UNSET else self.apart


class _RulesVersion(msgspec.Struct, frozen=True):
    rules: int = 0  # 0: before versions were numbered


_RULES = msgspec.msgpack.Decoder(_RulesVersion)

OTHER_RULES_FIX = "go on with the version of atoll that began it, or begin a new run in a new folder: atoll up"


def other_rules(data: bytes) -> str | None:
    """Why this program cannot continue a run with these encoded settings; None if it knows the rules version."""
    try:
        rules = _RULES.decode(data).rules
    except UNREADABLE:
        return None  # not settings at all: `decode_settings` reports it
    if rules == RULES:
        return None
    return f"this run was begun with another version of atoll: it follows rules {rules}, this one knows {RULES}"


def features_of(settings: RunSettings) -> set[str]:
    """The run's features that other features may exclude (`policy/compatibility.py`)."""
    rounds, believes = settings.round, settings.round.quorum == "majority"
    effort = rounds.effort if rounds.effort is not msgspec.UNSET else None
    is_on = {
        "members that are trusted": believes,
        "members that may lie": not believes,
        "Raft": settings.by_raft,
        "weights by distances": settings.statistic in DISTANCES,
        "several owners per part": settings.witnessed,
        "one owner per part": not settings.witnessed,
        "openings": settings.opened is not None,
        "results that are not opened": settings.opened is None,
        "parts that liars own alone": settings.captured_share > 0,
        # where members may lie, rows are direct in every topology
        "sums of rows on the way": believes and settings.topology not in ("butterfly", "star"),
        "no reputations": not settings.reputed,
        "replay audits": settings.audited_share > 0,
        "loss scores": settings.scored_share > 0,
        "redundant training": settings.twinned_share > 0,
        "members that train apart": settings.apart_terms is not None,
        "a quorum of updates": rounds.acceptance is not msgspec.UNSET,
        "sampled trainers": rounds.sample is not msgspec.UNSET,
        "batches that grow": effort is not None and effort.batches is not msgspec.UNSET,
        "rounds that follow the run": effort is not None,
        "phases of several lengths": rounds.rhythm is not msgspec.UNSET,
    }
    return {name for name, on in is_on.items() if on}


def pacing_problem(settings: RunSettings) -> str:
    """Conflict of these settings with rounds that adapt their work; empty if none."""
    effort, features = settings.round.effort, features_of(settings)
    if effort is msgspec.UNSET:
        return ""
    grows = problem_with("batches that grow", features) if "batches that grow" in features else ""
    return grows or effort_problem(effort, settings.round.inner_steps)


_SETTINGS = msgspec.msgpack.Decoder(RunSettings)


def encode_settings(settings: RunSettings) -> bytes:
    return msgspec.msgpack.encode(settings, order="deterministic")


def decode_settings(data: bytes) -> RunSettings:
    try:
        if why := other_rules(data):
            raise PeerFault("", f"{why}; {OTHER_RULES_FIX}")
        settings = _SETTINGS.decode(data)
        if (conflict := next(conflicts_among(features_of(settings)), None)) is not None:
            raise PeerFault("", f"genesis asks for {conflict.remover} and {conflict.needer}: {conflict.cause}")
        if (coded := settings.kept_coded) is not None and coded.k >= coded.n:
            raise PeerFault("", f"genesis asks for {coded.k} of {coded.n} pieces: no piece could be lost")
        if problem := pacing_problem(settings):
            raise PeerFault("", f"genesis has rounds adapt their work, but {problem}")
        return settings
    except UNREADABLE as why:
        raise PeerFault("", f"genesis holds invalid settings: {why}") from None


def settings_of_run(genesis: VertexBody) -> RunSettings:
    """Settings in genesis; PeerFault if they are invalid or its own members could not vote under them."""
    settings = decode_settings(genesis.settings)
    signing = settings.round.signing
    if not all(signing.takes(m.vote_key) for m in genesis.members):
        raise PeerFault(
            "", f"genesis lists a member with a session key of another kind than it names ({signing.kind})"
        )
    return settings
