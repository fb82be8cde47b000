"""Flattening of an all-reduce's tensors into one vector, and back, on any mix of devices.

    vector   host memory for tensors on several devices, and for codecs that work on a CPU;
             device memory if all lie on one GPU and the codec works there
             (`training/codec/compiled/device.py`)
    lane     the stream in which the vector is worked on, and the events that it waits for

Copies and codecs have their own stream on every device. It starts after the work that the user's current stream had
at the call, so the device waits for a kernel that still writes a tensor, and the caller does not. Later work of the
user's stream does not delay it. Host memory is pinned (`device.pinned`): torch keeps it between calls,
`CudaStreamPool.close` returns it.

Invariants:
- Host code reads no value before its copy has arrived; a call has its result once all its work is done.
- No memory is freed while a stream uses it: torch knows the streams (record_stream).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, cuda

from atoll.training.codec.compiled import device


@dataclass(frozen=True)
class DeviceStream:
    arriving: tuple[Any, ...] = ()  # one event per device with copies to the host in progress
    stream: Any = None  # stream in which the vector is worked on; None: the vector lies on the host

    @contextmanager
    def work(self) -> Iterator[None]:
        """Context that completes the work on the vector at its exit."""
        for event in self.arriving:
            event.synchronize()
        if self.stream is None:
            yield
            return
        with cuda.stream(self.stream):
            try:
                yield
            finally:
                self.stream.synchronize()


ON_HOST = DeviceStream()


@dataclass(frozen=True)
class FlatTensors:
    vector_N: Tensor  # (N,) fp32
    lane: DeviceStream
    own: bool = False  # True if the vector is the one tensor's own memory


class CudaStreamPool:
    """Streams of one group: one for every device of its calls."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def fused(self, tensors: Sequence[Tensor], works_on: Callable[[Tensor], bool]) -> FlatTensors:
        """`works_on`: whether the call's codec works on the device of this tensor."""
        devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))
        if not devices:
            return _on_host(tensors)
        if len(devices) == 1 and all(tensor.is_cuda for tensor in tensors) and works_on(tensors[0]):
            return self._there(tensors)
        vector_N = device.pinned(sum(tensor.numel() for tensor in tensors), torch.float32)
        pieces = list(zip(_pieces(vector_N, tensors), tensors, strict=True))
        arriving = []
        for where in devices:
            stream = self._stream_after_user(where)
            with cuda.stream(stream):
                for piece, tensor in pieces:
                    if tensor.is_cuda and tensor.device == where:
                        _copy(piece, tensor, stream)
                arriving.append(stream.record_event(cuda.Event(blocking=True)))
        for piece, tensor in pieces:
            if not tensor.is_cuda:
                piece.copy_(_flat(tensor))
        return FlatTensors(vector_N, DeviceStream(tuple(arriving)))

    def close(self) -> None:
        """Return pinned memory once no copy uses it."""
        if self._streams:
            self._streams.clear()
            _give_back()

    def _there(self, tensors: Sequence[Tensor]) -> FlatTensors:
        stream = self._stream_after_user(tensors[0].device)
        lane = DeviceStream(stream=stream)
        if len(tensors) == 1 and _is_vector(tensors[0]):
            return FlatTensors(tensors[0].detach().view(-1), lane, own=True)
        size = sum(tensor.numel() for tensor in tensors)
        with cuda.stream(stream):
            vector_N = tensors[0].new_empty(size, dtype=torch.float32)
            for piece, tensor in zip(_pieces(vector_N, tensors), tensors, strict=True):
                _copy(piece, tensor, stream)
        return FlatTensors(vector_N, lane)

    def _stream_after_user(self, where: torch.device) -> Any:
        """Stream of this device, ordered after the current work of the user's stream."""
        if where not in self._streams:
            self._streams[where] = cuda.Stream(where)
        stream = self._streams[where]
        stream.wait_stream(cuda.current_stream(where))
        return stream


def unfused(fused: FlatTensors, tensors: Sequence[Tensor]) -> None:
    """Write the vector back in the user's stream, each tensor in its own dtype and on its own device."""
    if fused.own:
        return
    for piece, tensor in zip(_pieces(fused.vector_N, tensors), tensors, strict=True):
        if tensor.is_cuda and not piece.is_cuda:  # copied as fp32: a device rounds faster
            piece = tensor.new_empty(piece.shape, dtype=torch.float32).copy_(piece, non_blocking=True)
        elif piece.is_cuda:
            piece.record_stream(cuda.current_stream(piece.device))
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(piece.view(tensor.shape))


def moved(x_N: Tensor, beside: Tensor) -> Tensor:
    """The vector, for reading, on the device of the other tensor."""
    return x_N if x_N.device == beside.device else beside.new_empty(x_N.shape).copy_(x_N)


def _on_host(tensors: Sequence[Tensor]) -> FlatTensors:
    if len(tensors) == 1 and _is_vector(tensors[0]) and tensors[0].device.type == "cpu":
        return FlatTensors(tensors[0].detach().view(-1), ON_HOST, own=True)
    size = sum(tensor.numel() for tensor in tensors)
    vector_N = torch.empty(size, dtype=torch.float32, device="cpu")
    for piece, tensor in zip(_pieces(vector_N, tensors), tensors, strict=True):
        piece.copy_(_flat(tensor))
    return FlatTensors(vector_N, ON_HOST)


def _pieces(vector_N: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return vector_N.split([tensor.numel() for tensor in tensors])


def _copy(piece: Tensor, tensor: Tensor, stream: Any) -> None:
    """Copy in this stream, which is the current one, without waiting."""
    piece.copy_(_flat(tensor), non_blocking=True)
    tensor.record_stream(stream)


def _flat(tensor: Tensor) -> Tensor:
    """The tensor as a flat vector; a lazy negation is resolved, since torch negates copies before they arrive."""
    return tensor.detach().resolve_neg().reshape(-1)


def _is_vector(tensor: Tensor) -> bool:
    """True if another thread can read and write the tensor in place."""
    fits = tensor.dtype == torch.float32 and tensor.is_contiguous()
    return fits and not tensor.is_neg() and not tensor.is_inference()


def _give_back() -> None:
    accelerator = torch.accelerator
    # newer torch only; with older ones the memory stays for the next group
    if hasattr(accelerator, "empty_host_cache"):
        accelerator.empty_host_cache()
