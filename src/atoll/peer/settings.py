"""What a run is: the settings that genesis fixes, that every peer shares and that plans may depend on. Numbers of
them that members may change later: `tuning.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from atoll.base.arguments import Amount, Peers, Whole
from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.limits import ERA_ROUNDS_MAX, PIECES_MAX, VOTE_ROUNDS_MAX
from atoll.base.workload import effort_problem
from atoll.features.archive.policy import ErasureParams
from atoll.features.partition_training.policy import PartitionPolicy
from atoll.policy.fault_tolerance import DISTANCES, StatisticName
from atoll.policy.plan import RoundSettings
from atoll.policy.votes import VoteTerms
from atoll.verification.state_validation.policy import ValidationRule
from atoll.verification.sum_check.policy import SumCheckTerms
from atoll.wire.messages.vertex import VertexBody

TopologyName = Literal["auto", "butterfly", "hierarchical", "ring", "tree", "star"]
Pieces = Annotated[int, msgspec.Meta(ge=1, le=PIECES_MAX)]
EraRounds = Annotated[int, msgspec.Meta(ge=0, le=ERA_ROUNDS_MAX)]
VoteRounds = Annotated[int, msgspec.Meta(ge=0, le=VOTE_ROUNDS_MAX)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
ERA_ROUNDS = 100  # that founders write into genesis: one signature of 5 kB per member and this many rounds


RULES = 1  # by which vertices follow from each other; a run keeps those that it began with


class RunSettings(msgspec.Struct, frozen=True):
    name: str = "run"
    rounds: Whole = 0  # training rounds until the run is over; 0 goes on until it is stopped
    start_peers: Peers = 1  # members that vote or will, before the first round trains; until then members assemble
    min_peers: Peers = 1  # of these, for any round to train; keep at or below start_peers
    open_to_all: bool = False  # True: nobody needs a ticket
    recovery: bytes = b""  # public identity that may start over when a quorum is gone for good; empty: nobody
    round: RoundSettings = RoundSettings()
    topology: TopologyName = "butterfly"  # how updates are reduced: specs/topologies.md
    pieces: Pieces = 1  # each owner's share is cut so fine: while one is combined the next is on its way
    update_bytes: Amount = 0  # the most that one encoded update can have; large ones are cut into more parts
    statistic: StatisticName = "mean"  # what the rows of a part become; others than the mean need direct rows
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # share of members that may lie
    witnessed: bool = False  # trust = "open": a part has owners that check each other; asks for quorum two-thirds
    era_rounds: EraRounds = 0  # after which identities sign the history; 0: never, as before this could be said
    audit_rate: Rate | msgspec.UnsetType = msgspec.UNSET  # of rounds of trainers that are replayed; left out: none
    score_rate: Rate | msgspec.UnsetType = msgspec.UNSET  # of updates that others score; left out: none
    twin_rate: Rate | msgspec.UnsetType = msgspec.UNSET  # of updates made of another's samples; left out: none
    reputation: bool | msgspec.UnsetType = msgspec.UNSET  # members' records decide influence; left out: no
    validation: ValidationRule | msgspec.UnsetType = (
        msgspec.UNSET
    )  # members look at agreed states; left out: nobody does
    coded: ErasureParams | msgspec.UnsetType = (
        msgspec.UNSET
    )  # older states lie in pieces; left out: whole at every member
    openings: SumCheckTerms | msgspec.UnsetType = (
        msgspec.UNSET
    )  # of blocks of answers; left out: owners are believed
    captured: Rate | msgspec.UnsetType = msgspec.UNSET
    """Share of parts that liars may own by themselves, where answers are opened besides; left out: none."""
    protocol: Literal["raft"] | msgspec.UnsetType = msgspec.UNSET  # by which members agree; left out: two phases
    apart: PartitionPolicy | msgspec.UnsetType = (
        msgspec.UNSET
    )  # who hears no quorum trains on; left out: it stands still
    public: bool | msgspec.UnsetType = msgspec.UNSET  # True: a peer without a ticket may read; left out: it may not
    steady: bool | msgspec.UnsetType = msgspec.UNSET  # the same owners every round, who remember; left out: drawn
    spread: bool | msgspec.UnsetType = msgspec.UNSET  # an owner's pieces pass to one member each; left out: to one
    vote_after_rounds: VoteRounds | msgspec.UnsetType = msgspec.UNSET
    """Counted rounds after which a member votes that came after the first training round; left out: at once."""
    sponsor_rounds: VoteRounds | msgspec.UnsetType = msgspec.UNSET
    """Counted rounds until which members of one root hold few votes together; left out: no bound."""
    learning: bytes = b""  # model, data and recipe, encoded and read by the island that trains
    rules: Whole = RULES

    @property
    def by_raft(self) -> bool:
        """One phase of votes under a leader that stays, where nobody lies: specs/raft.md."""
        return self.protocol == "raft"

    @property
    def is_public(self) -> bool:
        """Any peer that knows the run's id may read its history, data and model. Open to all says so, too."""
        return self.public is True or self.open_to_all

    @property
    def audited_share(self) -> float:
        """Of all rounds of all trainers, those of which a segment is taken again."""
        return 0.0 if self.audit_rate is msgspec.UNSET else self.audit_rate

    @property
    def scored_share(self) -> float:
        """Of all updates, those along which others take a step to see what they teach."""
        return 0.0 if self.score_rate is msgspec.UNSET else self.score_rate

    @property
    def twinned_share(self) -> float:
        """Of all updates, those that are made of another member's samples, which nobody knows before."""
        return 0.0 if self.twin_rate is msgspec.UNSET else self.twin_rate

    @property
    def reputed(self) -> bool:
        """Vertices keep a score of every member's record."""
        return self.reputation is True

    @property
    def validated(self) -> ValidationRule | None:
        """By which agreed states are looked at, and gone back behind if they are bad; None: nobody looks."""
        return None if self.validation is msgspec.UNSET else self.validation

    @property
    def kept_coded(self) -> ErasureParams | None:
        """In how many pieces older states lie at the members."""
        return None if self.coded is msgspec.UNSET else self.coded

    @property
    def opened(self) -> SumCheckTerms | None:
        """How much of every answer is opened, where anything is."""
        return None if self.openings is msgspec.UNSET else self.openings

    @property
    def captured_share(self) -> float:
        """Of all parts, those whose first owners may be liars one and all: openings find what they say there."""
        return 0.0 if self.captured is msgspec.UNSET else self.captured

    @property
    def vote_terms(self) -> VoteTerms | None:
        """How votes are earned; None: every trainer votes as soon as it is ready."""
        after, sponsor = self.vote_after_rounds, self.sponsor_rounds
        told = [0 if rounds is msgspec.UNSET else rounds for rounds in (after, sponsor)]
        return VoteTerms(*told) if any(told) else None

    @property
    def apart_terms(self) -> PartitionPolicy | None:
        """On which members train on that hear no quorum; None: they do not."""
        return None if self.apart is msgspec.UNSET else self.apart


class _RulesVersion(msgspec.Struct, frozen=True):
    rules: int = 0  # before they were numbered


_RULES = msgspec.msgpack.Decoder(_RulesVersion)

OTHER_RULES_FIX = "go on with the version of atoll that began it, or begin a new run in a new folder: atoll up"


def other_rules(data: bytes) -> str | None:
    """Why this program cannot go on with a run of these encoded settings: None if it knows its rules."""
    try:
        rules = _RULES.decode(data).rules
    except UNREADABLE:
        return None  # these are no settings at all: `decode_settings` says so
    if rules == RULES:
        return None
    return f"this run was begun with another version of atoll: it follows rules {rules}, this one knows {RULES}"


def acceptance_problem(settings: RunSettings) -> str:
    """What of these stands against rounds that begin to share without everybody; empty if nothing does."""
    if settings.round.quorum != "majority":
        return "whoever commits first ends the training of all, and members do not trust each other"
    if settings.topology not in ("butterfly", "star"):
        return f"a {settings.topology} topology waits for everybody's row on its way"
    if settings.audited_share:
        return "audits need rounds that end after steps that everybody knows beforehand"
    return ""


def twins_misfit(settings: RunSettings) -> str:
    """What of these stands against updates that are made of another's samples in secret; empty if nothing does."""
    cannot = {
        "it keeps no records that their comparison could move": not settings.reputed,
        "an auditor would take the samples again that a member was told to learn from": settings.audited_share > 0,
        "a scorer would look at the samples that a member was told to learn from": settings.scored_share > 0,
        "who trains apart takes steps that nobody assigned": settings.apart_terms is not None,
        "who is slow sends steps of two rounds": settings.round.acceptance is not msgspec.UNSET,
    }
    return "; ".join(why for why, asked in cannot.items() if asked)


def captured_problem(settings: RunSettings) -> str:
    """Why what liars say of a part that they own by themselves would never be found out; empty if it is."""
    if not settings.witnessed:
        return "its owners do not watch each other"
    if settings.opened is None:
        return "nobody opens their answers afterwards"
    return ""


def pacing_problem(settings: RunSettings) -> str:
    """What of these stands against rounds whose work follows the run; empty if nothing does."""
    effort = settings.round.effort
    if effort is msgspec.UNSET:
        return ""
    if effort.batches is not msgspec.UNSET and settings.apart_terms is not None:
        return "members train apart, in batches of a size that the others have left behind"
    if effort.batches is not msgspec.UNSET and settings.round.acceptance is not msgspec.UNSET:
        return "rounds go on without the slow, whose steps then have batches of two sizes"
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
            raise PeerFault("", "genesis asks for scores of updates and keeps no records that they could move")
        if settings.twinned_share and (problem := twins_misfit(settings)):
            raise PeerFault("", f"genesis has members take each other's samples, but {problem}")
        if (coded := settings.kept_coded) is not None and coded.k >= coded.n:
            raise PeerFault("", f"genesis asks for {coded.k} of {coded.n} pieces: none could be lost")
        if settings.opened is not None and settings.round.quorum != "two-thirds":
            raise PeerFault("", "genesis asks for openings where nobody may lie")
        if settings.witnessed and settings.statistic in DISTANCES:
            raise PeerFault(
                "",
                f'genesis has several owners combine a part and weighs rows by distances ("{settings.statistic}"), '
                "and nobody checks what owners say of distances",
            )
        if settings.captured_share and (problem := captured_problem(settings)):
            raise PeerFault("", f"genesis lets liars own whole parts, and {problem}")
        if settings.by_raft and settings.round.quorum != "majority":
            raise PeerFault("", "genesis asks for Raft where members may lie")
        if settings.round.acceptance is not msgspec.UNSET and (problem := acceptance_problem(settings)):
            raise PeerFault("", f"genesis asks for rounds that wait for a quorum of updates, but {problem}")
        if settings.apart_terms is not None and settings.round.sample is not msgspec.UNSET:
            raise PeerFault("", "genesis draws who trains and has members train apart: late work had no turn")
        if settings.apart_terms is not None and settings.audited_share:
            raise PeerFault("", "genesis audits rounds and has members train apart, whose steps nobody assigned")
        if settings.apart_terms is not None and settings.round.acceptance is not msgspec.UNSET:
            raise PeerFault(
                "", "genesis has rounds go on without the slow and members train apart: steps would get lost"
            )
        if problem := pacing_problem(settings):
            raise PeerFault("", f"genesis has the work of rounds follow the run, but {problem}")
        return settings
    except UNREADABLE as why:
        raise PeerFault("", f"genesis carries settings that are not valid: {why}") from None


def settings_of_run(genesis: VertexBody) -> RunSettings:
    """What genesis fixes. PeerFault if these are no settings, or its own members could not vote by them."""
    settings = decode_settings(genesis.settings)
    signing = settings.round.signing
    if not all(signing.takes(m.vote_key) for m in genesis.members):
        raise PeerFault(
            "", f"genesis lists a member whose session key is not of the kind it names ({signing.kind})"
        )
    return settings
