"""Replay audits: did a trainer take the steps that it was told to take?

A round is cut into short segments. The trainer commits to a hash chain over its whole state at every boundary
between them; once nobody can change it any more, one segment is drawn, and an auditor takes its few steps again,
from the committed state, with the data that the plan assigned. What comes out must be what the next link names.

    replay   what was assigned, a trainer's state and its name, and the steps themselves
    chain    what is committed, and how a trainer that kept few states shows any of them
    shown    what a trainer lays out for its auditors, and whether it is what it committed to
    judge    one audit and its verdict
    profile  what can be audited, how closely, and where bits are compared

Who is audited and by whom is `verification/replay_audit/policy.py`'s, what a run does with it
`verification/replay_audit/machine.py`'s and
`verification/replay_audit/worker.py`'s. What is committed, asked, compared, and what an audit cannot see:
specs/audit.md.
"""

from __future__ import annotations

from atoll.verification.replay_audit.judge import (
    Accepted,
    EndWanted,
    Mismatch,
    Unauditable,
    Verdict,
    WrongChain,
    judge_segment,
    judge_update,
    judging,
)
from atoll.verification.replay_audit.replay import (
    Assignment,
    Link,
    Live,
    Replica,
    fresh_private,
    live_bytes,
    live_from_bytes,
    name_of,
    name_of_x,
    segments,
)
from atoll.verification.replay_audit.state_chain import Claim, Record, chain_head, claim_name, memory_name
from atoll.verification.replay_audit.tolerance import (
    Profile,
    pinned,
    profile_here,
    recipe_problem,
    tolerance_from,
    why_unauditable,
)

__all__ = [
    "Accepted",
    "Assignment",
    "Claim",
    "EndWanted",
    "Link",
    "Live",
    "Mismatch",
    "Profile",
    "Record",
    "Replica",
    "Unauditable",
    "Verdict",
    "WrongChain",
    "chain_head",
    "claim_name",
    "fresh_private",
    "judge_segment",
    "judge_update",
    "judging",
    "live_bytes",
    "live_from_bytes",
    "memory_name",
    "name_of",
    "name_of_x",
    "pinned",
    "profile_here",
    "recipe_problem",
    "segments",
    "tolerance_from",
    "why_unauditable",
]
