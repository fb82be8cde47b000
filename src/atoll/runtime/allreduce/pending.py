"""An all-reduce in progress, and the result of its slices."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait as ended
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from atoll.base.arguments import arguments
from atoll.base.errors import AtollError, RunFailedError
from atoll.runtime.allreduce.call import Part, ReduceCall, ReduceResult
from atoll.runtime.allreduce.call_checks import CODE, Patience
from atoll.runtime.allreduce.flatten import FlatTensors, unfused


class GroupHealth(Protocol):
    """What a pending call needs of its group."""

    def check_process(self) -> None: ...

    def trouble(self) -> str: ...


class PendingReduce:
    """An all-reduce in progress."""

    def __init__(
        self, group: GroupHealth, tensors: Sequence[Tensor], fused: FlatTensors, calls: Sequence[ReduceCall]
    ) -> None:
        self._group, self._tensors, self._fused, self._calls = group, tensors, fused, calls
        self._done: ReduceResult | None = None

    def done(self) -> bool:
        self._group.check_process()
        return all(call.future.done() for call in self._calls)

    @arguments("work.wait", CODE)
    def wait(self, timeout_s: Patience | None = None) -> ReduceResult:
        """Wait until the mean is in the tensors.

        Raises RunFailedError if it is not within `timeout_s`, or if the call failed. A failed call writes to the
        tensors no more, and they hold what `all_reduce` describes.
        """
        self._group.check_process()
        if self._done is None:
            futures = [call.future for call in self._calls]
            if ended(futures, timeout_s).not_done:  # also if another slice failed: this one may still be written
                raise RunFailedError(
                    "E-RED-03",
                    f"the all-reduce was not agreed within {timeout_s} s; it continues and still owns its tensors",
                    cause=self._group.trouble(),
                    fix="wait again with work.wait() (returned by all_reduce_async), or close the group and "
                    "found a new one",
                )
            try:
                results = [future.result() for future in futures]
            except AtollError as why:
                raise self._with_overwritten_spans(why) from None
            unfused(self._fused, self._tensors)
            self._done = _merge_results(results, [len(call.flat_N) for call in self._calls])
        return self._done

    def _with_overwritten_spans(self, why: AtollError) -> AtollError:
        """The error, extended by the spans already overwritten if a tensor is reduced in place."""
        spans = [f"{call.at} to {call.at + call.written}" for call in self._calls if call.written]
        if not spans or not self._fused.own:
            return why
        count = len(self._fused.vector_N)
        what = f"{why.what}; of {count} values {' and '.join(spans)} were written over, the others not"
        fix = f"{why.fix}; " if why.fix else ""
        return type(why)(why.code, what, cause=why.cause, fix=f"{fix}refill the tensor before you use it")


def _merge_results(results: Sequence[ReduceResult], lengths: Sequence[int]) -> ReduceResult:
    """One result for all slices of a call."""
    if len(results) == 1:
        return results[0]
    parts: list[Part] = []
    for at, result in zip(accumulate(lengths, initial=0), results, strict=False):
        parts += [((at + lo, at + hi), names) for (lo, hi), names in result.parts]
    everywhere = set(results[0].contributors) - set(results[0].partly)
    for result in results:
        everywhere &= set(result.contributors) - set(result.partly)
    contributors = {peer for result in results for peer in result.contributors}
    missing = {peer for result in results for peer in result.missing} - contributors
    counted, partly, missing = (tuple(sorted(s)) for s in (contributors, contributors - everywhere, missing))
    return ReduceResult(results[-1].round, counted, partly, missing, tuple(parts), results[-1].topology)
