"""Evidence store: which exhibits stay, where there are more than its bound."""

from __future__ import annotations

from atoll.base.ids import PeerId
from atoll.crypto.digest import digest
from atoll.peer.verify.evidence_store import EXHIBITS_KEPT, ConvictionEvidenceStore, StoredEvidence


def test_more_of_one_round_than_may_stay_take_no_turns_at_being_written_down():
    """A liar that left is examined with every vertex, as long as its audits are open."""
    eve, kept = PeerId("eve"), ConvictionEvidenceStore()
    many = [StoredEvidence(7, eve, digest(b"%d" % k)) for k in range(EXHIBITS_KEPT + 1)]
    assert kept.keep(many) and kept.kept == tuple(many[:-1])
    assert not kept.keep(many) and not kept.keep(many)
    newer = StoredEvidence(8, eve, digest(b"newer"))
    assert kept.keep([newer]) and kept.kept == (newer, *many[:-2])
