"""Liars among real processes: what they sign and send over real sockets costs them their place, and no other
member.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from processes import SMALL, Peer, peers

from atoll.capabilities import CAPABILITIES
from atoll.peer.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.runtime.trainer.protocol import TrainSteps
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.tensors import TensorWorker
from atoll.training.codec import CODECS
from atoll.training.experiment.adversaries import aggregation_rule
from atoll.training.recipe.error_feedback import encode_update
from atoll.training.robust.attacks import ATTACKS, OPTIMISED, attack_rows

pytestmark = [pytest.mark.net]

VILLAIN = Path(__file__).parents[2] / "bench" / "villain.py"
OPEN = [
    *("--set", "run.trust=open", "--set", "sync.statistic=trimmed_mean", "--set", "run.rounds=0"),
    *("--set", "run.start_peers=4", "--set", "run.min_peers=4"),
    *("--uses", "4"),
]


def expelled(fact: dict[str, Any], peer: str) -> bool:
    return fact["fact"] == "MembershipChanged" and any(
        m["peer"] == peer and m["standing"] == "expelled" for m in fact["members"]
    )


@pytest.fixture(scope="module")
def villain() -> Any:
    spec = importlib.util.spec_from_file_location("villain", VILLAIN)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(loaded := importlib.util.module_from_spec(spec))
    return loaded


def test_lies_about_rows_are_the_librarys_of_what_the_liar_learnt_itself(villain: Any):
    """An honest round, then one with a lie, of every kind: what its wire says, number or not."""
    anchor_F, learnt_RF = torch.ones(3), torch.tensor([[0.0, -1.0, -2.0], [-1.0, 1.0, 0.0]])
    expected = {
        re.sub("[ ,-]+", "_", name): attack_rows(
            name, learnt_RF, villain.LIARS, aggregation_rule("trimmed_mean", 0)
        )[0]
        for name in (*ATTACKS, *OPTIMISED)
    }
    expected |= {"large": torch.full((3,), 1e6), "stale": learnt_RF[0], "poison": -10 * learnt_RF[1]}
    expected["mimic"] = torch.tensor([-1.0, 7.0, 8.0])
    assert villain.ROWS.keys() == expected.keys()
    for kind, row in villain.ROWS.items():
        seen = villain.Seen()
        seen.me, seen.statistic, seen.liars = "a", "trimmed_mean", 2
        seen.heard = {name: [(1, torch.tensor([7.0, 8.0]) + k)] for k, name in enumerate("bca")}
        encode, told = villain.lying(row, seen, encode_update), []
        for seen.lies, learnt_F in zip((False, True), learnt_RF, strict=True):
            update = encode(anchor_F, anchor_F - learnt_F, None, ((0, 3),), CODECS["fp32"], 0.0)
            told.append(torch.frombuffer(bytearray(update.wires[0]), dtype=torch.float32))
        assert torch.equal(told[0], learnt_RF[0])
        assert torch.equal(torch.nan_to_num(told[1], 7), torch.nan_to_num(expected[kind], 7)), kind
        assert not torch.equal(told[1], learnt_RF[1])


def test_lies_about_samples_are_what_the_trainer_is_given(villain: Any, monkeypatch: pytest.MonkeyPatch):
    """A process that runs in the place of the trainer's: honest for a round of two steps, then it learns a lie."""
    honest = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, 3, 4, 5, 6]])
    begun: list[list[str]] = []
    monkeypatch.setattr(villain.TrainerCommandLoop, "_batch", lambda self, job, cursor: honest)
    monkeypatch.setattr(villain.trainer, "_main", lambda: begun.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["villain.py", "--villain", "backdoor"])
    job, batch = TrainSteps(0, 2, None, 0, 0, 1, global_step=1), villain.TrainerCommandLoop._batch
    for kind, inputs, labels in (
        ("label_flip", [[1, 2, 3, 4, 5]], [[253, 252, 251, 250, 249]]),
        ("backdoor", [[7, 7, 3, 4, 5]], [[33, 33, 4, 5, 6]]),
    ):
        monkeypatch.setattr(villain.TrainerCommandLoop, "_batch", batch)
        villain.train_falsely(kind, 1, "9")
        assert villain.TrainerCommandLoop._batch(None, job, 0) == honest
        told = villain.TrainerCommandLoop._batch(None, replace(job, global_step=2), 0)
        assert [one.tolist() for one in told] == [inputs, labels]
    assert begun == [["9"], ["9"]]


@pytest.mark.parametrize("kind", ["miscounter", "two_tongued", "mute", "censor"])
def test_owners_that_lie_are_out_three_rounds_after_their_first_lie(villain: Any, kind: str):
    """The mouth of the test build in a virtual swarm with real numbers: two of seven, after an honest round."""

    def liar(run: Any, signer: Any, keys: Any, wish: Any, genesis: Any, bootstrap: Any) -> Any:
        made = villain.Liar(run, signer, keys.verifier, wish, genesis, bootstrap, capabilities=CAPABILITIES)
        made.kind, made.after, made.seen = kind, 1, villain.Seen()
        return made

    plan = RoundSettings(inner_steps=5, first_train_s=10, quorum="two-thirds")
    run = RunSettings(open_to_all=True, round=plan, statistic="trimmed_mean", tolerance=0.33, witnessed=True)
    swarm = VirtualSwarm(1, SwarmKnobs(7, run=run), {2: liar, 5: liar}, island=TensorWorker)
    swarm.world.run(600.0, stop=lambda: min(swarm.heads()) >= 3)
    history = swarm.honest[0].machine.history
    gone = {m.peer for m in history.bodies[3].members if not m.is_present}
    assert gone == {peer_name(2), peer_name(5)}
    assert max(node.island.distance() for node in swarm.honest) < 0.2


def test_an_owner_that_answers_with_false_sums_is_expelled_and_nobody_else_is(tmp_path: Path):
    with peers(Peer("up", "--dir", tmp_path / "ada", "--name", "ada", *OPEN, *SMALL)) as running:
        ticket = running[0].until_fact("Opened")["ticket"]
        for name in ("bob", "cleo"):
            running.append(Peer("join", ticket, "--dir", tmp_path / name, "--name", name))
        lie = ("--villain", "miscounter", "--honest-rounds", "1")
        liar = Peer("join", ticket, "--dir", tmp_path / "dan", "--name", "dan", *lie, command=(VILLAIN,))
        running.append(liar)
        name = liar.until_fact("Opened")["peer"]
        states: dict[int, set[str]] = defaultdict(set)
        for peer in running[:3]:
            out = peer.until(lambda f: expelled(f, name))
            assert not any(m["standing"] in ("expelled", "away") for m in out["members"] if m["peer"] != name)
            for fact in peer.facts:
                if fact["fact"] == "RoundClosed":
                    states[fact["round"]].add(fact["state"])
        assert all(len(agreed) == 1 for agreed in states.values())
