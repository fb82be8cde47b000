"""A real swarm with liars in it: seven processes, two of them villains (`bench/villain.py`), over loopback.

    python bench/hostile.py [--json] [--quick] [--villains miscounter,poison] [--statistic trimmed_mean]
                            [--steps 16] [--audit-rate 1.0]
    python bench/hostile.py --simulated [--json] [--quick]

The run is open (`trust = "open"`; a trimmed mean, or another order statistic), and every update is audited, unless
the rate says otherwise: with 0 the statistic alone bears a false row. After some honest rounds the villains lie.

Told is of each how many rounds after its first lie it was out (1: with the vertex of that very round), and how long
each of these took; in how many agreed rounds it lied, and in how many of these its row was counted, refused since
it does not decode, or bit for bit the other villain's; and what auditors found. Of the run: whether any honest
member ever lost its place; whether all honest members held the same state after every round; and what the model
learnt, beside the same run without villains.

`--simulated`: every attack of the library by two of seven virtual peers that know every honest row in time, without
audits (`atoll simulate poisoners`, all of it instead of a draw). `moved` is how far the agreed update was at most
from the mean of the honest rows, in their spreads (an honest row alone is at 1), `moved_a_mean` where a mean of all
that was sent would have been, null if at no number.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

from form import asking, lines, report, versions
from real_swarm import Swarm
from villain import KINDS

from atoll.runtime.control.socket import send_request
from atoll.simulation.adversaries.colluding_poisoners import GANGS
from atoll.simulation.scenarios.colluding_poisoners import play_poisoners
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.training.exchange.statistic import STATISTICS

PEERS = 7
VILLAIN = Path(__file__).with_name("villain.py")
KNOWING = (2, 5)  # of seven virtual founders
HONEST_ROUNDS = 4  # before anybody lies: until windows follow the pace all wait long for an owner that is silent
STORY_S = 400.0
SETTINGS = [
    "run.trust=open",
    "run.rounds=0",
    f"run.start_peers={PEERS}",
    "run.min_peers=5",
    "run.reputation=false",  # as the figures were measured
    "model.name=gpt-nano",
    "train.seq_len=32",
    "train.batch=4",
]


def story(
    villains: list[str], rounds: int, steps: int, statistic: str, audit_rate: float, base: Path
) -> dict[str, Any]:
    """One run to its `rounds`-th round. The last peers to join are the villains."""
    kinds = dict(zip(range(PEERS - len(villains), PEERS), villains, strict=True))
    settings = [*SETTINGS, f"train.inner_steps={steps}", f"sync.statistic={statistic}"]
    settings.append(f"run.audit_rate={audit_rate}")
    with Swarm(base, settings) as swarm:
        swarm.found()
        for index in range(1, PEERS):
            lie = ("--villain", kinds.get(index, ""), "--honest-rounds", str(HONEST_ROUNDS))
            swarm.join(index, command=(sys.executable, str(VILLAIN), *lie) if index in kinds else None)
        honest = [i for i in range(PEERS) if i not in kinds]
        for index in honest:
            swarm.closed(rounds, peer=index, patience_s=STORY_S)
        loss = send_request(base / "peer-0", "evaluate")["loss"]
        return told(swarm, kinds, honest) | {"val_loss": round(loss, 3)}


def told(swarm: Swarm, kinds: dict[int, str], honest: list[int]) -> dict[str, Any]:
    names = {f["by"]: f["peer"] for f in swarm.facts if f["fact"] == "Opened"}
    states: dict[int, set[str]] = defaultdict(set)
    standing: dict[str, dict[str, int]] = defaultdict(dict)  # peer -> standing -> round before it
    for fact in swarm.facts:
        if fact["by"] not in honest:
            continue
        if fact["fact"] == "RoundClosed":
            states[fact["round"]].add(fact["state"])
        if fact["fact"] == "MembershipChanged":
            for member in fact["members"]:
                standing[member["peer"]].setdefault(member["standing"], fact["round"])
    closed: dict[int, float] = {}  # round -> when the last honest member was done with it
    for fact in (f for f in swarm.facts if f["fact"] == "RoundClosed" and f["by"] in honest):
        closed[fact["round"]] = max(fact["at"], closed.get(fact["round"], 0.0))
    took = {r: closed[r] - closed[r - 1] for r in closed if r - 1 in closed}
    trained = {f["round"]: f["trained"] for f in swarm.facts if f["fact"] == "RoundClosed"}
    before = [took[r] for r in took if 1 < trained[r] <= HONEST_ROUNDS]
    villains: list[dict[str, Any]] = []
    for index, kind in kinds.items():
        lied = min((f["round"] for f in swarm.facts if f["by"] == index and f["fact"] == "Confessed"), default=None)
        out = {s: r for s, r in standing[names[index]].items() if s in ("expelled", "away")}
        villains.append(
            {
                "kind": kind,
                "became": min(out, key=out.__getitem__) if out else "member",
                "rounds": min(out.values()) - lied + 2 if out and lied is not None else None,
                "rounds_s": [round(took[r], 1) for r in sorted(took) if lied <= r <= min(out.values()) + 1]
                if out and lied is not None
                else None,
                **deeds(swarm, index, names[index], honest),
            }
        )
    harmed = sum(bool(standing[names[i]].keys() & {"expelled", "away"}) for i in honest)
    return {
        "villains": villains,
        "honest_harmed": harmed,
        "round_s_before": round(statistics.median(before), 2),
        "rounds": len(states),
        "rounds_agreed": sum(len(s) == 1 for s in states.values()),
    }


def deeds(swarm: Swarm, index: int, name: str, honest: list[int]) -> dict[str, Any]:
    """What became of this villain's rows in the rounds in which it lied, as honest members tell it."""
    confessed = {f["round"] for f in swarm.facts if f["by"] == index and f["fact"] == "Confessed"}
    seen = [f for f in swarm.facts if f["by"] in honest]
    closed = {f["round"]: f for f in seen if f["fact"] == "RoundClosed" and f["round"] in confessed}
    return {
        "lied": len(closed),
        "counted": sum(name in f["counted"] for f in closed.values()),
        "refused": len({f["round"] for f in seen if f["fact"] == "RowDecodeFailed" and f["peer"] == name}),
        "alike": sum(any(name in some for some in f["alike"]) for f in closed.values()),
        "found": sorted({f["finding"] for f in seen if f["fact"] == "AuditFindingRecorded" and f["peer"] == name}),
    }


def simulated(rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for attack, statistic in product(GANGS, ("robust", "trimmed_mean")):
        stage = ScenarioContext("poisoners", 1, PEERS, rounds, "two-thirds")
        harm = play_poisoners(stage, list(KNOWING), attack, statistic)
        far = {"moved": round(harm.moved, 3), "moved_a_mean": harm.moved_a_mean}
        rows.append({"attack": attack, "statistic": statistic, **far})
    return rows


def main() -> None:
    parser = asking(__doc__, "fewer and shorter rounds")
    parser.add_argument("--villains", default="miscounter,poison", help="kinds, at most two")
    parser.add_argument(
        "--statistic", default="trimmed_mean", choices=[*STATISTICS], help="what the rows of a part become"
    )
    parser.add_argument("--steps", type=int, help="of a round; 16, with --quick 4")
    parser.add_argument("--audit-rate", type=float, default=1.0, help="share of the updates that are audited")
    parser.add_argument(
        "--simulated", action="store_true", help="every attack, by liars that know every honest row"
    )
    options = parser.parse_args()
    if options.simulated:
        rounds = 2 if options.quick else 6
        rows = simulated(rounds)
        if options.json:
            print(report("hostile", {"peers": PEERS, "rounds": rounds, "simulated": True}, rows, versions("torch")))
            return
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
        return
    how = options.statistic, options.audit_rate
    villains = [kind for kind in options.villains.split(",") if kind]
    if len(villains) > 2 or not {*villains} <= {*KINDS}:
        parser.error(f"--villains {options.villains}: name at most two of {', '.join(KINDS)}")
    rounds, steps = (10, options.steps or 4) if options.quick else (24, options.steps or 16)
    with tempfile.TemporaryDirectory() as folder:
        found = story(villains, rounds, steps, *how, Path(folder))
    if not options.quick:
        with tempfile.TemporaryDirectory() as folder:
            found["val_loss_honest"] = story([], rounds, steps, *how, Path(folder))["val_loss"]
    if options.json:
        what = {"peers": PEERS, "rounds": rounds, "inner_steps": steps, "statistic": options.statistic}
        what["audit_rate"] = options.audit_rate
        print(report("hostile", what, found, versions("torch")))
        return
    print(lines({k: json.dumps(v) if isinstance(v, list) else v for k, v in found.items()}))


if __name__ == "__main__":
    main()
