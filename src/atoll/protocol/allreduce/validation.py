"""Validation of received rows, sums, results, comparisons and weights against the plan and the commitments.

Not responsible for: the progress of the attempt; a valid message may still come too late.
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
from atoll.protocol.allreduce.buffers import GatheredRow
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.wire.messages.round import PartialSum, RowContribution, RowResponse
from atoll.wire.messages.statements import AgreedWeights, Commitment, OwnerResult, RowInnerProducts
from atoll.wire.opening import names_commitments_iff_opened
from atoll.wire.weights import mixtures_in

PRODUCT_MAX = 1e60  # of two rows: 2^41 values of at most 2^60 each, the largest that codecs admit
SUM_SLACK = 1e-9  # excess of the sum of weights over 1, from rounding


def committed_row(
    author: PeerId, commit: Commitment, message: RowContribution | RowResponse, payload: Payload
) -> GatheredRow | None:
    """The row of this message; None if its author did not commit to it."""
    if not merkle_holds(commit.root, payload.digest, message.part, commit.parts, message.path):
        return None
    return GatheredRow(frozenset((author,)), commit.weight, payload, message.path, message.statement)


def check_handed(
    plan: ReducePlan,
    sender: PeerId,
    by: PeerId,
    message: PartialSum,
    commit_of: Callable[[PeerId], Commitment | None],
) -> None:
    """Raise PeerFault unless relay `by` may have combined these rows, with the committed weights.

    `by` is the sender, except around broken links.
    """
    names = frozenset(message.contributors)
    below = plan.topology.parts[message.part].below(by)
    once = len(names) == len(message.contributors) > 0
    if not below or not once or not names <= below | {by}:
        # a sender with no peer below it could disguise its own row as a sum, which no commitment can judge
        raise PeerFault(sender, f"handed on rows of part {message.part} that do not come through it")
    commits = [commit_of(name) for name in names]
    known = [commit.weight for commit in commits if commit is not None]
    if message.weight < 0 or (len(known) == len(names) and sum(known) != message.weight):
        raise PeerFault(
            sender, f"weight of part {message.part} is {message.weight}, not the sum of its contributors' weights"
        )


def check_answer(plan: ReducePlan, owner: PeerId, answered: OwnerResult) -> None:
    """Raise PeerFault unless this owner may sign this result."""
    part, index = answered.part, answered.owner_index
    signer = plan.signer(part, index) if 0 <= part < plan.parts else None
    if signer is None:
        raise PeerFault(owner, f"answered for part {part} as owner {index}, which the plan does not have")
    if signer != owner:
        raise PeerFault(owner, f"answered for part {part}, which it does not own")
    names = answered.contributors
    rising = names == tuple(sorted(names)) and len(set(names)) == len(names)  # sorting a sorted tuple is fast
    if not names or not rising or not plan.recipient_set.issuperset(names):
        raise PeerFault(owner, f"lists contributors of part {part} that are unsorted, repeated or no listeners")
    takes = plan.topology.parts[part].authors
    if takes is not None and not (owner in names and takes.issuperset(names)):
        raise PeerFault(owner, f"lists contributors of part {part} that the part does not take")
    if not names_commitments_iff_opened(answered.made_of, plan.is_audited):
        raise PeerFault(owner, f"names the commitments of part {part} wrongly")
    if not plan.is_enough(names):
        raise PeerFault(owner, f"combined {len(names)} rows of part {part}, {plan.rows_least} are needed")


def check_compared(plan: ReducePlan, owner: PeerId, compared: RowInnerProducts) -> None:
    """Raise PeerFault unless this owner may sign this comparison."""
    part, index, names = compared.part, compared.owner_index, compared.contributors
    owns = 0 <= part < plan.parts and 0 <= index < len(plan.owners(part)) and plan.owners(part)[index] == owner
    if not owns:
        raise PeerFault(owner, f"compared rows of part {part}, which it does not own")
    if not names or list(names) != sorted(set(names)) or not plan.authors.issuperset(names):
        raise PeerFault(owner, f"compared authors of part {part} that are unsorted, repeated or give no rows")
    products, count = compared.products, len(plan.with_weight(names))
    if count > WEIGHED_ROWS_MAX or len(products) != 8 * (count * (count + 1) // 2):
        raise PeerFault(owner, f"sent {len(products)} bytes of inner products for {count} rows of part {part}")
    values = struct.unpack(f"<{len(products) // 8}d", products)
    if not all(abs(value) <= PRODUCT_MAX for value in values):  # NaN compares false
        raise PeerFault(owner, f"sent inner products of part {part} that are not finite or exceed {PRODUCT_MAX}")


def weighing_flaw(plan: ReducePlan, weighing: AgreedWeights) -> str | None:
    """Why no rows of this plan can have these weights; None if they can."""
    names = weighing.peers
    if list(names) != sorted(set(names)) or not plan.authors.issuperset(names):
        return "weighs authors that are unsorted, repeated or give no rows"
    if isinstance(weighing.weights, bytes) != plan.has_mixtures or not mixtures_hold(plan, weighing):
        return "holds mixtures that do not fit the rows"
    weights = weighing.shares
    # each is checked before the sum: fsum of huge floats raises
    if len(weights) != len(names) or not all(0 <= weight <= 1 + SUM_SLACK for weight in weights):
        return "holds weights outside 0 to 1"
    if len(weighing.compared) != DIGEST_BYTES:
        return "names its comparisons by an invalid digest"
    if any(weight for name, weight in zip(names, weights, strict=True) if name in plan.weightless):
        return "gives weight to a newcomer's row"
    if not 0 < fsum(weights) <= 1 + SUM_SLACK or not plan.is_enough(names):
        return "weighs too few rows, or weights do not sum to at most 1"
    if list(weighing.without) != sorted(set(weighing.without)) or not set(range(plan.parts)).issuperset(
        weighing.without
    ):
        return "leaves out parts that the plan does not have"
    return None


def mixtures_hold(plan: ReducePlan, weighing: AgreedWeights) -> bool:
    """Whether each mixture, if the weights are mixtures, has the row itself and all but `liars` of the rows."""
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


def fits_weights(answered: OwnerResult, weighing: AgreedWeights) -> bool:
    """Whether this result can have these weights: rows may be lost with an owner, and none are added."""
    return answered.part not in weighing.without and set(weighing.peers).issuperset(answered.contributors)
