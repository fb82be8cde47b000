"""`atoll.checkpoints`: agreed states of a run as they come, for evaluations and exports of your own.

    model = MyModel()
    for checkpoint in atoll.checkpoints("atoll-run", every=5):
        checkpoint.load_into(model)
        checkpoint.report(loss=held_out_loss(model))

Works in any process on the computer of a member or observer, beside its loop or `atoll up`, and after the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import SupportsFloat

from torch import Tensor, nn

from atoll.base.arguments import Count, Whole, arguments
from atoll.base.errors import PeerFault, UsageError
from atoll.peer.settings import settings_of_run
from atoll.runtime.embed.loop_model import number_of
from atoll.runtime.evaluation.facts import StateEvaluated, record_evaluation
from atoll.runtime.publishing.checkpoints import AgreedCheckpoint, follow_checkpoints
from atoll.runtime.storage.stored_history import kept_in, read_vertex
from atoll.runtime.training_spec import parse_training_spec
from atoll.training.exchange.layout import ModelLayout, tensors_by_name, unflatten
from atoll.training.recipe.state import SharedState, state_from_bytes


class Checkpoint:
    """An agreed state. `atoll.checkpoints` makes it."""

    def __init__(self, agreed: AgreedCheckpoint, layout: ModelLayout) -> None:
        self._agreed, self._layout = agreed, layout
        self._state: SharedState = state_from_bytes(agreed.state(), layout)

    def __repr__(self) -> str:
        return f"<atoll.Checkpoint of round {self.round}: state {self.state[:8]}>"

    @property
    def round(self) -> int:
        """Number of its vertex; -1 is genesis."""
        return self._agreed.body.round

    @property
    def trained(self) -> int:
        """Rounds trained up to here."""
        return self._agreed.body.trained

    @property
    def state(self) -> str:
        """Agreed digest of the state, hexadecimal."""
        return self._agreed.body.state.hex()

    def tensors(self) -> dict[str, Tensor]:
        """The exchanged tensors by name, on the CPU."""
        return tensors_by_name(self._state.anchor_F, self._state.counters_K, self._layout)

    def load_into(self, model: nn.Module) -> None:
        """Copy the exchanged tensors into a model like the members'; frozen ones stay. UsageError for another."""
        try:
            unflatten(self._state.anchor_F, self._state.counters_K, model, self._layout)
        except ValueError as why:
            raise UsageError(
                "E-EVA-05", f"this is another model than the run's: {why}", fix="build the model as the founder did"
            ) from None

    @arguments("Checkpoint.report", "E-EVA-06")
    def report(
        self,
        *,
        loss: SupportsFloat | None = None,
        accuracy: SupportsFloat | None = None,
        samples: Whole = 0,
        text: str = "",
    ) -> None:
        """Write a finding into the event log of the folder: `atoll watch`, `status` and `plot` show it."""
        found = StateEvaluated(
            round=self.round,
            trace=self._agreed.body.parent.hex()[:16],
            trained=self.trained,
            state=self._agreed.body.state,
            loss=_number("loss", loss),
            accuracy=_number("accuracy", accuracy),
            samples=samples,
            text=text,
        )
        record_evaluation(self._agreed.folder, found)


def _number(name: str, given: SupportsFloat | None) -> float | None:
    try:
        return None if given is None else number_of(given)
    except (TypeError, ValueError, RuntimeError) as why:  # a tensor of many values
        raise UsageError(
            "E-EVA-06",
            f"Checkpoint.report ({name}={given!r:.60}): {why}",
            cause="it is one number",
            fix=f"report({name}=value.item())",
        ) from None


@arguments("atoll.checkpoints", "E-EVA-06")
def checkpoints(folder: str | Path, *, every: Count = 1, once: bool = False) -> Iterator[Checkpoint]:
    """Newest agreed states of the run in this folder, `every` rounds apart or more, until its peer has ended.

    The first one comes at once, the last one whatever its distance; a slow loop skips rounds. `once`: only the
    newest one. Raises UsageError if the folder holds no run with a model.
    """
    return _checkpoints(Path(folder).expanduser().absolute(), every, once)


def _checkpoints(folder: Path, every: int, once: bool) -> Iterator[Checkpoint]:
    layout: ModelLayout | None = None
    for agreed in follow_checkpoints(folder, every, once=once):
        try:
            layout = layout or _layout_in(folder)
            found = Checkpoint(agreed, layout)
        except FileNotFoundError:
            continue  # the peer removed the state meanwhile: a newer one follows
        except PeerFault as fault:
            raise UsageError(
                "E-EVA-07",
                f"the run in {folder} has no model to load: {fault.what}",
                cause="a group that only reduces, or a run of another version",
                fix="name the folder of a run that trains a model",
            ) from None
        yield found


def _layout_in(folder: Path) -> ModelLayout:
    with kept_in(folder) as kept:
        return parse_training_spec(settings_of_run(read_vertex(kept, folder, -1)[1])).layout
