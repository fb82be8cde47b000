"""The inner optimizer: AdamW on one flat vector, with a schedule that follows the run's global step.

State is two vectors and a count, private to a peer, saved and restored as bytes. The schedule is a function
of the global step that the plan names, so a peer that joins late trains at the rate everybody has.
Never touches anything but the vectors it is handed; its bits need not agree between machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.learn.tensorfile import dump, load

FORMAT = "atoll/inner/adamw/1"


class AdamW(msgspec.Struct, frozen=True, tag="adamw"):
    """Decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2) with a warm-up and a cosine to the floor."""

    lr: float = 4e-3  # for models below 1 M parameters; divide by 10 at 30 M and more
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # of the whole gradient; one bad batch must not cost a round
    warmup_steps: int = 100
    total_steps: int = 1500  # of one worker over the whole run: rounds x inner steps
    floor: float = 0.1  # share of lr at the end; afterwards it stays there


@dataclass
class InnerState:
    """Private to one trainer; changed in place by `inner_step`."""

    first_P: Tensor  # mean of gradients
    second_P: Tensor  # mean of squared gradients
    steps: int  # taken by this state, for the bias correction; a joiner's starts at 0 in the middle of a run


def fresh_inner(parameters: int, device: str = "cpu") -> InnerState:
    return InnerState(torch.zeros(parameters, device=device), torch.zeros(parameters, device=device), 0)


def rate_at(spec: AdamW, global_step: int) -> float:
    """Learning rate of a step of the run, counted from 0."""
    if global_step < spec.warmup_steps:
        return spec.lr * (global_step + 1) / spec.warmup_steps
    done = (global_step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps)
    return spec.lr * (spec.floor + (1 - spec.floor) * 0.5 * (1 + cos(pi * min(1.0, done))))


@torch.no_grad()
def inner_step(spec: AdamW, state: InnerState, x_P: Tensor, gradient_P: Tensor, global_step: int) -> None:
    """One step of x, in place; `gradient_P` is scaled in place if it is clipped."""
    state.steps += 1
    norm = gradient_P.norm()
    gradient_P.mul_((spec.clip_norm / (norm + 1e-6)).clamp(max=1.0))
    state.first_P.lerp_(gradient_P, 1 - spec.beta1)
    state.second_P.mul_(spec.beta2).addcmul_(gradient_P, gradient_P, value=1 - spec.beta2)
    rate = rate_at(spec, global_step)
    x_P.mul_(1 - rate * spec.weight_decay)
    correction1, correction2 = 1 - spec.beta1**state.steps, 1 - spec.beta2**state.steps
    spread_P = state.second_P.sqrt().mul_(correction2**-0.5).add_(spec.eps)
    x_P.addcdiv_(state.first_P, spread_P, value=-rate / correction1)


def inner_bytes(state: InnerState) -> bytes:
    return dump({"first": state.first_P, "second": state.second_P}, {"format": FORMAT, "steps": str(state.steps)})


def inner_from_bytes(data: bytes, parameters: int, device: str = "cpu") -> InnerState:
    """ValueError if these are not the bytes of an AdamW state for so many parameters."""
    try:
        tensors, metadata = load(data)
    except PeerFault as fault:
        raise ValueError(f"the inner state is damaged: {fault.what}") from fault
    shapes = {name: (value.numel(), value.dtype) for name, value in tensors.items()}
    if metadata.get("format") != FORMAT or shapes != dict.fromkeys(
        ("first", "second"), (parameters, torch.float32)
    ):
        raise ValueError(f"not the inner state of an AdamW over {parameters} parameters")
    first_P, second_P = (tensors[name].clone().to(device) for name in ("first", "second"))
    return InnerState(first_P, second_P, int(metadata["steps"]))
