"""A GPU that is not there, and lags: what it is told waits in its stream until somebody waits for the stream.

Tensors made by `there` say that they are on "cuda:0", or another. An operation that would write memory, there or,
where it was asked for without waiting, from there to the host, is put at the end of the current stream; until it is
done its results hold NaN. A stream does what it was told only where somebody waits for it: by an event, a number
that is read, a copy that was not asked for without waiting. So whoever forgets to wait reads NaN, every time.
Views and shapes are known at once. Never says anything about how a real GPU rounds, or how fast it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

WHERE = torch.device("cuda", 0)
_working = threading.RLock()  # streams belong to threads, and may wait for each other


class Stream:
    def __init__(self, device: torch.device = WHERE) -> None:
        self.device, self.told, self.done = device, [], 0

    def tell(self, work: Callable[[], object]) -> None:
        with _working:
            self.told.append(work)

    def record_event(self, event: Event) -> Event:
        event.stream, event.at = self, len(self.told)
        return event

    def wait_stream(self, other: Stream) -> None:
        at = len(other.told)
        self.tell(lambda: other.run(at))

    def run(self, upto: int) -> None:
        with _working:
            while self.done < upto:
                self.done += 1
                self.told[self.done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.told))


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self.stream, self.at = Stream(), 0

    def synchronize(self) -> None:
        self.stream.run(self.at)


class Lagging(Tensor):
    """Looks like a CUDA tensor to Python; `inner` is memory of this computer."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: self.where)
    inner: Tensor
    where: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, where: torch.device) -> Lagging:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner, made.where = inner, where
        return made

    def is_neg(self) -> bool:
        return self.inner.is_neg()

    def resolve_neg(self) -> Tensor:
        return self.clone() if self.is_neg() else self

    def record_stream(self, stream: Stream) -> None:
        recorded.append((self.inner.untyped_storage().data_ptr(), stream))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = next(leaf.where for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Lagging))
        current = current_stream(where)
        inner_args, inner_kwargs = tree_map_only(Lagging, lambda t: t.inner, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            current.synchronize()
            return func(*inner_args)
        if func is torch.ops.aten.copy_.default:
            return _copied(current, args, *inner_args)
        if func.is_view:
            return tree_map_only(Tensor, lambda t: Lagging(t, where), func(*inner_args, **inner_kwargs))
        if func._schema.name in ("aten::empty_like", "aten::new_empty"):
            return Lagging(_spoiled(func(*inner_args, **inner_kwargs)), where)
        if func._schema.is_mutable:
            current.tell(lambda: func(*inner_args, **inner_kwargs))
            return kwargs.get("out", args[0])
        shaped = func(*tree_map(_shaped, inner_args), **tree_map(_shaped, inner_kwargs))
        out = _spoiled(torch.empty(shaped.shape, dtype=shaped.dtype))
        current.tell(lambda: out.copy_(func(*inner_args, **inner_kwargs)))
        return Lagging(out, where)


def _copied(current: Stream, args: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(args[0], Lagging) or not (non_blocking and source.is_neg()):
        current.tell(lambda: to.copy_(source))
    else:  # as torch does it: the copy will come, and what lies there now is negated (ATen/native/cuda/Copy.cu)
        plain = torch._neg_view(source)
        current.tell(lambda: to.copy_(plain))
        to.neg_()
    if not (isinstance(args[0], Lagging) and isinstance(args[1], Lagging)) and not non_blocking:
        current.synchronize()
    return args[0]


def _shaped(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _spoiled(out: Tensor) -> Tensor:
    return out.fill_(float("nan") if out.is_floating_point() else 77)


recorded: list[tuple[int, Stream]] = []  # memory, and a stream that was told to be working with it
_users: dict[torch.device, Stream] = {}
_current = threading.local()


def current_stream(device: torch.device = WHERE) -> Stream:
    chosen = getattr(_current, "stream", None)
    if chosen is not None and chosen.device == device:
        return chosen
    return _users.setdefault(device, Stream(device))


@contextmanager
def stream(one: Stream) -> Iterator[None]:
    before, _current.stream = getattr(_current, "stream", None), one
    try:
        yield
    finally:
        _current.stream = before


def there(x: Tensor, where: torch.device = WHERE) -> Lagging:
    """The values, once the current stream has brought them."""
    made = Lagging(_spoiled(torch.empty_like(x)), where)
    current_stream(where).tell(lambda: made.inner.copy_(x))
    return made


def here(tensor: Tensor) -> Tensor:
    """What the user's stream leaves in it."""
    if not isinstance(tensor, Lagging):
        return tensor
    current_stream(tensor.where).synchronize()
    return tensor.inner.clone()


cuda = SimpleNamespace(Stream=Stream, Event=Event, stream=stream, current_stream=current_stream)
