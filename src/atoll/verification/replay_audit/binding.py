"""Binding of an exhibit to its trainer: only one set of bytes fits the claim that the trainer signed.

A drawn auditor receives the exhibit from the trainer itself. A later reader only finds a blob: a flipped byte
contradicts the chain too, and any peer may have flipped it.
The trainer signed the name of its claim before the draw. The name fixes the claim, and the claim fixes the head,
error feedback and wires. The head fixes all links, and the links fix x and the states at every boundary. A verdict
about these bytes needs no other peer's report. For any other bytes, only an auditor reports that the trainer
showed them.
Not responsible for: judging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest
from atoll.crypto.digest import Buffer, digest, merkle_root
from atoll.training.codec import Codec
from atoll.training.exchange.layout import ModelLayout
from atoll.verification.replay_audit.exhibit import SegmentExhibit, states_of, vector_from_bytes, why_not_said
from atoll.verification.replay_audit.replay import TrainingAssignment, fresh_private, name_of, name_of_x, segments
from atoll.verification.replay_audit.state_chain import chain_head, memory_name


def why_update_unbound(
    shown: SegmentExhibit,
    assignment: TrainingAssignment,
    claim: Digest,
    last: Digest | None,
    codecs: Sequence[Codec],
    layout: ModelLayout,
    named: Callable[[Buffer], Digest] = digest,
) -> str:
    """Why links, x, error feedback or wires need not be the trainer's; empty if its commitment `claim` fixes them.

    `last`: the claim in its last counted commitment before, if there is one. `codecs`: codecs of its parts.
    """
    if why := why_not_said(shown, claim, last):
        return why
    made = shown.claim
    if not 0 < made.steps <= assignment.steps:
        return ""  # the claim alone proves it
    if len(shown.links) != len(segments(assignment, made.steps)) + 1:
        return "its links are not as many as the steps that were claimed have"
    if chain_head(assignment, made.steps, shown.links) != made.head:
        return "its links do not hash to the head that was committed to"
    begins = shown.links[0].private, made.memory
    if shown.last is None and last is not None and begins != (fresh_private(layout), ZERO_DIGEST):
        return "the claim that its moments and error feedback may go on from is left out"
    try:
        x_F = vector_from_bytes(shown.x, layout.floats)
        memory_F = vector_from_bytes(shown.memory, layout.floats) if shown.memory else None
    except PeerFault as fault:
        return fault.what
    if name_of_x(x_F) != shown.links[-1].x:
        return "its x is not the one at the end of the chain"
    if memory_name(memory_F) != made.memory:
        return "its error feedback is not the one in the claim"
    if all(codec.same_everywhere for codec in codecs):
        return ""  # the judge encodes the parts itself
    whole = len(shown.wires) == len(codecs)
    if not whole or merkle_root(tuple(named(wire) for wire in shown.wires)) != made.root:
        return "its parts are not those that were committed to"
    return ""


def why_states_unbound(shown: SegmentExhibit, segment: int, layout: ModelLayout) -> str:
    """Why the states around this segment need not be the trainer's; empty if its bound links name them."""
    try:
        begin, end = states_of(shown, layout)
    except PeerFault as fault:
        return fault.what
    if (name_of(begin), name_of(end)) != (shown.links[segment], shown.links[segment + 1]):
        return f"its states are not those of segment {segment} in the chain"
    return ""
