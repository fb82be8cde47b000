"""`atoll.experiment`: runs a recipe with all members in one process, step by step, deterministically.

    from atoll.training.recipe.recipes import diloco
    done = atoll.experiment(diloco(rounds=30, inner_steps=32, up="2bit", down="2bit"), peers=4)
    done.val_loss, done.upload_ratio
    done.plot("diloco.png")  # beside others: done.plot("both.png", "diloco", auto=other)

With Byzantine members (training/experiment/adversaries), and owners that tolerate them:

    two = FaultSpec(villains={6: "sign flip", 7: "sign flip"})
    atoll.experiment(diloco(rounds=30), peers=8, statistic="robust", trouble=two)

With batches that follow the loss (base/workload.py), and rates that follow the learned tokens
(training/recipe/lr_position.py):

    grows = AdaptiveWorkloadPolicy(batch=4, batches=LossAdaptiveBatchSize(target_loss=2.0, least=2, most=32))
    atoll.experiment(over_tokens(diloco(rounds=30), 2_000_000), options=ExperimentOptions(effort=grows))

The arithmetic is that of real rounds. Updates are encoded under error feedback; part owners decode, combine and
encode the result (`exchange/combine`); every member decodes it, takes the outer step and merges. The result
therefore includes the loss of the downlink. For a recipe that real rounds can run, without faults,
`ExperimentResult.state` is the state hash at their end: bench/exact.py compares the two.
Bytes are those sent and received by one peer under the butterfly plan, every copy counted: its rows to the owners,
and its own part's result to all members. Ratios are against ring data parallelism in fp32: 2 (M - 1) / M x 4 P
bytes per step each way.
Not responsible for:
- packet headers, agreement and downloads of joiners;
- wall-clock time: it counts inner steps and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET
from torch import nn

from atoll.base.arguments import Count, Peers, arguments
from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize
from atoll.training.data import Data, ImageDataset, TextDataset, load_data
from atoll.training.exchange.parameter_names import parameters_of
from atoll.training.exchange.parameter_selection import exchanged_names
from atoll.training.experiment.client_draw import check_sampling
from atoll.training.experiment.faults import FaultSpec, MemberAbsence, check_faults
from atoll.training.experiment.options import ExperimentOptions
from atoll.training.experiment.results import ExperimentResult, SyncRecord
from atoll.training.experiment.round_clock import misfit as effort_misfit
from atoll.training.experiment.simulator import ExperimentSimulator
from atoll.training.models import build_model, misfit, spec_of
from atoll.training.models import loss_of as built_in_loss
from atoll.training.recipe.gradient import PLAIN, ComputeOptions
from atoll.training.recipe.recipes import Recipe, check_recipe, sample_problem, with_length
from atoll.training.recipe.reducer import PEERS_MIN, ROBUST, Statistic

DATA = (
    "'stdlib', a path, a TextDataset or ImageDataset of atoll.training.data, or a list of them, one for each peer"
)


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
    samples: Count = 2048,
    progress: Callable[[SyncRecord], object] | None = None,
    options: ExperimentOptions | None = None,
) -> ExperimentResult:
    """Train `peers` members by this recipe. `model`: a module to copy, or a built-in name (default: the recipe's).
    Samples are as long as the recipe says, or as the longest that a built-in model reads.

    `data`: "stdlib", a path or samples that all members share out among them, or a list with each member's private
    data (federated); the held-out part of the first one then validates the model. `steps` overrides the recipe's
    length, and its learning rate then falls over those; `statistic` overrides that of its reducer. `samples` of the
    validation data are evaluated; `progress` is called with every record. Parameters of `model` that require no
    gradient are neither trained nor exchanged nor counted. If the schedule has `epochs`, a member's round is
    that number of passes over its own share. Validation losses are in fp32.

    UsageError for an argument of the wrong kind, ValueError if the recipe cannot be run.
    """
    options, trouble = options or ExperimentOptions(), trouble or FaultSpec()
    recipe = _overridden(recipe, statistic, options)
    check_recipe(recipe)
    _check_peers(recipe, peers, trouble)
    _check_options(recipe, peers, options)
    recipe = with_length(recipe, recipe.schedule.steps if steps is None else steps)
    found = _data_sets(data, peers)
    if isinstance(model, str) or model is None:
        name = model or recipe.model
        for one in found if isinstance(found, list) else [found]:
            if problem := misfit(name, one):
                raise ValueError(problem)
        longest = spec_of(name).seq_len or recipe.seq_len
        recipe = msgspec.structs.replace(recipe, model=name, seq_len=min(recipe.seq_len, longest))
        model = build_model(name, recipe.seed)
    frozen = {name for name, value in parameters_of(model) if not value.requires_grad}
    if still := sorted(exchanged_names(model, options.only) & frozen):
        raise ValueError(f"only= names frozen parameters: unfreeze them, or leave them out: {', '.join(still)}")
    length = steps or recipe.schedule.steps
    run = ExperimentSimulator(recipe, model, found, peers, length, trouble, options=options)
    return run.run_to_end(options.evaluate_every, samples, progress)


def _overridden(recipe: Recipe, statistic: Statistic | None, options: ExperimentOptions) -> Recipe:
    """The recipe with the statistic and the gradient computation of the call."""
    if statistic is not None:
        reducer = msgspec.structs.replace(recipe.reducer, statistic=statistic)
        recipe = msgspec.structs.replace(recipe, reducer=reducer)
    own = recipe.computing or PLAIN
    compiled = own.compiled if options.compiled is None else options.compiled
    computing = ComputeOptions(options.precision or own.precision, compiled)
    return msgspec.structs.replace(recipe, computing=UNSET if computing == PLAIN else computing)


def _check_peers(recipe: Recipe, peers: int, trouble: FaultSpec) -> None:
    """ValueError if the recipe needs more peers, or the faults do not fit it."""
    statistic = recipe.reducer.statistic
    if recipe.reducer.peers_min > peers:
        raise ValueError(f"this recipe needs at least {recipe.reducer.peers_min} peers, not {peers}")
    if statistic in ROBUST and peers < PEERS_MIN:
        raise ValueError(f"{statistic} needs at least {PEERS_MIN} peers to tolerate a liar, not {peers}")
    check_faults(trouble, peers)
    own = recipe.own_anchors or recipe.reducer.group == "one" or recipe.merge == "swap"
    if own and trouble.byzantine:
        raise ValueError("villains need members that reduce together: group='all', own='sent', no merge='swap'")


def _check_options(recipe: Recipe, peers: int, options: ExperimentOptions) -> None:
    """ValueError if an option does not fit the recipe or the number of peers."""
    order, effort, records = options.order, options.effort, options.records
    if order is not None and sorted(order) != list(range(peers)):
        raise ValueError(f"order names each of the peers 0 … {peers - 1} once, not {list(order)}")
    if effort is not None and (problem := effort_misfit(effort, recipe)):
        raise ValueError(f"effort does not fit this recipe: {problem}")
    check_sampling(options.sample, options.groups, peers)
    if records and (len(records) != peers or min(records) < 1 or recipe.reducer.group not in ("all", "server")):
        raise ValueError("records are one number per peer, at least 1, where members reduce all together")
    if options.sample is not None and (problem := sample_problem(recipe) or _unsampled(recipe)):
        raise ValueError(f"rounds of this recipe cannot be sampled: {problem}")


def _unsampled(recipe: Recipe) -> str:
    if recipe.reducer.group != "all":
        return "its members do not reduce all together"
    average = recipe.schedule.closing or any(recipe.schedule.moments)
    return "an average over all members includes undrawn ones" if average else ""


def _data_sets(data: object, peers: int) -> Data | list[Data]:
    """One data set for all peers, or a list with one per peer. ValueError if it is neither."""
    if not isinstance(data, Sequence) or isinstance(data, str | TextDataset | ImageDataset):
        return _loaded(data)
    found = [_loaded(one) for one in data]
    if len(found) != peers:
        raise ValueError(f"{peers} peers need {peers} data sets of their own, not {len(found)}")
    return found


def _loaded(data: object) -> Data:
    if data is None or isinstance(data, str):
        return load_data(data or "stdlib")
    if not isinstance(data, TextDataset | ImageDataset):
        raise ValueError(f"data is {DATA}, not a {type(data).__name__}")
    return data


__all__ = [
    "AdaptiveWorkloadPolicy",
    "ExperimentOptions",
    "ExperimentResult",
    "ExperimentSimulator",
    "FaultSpec",
    "LossAdaptiveBatchSize",
    "MemberAbsence",
    "SyncRecord",
    "built_in_loss",
    "experiment",
]
