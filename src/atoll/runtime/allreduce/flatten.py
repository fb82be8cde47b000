"""The tensors of an all-reduce as one vector, and the vector back in the tensors, wherever they lie.

    vector   the host's memory for tensors on several devices, and for codecs that work on a CPU;
             memory of the device where all lie on one GPU and the codec works there
             (`training/codec/compiled/device.py`)
    lane     what has to happen before the vector is worked on, and in which stream that is done

Copies and codecs have a stream of their own on every device. It begins behind what the user's current stream was
told before the call, so a kernel that is still writing a tensor is waited for, by the device and not by the caller;
nothing that the user's stream is told later waits for it. Memory on the host is pinned (`device.pinned`): torch
keeps it between calls, `StreamPool.close` gives it back.
Promises: nobody reads on the host what has not arrived there; a call has its result once all of it is done.
Never lets memory go that a stream still works with: torch is told which streams do (record_stream).
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
    arriving: tuple[Any, ...] = ()  # an event for each device whose copies to the host are under way
    stream: Any = None  # in which the vector is worked on; None: it lies on the host

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is done with the vector in here is done when this is left."""
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
    own: bool = False  # it is the one tensor's own memory


class StreamPool:
    """Of one group: a stream on every device that its calls brought tensors of."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def fused(self, tensors: Sequence[Tensor], works_on: Callable[[Tensor], bool]) -> FlatTensors:
        """`works_on`: whether the call's codec works where this tensor lies."""
        devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))
        if not devices:
            return _on_host(tensors)
        if len(devices) == 1 and all(tensor.is_cuda for tensor in tensors) and works_on(tensors[0]):
            return self._there(tensors)
        vector_N = device.pinned(sum(tensor.numel() for tensor in tensors), torch.float32)
        pieces = list(zip(_pieces(vector_N, tensors), tensors, strict=True))
        arriving = []
        for where in devices:
            stream = self._behind_user(where)
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
        """Give back what was pinned, once nobody works with it any more."""
        if self._streams:
            self._streams.clear()
            _give_back()

    def _there(self, tensors: Sequence[Tensor]) -> FlatTensors:
        stream = self._behind_user(tensors[0].device)
        lane = DeviceStream(stream=stream)
        if len(tensors) == 1 and _is_vector(tensors[0]):
            return FlatTensors(tensors[0].detach().view(-1), lane, own=True)
        size = sum(tensor.numel() for tensor in tensors)
        with cuda.stream(stream):
            vector_N = tensors[0].new_empty(size, dtype=torch.float32)
            for piece, tensor in zip(_pieces(vector_N, tensors), tensors, strict=True):
                _copy(piece, tensor, stream)
        return FlatTensors(vector_N, lane)

    def _behind_user(self, where: torch.device) -> Any:
        """The stream of this device, which goes on when what its user's was told until now is done."""
        if where not in self._streams:
            self._streams[where] = cuda.Stream(where)
        stream = self._streams[where]
        stream.wait_stream(cuda.current_stream(where))
        return stream


def unfused(fused: FlatTensors, tensors: Sequence[Tensor]) -> None:
    """Write the vector back, each tensor in its own dtype and on its own device, in its user's stream."""
    if fused.own:
        return
    for piece, tensor in zip(_pieces(fused.vector_N, tensors), tensors, strict=True):
        if tensor.is_cuda and not piece.is_cuda:  # in fp32: a device rounds faster
            piece = tensor.new_empty(piece.shape, dtype=torch.float32).copy_(piece, non_blocking=True)
        elif piece.is_cuda:
            piece.record_stream(cuda.current_stream(piece.device))
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(piece.view(tensor.shape))


def moved(x_N: Tensor, beside: Tensor) -> Tensor:
    """The vector where the other one lies, to be read."""
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
    """In this stream, which is the current one, without waiting."""
    piece.copy_(_flat(tensor), non_blocking=True)
    tensor.record_stream(stream)


def _flat(tensor: Tensor) -> Tensor:
    """A lazily negated one in plain numbers: torch negates a copy that has not arrived yet."""
    return tensor.detach().resolve_neg().reshape(-1)


def _is_vector(tensor: Tensor) -> bool:
    """Such that another thread can read and write it where it lies."""
    fits = tensor.dtype == torch.float32 and tensor.is_contiguous()
    return fits and not tensor.is_neg() and not tensor.is_inference()


def _give_back() -> None:
    accelerator = torch.accelerator
    if hasattr(accelerator, "empty_host_cache"):  # of newer versions; in older ones it stays for the next group
        accelerator.empty_host_cache()
