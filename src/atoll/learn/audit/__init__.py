"""Replay audits: did a trainer take the steps that it was told to take?

A round is cut into short segments. The trainer commits to a hash chain over its whole state at every boundary
between them; once nobody can change it any more, one segment is drawn, and an auditor takes its few steps again,
from the committed state, with the data that the plan assigned. What comes out must be what the next link names.

    replay   what was assigned, a trainer's state and its name, and the steps themselves
    chain    what is committed, and how a trainer that kept few states shows any of them
    judge    one audit and its verdict; what several verdicts together mean
    profile  what can be audited, how closely, and where bits are compared
    odds     check rate, stake, and what a cheater may expect

Nothing here crosses a network and no round asks for an audit yet. What is committed, asked, compared, and what an
audit cannot see: specs/audit.md.
"""

from __future__ import annotations

from atoll.learn.audit.chain import Claim, Record, chain_head, memory_name
from atoll.learn.audit.judge import (
    Accepted,
    EndWanted,
    Mismatch,
    Unauditable,
    Verdict,
    WrongChain,
    conclusion,
    drawn,
    judge_segment,
    judge_update,
)
from atoll.learn.audit.profile import Profile, pinned, profile_here, tolerance_from, why_unauditable
from atoll.learn.audit.replay import (
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
    "conclusion",
    "drawn",
    "fresh_private",
    "judge_segment",
    "judge_update",
    "live_bytes",
    "live_from_bytes",
    "memory_name",
    "name_of",
    "name_of_x",
    "pinned",
    "profile_here",
    "segments",
    "tolerance_from",
    "why_unauditable",
]
