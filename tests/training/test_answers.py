"""Answers that say more than a mean: what readers make of them is what their maker meant, whatever the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.training.codec import Codec, codec_named
from atoll.training.exchange.combine import combine, gather
from atoll.training.recipe.reducer import Statistic, agreement, made_of
from atoll.training.recipe.reply_formats import EXACT, HEAD, MEAN, ROWS, ReplyFormat

SIZES = (4096, 1000, 3000)
N = sum(SIZES)


def rows_of(up: Codec, count: int = 3, seed: int = 0) -> list[tuple[int, bytes]]:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(N, generator=draw) * (1 + 9 * (k == 1)) for k in range(count)]
    return [(k + 1, bytes(up.encode(row))) for k, row in enumerate(rows)]


def answering(
    up: str = "sparseloco", down: str | None = None, statistic: Statistic = "mean", agreeing: bool = False
) -> ReplyFormat:
    return ReplyFormat(codec_named(up), codec_named(down) if down else None, statistic, agreeing, SIZES)


@pytest.mark.parametrize(("up", "kind"), [("sparseloco", ROWS), ("2bit", ROWS), ("fp32", EXACT)])
def test_gathered_rows_give_everybody_the_mean_without_a_second_loss(up: str, kind: int):
    """The same bits as if all had every row; where rows would be longer than what they make, that is sent."""
    how = answering(up)
    rows = rows_of(how.up)
    done = how.encode(rows)
    assert done.wire is not None and done.counted == (0, 1, 2) and HEAD.unpack_from(done.wire)[0] == kind
    wanted = gather(rows, N, how.up).mean_N
    assert wanted is not None and torch.equal(how.decode(done.wire).value_N, wanted)
    assert len(done.wire) <= 4 * N + HEAD.size


@pytest.mark.parametrize("statistic", ["clipped", "radial"])
@pytest.mark.parametrize("down", [None, "fp32"])
def test_rows_are_scaled_tensor_by_tensor_as_in_experiments(statistic: Statistic, down: str | None):
    how = answering("int8", down, statistic)
    rows = rows_of(how.up)
    done = how.encode(rows)
    assert done.wire is not None
    wanted = made_of(statistic, [(w, how.up.decode(wire, N)) for w, wire in rows], SIZES)
    assert wanted is not None
    torch.testing.assert_close(how.decode(done.wire).value_N, wanted, rtol=1e-5, atol=1e-6)
    plain = gather(rows, N, how.up).mean_N
    assert plain is not None and (wanted - plain).norm() > 0.1 * plain.norm(), "the long row counts for less"


def test_an_owner_says_how_much_the_updates_agree_beside_the_encoded_mean():
    how = answering("int8", "int8", agreeing=True)
    rows = rows_of(how.up)
    rows[2] = (3, rows[0][1])
    done = how.encode(rows)
    assert done.wire is not None and HEAD.unpack_from(done.wire)[0] == MEAN
    said, plain = how.decode(done.wire), combine(rows, N, how.up, codec_named("int8")).wire
    assert said.agreement == pytest.approx(agreement(rows, N, how.up)) and 0.2 < said.agreement < 0.5
    assert plain is not None and torch.equal(said.value_N, codec_named("int8").decode(plain, N))


def test_rows_without_weight_are_in_it_and_add_nothing():
    how = answering("2bit", statistic="clipped")
    rows = rows_of(how.up)
    silent = [*rows, (0, rows[1][1])]
    done = how.encode(silent)
    assert done.wire is not None and done.counted == (0, 1, 2, 3)
    assert done.wire == how.encode(rows).wire
    assert how.encode([(0, rows[0][1])]).why == "no row has any weight"


def test_a_row_that_does_not_decode_is_named_and_the_others_count():
    how = answering("2bit")
    rows = rows_of(how.up)
    done = how.encode([rows[0], (1, b"garbage"), rows[2]])
    assert [index for index, _ in done.faults] == [1] and done.counted == (0, 2)
    assert done.wire == how.encode([rows[0], rows[2]]).wire


@given(st.data())
def test_whatever_an_owner_sends_is_read_or_is_its_fault(data: st.DataObject):
    """Invariant: a PeerFault, or N finite-length values and an agreement of 0 … 1; nothing else is ever raised."""
    how = answering(data.draw(st.sampled_from(["sparseloco", "2bit"])), statistic="clipped")
    wire = bytearray(how.encode(rows_of(how.up, 2)).wire or b"")
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, min(len(wire) - 1, 80)))
        wire[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(wire)), st.integers(0, len(wire))))
    try:
        said = how.decode(bytes(wire[:cut]) + data.draw(st.binary(max_size=8)))
    except PeerFault:
        return
    assert len(said.value_N) == N and 0 <= said.agreement <= 1


@pytest.mark.parametrize(
    ("how", "wire"),
    [
        (answering(), HEAD.pack(MEAN, 1.0)),
        (answering(), HEAD.pack(ROWS, 1.0) + b"\x00\x00\x03\x00"),
        (answering(), HEAD.pack(ROWS, 0.5)),
        (answering("int8", "int8", agreeing=True), HEAD.pack(MEAN, float("nan"))),
        (answering("int8", "int8", agreeing=True), HEAD.pack(ROWS, 1.0)),
        (answering(), b"\x01"),
    ],
)
def test_an_answer_of_another_recipe_is_refused(how: ReplyFormat, wire: bytes):
    with pytest.raises(PeerFault):
        how.decode(wire)


def test_an_owner_refuses_to_answer_with_what_nobody_would_read():
    """A member that diverged: its row is as long as no fp32 number can say. No answer, rather than one that every
    member would choke on in the same way, attempt after attempt."""
    how = answering("bf16", statistic="radial")
    rows = [(1, bytes(how.up.encode(torch.ones(N) * size))) for size in (1e-3, 1e-3, 1e18)]
    rows += [(1, wire) for _, wire in rows]
    with pytest.raises(ValueError, match="diverged"):
        how.encode(rows)
