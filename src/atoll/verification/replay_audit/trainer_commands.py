"""Trainer commands of replay audits: show a segment of an own round, or take another member's segment again."""

from __future__ import annotations

import msgspec

from atoll.verification.replay_audit.judge import Verdict
from atoll.verification.replay_audit.replay import TrainingAssignment
from atoll.verification.replay_audit.state_chain import ChainClaim


class WriteSegmentExhibit(msgspec.Struct, frozen=True, tag="WriteSegmentExhibit"):
    """Write the exhibit of this segment of a round into this file."""

    round: int
    segment: int
    claim: ChainClaim
    last: ChainClaim | None
    path: str


class JudgeSegment(msgspec.Struct, frozen=True, tag="JudgeSegment"):
    """Replay the segment that another member shows in this file."""

    assignment: TrainingAssignment
    segment: int
    path: str


class NextAuditStep(msgspec.Struct, frozen=True, tag="NextAuditStep"):
    """One more step of the segment that is being shown or judged."""


class AuditStepCompleted(msgspec.Struct, frozen=True, tag="AuditStepCompleted"):
    """One step of an audit is done. The last one brings the verdict of a judgment."""

    done: bool
    verdict: Verdict | None = None


AuditCommand = WriteSegmentExhibit | JudgeSegment | NextAuditStep
