"""What a recipe reaches, before any network: all members of a run in one process, step by step, deterministically.

    from atoll.training.recipe.recipes import diloco
    done = atoll.experiment(diloco(rounds=30, inner_steps=32, up="2bit", down="2bit"), peers=4)
    done.val_loss, done.upload_ratio
    done.plot("diloco.png")  # beside others: done.plot("both.png", "diloco", auto=other)

With villains (training/experiment/adversaries), and owners that withstand them:

    two = Trouble(villains={6: "sign flip", 7: "sign flip"})
    atoll.experiment(diloco(rounds=30), peers=8, statistic="robust", trouble=two)

With batches that follow the loss (base/workload.py), and rates that follow what was learned
(training/recipe/lr_position.py):

    grows = Effort(batch=4, batches=Batches(target_loss=2.0, least=2, most=32))
    atoll.experiment(over_tokens(diloco(rounds=30), 2_000_000), effort=grows)

The arithmetic is that of real rounds: updates are encoded under error feedback, part owners decode, combine and
encode the answer (`training/exchange/combine`), everybody decodes it, takes the outer step and merges; so the loss
of the way
back is in the result. Where real rounds can run a recipe, and nothing goes wrong in them, `Outcome.state` is to be
the very name of the state that they end with: bench/exact.py compares the two.
Bytes are those that one peer sends and hears under the butterfly plan, every copy counted: its rows to the owners,
and its own part's answer to everybody. Ratios are against ring data parallelism in fp32, 2 (M - 1) / M x 4 P bytes
per step each way. Packet headers, agreement and downloads of joiners are left out.
Time is counted in inner steps; nothing here waits or measures seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET
from torch import nn

from atoll.base.arguments import Count, Peers, Whole, arguments
from atoll.base.workload import BatchGrowth, WorkloadPolicy
from atoll.training.data import Data, ImageDataset, TextDataset, load_data
from atoll.training.exchange.parameter_names import parameters_of
from atoll.training.exchange.parameter_selection import exchanged
from atoll.training.experiment.client_draw import ClientSampler, check_clients
from atoll.training.experiment.faults import FaultSpec, MemberAbsence, check_trouble
from atoll.training.experiment.round_clock import misfit as rhythm_misfit
from atoll.training.experiment.simulator import ExperimentResult, ExperimentSimulator, SyncRecord
from atoll.training.models import build_model, misfit
from atoll.training.models import loss_of as built_in_loss
from atoll.training.recipe.gradient import PLAIN, ComputeOptions, Loss, Precision
from atoll.training.recipe.recipes import Recipe, check_recipe, lasting, sample_problem
from atoll.training.recipe.reducer import PEERS_MIN, ROBUST, Statistic

DATA = "'stdlib', a path, a Text or Images of atoll.training.data, or a list of them, one for each peer"


@arguments("atoll.experiment", "E-EXP-01")
def experiment(
    recipe: Annotated[Recipe, "what a method of atoll.training.recipe.methods returns: diloco(), …"],
    model: str | nn.Module | None = None,
    data: Annotated[str | Data | Sequence[str | Data] | None, DATA] = None,
    *,
    peers: Peers = 4,
    steps: Count | None = None,
    statistic: Statistic | None = None,
    trouble: FaultSpec | None = None,
    effort: WorkloadPolicy | None = None,
    evaluate_every: Whole = 0,
    samples: Count = 2048,
    order: Sequence[int] | None = None,
    only: Sequence[str] = (),
    sample: int | float | None = None,
    groups: Sequence[str] = (),
    records: Sequence[int] = (),
    loss: Loss = built_in_loss,
    precision: Precision | None = None,
    compiled: bool | None = None,
    progress: Callable[[SyncRecord], object] | None = None,
) -> ExperimentResult:
    """Train `peers` workers by this recipe. `model`: a module to copy, or a built-in name (default: the recipe's).

    `data`: "stdlib", a path or samples that all members share out among them, or a list of every member's own,
    which nobody else sees (federated); what the first holds out then judges the model.
    `steps` overrides the recipe's length, and its learning rate then falls over those; `statistic` overrides what
    its reducer makes of the rows. With an `effort` rounds are as long, and batches as large, as it has them; its
    `train_s` needs nothing here: every round lasts as many steps of the run's clock, of which the slow (`trouble`)
    take fewer. `samples` of the validation data are looked at, at the end and every `evaluate_every` steps (0: only
    at the end). `order` is that in which owners add up rows, which decides the last
    bits: peers are numbered as they get their shares of the data, in a real run in the order in which they joined,
    but their rows are added up in the order of their ids. Parameters of `model` that require no gradient are
    neither trained nor exchanged nor counted; `only` names what is (`training/exchange/parameter_selection.py`).
    `sample`, a share of the
    peers (0.5) or how many of them (10), train in a round, drawn as real rounds draw them; `groups` says of each
    whose data it has. `records`: what the rows of each peer weigh, times its steps, in place of its samples: its
    influence in a run that keeps records (specs/reputation.md), which here stays as it is. Where the recipe's
    schedule counts `epochs`, a peer's round is so many passes over its own share. `precision="bf16"` and
    `compiled=True` (torch.compile) say how workers compute gradients, in place of the recipe
    (`training/recipe/gradient.py`); losses are looked at in fp32. UsageError for an argument that is none,
    ValueError if the
    recipe cannot be run.
    """
    if statistic is not None:
        reducer = msgspec.structs.replace(recipe.reducer, statistic=statistic)
        recipe = msgspec.structs.replace(recipe, reducer=reducer)
    asked = recipe.computing or PLAIN
    asked = ComputeOptions(precision or asked.precision, asked.compiled if compiled is None else compiled)
    recipe = msgspec.structs.replace(recipe, computing=UNSET if asked == PLAIN else asked)
    check_recipe(recipe)
    if recipe.reducer.peers_min > peers:
        raise ValueError(f"this recipe needs at least {recipe.reducer.peers_min} peers, not {peers}")
    if recipe.reducer.statistic in ROBUST and peers < PEERS_MIN:
        raise ValueError(
            f"{recipe.reducer.statistic} needs at least {PEERS_MIN} peers to withstand a liar, not {peers}"
        )
    check_trouble(trouble or FaultSpec(), peers)
    if order is not None and sorted(order) != list(range(peers)):
        raise ValueError(f"order names each of the peers 0 … {peers - 1} once, not {list(order)}")
    if effort is not None and (problem := rhythm_misfit(effort, recipe)):
        raise ValueError(f"rounds of this recipe cannot follow the run: {problem}")
    check_clients(sample, groups, peers)
    if records and (len(records) != peers or min(records) < 1 or recipe.reducer.group not in ("all", "server")):
        raise ValueError("records are one number per peer, at least 1, where members reduce all together")
    if sample is not None and (problem := sample_problem(recipe) or _unsampled(recipe)):
        raise ValueError(f"rounds of this recipe cannot be sampled: {problem}")
    own = recipe.own_anchors or recipe.reducer.group == "one" or recipe.merge == "swap"
    if own and trouble and trouble.villains:
        raise ValueError("villains lie to members that reduce together: group='all', own='sent', no merge='swap'")
    recipe = lasting(recipe, recipe.schedule.steps if steps is None else steps)
    if isinstance(data, Sequence) and not isinstance(data, str | TextDataset | ImageDataset):
        found = [_loaded(one) for one in data]
    else:
        found = _loaded(data)
    if isinstance(found, list) and len(found) != peers:
        raise ValueError(f"{peers} peers need {peers} data sets of their own, not {len(found)}")
    if isinstance(model, str) or model is None:
        name = model or recipe.model
        for one in found if isinstance(found, list) else [found]:
            if problem := misfit(name, one):
                raise ValueError(problem)
        recipe = msgspec.structs.replace(recipe, model=name)
        model = build_model(name, recipe.seed)
    frozen = {name for name, value in parameters_of(model) if not value.requires_grad}
    if still := sorted(exchanged(model, only) & frozen):
        raise ValueError(f"only= names what requires no gradient: unfreeze it, or leave it out: {', '.join(still)}")
    length, trouble = steps or recipe.schedule.steps, trouble or FaultSpec()
    run = ExperimentSimulator(recipe, model, found, peers, length, trouble, loss, order, effort, only)
    run.clients = None if sample is None else ClientSampler(peers, sample, groups)
    run.records = tuple(records)
    return run.whole(evaluate_every, samples, progress)


def _unsampled(recipe: Recipe) -> str:
    if recipe.reducer.group != "all":
        return "its members do not reduce all together"
    return "a closing average is everybody's" if recipe.schedule.closing or any(recipe.schedule.moments) else ""


def _loaded(data: object) -> Data:
    if data is None or isinstance(data, str):
        return load_data(data or "stdlib")
    if not isinstance(data, TextDataset | ImageDataset):
        raise ValueError(f"data is {DATA}, not a {type(data).__name__}")
    return data


__all__ = [
    "BatchGrowth",
    "ExperimentResult",
    "ExperimentSimulator",
    "FaultSpec",
    "MemberAbsence",
    "SyncRecord",
    "WorkloadPolicy",
    "experiment",
]
