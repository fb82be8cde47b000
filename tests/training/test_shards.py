"""Shards of a data set in a user's loop: what is read, in which order, and where reading goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from atoll.base.errors import UsageError
from atoll.training.data.shards.dataset import AssignedShardsDataset
from atoll.training.data.shards.sources import RandomAccessSource, source_of
from atoll.wire.data_ranges import AssignedShard, DataRange, RoundDataShards


def shards(source, *assigned: tuple[int, int], per_step: int = 0) -> AssignedShardsDataset:
    """Ends where these are used up."""
    found = AssignedShardsDataset(source, per_step, lambda: False)
    found.assign(RoundDataShards(tuple(AssignedShard(*one) for one in assigned)), ())
    return found


class Stream:
    """As `datasets.IterableDataset`: shards, and a beginning anywhere in each."""

    def __init__(self, parts: list[list[int]], skipped: int = 0) -> None:
        self.parts, self.num_shards, self.skipped = parts, len(parts), skipped

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(self.parts[index::num_shards])

    def skip(self, n: int) -> Stream:
        return Stream(self.parts, n)

    def __iter__(self):
        return iter([one for part in self.parts for one in part][self.skipped :])


@pytest.mark.parametrize("length", [7, 100, 1000])
def test_every_epoch_holds_each_sample_once_however_it_is_cut(length: int):
    """In another order each time; a shard that is begun in the middle goes on with the same samples."""
    source = source_of(list(range(length)), 7, 3, True, 0)
    epochs = [list(shards(source, *((g, 0) for g in range(7 * e, 7 * e + 7)))) for e in range(2)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    assert epochs[0] != epochs[1] or length < 10
    whole = list(shards(source, (3, 0)))
    for at in range(len(whole)):
        assert list(shards(source, (3, at))) == whole[at:]
    in_order = source_of(list(range(length)), 7, 3, False, 0)
    assert list(shards(in_order, *((g, 0) for g in range(7)))) == list(range(length))


def test_a_stream_keeps_its_shards_and_is_read_on_from_any_sample():
    stream = Stream([[0, 1, 2], [10], [20, 21, 22, 23]])
    source = source_of(stream, 0, 0, True, 0)
    assert list(shards(source, (0, 1), (1, 0), (5, 2))) == [1, 2, 10, 22, 23]
    plain = source_of(_Endless(5), 0, 0, True, 0)
    assert list(shards(plain, (4, 3))) == [3, 4]
    for wrong, told in ((iter([1]), "beginning"), ([], "empty"), (np.zeros(9, np.uint16), "window")):
        with pytest.raises(ValueError, match=told):
            source_of(wrong, 0, 0, True, 0)


def test_a_stream_is_cut_into_every_nth_sample(caplog: pytest.LogCaptureFixture):
    """Where it has fewer shards than the caller wants; without them each member would read all of it."""
    one, parts = _Endless(11), Stream([[0, 1, 2, 3], [10, 11, 12], [20]])
    cut = source_of(one, 4, 0, True, 0)
    assert [list(shards(cut, (g, 0))) for g in range(4)] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7]]
    assert list(shards(cut, (4, 1), (7, 1))) == [4, 8, 7]
    assert not caplog.text
    finer = source_of(parts, 4, 0, True, 0)
    assert [list(shards(finer, (g, 0))) for g in range(6)] == [[0, 2], [10, 12], [20], [1, 3], [11], []]
    assert source_of(parts, 3, 0, True, 0).name == source_of(parts, 0, 0, True, 0).name != finer.name
    source_of(one, 0, 0, True, 0)
    assert "run.data(stream, shards=n)" in caplog.text


def test_a_loop_is_told_once_that_its_shards_are_too_small_for_its_rounds(caplog: pytest.LogCaptureFixture):
    """Eight are the most; fewer of them grow by themselves, and the end of a run is no lack."""
    source = RandomAccessSource(list(range(1000)), 100, 0, True)
    found = AssignedShardsDataset(source, 0, lambda: False)
    for count in (7, 8, 8):
        found.assign(RoundDataShards(tuple(AssignedShard(g, 0) for g in range(count))), ())
        assert len(list(found)) == 10 * count
        assert ("pass fewer shards" in caplog.text) == (count == 8)
        found.take_step()
    assert caplog.text.count("pass fewer shards") == 1
    found = AssignedShardsDataset(source, 0, lambda: False)
    found.assign(RoundDataShards(tuple(AssignedShard(g, 0) for g in range(8))), ())
    next(samples := iter(found))
    found.forget_places()
    assert not list(samples) and caplog.text.count("pass fewer shards") == 1


class _Endless:
    """An iterable without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_streams_and_tables_of_datasets_are_read(tmp_path: Path):
    """Local and streaming, as the library makes them; skipped where it is not installed."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"n": list(range(40))})
    local = source_of(table, 4, 1, True, 0)
    assert sorted(row["n"] for row in shards(local, *((g, 0) for g in range(4)))) == list(range(40))
    streamed = source_of(table.to_iterable_dataset(num_shards=4), 0, 0, True, 0)
    assert [row["n"] for row in shards(streamed, (1, 7), (2, 0))] == [17, 18, 19, *range(20, 30)]


def test_tokens_folders_and_tensors_are_read(tmp_path: Path):
    """Windows of a memory map, windows of a folder of text, and what `torch.utils.data` calls a data set."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    mapped = source_of(np.load(path, mmap_mode="r"), 2, 0, False, 10)
    inputs, targets = next(iter(shards(mapped, (0, 3))))
    assert inputs.tolist() == list(range(30, 40)) and targets.tolist() == list(range(31, 41))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"{name} is a text of many words. " * 2000)
    x, y = next(iter(shards(source_of(folder, 0, 0, True, 32), (0, 0))))
    assert x.shape == y.shape == (32,) and torch.equal(x[1:], y[:-1])
    pairs = TensorDataset(torch.arange(20.0), torch.arange(20))
    batches = list(DataLoader(shards(source_of(pairs, 2, 0, True, 0), (0, 0), (1, 0)), batch_size=4))
    assert sorted(n for _, labels in batches for n in labels.tolist()) == list(range(20))


def test_what_was_read_before_a_step_is_behind_it():
    """Or so many samples, where a loader reads ahead; without them the loop would claim what it has not learned."""
    found = shards(RandomAccessSource(list(range(100)), 10, 0, True), (0, 0), (1, 0))
    batches = iter(DataLoader(found, batch_size=6))
    next(batches), next(batches)
    assert found.has_given and found.take_step() == (DataRange(0, 0, 10, True), DataRange(1, 0, 2))
    assert not found.has_given and found.take_step() == ()
    ahead = shards(RandomAccessSource(list(range(100)), 10, 0, True), (0, 0), (1, 0), per_step=6)
    batches = iter(DataLoader(ahead, batch_size=6))
    next(batches), next(batches)
    assert ahead.take_step() == (DataRange(0, 0, 6),)
    assert ahead.take_step() == (DataRange(0, 6, 10, True), DataRange(1, 0, 2))
    greedy = shards(RandomAccessSource(list(range(100)), 2, 0, True), (0, 0), (1, 0), per_step=2)
    assert len(list(greedy)) == 100
    with pytest.raises(UsageError, match=r"(?s)E-DATA-04 .*2 samples per step.*GradScaler.*fused=True"):
        greedy.take_step()


def test_a_new_assignment_goes_on_behind_what_the_loop_still_holds():
    """Behind steps that are not handed over and samples that no step has used. Dropped steps are read again."""
    found = shards(RandomAccessSource(list(range(100)), 10, 0, True), (0, 0), (1, 0))
    samples = iter(found)
    first = [next(samples) for _ in range(13)]
    held = found.take_step()
    given = [next(samples) for _ in range(2)]
    found.assign(RoundDataShards((AssignedShard(0, 0), AssignedShard(1, 0), AssignedShard(2, 0))), held)
    rest = [next(samples) for _ in range(15)]
    assert len({*first, *given, *rest}) == 30
    found.take_step()
    found.forget_places()
    assert found.is_waiting
    found.assign(RoundDataShards((AssignedShard(1, 3),)), ())  # the last step was dropped
    assert next(samples) == given[0]


def test_a_worker_of_a_loader_and_another_checkpoint_are_refused():
    found = shards(RandomAccessSource(list(range(100)), 10, 0, True), (0, 0))
    with pytest.raises(RuntimeError, match="E-DATA-03"):  # as loaders tell of their workers
        next(iter(DataLoader(found, batch_size=2, num_workers=1)))
    other = shards(RandomAccessSource(list(range(100)), 5, 0, True), (0, 4))
    assert other.state_dict()["shards"] == {"0": 4}
    found.load_state_dict(found.state_dict())
    with pytest.raises(UsageError, match="E-DATA-05"):
        found.load_state_dict(other.state_dict())
    assert Counter(map(len, (found.name, other.name))) == {32: 2}
