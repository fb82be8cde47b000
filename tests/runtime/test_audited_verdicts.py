"""What auditors were shown, judged again by who was not there, out of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from audited import NAMES, RUN, STEPS, Swarm, play, skips
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST
from atoll.cli.verdicts import judged_again, verdicts_text
from atoll.crypto.identity import SessionVerifier
from atoll.peer.verify.chain import ContributionTotals, HistoryVerificationReport, reading
from atoll.runtime.training_spec import parse_training_spec
from atoll.verification.offline import AuditorFinding, DisputedCase, DisputeHistory
from atoll.verification.offline_judge import OfflineJudge, RejudgedReport, fallen
from atoll.verification.replay_audit import replay_judge
from atoll.verification.replay_audit.exhibit import SegmentExhibit, shown_bytes, shown_from_bytes
from atoll.verification.replay_audit.judge import ReplayAccepted
from atoll.wire.messages.statements import Finding


class Reader:
    """Somebody with a folder of the run, to whom auditors' words and what they judged is all there is."""

    def __init__(self, swarm: Swarm, of: int, by: int = 0) -> None:
        self.swarm, self.of, self.folder = swarm, of, swarm.stores[by].folder
        self.court = OfflineJudge(
            [self.folder], swarm.founded.settings, reading(RUN, SessionVerifier()), parse_training_spec
        )

    async def refuted(self, segment: int) -> SegmentExhibit:
        """As the audit of this segment ended; what was shown."""
        self.work = self.swarm.work(self.of, segment, await self.swarm.exhibit(self.of, segment))
        return shown_from_bytes(self.swarm.stores[0].read_blob(self.work.blob))

    def looks(self, finding: Finding = "mismatch", shown: SegmentExhibit | bytes | None = None) -> RejudgedReport:
        """At one auditor's word, about another blob if one is given."""
        store, blob = self.swarm.stores[0], self.work.blob
        if shown is not None:
            blob = store.put_blob(shown if isinstance(shown, bytes) else shown_bytes(shown))
        said = AuditorFinding(NAMES[0], finding, self.work.round + 1, blob)
        peer = NAMES[self.of]
        doubt = self.doubt = DisputedCase(
            self.work.round, peer, "a segment", 1, self.work, {}, UNSET, {NAMES[0]: said}
        )
        (looked,) = self.court.look(doubt)
        self.stands = not fallen([doubt], lambda _: [looked])
        return looked

    def told(self) -> tuple[list[str], list[str]]:
        """By `atoll verify --verdicts`, had the history held this alone: codes of problems, and lines."""
        audit = HistoryVerificationReport(
            RUN, self.swarm.founded.settings, shares={peer: ContributionTotals(peer) for peer in NAMES}
        )
        out = DisputeHistory()
        out.doubts[self.doubt.round, self.doubt.peer] = self.doubt
        looked = judged_again(audit, out, [self.folder], fetch=False)
        return [p.code for p in audit.problems], list(verdicts_text(audit, out, looked))


def test_an_exhibit_convicts_a_cheat_again_in_the_hands_of_a_stranger(tmp_path: Path, book: str):
    """Out of a folder, with nobody asked: the segment with the skipped step is refuted, the one before it is not,
    and who says otherwise of that one is not borne out."""

    async def story(swarm: Swarm) -> None:
        for _ in range(2):
            await swarm.play()
        reader = Reader(swarm, of=2)
        await reader.refuted(1)
        looked = reader.looks()
        assert (looked.result, reader.stands) == ("agrees", True) and "mismatch" in looked.what
        assert reader.told()[0] == []
        await reader.refuted(0)
        assert reader.looks().result == "differs" and not reader.stands
        problems, lines = reader.told()
        assert problems == ["E-VER-16"] and any("differs  ada said mismatch" in line for line in lines)
        reader.folder.joinpath("blobs", reader.work.before.hex()).unlink()
        reader.court = OfflineJudge(
            [reader.folder], swarm.founded.settings, reading(RUN, SessionVerifier()), parse_training_spec
        )
        looked = reader.looks()
        assert looked.result == "unknown" and "state" in looked.what and reader.stands
        reader.court.folders = [reader.folder, swarm.stores[1].folder]
        assert reader.looks().result == "differs"

    play(tmp_path, book, story, cheat=skips)


def test_what_other_machines_may_find_otherwise_is_not_held_against_auditors(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch
):
    """Near the tolerance, or where they compared bits that are not the same here: nobody can tell from here."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        reader = Reader(swarm, of=1)
        await reader.refuted(0)
        for distance, bits, result in ((6e-4, False, "unknown"), (1e-5, True, "unknown"), (1e-5, False, "differs")):
            found = ReplayAccepted(distance, 1e-3)
            monkeypatch.setattr(replay_judge, "judge_segment", lambda *_, found=found: found)
            monkeypatch.setattr(replay_judge, "pinned", lambda one, other, bits=bits: bits and one is other)
            reader.court = OfflineJudge(
                [reader.folder], swarm.founded.settings, reading(RUN, SessionVerifier()), parse_training_spec
            )
            assert reader.looks().result == result, distance

    play(tmp_path, book, story)


def test_nobody_is_convicted_by_an_exhibit_that_somebody_made_up(tmp_path: Path, book: str):
    """An honest round, and whatever a liar may do to what it showed: none of that is what it committed to."""

    async def story(swarm: Swarm) -> None:
        for _ in range(2):
            await swarm.play()
        reader = Reader(swarm, of=1)
        shown = await reader.refuted(1)
        assert reader.looks().result == "differs" and not reader.stands
        of_another = swarm.stores[0].read_blob(await swarm.exhibit(0, 1))
        of_another_segment = swarm.stores[0].read_blob(await swarm.exhibit(1, 2))

        def flipped(data: bytes) -> bytes:
            return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]

        turned = (shown.links[0], shown.links[2], shown.links[1], shown.links[3])
        assert shown.last is not None and shown.memory and shown.wires
        made_up: dict[str, SegmentExhibit | bytes] = {
            "junk": b"junk",
            "another's": bytes(of_another),
            "another segment": bytes(of_another_segment),
            "another claim": replace(shown, claim=replace(shown.claim, steps=STEPS + 1)),
            "without the claim before": replace(shown, last=None),
            "another claim before": replace(shown, last=replace(shown.last, ends=ZERO_DIGEST)),
            "links": replace(shown, links=turned),
            "fewer links": replace(shown, links=shown.links[:-1]),
            "begin": replace(shown, begin=flipped(shown.begin)),
            "end": replace(shown, end=flipped(shown.end)),
            "x": replace(shown, x=flipped(shown.x)),
            "feedback": replace(shown, memory=flipped(shown.memory)),
            "no feedback": replace(shown, memory=b""),
            "wires": replace(shown, wires=(flipped(shown.wires[0]), *shown.wires[1:])),
            "no wires": replace(shown, wires=()),
        }
        for name, one in made_up.items():
            looked = reader.looks("mismatch", one)
            assert looked.result == "differs" and "any peer" in looked.what and not reader.stands, (name, looked)
            assert reader.looks("wrong", one).result == "word", name  # that it was shown so

    play(tmp_path, book, story, up="int8+zstd")
