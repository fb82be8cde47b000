"""Findings of auditors and checkers: which ones count against a member, and how many refute it."""

from __future__ import annotations

from atoll.policy.plan import QuorumRule
from atoll.wire.messages.statements import Finding

AGAINST: frozenset[Finding] = frozenset({"mismatch", "wrong", "withheld"})
REFUTING: frozenset[Finding] = frozenset({"mismatch", "wrong"})  # silence proves less: a crash loses the record


def voices_needed(voters: int, rule: QuorumRule) -> int:
    """Auditors that refute a member: more than may lie, and at least two, since one may be wrong."""
    return max(2, (voters - 1) // 3 + 1 if rule == "two-thirds" else 0)
