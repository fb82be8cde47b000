"""Run settings: what genesis fixes, all peers share and plans may depend on.

Members may change some of these numbers later: `governance/settings_change.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from atoll.base.arguments import Amount, Peers, Whole
from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.limits import ERA_ROUNDS_MAX, PIECES_MAX, VOTE_ROUNDS_MAX
from atoll.base.workload import effort_problem
from atoll.policy.capability_terms import ErasureParams, PartitionPolicy, SumCheckTerms, ValidationRule
from atoll.policy.fault_tolerance import DISTANCES, StatisticName
from atoll.policy.plan import RoundSettings
from atoll.policy.votes import VoteTerms
from atoll.wire.messages.vertex import VertexBody

TopologyName = Literal["auto", "butterfly", "hierarchical", "ring", "tree", "star"]
Pieces = Annotated[int, msgspec.Meta(ge=1, le=PIECES_MAX)]
EraRounds = Annotated[int, msgspec.Meta(ge=0, le=ERA_ROUNDS_MAX)]
VoteRounds = Annotated[int, msgspec.Meta(ge=0, le=VOTE_ROUNDS_MAX)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
ERA_ROUNDS = 100  # founders' default: one 5 kB signature per member and this many rounds


RULES = 1  # version of the rules by which vertices follow from each other; a run keeps its version


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
    reputation: bool | msgspec.UnsetType = msgspec.UNSET  # True: reputation decides influence; unset: no
    validation: ValidationRule | msgspec.UnsetType = (
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

    @property
    def reputed(self) -> bool:
        """True if vertices keep a reputation score of every member."""
        return self.reputation is True

    @property
    def validated(self) -> ValidationRule | None:
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
    def vote_terms(self) -> VoteTerms | None:
        """How votes are earned; None: every trainer votes as soon as it is ready."""
        after, sponsor = self.vote_after_rounds, self.sponsor_rounds
        told = [0 if rounds is msgspec.UNSET else rounds for rounds in (after, sponsor)]
        return VoteTerms(*told) if any(told) else None

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


def acceptance_problem(settings: RunSettings) -> str:
    """Conflict of these settings with rounds that wait for a quorum only; empty if none."""
    if settings.round.quorum != "majority":
        return "the first to commit ends the training of all, and members do not trust each other"
    if settings.topology not in ("butterfly", "star"):
        return f"a {settings.topology} topology waits for the rows of all members on its way"
    if settings.audited_share:
        return "audits need rounds with a number of steps that is known beforehand"
    return ""


def twins_misfit(settings: RunSettings) -> str:
    """Conflicts of these settings with redundant training; empty if none."""
    cannot = {
        "the run keeps no reputation that the comparison could change": not settings.reputed,
        "an auditor would replay samples other than the member was told to learn from": settings.audited_share > 0,
        "a scorer would use samples other than the member was told to learn from": settings.scored_share > 0,
        "members that train apart take steps that were not assigned": settings.apart_terms is not None,
        "slow members send steps of two rounds": settings.round.acceptance is not msgspec.UNSET,
    }
    return "; ".join(why for why, asked in cannot.items() if asked)


def captured_problem(settings: RunSettings) -> str:
    """Why results of liars that own a part alone would never be checked; empty if they are."""
    if not settings.witnessed:
        return "the owners of a part do not check each other"
    if settings.opened is None:
        return "results are not opened afterwards"
    return ""


def pacing_problem(settings: RunSettings) -> str:
    """Conflict of these settings with rounds that adapt their work; empty if none."""
    effort = settings.round.effort
    if effort is msgspec.UNSET:
        return ""
    if effort.batches is not msgspec.UNSET and settings.apart_terms is not None:
        return "members that train apart would use a batch size that the others have left"
    if effort.batches is not msgspec.UNSET and settings.round.acceptance is not msgspec.UNSET:
        return "rounds go on without slow members, which then have steps of two batch sizes"
    return effort_problem(effort, settings.round.inner_steps)


_SETTINGS = msgspec.msgpack.Decoder(RunSettings)


def encode_settings(settings: RunSettings) -> bytes:
    return msgspec.msgpack.encode(settings, order="deterministic")


def decode_settings(data: bytes) -> RunSettings:
    try:
        if why := other_rules(data):
            raise PeerFault("", f"{why}; {OTHER_RULES_FIX}")
        settings = _SETTINGS.decode(data)
        if settings.scored_share and not settings.reputed:
            raise PeerFault("", "genesis asks for scores of updates and keeps no reputation that they could change")
        if settings.twinned_share and (problem := twins_misfit(settings)):
            raise PeerFault("", f"genesis asks for redundant training, but {problem}")
        if (coded := settings.kept_coded) is not None and coded.k >= coded.n:
            raise PeerFault("", f"genesis asks for {coded.k} of {coded.n} pieces: no piece could be lost")
        if settings.opened is not None and settings.round.quorum != "two-thirds":
            raise PeerFault("", "genesis asks for openings, but members are trusted")
        if settings.witnessed and settings.statistic in DISTANCES:
            raise PeerFault(
                "",
                f'genesis has several owners per part and weights rows by distances ("{settings.statistic}"), '
                "but the owners' distances would not be checked",
            )
        if settings.captured_share and (problem := captured_problem(settings)):
            raise PeerFault("", f"genesis lets liars own whole parts, but {problem}")
        if settings.by_raft and settings.round.quorum != "majority":
            raise PeerFault("", "genesis asks for Raft, but members may lie")
        if settings.round.acceptance is not msgspec.UNSET and (problem := acceptance_problem(settings)):
            raise PeerFault("", f"genesis has rounds wait for a quorum of updates, but {problem}")
        if settings.apart_terms is not None and settings.round.sample is not msgspec.UNSET:
            raise PeerFault(
                "", "genesis samples trainers and has members train apart: late work would have no turn"
            )
        if settings.apart_terms is not None and settings.audited_share:
            raise PeerFault("", "genesis audits rounds and has members train apart, with steps not assigned")
        if settings.apart_terms is not None and settings.round.acceptance is not msgspec.UNSET:
            raise PeerFault(
                "", "genesis has rounds go on without slow members, and members train apart: steps would get lost"
            )
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
