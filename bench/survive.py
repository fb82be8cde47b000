"""What trouble costs a real swarm: one of four killed mid-share, one frozen, one trainer killed.

    python bench/survive.py [--json] [--quick]

Four peer processes, as a person would start them. For each trouble, the length of the round in which it happened
is set beside the median of undisturbed rounds of the same run.
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from form import asking, report, versions
from real_swarm import Swarm

PEERS = 4


def ends(swarm: Swarm, peer: int, since: int = 0) -> list[dict]:
    return [f for f in swarm.facts[since:] if f["fact"] == "RoundClosed" and f["by"] == peer and f["trained"] > 0]


def trouble(settings: list[str], kind: str, base: Path) -> dict[str, float]:
    """One run: undisturbed rounds first, then the trouble; seconds from the round's begin to its end at peer 0."""
    with Swarm(base, settings) as swarm:
        swarm.found()
        for index in range(1, PEERS):
            swarm.join(index)
        swarm.closed(6, peer=0)
        closed = ends(swarm, 0)
        quiet_s = statistics.median(b["at"] - a["at"] for a, b in pairwise(closed[1:]))
        since = len(swarm.facts)
        begun = swarm.wait(lambda f: f["fact"] == "UpdateSharingBegan" and f["by"] == 2, since)
        if kind == "kill":
            swarm.kill(2)
        elif kind == "freeze":
            swarm.freeze(2)
        else:
            swarm.peers[2].trainer().kill()
        victim = swarm.wait(lambda f: f["fact"] == "Opened" and f["by"] == 2)["peer"]
        hurt = swarm.wait(
            lambda f: f["fact"] == "RoundClosed" and f["by"] == 0 and f["round"] >= begun["round"], since
        )
        before = [f for f in ends(swarm, 0) if f["round"] < hurt["round"]][-1]
        figures: dict[str, float] = {"undisturbed_s": quiet_s, "disturbed_s": hurt["at"] - before["at"]}
        if kind == "trainer":
            seen = len(swarm.facts)
            swarm.wait(lambda f: f["fact"] == "LocalContributionSkipped" and f["by"] == 2, since)
            back = swarm.wait(
                lambda f: (
                    f["fact"] == "RoundClosed"
                    and f["by"] == 0
                    and victim in f["counted"]
                    and f["round"] > hurt["round"]
                ),
                since,
            )
            missed = [f for f in ends(swarm, 0, since) if victim in f["missing"] and f["round"] < back["round"]]
            return figures | {"rounds_missed": len(missed), "facts": len(swarm.facts) - seen}
        named = swarm.wait(lambda f: f["fact"] == "RoundClosed" and f["by"] == 0 and victim in f["missing"], since)
        return figures | {"rounds_until_named": named["round"] - begun["round"]}


def main() -> None:
    options = asking(__doc__, "shorter rounds", json="one object instead of lines").parse_args()
    steps = 20 if options.quick else 40
    settings = ["run.rounds=0", f"run.start_peers={PEERS}", f"train.inner_steps={steps}", "sync.up=2bit"]
    figures: dict[str, float] = {}
    for kind in ("kill", "freeze", "trainer"):
        with tempfile.TemporaryDirectory() as folder:
            found = trouble(settings, kind, Path(folder))
        figures[f"{kind}_extra_s"] = round(found["disturbed_s"] - found["undisturbed_s"], 3)
        figures[f"{kind}_undisturbed_s"] = round(found["undisturbed_s"], 3)
        if kind == "trainer":
            figures["trainer_rounds_missed"] = found["rounds_missed"]
    if options.json:
        told = {"peers": PEERS, "inner_steps": steps, "model": "gpt-tiny"}
        print(report("survive", told, figures, versions("torch")))
        return
    for kind in ("kill", "freeze", "trainer"):
        extra, quiet = figures[f"{kind}_extra_s"], figures[f"{kind}_undisturbed_s"]
        print(f"{kind:8s} the round took {extra:+.2f} s beside {quiet:.2f} s undisturbed")
    print(f"a killed trainer missed {figures['trainer_rounds_missed']} rounds")


if __name__ == "__main__":
    main()
