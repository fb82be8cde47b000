"""Selection of the exchanged tensors of a model, and a guard against changes of the others (the base).

Fine-tuning trains a few values (adapters, a head) beside a frozen base that every member loads itself. `exchanged`
selects the tensors that travel: those that require a gradient, or those that are named. `FrozenBaseGuard` detects a
change of the base. Such a change never travels, so members would silently train different models.
Invariants:
- A model is never changed here.
Not responsible for: writes through `.data`, which torch does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from atoll.training.exchange.parameter_names import buffers_of, kept_of, parameters_of

SHOWN = 4  # names listed in an error message


def exchanged_names(model: nn.Module, only: Sequence[str] = ()) -> set[str]:
    """Names of all parameters and buffers that travel, tied ones under each of their names.

    Without patterns: parameters that require a gradient. With patterns (shell style, `["*lora*", "head.*"]`):
    parameters that match one of them. Buffers travel with the parameters of their own module, or if they match.
    ValueError if a pattern matches nothing, or nothing is selected.
    """
    if isinstance(only, str):
        only = (only,)
    names_of: dict[int, list[str]] = {}  # tied parameters have several names
    for name, value in parameters_of(model, every=True):
        names_of.setdefault(id(value), []).append(name)
    parameters = list(parameters_of(model, every=True))
    buffers = [name for name, _ in buffers_of(model, every=True)]
    known = [name for name, _ in parameters] + buffers
    if idle := [pattern for pattern in only if not any(fnmatchcase(name, pattern) for name in known)]:
        raise ValueError(
            f"only={list(only)}: no parameter or buffer of this model matches {join_names(idle)}; "
            f"its parameters are called {join_names([name for name, _ in parameters])}"
        )

    def named(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in only)

    def travels(value: Tensor) -> bool:
        return any(map(named, names_of[id(value)])) if only else value.requires_grad

    going = {name for name, value in parameters if travels(value)}
    if parameters and not going:
        raise ValueError(
            "nothing of this model would be exchanged: "
            + ("only buffers are named by only=" if only else "none of its parameters requires a gradient")
            + "; unfreeze what is trained, or name it: only=['head.*']"
        )
    if len(going) == len(parameters):
        return going | set(buffers)
    at_home = {_module(name) for name in going}
    return going | {name for name in buffers if named(name) or _module(name) in at_home}


def check_optimizer(model: nn.Module, going: set[str], held: Iterable[Tensor]) -> None:
    """ValueError if the optimizer's tensors `held` include tensors that are not exchanged, or none that are.

    Frozen parameters in its groups are harmless: an optimizer skips parameters without a gradient.
    """
    ids = {id(value) for value in held}
    mine = [(name, value) for name, value in parameters_of(model) if id(value) in ids]
    loose = [n for n, p in mine if n not in going and (p.requires_grad or p.grad is not None)]
    if loose:
        raise ValueError(
            f"the optimizer trains {join_names(loose)}, which this run does not exchange: members would drift "
            "apart; freeze it (requires_grad_(False), p.grad = None), leave it out of the optimizer, or name it "
            "in only="
        )
    if going and not any(name in going for name, _ in mine):
        raise ValueError(
            f"the optimizer holds none of the parameters that this run exchanges ({join_names(sorted(going))}); "
            "create the optimizer from the parameters of this model, after adapters are added"
        )


class FrozenBaseGuard:
    """Detects changes of tensors that are not exchanged. Costs a few integers per tensor, and a copy of base
    buffers.
    """

    def __init__(self, model: nn.Module, going: set[str], by_name: bool) -> None:
        kept = kept_of(model)
        self._still = [(n, p, _mark(p)) for n, p in parameters_of(model) if n not in going]
        # batch norm writes its statistics past torch's version counter, so buffers are compared by value
        buffers = [(n, b) for n, b in buffers_of(model) if n in kept and n not in going]
        self._values = [(n, b, b.detach().clone()) for n, b in buffers]
        named = by_name or not (self._still or self._values)
        self._grads = [(n, p, p.requires_grad) for n, p in parameters_of(model)] if not named else []

    def problem(self) -> str:
        """The change of the base and its remedy; empty if nothing has changed since construction."""
        if turned := [n for n, p, trains in self._grads if p.requires_grad != trains]:
            return (
                f"{join_names(turned)}: requires_grad changed after attach(), which read the exchanged parameters "
                "from it; name all parameters that are trained at any time, attach(…, only=['head.*']), "
                "then freeze and unfreeze them as needed"
            )
        if moved := [n for n, p, mark in self._still if _mark(p) != mark]:
            return (
                f"{join_names(moved)} changed, but this run does not exchange it: members would drift apart; "
                "freeze it (an optimizer or a load_state_dict wrote to it), or name it in attach(…, only=[…])"
            )
        if moved := [n for n, b, before in self._values if not _same(b, before)]:
            return (
                f"the buffers {join_names(moved)} changed, but the run does not exchange them: a frozen layer "
                "updates statistics; call .eval() on it after every model.train(), or name them "
                "in attach(…, only=[…])"
            )
        return ""


def _mark(value: Tensor) -> tuple[torch.dtype, int]:
    return value.dtype, 0 if value.is_inference() else value._version


def _same(now: Tensor, before: Tensor) -> bool:
    return now.dtype == before.dtype and torch.equal(as_bytes(now), as_bytes(before).to(now.device))


def as_bytes(value: Tensor) -> Tensor:
    """The tensor's bytes in row-major order, uint8, one dimension; a view if it is contiguous."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def join_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
