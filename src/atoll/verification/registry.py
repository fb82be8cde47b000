"""The checks that this program offers, in the order in which a peer calls them.

A new check is a folder beside this file, and one line here.
"""

from __future__ import annotations

from atoll.verification.loss_scoring.machine import LOSS_SCORING
from atoll.verification.malformed_updates.machine import MALFORMED_UPDATES
from atoll.verification.redundant_training.machine import REDUNDANT_TRAINING
from atoll.verification.replay_audit.machine import REPLAY_AUDIT
from atoll.verification.state_validation.machine import STATE_VALIDATION

VERIFIERS = (REPLAY_AUDIT, STATE_VALIDATION, MALFORMED_UPDATES, REDUNDANT_TRAINING, LOSS_SCORING)
