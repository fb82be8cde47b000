"""What makes a vertex final, rule by rule: each forgery is refused, and believed by a history that lacks the rule.

A mutant is a change of the source text (`mutated.py`), as in `conformance/mutants.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from mutated import without

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.crypto.digest import digest
from atoll.protocol.history import chain as room
from atoll.protocol.history.chain import VertexChain, recovery_bytes
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner, sign_as_identity
from atoll.wire.authority import FounderAuthority
from atoll.wire.codec import decode_body, encode, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import LeaveReport, QuorumCertificate, SignedStatement, Stage, Vote
from atoll.wire.messages.vertex import (
    EarnedVoteRecord,
    IssuedTicketRecord,
    Member,
    SharedDataProgress,
    SwarmRoundMetrics,
    Vertex,
    VertexBody,
)

NAMES = tuple(PeerId(f"p{i}") for i in range(4))
SIGNERS = {p: VirtualSigner(p) for p in NAMES}
KEYS = {p: signer.vote_key for p, signer in SIGNERS.items()}
QUORUM, RECOVERY = 3, b"the founder's identity"


def member(peer: PeerId) -> Member:
    return Member(peer, KEYS[peer], (), "trainer", "member", -1, 0.0, peer, links=b"as measured")


GENESIS = VertexBody(
    run=ZERO_DIGEST,
    round=-1,
    attempt=0,
    parent=ZERO_DIGEST,
    time_s=100.0,
    proposer=NAMES[0],
    parts=(),
    state=digest(b"the first state"),
    commits=(),
    members=tuple(map(member, NAMES)),
    tickets=(),
    reports=(),
    metrics=SwarmRoundMetrics(0.0, 0, 0),
)
RUN = vertex_id(encode(GENESIS))
NEXT = replace(GENESIS, run=RUN, round=0, parent=RUN, time_s=101.0, trained=1, state=digest(b"the next state"))
EPOCH = replace(
    GENESIS,
    **{"run": RUN, "round": 0, "parent": RUN, "time_s": 102.0, "epoch": 1},
    members=(*map(member, NAMES[:2]), *(replace(member(p), standing="away", links=b"") for p in NAMES[2:])),
)
WORD = SignedStatement(NAMES[3], encode(LeaveReport(0, "gone")), b"never signed")


def voted(
    body: VertexBody,
    voters: tuple[PeerId, ...] = NAMES[:3],
    stage: Stage = "commit",
    said: VertexBody | None = None,
    round: int = 0,
) -> Vertex:
    """With the votes of these: for this body, or in truth for what they `said`."""
    name = vertex_id(encode(said or body))
    vote = Vote(round, 0, stage, name)
    votes = tuple(
        (p, StatementSigner(RUN, SIGNERS[p], VirtualSignatureVerifier()).sign(vote).signature) for p in voters
    )
    return Vertex(encode(body), QuorumCertificate(round, 0, stage, name, votes))


def recovered(body: VertexBody, by: bytes = RECOVERY) -> Vertex:
    raw = encode(body)
    return Vertex(raw, None, sign_as_identity(by, recovery_bytes(RUN, raw)))


def founded(kind: type[VertexChain] = VertexChain) -> VertexChain:
    reader = StatementSigner(RUN, VirtualSigner(PeerId("reader")), VirtualSignatureVerifier())
    return kind(
        Vertex(encode(GENESIS), None),
        reader,
        lambda name, body: (KEYS, QUORUM),
        FounderAuthority(RECOVERY, reader.verifier),
    )


@dataclass(frozen=True)
class Forgery:
    of: str
    vertex: Vertex
    text: str  # the rule that refuses it
    instead: str

    def __str__(self) -> str:
        return self.of


KEPT = "(body.invited, body.extensions, body.data) == (parent.invited, parent.extensions, parent.data)"
STAYS = "(body.epoch, body.state, body.trained, body.tickets) == ("
FORGERIES = [
    Forgery("another run", voted(replace(NEXT, run=digest(b"?"))), "body.run != self.notary.run or ", ""),
    Forgery(
        "another parent",
        voted(replace(NEXT, parent=digest(b"?"))),
        "self.notary.run or body.parent != parent:",
        "self.notary.run:",
    ),
    Forgery(
        "an older time",
        voted(replace(NEXT, time_s=99.0)),
        "if is_too_old(before, body.time_s):",
        "if False:",
    ),
    Forgery(
        "too few votes",
        voted(NEXT, NAMES[:2]),
        "            and self.notary.certificate_holds(certificate, keys, quorum)\n",
        "",
    ),
    Forgery("prepare votes", voted(NEXT, stage="prepare"), 'certificate.stage == "commit"', "True"),
    Forgery("votes of another round", voted(NEXT, round=1), "certificate.round == body.round", "True"),
    Forgery(
        "votes for another body", voted(NEXT, said=EPOCH), "certificate.digest == digest != ZERO_DIGEST", "True"
    ),
    Forgery("an epoch begun by votes", voted(EPOCH), "if body.epoch != before.epoch:", "if False:"),
    Forgery(
        "an epoch begun by somebody else", recovered(EPOCH, b"somebody else"), "if not (believed and ", "if not ("
    ),
    Forgery(
        "an epoch that is not the next",
        recovered(replace(EPOCH, epoch=2)),
        STAYS,
        STAYS.replace("body.epoch", "parent.epoch + 1"),
    ),
    Forgery(
        "an epoch with another state",
        recovered(replace(EPOCH, state=digest(b"?"))),
        STAYS,
        STAYS.replace("body.state", "parent.state"),
    ),
    Forgery(
        "an epoch that trained",
        recovered(replace(EPOCH, trained=1)),
        STAYS,
        STAYS.replace("body.trained", "parent.trained"),
    ),
    Forgery(
        "an epoch with a ticket",
        recovered(replace(EPOCH, tickets=(IssuedTicketRecord(b"t", b"key", "trainer", 1, 0.0),))),
        STAYS,
        STAYS.replace("body.tickets", "parent.tickets"),
    ),
    Forgery(
        "an epoch that says otherwise who invited",
        recovered(replace(EPOCH, invited=EarnedVoteRecord((0,) * 4, (0,) * 4, ()))),
        KEPT,
        KEPT.replace("body.invited", "parent.invited"),
    ),
    Forgery(
        "an epoch at another place in the data",
        recovered(replace(EPOCH, data=SharedDataProgress(ZERO_DIGEST, 0, ()))),
        KEPT,
        KEPT.replace("body.data", "parent.data"),
    ),
    Forgery("an epoch with a report", recovered(replace(EPOCH, reports=(WORD,))), " or body.reports)", ")"),
    Forgery("an epoch with a commitment", recovered(replace(EPOCH, commits=(WORD,))), " or body.commits", ""),
    Forgery("an epoch with a part", recovered(replace(EPOCH, parts=(WORD,))), "body.parts or ", ""),
    Forgery(
        "an epoch without a member",
        recovered(replace(EPOCH, members=EPOCH.members[:3])),
        "[m.peer for m in body.members] == list(before) and ",
        "",
    ),
    Forgery(
        "an epoch with another key",
        recovered(replace(EPOCH, members=(replace(EPOCH.members[0], vote_key=KEYS[NAMES[3]]), *EPOCH.members[1:]))),
        'return now.links in (b"", before.links) and now in (stays, replace(stays, standing="away"))',
        "return True",
    ),
    Forgery(
        "an epoch with links that nobody measured",
        recovered(replace(EPOCH, members=(replace(EPOCH.members[0], links=b"anew"), *EPOCH.members[1:]))),
        'now.links in (b"", before.links) and ',
        "",
    ),
    Forgery(
        "an epoch in which nobody votes",
        recovered(replace(EPOCH, members=tuple(replace(m, standing="away") for m in EPOCH.members))),
        " and any(m.votes for m in body.members)",
        "",
    ),
]


@pytest.mark.parametrize("vertex", [voted(NEXT), recovered(EPOCH)], ids=["votes", "recovery"])
def test_what_is_final_is_believed(vertex: Vertex):
    history = founded()
    assert history.append(vertex) is not None and history.head == 0


@pytest.mark.parametrize("forgery", FORGERIES, ids=str)
def test_a_forged_vertex_is_refused_and_believed_where_its_rule_is_deleted(forgery: Forgery):
    history = founded()
    with pytest.raises(PeerFault):
        history.append(forgery.vertex, NAMES[3])
    assert history.head == -1
    assert (
        founded(without(room, forgery.text, forgery.instead).VertexChain).append(forgery.vertex, NAMES[3])
        is not None
    )


def test_another_branch_is_believed_by_the_same_rules_and_changes_nothing_here():
    """A recovery while a quorum was alive: both are final after one parent; a forged one is its bringer's fault."""
    history = founded()
    history.append(voted(NEXT))
    assert history.check_other_branch(voted(NEXT)) is None
    assert history.check_other_branch(recovered(EPOCH)) == EPOCH and history.head_body == NEXT
    for forgery in FORGERIES:
        body = decode_body(forgery.vertex.body)
        if body == NEXT or body.parent != RUN:  # ours, whatever was said of it; or nobody here knows its place
            assert history.check_other_branch(forgery.vertex, NAMES[3]) is None
            continue
        with pytest.raises(PeerFault):
            history.check_other_branch(forgery.vertex, NAMES[3])
    assert history.head_body == NEXT
