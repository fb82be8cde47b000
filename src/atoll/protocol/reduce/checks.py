"""What others may say in a reduce: a row must be the one its author committed to, a sum and an answer possible.

Each check knows the plan and the commitments, nothing of how far the reduce has come.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Payload
from atoll.keys.digest import merkle_holds
from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.rows import Held
from atoll.wire.messages.round import Contribution, Handed, RowBytes
from atoll.wire.messages.statements import Answered, Commit


def committed_row(
    author: PeerId, commit: Commit, message: Contribution | RowBytes, payload: Payload
) -> Held | None:
    """The row that came with this message; None if it is not what its author committed to."""
    if not merkle_holds(commit.root, payload.digest, message.part, commit.parts, message.path):
        return None
    return Held(frozenset((author,)), commit.weight, payload, message.path, message.statement)


def check_handed(
    plan: ReducePlan, sender: PeerId, message: Handed, commit_of: Callable[[PeerId], Commit | None]
) -> None:
    """Raise PeerFault unless these rows come through this sender, with the weight they were committed to with."""
    names = frozenset(message.contributors)
    below = plan.topology.parts[message.part].below(sender)
    once = len(names) == len(message.contributors) > 0
    if not below or not once or not names <= below | {sender}:
        # without anybody below it, a sender would dress its own row up as a sum, which no commitment can judge
        raise PeerFault(sender, f"handed on rows of part {message.part} that do not come through it")
    commits = [commit_of(name) for name in names]
    known = [commit.weight for commit in commits if commit is not None]
    if message.weight < 0 or (len(known) == len(names) and sum(known) != message.weight):
        raise PeerFault(sender, f"weighs part {message.part} by {message.weight}, not as its contributors do")


def check_answer(plan: ReducePlan, owner: PeerId, answered: Answered) -> None:
    """Raise PeerFault unless this owner may say this about this part."""
    part, index = answered.part, answered.owner_index
    if not (0 <= part < plan.parts and 0 <= index < len(plan.owners(part))):
        raise PeerFault(owner, f"answered for part {part} as owner {index}, which the plan does not have")
    if plan.owners(part)[index] != owner:
        raise PeerFault(owner, f"answered for part {part}, which it does not own")
    names = answered.contributors
    rising = names == tuple(sorted(names)) and len(set(names)) == len(names)  # sorting what is sorted is quick
    if not names or not rising or not set(plan.listeners).issuperset(names):
        raise PeerFault(owner, f"lists contributors of part {part} that cannot be")
    if not plan.enough(names):
        raise PeerFault(owner, f"combined {len(names)} rows of part {part}, {plan.rows_least} are needed")
