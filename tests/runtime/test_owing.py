"""What an owner's answers left out: made good by its next answers, touched by nothing that no vertex holds."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.crypto.digest import digest
from atoll.training.codec import codec_named
from atoll.worker.downlink_error_feedback import DownlinkErrorFeedback

N, FLOATS = 1024, 2048
UP, DOWN = codec_named("fp32"), codec_named("2bit")


def answered(owing: DownlinkErrorFeedback, mean_N: Tensor, at: int = 0) -> tuple[bytes, Tensor]:
    """Its answer to one row, and what it says."""
    done, left_N = owing.combine([(1, UP.encode(mean_N))], at, len(mean_N), UP, DOWN)
    wire = bytes(done.wire)
    owing.stage(digest(wire), at, left_N)
    return wire, DOWN.decode(wire, len(mean_N))


def test_answers_together_say_what_rows_said():
    """Twenty answers in two bits add up to twenty means, but for what the last one left out."""
    owing, mean_N = DownlinkErrorFeedback(), torch.randn(N, generator=torch.Generator().manual_seed(1))
    said_N, once_N = torch.zeros(N), 20 * DOWN.decode(DOWN.encode(mean_N), N)
    for _ in range(20):
        wire, value_N = answered(owing, mean_N)
        said_N += value_N
        owing.commit([digest(wire)], FLOATS)
    wrong = float((said_N - 20 * mean_N).norm() / (20 * mean_N).norm())
    assert wrong < 0.1 < float((once_N - 20 * mean_N).norm() / (20 * mean_N).norm())


def test_an_answer_that_no_vertex_holds_changes_nothing():
    owing, mean_N = DownlinkErrorFeedback(), torch.randn(N, generator=torch.Generator().manual_seed(2))
    first, _ = answered(owing, mean_N)
    owing.commit([], FLOATS)
    again, _ = answered(owing, mean_N)
    assert again == first
    owing.commit([digest(again)], FLOATS)
    after, _ = answered(owing, mean_N)
    assert after != first
    owing.reset()
    assert answered(owing, mean_N)[0] == first


def test_values_that_others_owned_meanwhile_keep_what_is_owed_for_them():
    """Part borders move: the second half is answered for alone, then both halves in one part."""
    owing, mean_N = DownlinkErrorFeedback(), torch.randn(FLOATS, generator=torch.Generator().manual_seed(3))
    wire, value_N = answered(owing, mean_N[N:], at=N)
    owing.commit([digest(wire)], FLOATS)
    done, left_N = owing.combine([(1, UP.encode(mean_N))], 0, FLOATS, UP, DOWN)
    wanted_N = mean_N.clone()
    wanted_N[N:] += mean_N[N:] - value_N
    assert bytes(done.wire) == bytes(DOWN.encode(wanted_N))
    assert torch.equal(left_N, wanted_N - DOWN.decode(done.wire, FLOATS))
