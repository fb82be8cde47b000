"""Event log: facts as lines of JSON in `facts.jsonl`, and `RunStatus`, the fold that reads them.

A line is one object {"at", "fact", "phase", "round", …}. Bodies and signatures are left out: the history has them.
The fold serves live views, plots of old runs and the control socket alike. A log has at most two files: once the
newer one is long it replaces the older one, `facts.old.jsonl`.

Invariants: torch is never imported, since light commands read logs.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict

from atoll.base.errors import UNREADABLE
from atoll.base.ids import NAME_SHOWN_MAX, PeerId, names_of, one_line, short_id
from atoll.base.limits import SCORE_ONE
from atoll.base.machine import Fact, tag_of
from atoll.peer.events import (
    UNSERVED,
    GenesisKnown,
    MembershipChanged,
    RoundClosed,
    StateValidationDecided,
    ValidationLossReported,
)
from atoll.peer.governance.orders import amend_of, pauses_in, tunes_in
from atoll.peer.governance.settings_change import numbers_in
from atoll.policy.contributions import late_of
from atoll.policy.reputation import FLOOR, tier_of
from atoll.protocol.agreement.events import BodyDecided, ProposalReceived
from atoll.protocol.allreduce.events import RowWeightsComputed
from atoll.runtime.storage.ownership import open_private
from atoll.verification.state_validation.policy import ALL, LOSS_MOST, NAT
from atoll.wire.codec import decode_body, statement_in
from atoll.wire.messages.statements import LeaveReport, SignedStatement
from atoll.wire.messages.vertex import Member

Entry = Mapping[str, Any]

SECRET_FACTS = (
    ProposalReceived,
    BodyDecided,
    RowWeightsComputed,
)  # RoundClosed has their content once it is agreed
LEFT_OUT = ("vertex", "body", "settings")
RETURNS_MAX = 64  # newest rollbacks behind bad states
LATE_MAX = 16  # newest entries of late work of rejoined members
NO_ANSWER = "no member answers"  # begin of the reason of a pause in which no member has a link yet
FILE_BYTES_MAX = 64 * 2**20  # about 16,000 rounds
# repeated in a new file, since later lines need them
HEADER_FACTS = ("GenesisKnown", "LearningKnown", "MembershipChanged")
CLOSED_BEFORE = "it is over: the others agreed on it without this peer"  # why a peer has no part in a round
LATE_START = "its time for training is over already"  # the same, while its trainer starts
DATA_LATE = "the data set is not loaded yet"
START_ROUNDS = 20  # of half a second each, while a trainer starts
EVENTS_VERSION = 2  # version of the fields of facts: docs/reference/events.md
ROTATED = "RecordTurned"  # first line of every file but the first
TAIL_BYTES = 4 * 2**20  # read at start: about 1,000 rounds
ROUND_SHARE = 0.2  # least share of the newest round in the mean duration
TIMED_LEAST = 3  # timed rounds before a time left is shown: the first ones vary most
CURVE_MAX = 4096  # losses kept for a screen; the file has all
_ENTRY = msgspec.json.Decoder(dict[str, Any])


def fact_to_entry(fact: Fact, at: float) -> dict[str, Any] | None:
    """The line for this fact; None for facts that are not logged."""
    if isinstance(fact, SECRET_FACTS):
        return None
    entry: dict[str, Any] = {"at": round(at, 3), "fact": tag_of(fact), "phase": fact.phase}
    match fact:
        case RoundClosed(body=body):
            entry |= {
                "trained": body.trained,
                "state": body.state,
                "loss": body.metrics.reported_loss,
                "steps": body.metrics.steps,
                "samples": body.metrics.samples,
                "attempt": body.attempt,
                "proposer": body.proposer,
                "time_s": round(body.time_s, 3),
            }
            if (back := amend_of(body)) is not None:
                entry |= {"back_to": back.round, "by": "recovery" if back.signature else "validators"}
            for _, pause in pauses_in(body.reports):
                entry |= {"pauses": pause.paused}
            for _, tune in tunes_in(body.reports):
                entry |= {"amends": numbers_in(tune.to)}
            if body.tuned is not UNSET and body.tuned.to.rounds is not UNSET:
                entry |= {"rounds": body.tuned.to.rounds}
            if body.tuned is not UNSET and body.tuned.to.min_peers is not UNSET:
                entry |= {"min_peers": body.tuned.to.min_peers}
            if parted := farewells_in(body.reports):
                entry |= {"farewells": parted}
            if late := late_of(body):
                entry["late"] = {peer: {"since": one.since, "steps": one.steps} for peer, one in late.items()}
            if body.weighing is not UNSET:
                entry["weighed"] = dict(zip(body.weighing.peers, body.weighing.shares, strict=True))
        case ValidationLossReported(losses=losses, right=right):
            entry |= {"losses": [nats(loss) for loss in losses], "right": [one / ALL for one in right]}
        case StateValidationDecided(values=values, bounds=bounds, accuracy=accuracy):
            entry |= {"values": [nats(v) for v in values], "bounds": [nats(b) for b in bounds or ()]}
            entry |= {"accuracy": [one / ALL for one in accuracy or ()]}
        case MembershipChanged(members=members):
            entry |= {"members": [member_entry(m) for m in members]}
        case GenesisKnown(settings=settings, vertex=vertex):
            body = decode_body(vertex.body)
            entry |= {
                "state": body.state,
                "members": [member_entry(m) for m in body.members],
                "name": settings.name,
                "rounds": settings.rounds,
                "min_peers": settings.min_peers,
                "inner_steps": settings.round.inner_steps,
                "quorum": settings.round.quorum,
                "protocol": "raft" if settings.by_raft else "bft",
                "schema": EVENTS_VERSION,
            }
        case _:
            pass
    rest = {k: v for k, v in asdict(fact).items() if k not in LEFT_OUT and k not in entry}
    return plain(entry | rest)


def farewells_in(reports: Iterable[SignedStatement]) -> dict[PeerId, str]:
    """Members that said farewell in these reports of a vertex, with the reason of each."""
    read = ((signed.signer, statement_in(signed)) for signed in reports)
    return {peer: statement.why for peer, statement in read if isinstance(statement, LeaveReport)}


def member_entry(member: Member, scores: Mapping[PeerId, int] | None = None) -> dict[str, Any]:
    """One member as screens show it, with its reputation if `scores` are given."""
    line = {
        "peer": member.peer,
        "name": one_line(member.name, NAME_SHOWN_MAX),
        "role": member.role,
        "standing": member.standing,
        "since": member.since,
        "step_s": round(member.step_s, 4),
        "missed": member.missed,
        "addresses": tuple(map(one_line, member.addresses)),
    }
    if not scores:
        return line
    score = scores.get(member.peer, FLOOR)
    return line | {"reputation": score / SCORE_ONE, "tier": tier_of(score)}


def waiting_text(working: int, wanted: int) -> str | None:
    """Why members do not train though they can agree, and what helps; None if enough members train."""
    if 0 < working < wanted:
        return f"waiting: {working} of {wanted} members needed to train; invite more with `atoll invite`"
    return None


def is_unanswered(entry: Entry) -> bool:
    """True for a line about a pause in which no member has a link yet: people read one message about all."""
    return entry.get("paused", "").startswith(NO_ANSWER)


def nats(loss: int) -> float | None:
    """Convert from millionths; None for a loss that is not finite."""
    return loss / NAT if loss < LOSS_MOST else None


def plain(value: Any) -> Any:
    """Convert to JSON for people: digests in hex, structs as objects, texts as one short printable line."""
    match value:
        case bytes():
            return value.hex()
        case dict():
            return {one_line(str(k)): plain(v) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(v) for v in value]
        case str():
            return one_line(value)
        case float() | int() | None:
            return value
        case _:
            return plain(asdict(value)) if hasattr(value, "__struct_fields__") else str(value)


@dataclass
class RunStatus:
    """State of a run as folded from one peer's event log."""

    max_retries: int = 3  # failed attempts that make a round troubled
    me: str = ""  # the peer whose log it is; empty: unknown
    run: str = ""
    model: str = ""
    parameters: int = 0  # exchanged values
    base_values: int = 0  # frozen values, which are not exchanged
    rounds: int = 0  # 0: no end
    founded_rounds: int = 0  # value in genesis
    inner_steps: int = 0
    topology: str = ""  # of the round in progress
    topology_why: str = ""
    min_peers: int = 1
    founded_min_peers: int = 1  # value in genesis
    unit: str = "tokens"  # tokens for text, samples otherwise
    batch: int = 0
    seq_len: int = 0
    round: int = -2
    trained: int = 0
    phase: str = "starting"
    step: int = 0  # inner steps done in this round
    loss: float | None = None  # mean training loss of the last round
    step_loss: float | None = None
    state: str = ""  # hash of the agreed state
    members: list[dict[str, Any]] = field(default_factory=list)
    passed: str = ""  # why this peer sent no update in the last round; empty if it did
    alike: list[list[str]] = field(
        default_factory=list[list[str]]
    )  # groups of members with identical updates in the last round
    alike_anew: list[list[str]] = field(default_factory=list[list[str]])  # those that were not in the round before
    counted: list[str] = field(default_factory=list)  # members whose update the last round counted
    missing: list[str] = field(default_factory=list)  # complete members without a counted update in the last round
    curve: list[tuple[int, float]] = field(default_factory=list)  # (trained rounds, training loss)
    tokens: int = 0  # trained on by the swarm
    tokens_per_s: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_data_parallel: int = 0  # estimate for one peer in data-parallel training
    bytes_data_parallel_all: int = 0  # estimate for all peers
    holds_model: bool = False  # True if the agreed state is here
    is_ready: bool = False  # True from this peer's first training on after it caught up
    unready_rounds: int = 0  # closed since then while this peer was not ready
    over: bool = False
    trouble: str = ""
    audits_drawn: int = 0  # segments of rounds drawn for replay
    verdicts: dict[str, int] = field(default_factory=dict)  # findings of auditors in vertices, by kind
    opinions: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Verdicts on reviewed updates in vertices: by check, by opinion."""
    validation: dict[str, Any] = field(default_factory=dict[str, Any])  # newest judged state
    evaluated: dict[str, Any] = field(default_factory=dict[str, Any])  # newest evaluation in this folder
    returns: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # rollbacks that validators ordered
    late: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # late work of partitioned members
    branches: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # other branches of the run
    apart_steps: int = 0  # steps taken since this peer lost its quorum
    farewells: dict[str, str] = field(default_factory=dict)  # members that left in order in the last round, and why
    suspected: set[str] = field(default_factory=set)  # members that stopped responding to this peer
    returning: list[str] = field(default_factory=list)  # newest arrivals that were members before
    download_reasons: list[str] = field(default_factory=list)  # of the download in progress
    download_text: str = ""  # message about the newest download; empty if it goes on with one that was reported
    unanswered_text: str = ""  # message that no member answers; empty if it was reported
    returned: str = ""  # the suspected member that responded again last
    closed_at_s: float = 0.0  # agreed time of the last round
    round_s: float = 0.0  # duration of a training round, a mean that follows the newest ones
    timed_rounds: int = 0  # rounds in that mean
    # (bytes here, bytes in all) of downloads in progress; the running peer supplies it
    transferred: Callable[[], tuple[int, int]] = field(default=lambda: (0, 0), repr=False, compare=False)

    @staticmethod
    def of(entries: Iterable[Entry], me: str = "") -> RunStatus:
        """Fold a log from before a restart; nothing of it is in progress now."""
        progress = RunStatus(me=me)
        for entry in entries:
            progress.fold(entry)
        progress.phase, progress.over, progress.holds_model, progress.is_ready = "starting", False, False, False
        progress.step, progress.step_loss, progress.trouble = 0, None, ""
        progress.suspected.clear()
        return progress

    def fold(self, entry: Entry) -> None:
        """Fold one line. A line of another version that lacks a field is skipped."""
        with suppress(KeyError):
            self._see(entry)

    def _see(self, entry: Entry) -> None:
        self.round = max(self.round, entry.get("round", self.round))
        self._see_silence(entry)
        match entry["fact"]:
            case "GenesisKnown":
                self.run, self.rounds, self.min_peers = entry["name"], entry["rounds"], entry["min_peers"]
                self.founded_rounds, self.founded_min_peers = self.rounds, self.min_peers
                self.inner_steps, self.members, self.state = entry["inner_steps"], entry["members"], entry["state"]
                self.phase = "joining"
            case "LearningKnown":
                self.model, self.parameters = entry["model"], entry["parameters"]
                self.base_values = entry.get("base_values", 0)  # absent in older logs
                self.batch, self.seq_len, self.unit = entry["batch"], entry["seq_len"], entry["unit"]
            case "LocalStateCaughtUp":
                self.phase, self.holds_model, self.is_ready = "waiting", True, False
                self.apart_steps = self.unready_rounds = 0
                self.trained = entry.get("trained") or self.trained  # absent in older logs
                self.download_reasons.clear()
            case "StateDownloadBegan":
                self._download_began(entry["why"])
            case "RoundBegan":
                self.phase, self.step = ("assembling" if entry["assembling"] else "training"), 0
                self.over = False  # members may agree on more rounds after the end
                self.phase = "paused" if entry.get("paused") else self.phase
                self.topology, self.topology_why = entry["topology"], entry["why"]
                self.inner_steps = entry.get("steps") or self.inner_steps  # may change every round
                self.batch = entry.get("batch") or self.batch
            case "Stepped":
                self.step, self.step_loss = entry["steps"], entry["loss"]
            case "LocalTrainingEnded":
                self.phase, self.step, self.passed, self.is_ready = "committing", entry["steps"], "", True
            case "LocalContributionSkipped":
                self.passed = entry["why"]
            case "TrainedWithoutQuorum":
                self.phase, self.apart_steps = "training apart", self.apart_steps + entry["steps"]
            case "UpdateSharingBegan":
                self.phase = "sharing"
            case "PartsReduced":
                self.phase = "agreeing"
            case "MembershipChanged":
                self.returning = [peer for peer in entry["joined"] if self.is_member(peer)]
                self.members = entry["members"]
            case "RoundClosed":
                self._round_closed(entry)
            case "TrainerDrawnForAudit":
                self.audits_drawn += 1
            case "AuditFindingRecorded":
                self.verdicts[entry["finding"]] = self.verdicts.get(entry["finding"], 0) + 1
            case "ReviewDecided":
                self.opinions[entry["check"]][entry["opinion"]] += 1
            case "StateValidationDecided":
                known = {key: entry[key] for key in ("of", "opinion", "values", "bounds", "accuracy")}
                self.validation = known if entry["of"] >= self.validation.get("of", -2) else self.validation
            case "StateEvaluated":
                self.evaluated = dict(entry)
            case "BadStateRolledBack":
                self.returns.append({key: entry[key] for key in ("round", "back_to", "refused", "contributors")})
                self.returns = self.returns[-RETURNS_MAX:]
            case "StoredVertexLost":
                self.trouble = (
                    f"this disk damaged or lost the vertex of history round {entry['lacks']}; asking the members"
                )
            case "HistoryVertexRecovered":
                self.trouble = ""
            case "ForkBranchDetected":
                self.branches.append({key: entry[key] for key in ("round", "epoch", "members", "recovered")})
            case "BranchPollResult":
                known = {key: entry[key] for key in ("ours", "named", "asked", "queries", "settled")}
                self.branches = [
                    b | {"preferred": known} if b["round"] == entry["round"] else b for b in self.branches
                ]
            case "RunOver":
                self.over, self.phase, self.state = True, "over", entry["state"]
            case "RoundAttemptFailed" | "PeerSuspected" | "PeerDeparted" if entry.get("paused"):
                self.unanswered_text = entry["paused"] if entry["paused"] != self.trouble else ""
                self.trouble = entry["paused"]
            case "WorkRefused":
                self.trouble = f"this computer cannot do its part of the round: {entry['why']}"
            case "RoundAttemptFailed" if entry["attempt"] + 1 >= self.max_retries and self.phase != "assembling":
                self.trouble = f"this round failed {entry['attempt'] + 1} times; the peer goes on trying"
            case "HistoryLacksEraSignatures" if entry.get("elsewhere"):
                self.trouble = (
                    f"this peer was shown a made-up past: {entry['elsewhere']} of those who should have signed the "
                    f"history up to its round {entry['round']} signed another one. "
                    "Take a new folder and another member's ticket: atoll join TICKET --dir NEW_FOLDER"
                )
            case "HistoryLacksEraSignatures" if "made-up past" not in self.trouble:
                self.trouble = (
                    f"the history after its round {entry['round']} has {entry['signed']} of {entry['needed']} "
                    "signatures of those who began its era, and the members asked have no others. Either those "
                    "members are gone for good, and the founder can sign for them (atoll recover), or this past is "
                    "forged, and another member's ticket leads to the true one (atoll join TICKET --dir NEW_FOLDER)"
                )
            case "PeerReturned" if self.trouble.startswith(("paused", NO_ANSWER)):
                self.trouble = ""
            case "EraQuorumSigned" if "signatures of those who began" in self.trouble:
                self.trouble = ""
            case "JoinRejected":
                self.trouble = f"{entry['code']} {entry['what']}"
            case _:
                pass

    def _see_silence(self, entry: Entry) -> None:
        match entry["fact"]:
            case "PeerSuspected" if not entry.get("never_linked"):
                self.suspected.add(entry["peer"])
            case "PeerReturned":  # it comes after a farewell, too, of a member that waits for its vertex
                self.returned = entry["peer"] if entry["peer"] in self.suspected else ""
                self.suspected.discard(entry["peer"])
            case "MembershipChanged":
                self.suspected -= set(entry["joined"])
            case "RoundClosed":
                self.farewells = entry.get("farewells", {})
            case _:
                pass

    def _download_began(self, why: str) -> None:
        """A download that turns to a newer state is the same one for people, unless no member could serve it."""
        reasons, self.phase = self.download_reasons, "downloading"
        is_same = why in reasons or (bool(reasons) and not why.endswith(UNSERVED))
        self.download_text = "" if is_same else f"downloading the agreed model ({why})"
        reasons.append(why)

    def is_late_start(self, why: str) -> bool:
        """True for a reason to skip a round that only says that this peer was not ready: no trouble."""
        return CLOSED_BEFORE in why or (self._is_starting and (LATE_START in why or DATA_LATE in why))

    def missed_start(self, entry: Entry) -> bool:
        """True for a closed round that lacks this peer's update because its trainer was not ready: no trouble."""
        return self.me in entry["missing"] and self._is_starting

    @property
    def _is_starting(self) -> bool:
        """True in the first rounds after catching up; a trainer that stays late for longer is trouble."""
        return not self.is_ready and self.unready_rounds <= START_ROUNDS

    def arrival_text(self, peer: str) -> str:
        """How this member came: for the first time, or back, and when its updates count again."""
        name = self.name_of(peer)
        if peer not in self.returning:
            return f"{name} joined"
        if self.standing_of(peer) != "observer":
            return f"{name} is back: its updates count from the next round on"
        watches = any(m["peer"] == peer and m["role"] == "observer" for m in self.members)
        return f"{name} is back" + ("" if watches else ": its updates count once it has caught up")

    def parting_text(self, peer: str) -> str:
        """How this member parted: in order, with its reason, or lost."""
        if peer in self.farewells:
            return f"{self.name_of(peer)} has left ({self.farewells[peer]})"
        how = "is lost: it stopped responding" if peer in self.suspected else "is gone"
        return f"{self.name_of(peer)} {how}"

    def _round_closed(self, entry: Entry) -> None:
        self.state, self.phase, self.trouble, self.apart_steps = entry["state"], "planning", "", 0
        self.unready_rounds += self.holds_model and not self.is_ready
        self.rounds = entry.get("rounds", self.founded_rounds)
        self.min_peers = entry.get("min_peers", self.founded_min_peers)
        late = entry.get("late", {})
        self.late += [{"round": entry["round"], "peer": peer} | work for peer, work in late.items()]
        self.late = self.late[-LATE_MAX:]
        self.missing = [p for p in entry["missing"] if self.standing_of(p) == "member"]
        before, self.alike = self.alike, entry.get("alike", [])
        self.alike_anew = [group for group in self.alike if group not in before]
        self.bytes_out, self.bytes_in = entry.get("bytes_out", 0), entry.get("bytes_in", 0)
        counted, before, self.counted = len(entry["counted"]), self.closed_at_s, entry["counted"]
        self.closed_at_s = entry["time_s"]
        if "back_to" in entry:  # rolled-back rounds leave the curve
            self.trained = entry["trained"]
            self.curve = [point for point in self.curve if point[0] <= self.trained]
            return
        if entry["trained"] <= self.trained or not counted:
            return
        self.trained, self.loss = entry["trained"], entry["loss"]
        if self.loss is not None:
            self.curve = [*self.curve[-CURVE_MAX + 1 :], (self.trained, self.loss)]
        tokens = entry["samples"] * max(1, self.seq_len)
        self.tokens += tokens
        if before and entry["time_s"] > before:  # agreed times, since a joiner receives old rounds in a burst
            took_s = entry["time_s"] - before
            self.tokens_per_s = tokens / took_s
            if self.trained > 1:  # the first one waits for trainers that start
                self.timed_rounds += 1
                self.round_s += (took_s - self.round_s) * max(ROUND_SHARE, 1 / self.timed_rounds)
        alone = data_parallel_bytes(counted, entry["steps"] // counted, self.parameters)
        self.bytes_data_parallel += alone
        self.bytes_data_parallel_all += alone * counted

    @property
    def left_s(self) -> float | None:
        """Time until the run is over, at the pace of its newest rounds; None until some rounds were timed."""
        if not self.rounds or self.timed_rounds < TIMED_LEAST or self.over:
            return None
        return max(0, self.rounds - self.trained) * self.round_s

    def standing_of(self, peer: str) -> str:
        """Standing in the plan of the round in progress."""
        return next((m["standing"] for m in self.members if m["peer"] == peer), "outside")

    def is_member(self, peer: str) -> bool:
        """Whether the newest membership has this peer, present or away."""
        return any(m["peer"] == peer for m in self.members)

    def waiting_text(self) -> str | None:
        """`waiting_text` of a run that trained before; None if enough members train, or the run is over."""
        if self.over or not self.trained:
            return None
        roles, standings = ("trainer", "apprentice"), ("new", "member")
        working = sum(m["standing"] in standings and m["role"] in roles for m in self.members)
        return waiting_text(working, self.min_peers)

    def name_of(self, peer: str) -> str:
        """Display name of this peer."""
        known = names_of((PeerId(m["peer"]), m["name"] or short_id(m["peer"])) for m in self.members)
        return known.get(PeerId(peer), short_id(peer))


def behind_text(entry: Entry) -> str:
    """Prefix of news from rounds that the local peer still catches up with; empty for news of now."""
    return "earlier: " if entry.get("behind") else ""


def alike_text(names: Sequence[str]) -> str:
    """Warning about members that sent bit-identical updates, all of which count."""
    return (
        f"{' and '.join(names)} sent the very same update: one copied it, one person runs them all, or their "
        "loops learn from the same data (run.shard)"
    )


def data_parallel_bytes(peers: int, steps: int, parameters: int) -> int:
    """Bytes that each peer sends in a ring all-reduce of fp32 gradients at every step: 2 (M-1)/M 4P."""
    return round(2 * (peers - 1) / max(1, peers) * 4 * parameters * steps)


def entries_in(record: Path) -> Iterator[dict[str, Any]]:
    """All entries, oldest first, also while a peer writes. Raises FileNotFoundError."""
    with record.open("rb") as newer:
        with suppress(FileNotFoundError), _older(record).open("rb") as older:
            if not os.path.samestat(os.fstat(older.fileno()), os.fstat(newer.fileno())):  # not rotated just now
                yield from _whole(older)
        yield from _whole(newer)


def _older(record: Path) -> Path:
    return record.with_suffix(".old.jsonl")


def _whole(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Decode lines; a line torn by a power cut is skipped."""
    for line in lines:
        with suppress(*UNREADABLE):
            yield _ENTRY.decode(line)


class EventLog:
    """facts.jsonl and the file before it: one line per fact, for people, plots and replays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._opened()
        self._size_bytes = path.stat().st_size
        self._carried: dict[str, dict[str, object]] = {}
        self._torn = False  # the last line is incomplete

    def tail(self) -> list[dict[str, Any]]:
        """The newest entries, oldest first."""
        found, left_bytes = list[dict[str, Any]](), TAIL_BYTES
        for path in (self._path, _older(self._path)):
            with suppress(FileNotFoundError), path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - left_bytes))
                lines = file.read(left_bytes).split(b"\n")[1 if size > left_bytes else 0 :]
                found, left_bytes = [*_whole(lines), *found], max(0, left_bytes - size)
        return found

    def write(self, entry: dict[str, object]) -> None:
        """Append a line. On a full disk only this line is lost."""
        try:
            if self._size_bytes > FILE_BYTES_MAX:
                self._turn()
            self._append(entry)
        except OSError:
            self._torn = True
        if (fact := str(entry.get("fact"))) in HEADER_FACTS:
            self._carried[fact] = entry

    def _append(self, entry: Entry) -> None:
        line = (b"\n" if self._torn else b"") + msgspec.json.encode(entry, enc_hook=str) + b"\n"
        self._size_bytes += len(line)
        self._torn = self._file.write(line) != len(line)

    def _turn(self) -> None:
        """Rotate the files. A crash at any point loses no line of the newer one."""
        with suppress(FileNotFoundError):  # a crash came after the rename
            self._path.replace(_older(self._path))
        whole, self._file = self._file, self._opened()
        whole.close()
        self._size_bytes, self._torn = 0, False
        for entry in ({"fact": ROTATED, "schema": EVENTS_VERSION}, *self._carried.values()):
            self._append(entry)

    def _opened(self) -> BinaryIO:
        return open(self._path, "ab", buffering=0, opener=open_private)

    def close(self) -> None:
        self._file.close()
