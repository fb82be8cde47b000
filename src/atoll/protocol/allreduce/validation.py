"""What others may say in a reduce: a row must be the one its author committed to, a sum and an answer possible.

Each check knows the plan and the commitments, nothing of how far the reduce has come.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import fsum

from atoll.base.errors import PeerFault
from atoll.base.ids import DIGEST_BYTES, PeerId
from atoll.base.limits import WEIGHED_ROWS_MAX
from atoll.base.machine import Payload
from atoll.crypto.digest import merkle_holds
from atoll.protocol.allreduce.buffers import StoredRow
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.wire.messages.round import PartialSum, RowContribution, RowResponse
from atoll.wire.messages.statements import AgreedWeights, Commitment, OwnerComparison, OwnerResult
from atoll.wire.opening import made_of_fits
from atoll.wire.weights import mixtures_in

PRODUCT_MAX = 1e60  # of two rows: 2^41 values of at most 2^60 each, the largest that codecs let through
SUM_SLACK = 1e-9  # by which weights may sum to more than 1: they were rounded


def committed_row(
    author: PeerId, commit: Commitment, message: RowContribution | RowResponse, payload: Payload
) -> StoredRow | None:
    """The row that came with this message; None if it is not what its author committed to."""
    if not merkle_holds(commit.root, payload.digest, message.part, commit.parts, message.path):
        return None
    return StoredRow(frozenset((author,)), commit.weight, payload, message.path, message.statement)


def check_handed(
    plan: ReducePlan,
    sender: PeerId,
    by: PeerId,
    message: PartialSum,
    commit_of: Callable[[PeerId], Commitment | None],
) -> None:
    """Raise PeerFault unless these rows come through whoever combined them (the sender, but for broken links), with
    the weight they were committed to with."""
    names = frozenset(message.contributors)
    below = plan.topology.parts[message.part].below(by)
    once = len(names) == len(message.contributors) > 0
    if not below or not once or not names <= below | {by}:
        # without anybody below it, a sender would dress its own row up as a sum, which no commitment can judge
        raise PeerFault(sender, f"handed on rows of part {message.part} that do not come through it")
    commits = [commit_of(name) for name in names]
    known = [commit.weight for commit in commits if commit is not None]
    if message.weight < 0 or (len(known) == len(names) and sum(known) != message.weight):
        raise PeerFault(sender, f"weighs part {message.part} by {message.weight}, not as its contributors do")


def check_answer(plan: ReducePlan, owner: PeerId, answered: OwnerResult) -> None:
    """Raise PeerFault unless this owner may say this about this part."""
    part, index = answered.part, answered.owner_index
    signer = plan.signer(part, index) if 0 <= part < plan.parts else None
    if signer is None:
        raise PeerFault(owner, f"answered for part {part} as owner {index}, which the plan does not have")
    if signer != owner:
        raise PeerFault(owner, f"answered for part {part}, which it does not own")
    names = answered.contributors
    rising = names == tuple(sorted(names)) and len(set(names)) == len(names)  # sorting what is sorted is quick
    if not names or not rising or not plan.hearers.issuperset(names):
        raise PeerFault(owner, f"lists contributors of part {part} that cannot be")
    takes = plan.topology.parts[part].takes
    if takes is not None and not (owner in names and takes.issuperset(names)):
        raise PeerFault(owner, f"lists contributors of part {part} whose rows it does not take")
    if not made_of_fits(answered.made_of, plan.opened):
        raise PeerFault(owner, f"does not say rightly what part {part} was made of")
    if not plan.enough(names):
        raise PeerFault(owner, f"combined {len(names)} rows of part {part}, {plan.rows_least} are needed")


def check_compared(plan: ReducePlan, owner: PeerId, compared: OwnerComparison) -> None:
    """Raise PeerFault unless this owner may say this about the rows of this part."""
    part, index, names = compared.part, compared.owner_index, compared.contributors
    owns = 0 <= part < plan.parts and 0 <= index < len(plan.owners(part)) and plan.owners(part)[index] == owner
    if not owns:
        raise PeerFault(owner, f"compared rows of part {part}, which it does not own")
    if not names or list(names) != sorted(set(names)) or not plan.givers.issuperset(names):
        raise PeerFault(owner, f"compared rows of part {part} that cannot be")
    products, count = compared.products, len(plan.settled(names))
    if count > WEIGHED_ROWS_MAX or len(products) != 8 * (count * (count + 1) // 2):
        raise PeerFault(owner, f"has {len(products)} bytes to say of {count} rows of part {part}")
    values = struct.unpack(f"<{len(products) // 8}d", products)
    if not all(abs(value) <= PRODUCT_MAX for value in values):  # NaN compares false
        raise PeerFault(owner, f"compared rows of part {part} to numbers that cannot be")


def weighing_flaw(plan: ReducePlan, weighing: AgreedWeights) -> str | None:
    """Why rows of this plan cannot weigh this, whatever they are; None if they can."""
    names = weighing.peers
    if list(names) != sorted(set(names)) or not plan.givers.issuperset(names):
        return "weighs rows that cannot be"
    if isinstance(weighing.weights, bytes) != plan.mixes or not mixtures_hold(plan, weighing):
        return "mixes rows otherwise than with their neighbours"
    weights = weighing.shares
    # each at most 1 before they are summed: a sum of huge ones is no float, and raises
    if len(weights) != len(names) or not all(0 <= weight <= 1 + SUM_SLACK for weight in weights):
        return "holds weights that are none"
    if len(weighing.compared) != DIGEST_BYTES:
        return "names what was compared by no digest"
    if any(weight for name, weight in zip(names, weights, strict=True) if name in plan.weightless):
        return "lets a newcomer's row weigh something"
    if not 0 < fsum(weights) <= 1 + SUM_SLACK or not plan.enough(names):
        return "weighs too few rows, or too much"
    if list(weighing.without) != sorted(set(weighing.without)) or not set(range(plan.parts)).issuperset(
        weighing.without
    ):
        return "goes without parts that the plan does not have"
    return None


def mixtures_hold(plan: ReducePlan, weighing: AgreedWeights) -> bool:
    """Whether mixtures, if these are any, can be of rows with all but as many of the others as may lie."""
    if not isinstance(weighing.weights, bytes):
        return True
    try:
        mixtures = mixtures_in(weighing.weights, len(weighing.peers))
    except ValueError:
        return False
    settled = {row for row, name in enumerate(weighing.peers) if name not in plan.weightless}
    nearest = len(settled) - plan.liars
    return all(
        {row} <= set(mixture) <= settled and len(mixture) == nearest if row in settled else not mixture
        for row, mixture in enumerate(mixtures)
    )


def made_with(answered: OwnerResult, weighing: AgreedWeights) -> bool:
    """Whether this answer can be of this weighing: it may lack rows that died with an owner, and has no others."""
    return answered.part not in weighing.without and set(weighing.peers).issuperset(answered.contributors)
