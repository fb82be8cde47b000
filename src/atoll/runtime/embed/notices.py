"""Texts of an attached loop for its user: the invitation, notices, and errors of its peer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from atoll.base.errors import AtollError, RunFailedError
from atoll.base.units import counted_text
from atoll.runtime.control.socket import ERRORS
from atoll.runtime.embed.messages import PeerFailureNotice, RunRequest
from atoll.runtime.embed.python_fix import in_python
from atoll.runtime.embed.readings import RunProgress
from atoll.runtime.network.addresses import LOOPBACK
from atoll.training.recipe.recipes import Recipe
from atoll.wire.ticket import parse

UNVALIDATED = (
    "members of this run may lie, and this loop cannot see whether an agreed model is bad. If too few members can, "
    "the run never goes back behind a bad one. Give it a held-out loss: run.attach(model, optimizer, validate=…)"
)
NO_BATCH = "attach got no batch=, so a step counts as one sample; pass it at all members or at none"
UNREPORTED = (
    "this loop reports no training loss, so members see none: call run.report(loss) after each optimizer step"
)


def print_invitation(ticket: str, request: RunRequest) -> None:
    if "ATOLL_TICKET_USES" in os.environ:  # `atoll.local` starts the other members itself
        return
    is_local = request.listen == LOOPBACK
    where = "  (on this computer; for others ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071)" * is_local
    print(f"others join with: atoll.join({ticket!r}){where}", flush=True)
    if parse(ticket).uses == 1:
        print(f"it admits one; for each of the others: atoll invite --dir {request.folder}", flush=True)


def ignored_text(folder: str, ignored: Sequence[str]) -> str:
    """Warning that a folder's run goes on as it was founded."""
    return (
        f"{folder} holds a run already, which goes on as it was founded: {', '.join(ignored)} changed nothing; "
        "for another run, use another folder="
    )


def outer_step_text(recipe: Recipe, optimizer: torch.optim.Optimizer) -> str:
    """Notice that the recipe takes the steps, so that people do not tune rates that have no effect."""
    outer = recipe.outer
    numbers = ", ".join(f"{name}={getattr(outer, name)!r}" for name in outer.__struct_fields__)
    return (
        f"members of this run agree on gradients: optimizer.step() takes the step of its recipe, "
        f"{type(outer).__name__}({numbers}); rates and moments of your {type(optimizer).__name__} have no effect"
    )


def over_text(rounds: int, model: str) -> str:
    """Message about the end of the run. `model`: file with the agreed model, empty if it could not be written."""
    return f"the run is over after {counted_text(rounds, 'round')}" + f"; the agreed model is in {model}" * bool(
        model
    )


def over_before_text(seen: RunProgress, folder: str) -> str:
    """Warning that the run was over when the loop came, with the figures of its last round as far as known."""
    loss = "" if math.isnan(seen.loss) else f" with loss {seen.loss:.4f}"
    return (
        f"this run is over, nothing is trained: it ended after {counted_text(seen.trained, 'round')}{loss}. "
        f"The model holds the agreed result; to begin another run, use another folder than {folder}"
    )


def comeback_text(request: RunRequest, seen: RunProgress, quiet: bool) -> str | None:
    """Line after Ctrl-C; empty if `quiet`, None if the run is over."""
    if seen.done or quiet:
        return None if seen.done else ""
    return f"stopped by Ctrl-C; the same command goes on as the same member (its folder is {request.folder})"


def error_of(message: PeerFailureNotice) -> AtollError:
    """The error with which the peer process ended, in terms of Python."""
    kind = ERRORS.get(message.exit_status, RunFailedError)
    return kind(message.code, message.what, cause=message.cause, fix=in_python(message.fix))
