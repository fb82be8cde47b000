"""Owners that lie about their parts, or as witnesses about others' parts. Each signs its statements.

miscounter    result with other bytes than its contributors' rows give
censor        leaves two contributors out, and sums the others rightly
forger        leaves two contributors out of the sum, and lists them anyway
two_tongued   right result to every second peer, other bytes to the rest
mute          combines, and never reports the result
two_promises  commits to one update before every second peer and to another before the rest, and sends each its own
framer        right result, and reports every honest result as a lie
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Payload, Send
from atoll.crypto.digest import digest, merkle_path, merkle_root
from atoll.protocol.allreduce.verified import CrossCheckedOwners
from atoll.simulation.adversaries.byzantine import MISCHIEF, ByzantineMember, Twist
from atoll.simulation.worker import whole_of
from atoll.wire.codec import decode_statement
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.round import PartResult, RowContribution, RowResponse, UpdateCommitmentMessage
from atoll.wire.messages.statements import Accusation, Commitment, OwnerComplaint, OwnerResult
from atoll.wire.opening import rows_digest

CENSORED = 2  # contributors that a censor leaves out

Lie = Callable[[ByzantineMember, OwnerResult, tuple[PeerId, ...]], tuple[OwnerResult, tuple[PeerId, ...]]]


def _told(villain: ByzantineMember, send: Send, lie: Lie) -> list[Effect]:
    """Insert the lie into own results, shown or only signed; pass everything else on."""
    message = send.message
    if not isinstance(message, PartResult) or message.statement.signer != villain.peer.me:
        return [send]
    answered = decode_statement(message.statement.body, villain.peer.me)
    assert isinstance(answered, OwnerResult)
    other, names = lie(villain, answered, tuple(send.payload.data) if send.payload is not None else ())
    said = replace(message, statement=villain.notary.sign(other))
    payload = Payload(other.digest, other.size_bytes, names) if send.payload is not None else None
    return [replace(send, message=said, payload=payload)]


def _other_bytes(villain: ByzantineMember, answered: OwnerResult, names: tuple[PeerId, ...]):
    return replace(answered, digest=digest(answered.digest)), names


def _fewer(villain: ByzantineMember, answered: OwnerResult, names: tuple[PeerId, ...]):
    round = villain.peer.round
    assert round is not None and round.reduce is not None
    if answered.part not in round.reduce.accumulators:  # on its jury, which leaves no contributor out
        return _other_bytes(villain, answered, names)
    rows = round.reduce.accumulators[answered.part].rows
    out = [p for p in answered.contributors if p != villain.peer.me][:CENSORED]
    left = tuple(p for p in answered.contributors if p not in out)
    made = whole_of([rows[p].payload.digest for p in left], answered.round, answered.part)
    of = rows_digest(commit for commit in map(round.reduce.commit_of, left) if commit is not None)
    made_of = UNSET if answered.made_of is UNSET else of
    return replace(answered, digest=made, contributors=left, rows=of, made_of=made_of), left


def _forged(villain: ByzantineMember, answered: OwnerResult, names: tuple[PeerId, ...]):
    other, left = _fewer(villain, answered, names)
    return replace(other, contributors=answered.contributors, rows=answered.rows, made_of=answered.made_of), left


def miscount(villain: ByzantineMember, send: Send) -> list[Effect]:
    return _told(villain, send, _other_bytes)


def censor(villain: ByzantineMember, send: Send) -> list[Effect]:
    return _told(villain, send, _fewer)


def forge(villain: ByzantineMember, send: Send) -> list[Effect]:
    return _told(villain, send, _forged)


def two_tongued(villain: ByzantineMember, send: Send) -> list[Effect]:
    others = villain.others
    if send.to not in others or others.index(send.to) % 2:
        return [send]
    return _told(villain, send, _other_bytes)


def mute(villain: ByzantineMember, send: Send) -> list[Effect]:
    mine = isinstance(send.message, PartResult) and send.message.statement.signer == villain.peer.me
    return [] if mine else [send]


def two_promises(villain: ByzantineMember, send: Send) -> list[Effect]:
    message, others, round = send.message, villain.others, villain.peer.round
    if (
        not isinstance(message, UpdateCommitmentMessage | RowContribution | RowResponse)
        or message.statement.signer != villain.peer.me
    ):
        return [send]
    if send.to not in others or others.index(send.to) % 2 or round is None or round.encoded is None:
        return [send]
    commit = decode_statement(message.statement.body, villain.peer.me)
    assert isinstance(commit, Commitment)
    rows = tuple(second_promise(part.digest) for part in round.encoded)
    signed = villain.notary.sign(replace(commit, root=merkle_root(rows)))
    if isinstance(message, UpdateCommitmentMessage):
        return [replace(send, message=replace(message, statement=signed))]
    if send.payload is None:
        return [replace(send, message=replace(message, statement=signed))]
    said = replace(message, statement=signed, path=merkle_path(rows, message.part))
    return [replace(send, message=said, payload=replace(send.payload, digest=rows[message.part]))]


def second_promise(row: Digest) -> Digest:
    """Row that a peer with two commitments sends in place of this one."""
    return digest(row)


def frame(villain: ByzantineMember, send: Send) -> list[Effect]:
    return [send]


def _frame(villain: ByzantineMember, to: PeerId, now: Seconds) -> list[Effect]:
    round = villain.peer.round
    if round is None or round.reduce is None or not isinstance(round.reduce.verification, CrossCheckedOwners):
        return []
    words = [w for p in villain.others for w in round.reduce.verification.cross_check.results_of(p)]
    if not words:
        return []
    word, another = villain.draw.choice(words), villain.draw.choice(words)
    said = villain.draw.choice(
        [
            Accusation(word.statement),
            Accusation(word.statement, another.statement),
            Accusation(word.statement, word.statement),
            Accusation(villain.notary.sign(replace(word.result, part=999))),
            OwnerComplaint(round.plan.round, word.statement.signer, "withheld"),
        ]
    )
    return [Send(to, ReportMessage(villain.notary.sign(said)))]


MISCHIEF[frame] = _frame


CROOKS: dict[str, Twist] = {
    "miscounter": miscount,
    "censor": censor,
    "forger": forge,
    "two_tongued": two_tongued,
    "mute": mute,
    "two_promises": two_promises,
    "framer": frame,
}
