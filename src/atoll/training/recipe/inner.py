"""Inner optimizer on one flat vector: AdamW, Muon, SGD or gradient accumulation.

State is two vectors and a count, private to a peer, saved and restored as bytes. The learning rate is a function of
the global step in the plan, so a late joiner trains at the same rate as all other members.
Invariants:
- Only the vectors passed in are changed.
Not responsible for: bit equality between machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from atoll.base.arguments import Factor, Share, Whole
from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.exchange.layout import ModelLayout, TensorSlot
from atoll.training.exchange.tensorfile import load, pieces_of

FORMAT = "atoll/inner/adamw/1"
QUEUE_MAX = 16  # queued gradient sums, each as large as the model; bounded, because genesis is untrusted input
SPAN = 2**17  # values processed at a time: a step is twice as fast while they stay in the cache


class AdamW(msgspec.Struct, frozen=True, tag="adamw"):
    """Decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2) with linear warm-up and cosine decay to the
    floor.
    """

    lr: Factor = 4e-3  # for models below 1 M parameters; divide by 10 at 30 M and more
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Factor = 1e-8
    weight_decay: Factor = 0.1
    clip_norm: Factor = 1.0  # norm bound of the whole gradient; one bad batch must not cost a round
    warmup_steps: Whole = 100
    total_steps: Whole = 1500  # steps of one worker over the whole run: rounds x inner steps
    floor: Share = 0.1  # share of lr at the end of the run and afterwards


class Muon(msgspec.Struct, frozen=True, tag="muon"):
    """Orthogonalized momentum for matrices (Jordan et al. 2024), `rest` for embeddings and vectors, as in MuLoCo
    (2505.23725).

    Better than AdamW if its rate fits the outer momentum (`methods.auto`); a step costs 1.6 times as much.
    """

    lr: Factor = 0.02
    momentum: Share = 0.95
    weight_decay: Factor = 0.1
    rest: AdamW = AdamW()  # its rate and schedule; clipping, warm-up and floor hold for the matrices too


class SGD(msgspec.Struct, frozen=True, tag="sgd"):
    """Gradient descent with heavy-ball momentum: FedAvg's local optimizer (McMahan et al. 2017, algorithm 1)."""

    lr: Factor = 0.1
    momentum: Share = 0.0
    clip_norm: Factor = 1.0
    warmup_steps: Whole = 100
    total_steps: Whole = 1500
    floor: Share = 0.1


class GradientSumOptimizer(msgspec.Struct, frozen=True, tag="accumulate"):
    """x <- x - gradient: the pseudo-gradient is then the sum of gradients, and the outer step is the optimizer."""


class PipelinedGradients(GradientSumOptimizer, frozen=True, tag="pipelined"):
    """Gradient accumulation with `depth` sums in flight (Pipe-SGD, 1811.03619, algorithm 1).

    Gradients are computed without waiting, on parameters that lack the last `depth` sums.
    """

    depth: Annotated[int, msgspec.Meta(ge=1, le=QUEUE_MAX)] = 3  # 1 to QUEUE_MAX


Inner = AdamW | Muon | SGD | GradientSumOptimizer | PipelinedGradients


@dataclass
class InnerState:
    """Optimizer state, private to one trainer; changed in place by `inner_step`."""

    first_P: Tensor  # mean of gradients
    second_P: Tensor  # mean of squared gradients
    steps: int  # steps of this state, for the bias correction; a joiner's starts at 0 in the middle of a run


def fresh_inner(parameters: int, device: str = "cpu") -> InnerState:
    first_P, second_P = (torch.zeros(parameters, dtype=torch.float32, device=device) for _ in range(2))
    return InnerState(first_P, second_P, 0)


def lasting(spec: Inner, steps: int) -> Inner:
    """The same optimizer for a run of `steps` steps: the rate decays over all of them; warm-up takes at most a
    tenth.
    """
    match spec:
        case GradientSumOptimizer():
            return spec
        case Muon():
            return msgspec.structs.replace(spec, rest=lasting(spec.rest, steps))
        case _:
            warmup_steps = min(spec.warmup_steps, steps // 10)
            return msgspec.structs.replace(spec, total_steps=steps, warmup_steps=warmup_steps)


def tuned(spec: Inner, **numbers: float) -> Inner:
    """The same optimizer with other hyperparameters. Muon's own rate scales with that of its AdamW.

    ValueError for a hyperparameter that the optimizer does not have.
    """
    if not numbers:
        return spec
    if isinstance(spec, Muon):
        share = numbers.get("lr", spec.rest.lr) / spec.rest.lr
        decay = numbers.get("weight_decay", spec.weight_decay)
        return Muon(spec.lr * share, spec.momentum, decay, msgspec.structs.replace(spec.rest, **numbers))
    if missing := [name for name in numbers if name not in spec.__struct_fields__]:
        raise ValueError(f"{type(spec).__name__} has no {', '.join(missing)}")
    return msgspec.structs.replace(spec, **numbers)


def rate_at(spec: AdamW | SGD, global_step: int) -> float:
    """Learning rate of a step of the run, counted from 0."""
    if global_step < spec.warmup_steps:
        return spec.lr * (global_step + 1) / spec.warmup_steps
    done = (global_step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps)
    return spec.lr * (spec.floor + (1 - spec.floor) * 0.5 * (1 + cos(pi * min(1.0, done))))


@torch.no_grad()
def inner_step(
    spec: Inner,
    state: InnerState,
    x_P: Tensor,
    gradient_P: Tensor,
    global_step: int,
    matrices: Sequence[TensorSlot] = (),
) -> None:
    """One step of x, in place; `gradient_P` is scaled in place if it is clipped. `matrices` are for Muon only."""
    state.steps += 1
    match spec:
        case AdamW():
            _clip(gradient_P, spec.clip_norm)
            _adamw(spec, state, x_P, gradient_P, global_step)
        case Muon():
            _clip(gradient_P, spec.rest.clip_norm)
            _muon(spec, state, x_P, gradient_P, global_step, matrices)
        case SGD():
            _clip(gradient_P, spec.clip_norm)
            state.first_P.mul_(spec.momentum).add_(gradient_P)
            x_P.add_(state.first_P, alpha=-rate_at(spec, global_step))
        case GradientSumOptimizer():
            x_P.sub_(gradient_P)


def _clip(gradient_P: Tensor, norm_max: float) -> None:
    gradient_P.mul_((norm_max / (gradient_P.norm() + 1e-6)).clamp(max=1.0))


def _adamw(spec: AdamW, state: InnerState, x_P: Tensor, gradient_P: Tensor, global_step: int) -> None:
    rate = rate_at(spec, global_step)
    correction1, correction2 = 1 - spec.beta1**state.steps, 1 - spec.beta2**state.steps
    length = SPAN if x_P.device.type == "cpu" else max(1, len(x_P))
    vectors = (x_P, gradient_P, state.first_P, state.second_P)
    for x_S, gradient_S, first_S, second_S in zip(*(vector.split(length) for vector in vectors), strict=True):
        first_S.lerp_(gradient_S, 1 - spec.beta1)
        second_S.mul_(spec.beta2).addcmul_(gradient_S, gradient_S, value=1 - spec.beta2)
        x_S.mul_(1 - rate * spec.weight_decay)
        spread_S = second_S.sqrt().mul_(correction2**-0.5).add_(spec.eps)
        x_S.addcdiv_(first_S, spread_S, value=-rate / correction1)


# names of input and output layers: Muon leaves them to AdamW (MuLoCo, section 3)
NOT_HIDDEN = ("embed", "token", "position", "wte", "wpe", "head")


def matrices_of(layout: ModelLayout) -> tuple[TensorSlot, ...]:
    """The hidden matrices of a model, which Muon orthogonalizes."""
    slots = (slot for slot in layout.slots if slot.kind == "parameter" and len(slot.shape) == 2)
    return tuple(slot for slot in slots if not any(word in slot.name for word in NOT_HIDDEN))


def _muon(
    spec: Muon, state: InnerState, x_P: Tensor, gradient_P: Tensor, global_step: int, matrices: Sequence[TensorSlot]
) -> None:
    kept = [(x_P[m.at : m.at + m.size].clone(), state.first_P[m.at : m.at + m.size].clone()) for m in matrices]
    _adamw(spec.rest, state, x_P, gradient_P, global_step)
    rate = spec.lr * rate_at(spec.rest, global_step) / spec.rest.lr
    for slot, (x_N, momentum_N) in zip(matrices, kept, strict=True):
        here = slice(slot.at, slot.at + slot.size)
        momentum_N.mul_(spec.momentum).add_(gradient_P[here])
        ahead_RC = gradient_P[here].add(momentum_N, alpha=spec.momentum).view(slot.shape)
        rows, columns = slot.shape
        turned_RC = orthogonalize(ahead_RC).mul_(max(1.0, rows / columns) ** 0.5)
        x_N.mul_(1 - rate * spec.weight_decay).add_(turned_RC.reshape(-1), alpha=-rate)
        x_P[here], state.first_P[here] = x_N, momentum_N


def orthogonalize(matrix_RC: Tensor) -> Tensor:
    """Singular values moved towards 1 by five Newton-Schulz steps (Jordan et al. 2024, with their coefficients)."""
    tall = matrix_RC.shape[0] > matrix_RC.shape[1]
    x = matrix_RC.T if tall else matrix_RC
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T.contiguous() if tall else x


def inner_pieces(state: InnerState) -> list[Buffer]:
    """The state's bytes in pieces, mostly views of its own memory."""
    tensors = {"first": state.first_P, "second": state.second_P}
    return pieces_of(tensors, {"format": FORMAT, "steps": str(state.steps)})


def inner_from_bytes(data: Buffer, parameters: int, device: str = "cpu") -> InnerState:
    """Inverse of `inner_pieces`. ValueError unless these are the bytes of an AdamW state of this size."""
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
