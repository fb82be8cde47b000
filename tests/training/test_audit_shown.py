"""What a stranger lays out for its auditors: refused before it costs anything, and never an error of ours."""

from __future__ import annotations

import msgspec
import pytest
import torch

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST
from atoll.base.limits import PARTS_OF_ANY
from atoll.training.exchange.layout import layout_of
from atoll.training.models import build_model
from atoll.training.recipe.inner import fresh_inner
from atoll.verification.replay_audit.exhibit import LINKS_MAX, shown_from_bytes
from atoll.verification.replay_audit.replay import TrainerSnapshot, why_no_state
from atoll.verification.replay_audit.state_chain import ChainClaim
from atoll.verification.replay_audit.tolerance import profile_here

CLAIM = ChainClaim(ZERO_DIGEST, 1, ZERO_DIGEST, profile_here())


@pytest.mark.parametrize(("links", "wires"), [(LINKS_MAX + 1, 0), (0, PARTS_OF_ANY + 1)])
def test_more_links_or_parts_than_any_round_has_are_refused_by_their_count(links: int, wires: int):
    data = msgspec.msgpack.encode([CLAIM, None, [[b"", b""]] * links, b"", b"", b"", b"", [b""] * wires])
    with pytest.raises(PeerFault, match="length <="):
        shown_from_bytes(data)


@pytest.mark.parametrize("shape", [(), (1, 0), (7,)])
def test_counters_of_any_shape_are_a_verdict_and_no_crash(shape: tuple[int, ...]):
    layout = layout_of(build_model("gpt-nano", 0))
    live = TrainerSnapshot(
        torch.zeros(layout.floats), torch.zeros(shape, dtype=torch.int64), fresh_inner(layout.parameters)
    )
    assert "counters" in (why_no_state(live, layout) or "")
