"""Names of the recipes that `train.recipe` takes, each with what it does."""

from __future__ import annotations

_INT8 = 'the result takes int8 where run.trust is not "private" or updates are handed on'

RECIPES = {
    "diloco": "AdamW inside, Nesterov outside, updates in int8 (arXiv 2311.08105)",
    "demo": "diloco with the numbers of `atoll demo`",
    "local_sgd": "diloco without outer momentum",
    "opendiloco": "diloco in fp16, 500 steps per round",
    "streaming": f"four fragments in turn, 4 steps of overlap, 2 bits both ways; {_INT8} (arXiv 2501.18512)",
    "auto": f"streaming with Muon inside, and an outer momentum that settles over the last 0.3 of the run; {_INT8}",
    "eager": "training never waits; a round's mean is applied when the next round ends (arXiv 2502.12996)",
    "muloco": f"Muon inside, 2 bits both ways; {_INT8} (arXiv 2505.23725)",
    "fedavg": "SGD inside, plain means (arXiv 1602.05629)",
    "sparseloco": "one value of 64 in 2 bits, updates gathered and clipped, no outer momentum (arXiv 2508.15706); "
    'needs run.trust = "private"',
    "cooperative": "peers keep half of their own parameters, the mean weighs members by run.reputation, momentum "
    'follows agreement (arXiv 1808.07576); needs three members and run.trust = "private"',
    "decoupled": "rounds wait for a quorum and a grace, four fragments, mean length times mean direction "
    '(arXiv 2604.21428); needs run.trust = "private"',
    "data_parallel": "every step: the mean gradient in fp32, AdamW on the agreed parameters",
    "demo_": "every step: the largest cosine components of the gathered gradient, and the sign of their mean "
    '(DeMo, arXiv 2411.19870); needs run.trust = "private"',
    "powersgd": "every step: low-rank factors of the gathered gradient (arXiv 1905.13727), AdamW on the agreed "
    'parameters; needs run.trust = "private"',
    "parameter_server": 'data_parallel through one member (sync.topology = "star")',
    "sparta": "every step: the mean of 0.5 % of the values, others in each round; members keep their own of the "
    "rest until the last round, which averages all",
    "pipelined": "data_parallel that computes the next gradients while a round is agreed, from parameters three "
    "rounds old; take a smaller train.lr (arXiv 1811.03619)",
    "des_loc": "plain means in fp32, of optimizer moments in every third and sixth round (arXiv 2505.22549)",
    "delayed_nesterov": "a round ends soon after one member has its steps, updates count by their work, momentum "
    'applies once per run.start_peers updates (arXiv 2401.09135); needs run.trust = "private"',
    "intellect1": "diloco with 100 steps per round (arXiv 2412.01152)",
}
EXPERIMENTS = ("halos", "noloco")  # without support in real runs yet; training/recipe/methods has their components
