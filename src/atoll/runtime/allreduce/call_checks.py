"""Checks of what a caller passes to an all-reduce: tensors, codec, topology."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from torch import Tensor, strided

from atoll.base.arguments import did_you_mean
from atoll.base.errors import UsageError
from atoll.base.ids import Seconds
from atoll.peer.round.topology_choice import TOPOLOGIES
from atoll.peer.settings import TopologyName
from atoll.runtime.allreduce.call import SAMPLE, SAMPLE_VALUES
from atoll.training.codec import codec_named

WEIGHT_MAX = 2**31 - 1  # samples behind one call; the sum over all members fits a signed 64-bit integer
FOREVER_S = 1e8  # longest idle time of a group: a call begins a round, the clock does not
CODE = "E-RED-02"  # error code of an invalid argument

Weight = Annotated[int, Meta(ge=1, le=WEIGHT_MAX)]
Patience = Annotated[Seconds, Meta(ge=0, le=FOREVER_S)]


def check_tensor(tensor: Tensor) -> None:
    """UsageError if a tensor cannot be averaged or written back; raised before other members notice the call."""
    fix = "reduce floating-point tensors"
    if tensor is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise UsageError(
            "E-RED-02",
            "None where a tensor is expected",
            cause="a parameter without a gradient: no backward pass reached it",
            fix="pass zeros of its size, so that all members reduce the same values",
        )
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(tensor).__name__
        if (
            type(tensor).__module__ == "numpy"
        ):  # a NumPy array among the tensors, or a NumPy number in place of a list
            fix = "reduce torch.from_numpy(array)"
        raise UsageError("E-RED-02", f"{kind} where a tensor is expected", fix=fix)
    if not tensor.is_floating_point():
        raise UsageError("E-RED-02", f"a tensor of {tensor.dtype}", fix=fix)
    kind = "nested" if tensor.is_nested else tensor.layout
    if kind != strided or tensor.is_meta:
        raise UsageError("E-RED-02", f"a tensor on {tensor.device}, {kind}", fix="reduce dense tensors")
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError("E-RED-02", "a tensor with values that share memory", fix="reduce tensor.clone()")


def known_topology(name: str) -> TopologyName:
    if name not in TOPOLOGIES:
        fix = f"choose one of {', '.join(TOPOLOGIES)}; for means of two, call average_with_partner"
        raise UsageError("E-RED-08", f"no topology {name}{did_you_mean(name, TOPOLOGIES)}", fix=fix)
    return name


def codec_name(name: str) -> str:
    """Full name of a codec that a group can use. UsageError for others."""
    try:
        codec = codec_named(name, SAMPLE)
        # raises if another codec hides the matrices, since the length is then unknown
        codec.wire_bytes(SAMPLE_VALUES)
        return codec.name
    except ValueError as why:
        if "delta" in name.split("+"):
            rest = "+".join(stage for stage in name.split("+") if stage != "delta")
            raise UsageError(
                "E-RED-08",
                f"a group cannot use the codec {name}",
                cause="a member that is new, or missed a call, cannot decode a difference",
                fix=f'use "{rest}" and all_reduce(…, held=atoll.reduce.DeltaReference())',
            ) from None
        if name.startswith("powersgd"):
            raise UsageError(
                "E-RED-08",
                f"a group cannot use the codec {name}",
                cause="PowerSGD needs two exchanges, and a call has one",
                fix='use "lowrank:4" or "lowrank:4+int8", with error_feedback=atoll.reduce.ErrorFeedback()',
            ) from None
        raise UsageError(
            "E-RED-08",
            f"a group cannot use the codec {name}: {why}",
            fix="atoll docs specs/codecs.md has every codec",
        ) from None


def row_topology(topology: str, trust: str, asked: str) -> Literal["butterfly", "star"]:
    """Topology of groups with owners that return rows or remember residuals. UsageError where they cannot."""
    if trust != "private":
        raise UsageError(
            "E-RED-14",
            f'{asked} with trust = "{trust}"',
            cause="members cannot check owners that pass on rows or use residuals of their own",
            fix='leave it out and use way_back = "fp32", or trust = "private"',
        )
    if topology not in ("auto", "butterfly", "star"):
        raise UsageError(
            "E-RED-08",
            f'{asked} with topology = "{topology}"',
            cause="its owners receive partial sums instead of rows",
            fix='use topology = "butterfly", or leave it out and use way_back = "fp32"',
        )
    return "star" if topology == "star" else "butterfly"
