"""A check of one's own: a ledger, a method and a task, one line in the registry, and `run.checks` turns it on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import msgspec
import pytest

from atoll.base.errors import PeerFault, UsageError
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Fact
from atoll.capabilities import CAPABILITIES
from atoll.peer.events import ReviewDecided, ReviewReported
from atoll.peer.round.context import RoundContext
from atoll.peer.settings import CheckShare, RunSettings, decode_settings, encode_settings
from atoll.peer.verify.registry import ledgers_of
from atoll.policy.reputation import scores_of
from atoll.runtime import config as runtime_config
from atoll.simulation import swarm
from atoll.simulation.adversaries import byzantine
from atoll.simulation.loss_scoring import LossScoringVirtualWorker
from atoll.simulation.replay_audits import as_it_is
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import peer_name
from atoll.simulation.worker import UpdateExhibit, VirtualWorker, WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.verification.review_ledger import DrawnUpdateReview, Numbers, ReviewLedger, ReviewVerdict
from atoll.verification.update_review import ReviewMethod, review_verifier


class EmptyUpdateLedger(ReviewLedger[DrawnUpdateReview]):
    check, duty, case_type = "empty", "look for empty updates", DrawnUpdateReview
    what, unit = "update that is looked at", "answers"

    def are_valid(self, numbers: Numbers) -> bool:
        return numbers in ((), (0,), (1,))

    def verdict(self, case: DrawnUpdateReview) -> ReviewVerdict:
        is_empty = case.most_say(lambda numbers: numbers == (1,))
        return ReviewVerdict(
            case.round, case.authors, "empty" if is_empty else "full", case.authors if is_empty else ()
        )


class LookForEmptyUpdate(msgspec.Struct, frozen=True):
    blob: Digest


class EmptyUpdateFound(msgspec.Struct, frozen=True):
    numbers: tuple[int, ...]
    why: str = ""


class EmptyUpdates(ReviewMethod):
    ledger = EmptyUpdateLedger

    def task(self, case: DrawnUpdateReview, blobs: Sequence[Digest], ground: RoundContext) -> LookForEmptyUpdate:
        return LookForEmptyUpdate(blobs[0])

    def not_shown(self, lacking: Sequence[bool]) -> Numbers:
        return ()


EMPTY_UPDATES = review_verifier(EmptyUpdates(), "updates looked at", "no.worker.here")
OFFERED = replace(CAPABILITIES, verifiers=(*CAPABILITIES.verifiers, EMPTY_UPDATES))
NAMED = (CheckShare("empty", 0.5),)


class EmptyUpdateVirtualWorker(LossScoringVirtualWorker):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.handlers |= {LookForEmptyUpdate: self._look}

    def _look(self, work: LookForEmptyUpdate) -> EmptyUpdateFound:
        shown = msgspec.msgpack.decode(self.blobs[work.blob], type=UpdateExhibit)
        return EmptyUpdateFound((int(shown.learned == "nothing"),))


@dataclass
class Verdicts:
    found: Counter[tuple[PeerId, str]]
    reports: int = 0

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, ReviewReported):
            self.reports += fact.check == "empty"
        if isinstance(fact, ReviewDecided) and node.name == peer_name(0):
            self.found[fact.peers[0], fact.opinion] += 1


def islands(kinds: dict[PeerId, str]):
    def make(me: PeerId, knobs: WorkerKnobs, draw: Random) -> VirtualWorker:
        worker = EmptyUpdateVirtualWorker(me, knobs, draw)
        worker.kind = kinds.get(me, "")
        return worker

    return make


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the registry had one line more."""
    for module in (swarm, byzantine, runtime_config):
        monkeypatch.setattr(module, "CAPABILITIES", OFFERED)


def test_its_reports_reach_vertices_and_its_verdicts_reach_records(offered: None):
    stage = ScenarioContext("scores", 1, 4, 16, "two-thirds")
    run = stage.settings(reputation=True, checks=NAMED)
    told = stage.play_beside({2: "nothing"}, lambda kind: as_it_is, islands, run, lambda _: Verdicts(Counter()))
    assert told.reports > 0
    assert {peer for peer, opinion in told.found if opinion == "empty"} == {peer_name(2)}
    assert len({peer for peer, opinion in told.found if opinion == "full"}) == 3
    machine = stage.swarm.honest[0].machine
    assert machine is not None and machine.history is not None
    worth = scores_of(machine.history.head_body)
    assert worth[peer_name(2)] == min(worth.values()) < max(worth.values())


def test_it_stands_beside_scores_which_show_the_same_updates(offered: None):
    stage = ScenarioContext("scores", 2, 4, 12, "two-thirds")
    run = stage.settings(reputation=True, checks=NAMED, score_rate=0.5)
    told = stage.play_beside({}, lambda kind: as_it_is, islands, run, lambda _: Verdicts(Counter()))
    assert {opinion for _, opinion in told.found} >= {"full", "taught"}


def test_a_version_without_it_does_not_take_part():
    settings = decode_settings(encode_settings(RunSettings(checks=NAMED)))
    assert ledgers_of(OFFERED.verifiers, settings).find(EmptyUpdateLedger) is not None
    assert ledgers_of(OFFERED.verifiers, RunSettings()).find(EmptyUpdateLedger) is None
    with pytest.raises(PeerFault, match="has no check empty"):
        ledgers_of(CAPABILITIES.verifiers, settings)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("empty", "E-CFG-16"),
        ("empty = 0", "E-CFG-16"),
        ("empty = 2", "E-CFG-16"),
        ("= 0.5", "E-CFG-16"),
        ("empty = much", "E-CFG-16"),
        ("empty = 0.5, empty = 0.1", "E-CFG-17"),
        ("score = 0.5", "E-CFG-17"),
        ("emptyy = 0.5", "E-CFG-17"),
    ],
)
def test_what_run_checks_may_hold(offered: None, text: str, code: str):
    assert runtime_config.checks_of("") == () and runtime_config.checks_of(" empty=0.5 ,") == NAMED
    with pytest.raises(UsageError, match=code):
        runtime_config.checks_of(text)
