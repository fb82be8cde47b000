"""Rows that cannot be read, judged again out of a folder: what holds, what does not, and what nobody can say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Payload
from atoll.crypto.digest import blob_id, digest, manifest_of, merkle_path, merkle_root
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import BuildMalformedRowEvidence, JudgeMalformedRow, MalformedRowJudged
from atoll.policy.capability_terms import SumCheckTerms
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.training.codec import CODECS
from atoll.training.recipe.schedule import SyncSchedule
from atoll.training.recipe.update import part_bounds
from atoll.verification.malformed_updates.messages import malformed_row_bytes, malformed_row_from_bytes
from atoll.verification.malformed_updates.worker import inspect_row
from atoll.verification.offline import AuditorFinding, DisputedCase
from atoll.verification.offline_judge import OfflineJudge, RejudgedReport, Result, fallen
from atoll.verification.sum_check.tensors import LeafLayout
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import Commitment

ROUND, VALUES, SHARES = 7, 3 * 5000, (1, 1, 1)
EVE, BOB, RUN = PeerId("eve"), PeerId("bob"), digest(b"run")
CUT = LeafLayout(CODECS["int8"])
SETTINGS = RunSettings(openings=SumCheckTerms(0.03, CUT.leaf_bytes))


def learning(up: str = "int8") -> SimpleNamespace:
    """As much of it as a row's judge asks for."""
    recipe = SimpleNamespace(coding=SimpleNamespace(up=up, down=up), schedule=SyncSchedule(inner_steps=5))
    return SimpleNamespace(
        recipe=recipe, recipe_at=lambda done: recipe, layout=SimpleNamespace(floats=VALUES, parameters=0)
    )


class Case:
    """Part 1 of a row of Eve's, spoilt or not, and the folder in which what shows it lies."""

    def __init__(self, folder: Path, spoilt: bool = True) -> None:
        self.folder, self.notary = folder, StatementSigner(RUN, VirtualSigner(EVE), VirtualSignatureVerifier())
        lo, hi = part_bounds(VALUES, SHARES)[1]
        wire = bytearray(CODECS["int8"].encode(torch.randn(hi - lo, generator=torch.Generator().manual_seed(1))))
        if spoilt:
            wire[38:40] = b"\xff\xff"  # the scale of the twentieth block, which is in the second leaf
        names = (digest(b"first"), CUT.name(wire), digest(b"last"))
        commit = Commitment(ROUND, 0, merkle_root(names), 3, 5, 80, 1.0, 0.1, 80)
        payload = Payload(names[1], len(wire), bytes(wire))
        self.shows = BuildMalformedRowEvidence(
            ROUND, 0, SHARES, self.notary.sign(commit), 1, merkle_path(names, 1), payload
        )
        self.wire = bytes(wire)

    def put(self, data: bytes):
        name = blob_id(manifest_of(data))
        (self.folder / "blobs").mkdir(exist_ok=True)
        (self.folder / "blobs" / name.hex()).write_bytes(data)
        return name

    def looked(self, up: str = "int8", cut: LeafLayout | None = CUT) -> MalformedRowJudged:
        return inspect_row(self.shows, learning(up), cut, self.put)

    def in_court(self, exhibit) -> tuple[str, str]:
        court = OfflineJudge([self.folder], SETTINGS, self.notary, lambda settings: learning())
        said = {by: AuditorFinding(by, "mismatch", ROUND, exhibit) for by in (BOB, PeerId("cid"))}
        keys = {EVE: VirtualSigner(EVE).vote_key, BOB: VirtualSigner(BOB).vote_key}
        doubt = DisputedCase(ROUND, EVE, "a row", 2, JudgeMalformedRow(ROUND, 0, SHARES), keys, UNSET, said)
        words = court.look(doubt)
        assert fallen([doubt], lambda doubt: words) == ([(ROUND, EVE)] if words[0].result == "differs" else [])
        return words[0].result, words[0].what


def test_what_cannot_be_read_here_either_agrees_with_who_said_so(tmp_path: Path):
    case = Case(tmp_path)
    looked = case.looked()
    assert looked.why and looked.blob is not None and malformed_row_from_bytes(looked.shown).index == 1
    assert (
        inspect_row(JudgeMalformedRow(ROUND, 0, SHARES, looked.shown), learning(), CUT, case.put).why == looked.why
    )
    assert case.in_court(looked.blob)[0] == "agrees"


def test_whoever_was_expelled_over_a_row_that_can_be_read_is_named_as_a_problem(tmp_path: Path):
    case = Case(tmp_path, spoilt=False)
    assert case.looked() == MalformedRowJudged(fault="it can be read")
    true = malformed_row_from_bytes(Case(tmp_path).looked().shown)
    tree, leaf = CUT.tree(case.wire), bytes(CUT.leaf(case.wire, 1))
    fine = replace(true, statement=case.shows.statement, part_path=case.shows.path, leaf=leaf)
    fine = replace(fine, name=digest(leaf), leaf_path=tree.path(1))
    others = replace(true, statement=replace(true.statement, signer=BOB))
    forged = replace(true, statement=replace(true.statement, signature=b"forged"))
    for shown in (fine, others, forged, replace(true, index=0)):
        result, what = case.in_court(case.put(malformed_row_bytes(shown)))
        assert result == "differs", what
    assert case.in_court(case.put(b"nonsense"))[0] == "differs"


def test_what_lies_nowhere_is_unknown_and_what_was_too_large_to_show_is_a_word(tmp_path: Path):
    case = Case(tmp_path)
    assert case.in_court(digest(b"elsewhere"))[0] == "unknown"
    assert case.in_court(None)[0] == "word"


@pytest.mark.parametrize("up", ["int8+zstd:3", "delta+int8"])
def test_rows_in_codecs_that_do_not_say_it_by_themselves_are_held_against_nobody(tmp_path: Path, up: str):
    assert Case(tmp_path).looked(up, cut=None).why == ""


def test_a_round_has_the_parts_that_it_had(tmp_path: Path):
    looked = Case(tmp_path).looked()
    judged = inspect_row(
        JudgeMalformedRow(ROUND, 0, (1,), looked.shown), learning(), CUT, lambda data: digest(data)
    )
    assert judged.why == "" and "no part 1" in judged.fault


def test_words_of_one_vertex_about_several_rounds_stand_and_fall_together():
    """Bob's about round 7 and Cid's about round 8, in vertex 9, which it takes two for. What was said of round 7
    before, and is false, is no part of it."""
    words = {
        by: AuditorFinding(by, "mismatch", at, None)
        for by, at in ((BOB, 9), (PeerId("cid"), 9), (PeerId("dan"), 8))
    }
    bob, cid, dan = words.values()

    def outcome(of_bob: Result, of_dan: Result) -> list[tuple[int, PeerId]]:
        found = {bob: of_bob, cid: "agrees", dan: of_dan}
        doubts = [
            DisputedCase(round, EVE, "a row", 2, None, {}, UNSET, {s.auditor: s for s in said}, vertex=9)
            for round, said in ((ROUND, (bob, dan)), (ROUND + 1, (cid,)))
        ]
        return fallen(doubts, lambda doubt: [RejudgedReport(s, found[s], "") for s in doubt.said.values()])

    assert outcome("agrees", "differs") == [] and outcome("differs", "agrees") == [(ROUND, EVE)]
