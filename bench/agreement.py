"""How long seven real processes take to agree on a round, undisturbed and in trouble.

    python bench/agreement.py [--json] [--quick] [--story undisturbed,shaped,killed,liars] [--protocol raft]

undisturbed   over loopback
shaped        every pair 50 to 100 ms apart (`bench/lab.py`; needs root)
killed        the proposer of every third round gets SIGKILL when its round shares, and comes back;
              rounds are longer, so that it is back before the next one dies
liars         two of seven vote, propose and commit one way to some and another way to the rest

Latency is from the moment a member first knows what became of every part to the moment the agreed round is
durable and merged there: state arithmetic, two phases of votes, the disk, and all of it again where an attempt
fails. `round_s` is from one round's end to the next, for the last member, with training
and sharing. Medians are over members and rounds. A round is lost if it closed without training, or not with the
same state everywhere.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from form import asking, report, versions
from lab import Lab, Network
from real_swarm import Fact, Swarm

from atoll.base.ids import Digest
from atoll.policy.committee import whose_turn
from atoll.wire.ticket import parse

PEERS, LIARS = 7, 2
RTT_S, JITTER_S = 0.075, 0.0125  # jitter is one way: round trips wander between 50 and 100 ms
EVERY = 3  # rounds from one killed proposer to the next
STORY_S = 600.0
VILLAIN = Path(__file__).with_name("villain.py")
SETTINGS = [
    "run.rounds=0",
    f"run.start_peers={PEERS}",
    "model.name=gpt-nano",
    "train.seq_len=32",
    "train.batch=4",
]
STEPS, STEPS_KILLED = 4, 120  # of a round; with the second it takes as long as a killed peer takes to be back


def proposer(run: Digest, facts: list[Fact], closed: Fact, protocol: str = "bft") -> str:
    """Who speaks first in the round that starts from this vertex, as every member computes it."""
    members = next(f["members"] for f in reversed(facts) if f["fact"] == "MembershipChanged")
    voters = [m for m in members if m["standing"] in ("new", "member") and m["role"] == "trainer"]
    since = {m["peer"]: m["since"] for m in voters}
    if protocol == "raft" and closed["proposer"] in since:
        return closed["proposer"]
    return whose_turn(run, closed["round"] + 1, since, closed["proposer"])


def kill_proposers(swarm: Swarm, rounds: int, protocol: str) -> int:
    """Until so many rounds are trained; how many were killed."""
    seen = 0
    index_of = {f["peer"]: f["by"] for f in swarm.facts if f["fact"] == "Opened"}
    for killed in range(rounds):
        due = min(EVERY * (killed + 1), rounds)
        closed = swarm.wait(lambda f, due=due: f["fact"] == "RoundClosed" and f["trained"] >= due, seen, STORY_S)
        if closed["trained"] >= rounds:
            return killed
        seen = swarm.facts.index(closed) + 1
        victim = proposer(parse(swarm.ticket).genesis, swarm.facts, closed, protocol)
        swarm.wait(
            lambda f, after=closed["round"]: f["fact"] == "UpdateSharingBegan" and f["round"] > after, seen, STORY_S
        )
        swarm.kill(index_of[victim])
        seen = len(swarm.facts)
        swarm.resume(index_of[victim])
        swarm.wait(lambda f, who=victim: f["fact"] == "RoundClosed" and who in f["counted"], seen, STORY_S)
    return rounds


def story(kind: str, rounds: int, protocol: str) -> dict[str, Any]:
    with ExitStack() as stack:
        network = Network.flat(PEERS, rtt_s=RTT_S, rate_bytes_s=125e6, jitter_s=JITTER_S)
        lab = stack.enter_context(Lab(network)) if kind == "shaped" else None
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trust = "community" if kind == "liars" else "private"
        plain = ["run.audit_rate=0", "run.reputation=false", "sync.statistic=mean"]  # agreement alone is measured
        steps = STEPS_KILLED if kind == "killed" else STEPS
        chosen = [f"train.inner_steps={steps}", f"run.trust={trust}", f"consensus.protocol={protocol}"]
        swarm = stack.enter_context(Swarm(base, [*SETTINGS, *chosen, *plain], lab))
        swarm.found()
        liars = range(PEERS - LIARS, PEERS) if kind == "liars" else range(0)
        for index in range(1, PEERS):
            lie = (sys.executable, str(VILLAIN), "--villain", "equivocator", "--honest-rounds", "2")
            swarm.join(index, command=lie if index in liars else None)
        killed = 0
        if kind == "killed":
            for index in range(PEERS):
                swarm.closed(1, peer=index, patience_s=STORY_S)
            killed = kill_proposers(swarm, rounds, protocol)
        else:
            for index in set(range(PEERS)) - set(liars):
                swarm.closed(rounds, peer=index, patience_s=STORY_S)
        row = figures([f for f in swarm.facts if f["by"] not in liars])
        if lab is not None:
            row["router_late_s"] = round(lab.counted().late_s, 4)
        return {"story": kind, "protocol": protocol, **row, "killed": killed}


def figures(facts: list[Fact]) -> dict[str, Any]:
    """Latencies and losses of all rounds that trained but the first, which is generous."""
    reduced: dict[tuple[int, int], float] = {}
    took: list[float] = []
    states: dict[int, set[str]] = defaultdict(set)
    trained: dict[int, int] = {}
    closed: dict[int, float] = {}  # round -> when the last member was done with it
    for fact in facts:
        if fact["fact"] == "PartsReduced":
            reduced.setdefault((fact["by"], fact["round"]), fact["at"])  # of its first attempt
        elif fact["fact"] == "RoundClosed":
            closed[fact["round"]] = max(fact["at"], closed.get(fact["round"], 0.0))
            states[fact["round"]].add(fact["state"])
            trained[fact["round"]] = fact["trained"]
            began = reduced.get((fact["by"], fact["round"]))
            if began is not None and fact["trained"] > 1:
                took.append(fact["at"] - began)
    training = [r for r in sorted(trained) if trained[r] > 0]
    idle = sum(trained[r] == trained.get(r - 1, -1) for r in training)
    took.sort()
    lengths = sorted(closed[r] - closed[r - 1] for r in training if trained[r] > 2 and r - 1 in closed)
    failed = {(fact["round"], fact["attempt"]) for fact in facts if fact["fact"] == "RoundAttemptFailed"}
    return {
        "rounds": len(training),
        "attempts_failed": len(failed),
        "rounds_lost": idle + sum(len(states[r]) > 1 for r in training),
        "latency_s_median": round(statistics.median(took), 3),
        "latency_s_p90": round(took[int(len(took) * 0.9)], 3),
        "latency_s_max": round(took[-1], 3),
        "round_s_median": round(statistics.median(lengths), 2),
        "round_s_max": round(lengths[-1], 2),
    }


def main() -> None:
    parser = asking(__doc__, "few rounds, undisturbed")
    parser.add_argument("--story", default="", help="which, separated by commas")
    parser.add_argument("--protocol", choices=["bft", "raft"], default="bft", help="by which members agree")
    options = parser.parse_args()
    kinds = options.story or ("undisturbed" if options.quick else "undisturbed,shaped,killed,liars")
    rounds = 10 if options.quick else 50
    rows = [story(kind, rounds, options.protocol) for kind in kinds.split(",")]
    if options.json:
        print(report("agreement", {"peers": PEERS, "rounds": rounds}, rows, versions("torch")))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
