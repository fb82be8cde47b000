"""How many honest rows count where rows are shown only to those who have committed or passed.

    python bench/reveal.py                      all stories, four seeds each (bench/RESULTS.md, "Under siege")
    python bench/reveal.py --stories slow --seeds 1
    python bench/reveal.py [--quick] [--json]

Plays stories of the simulator in which members may lie, and counts in every vertex that trained: of the rows that
honest members present could have in its parts, how many it has. Virtual time and seeds: the same everywhere.

    rows_share       of the rows that honest members present could have, those that are in the vertices' parts
    missing, parts   parts that count for nobody, of all
    seconds          virtual ones per round
    ended_early      seeds in which the story's own promises did not hold
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from form import asking, report, versions

from atoll.base.ids import Seconds
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed
from atoll.simulation.adversaries.commit_after_peek import PEEKERS
from atoll.simulation.scenarios import SCENARIOS
from atoll.simulation.scenarios.byzantine import MAKERS
from atoll.simulation.scenarios.harness import Scenario, ScenarioContext, ScenarioFailed, play
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import OwnerResult

STORIES = {"slow": (7, 20), "churn": (8, 12), "liars": (7, 12), "siege": (10, 12)}  # members, rounds


@dataclass
class Count:
    """Over the vertices of a story that trained."""

    rounds: int = 0
    rows: int = 0  # honest ones in their parts
    most: int = 0  # if every honest trainer present counted in every part
    parts: int = 0
    missing: int = 0  # parts that count for nobody
    seen: int = -1  # the newest round
    virtual_s: Seconds = 0.0  # until it was closed

    def add(self, other: Count) -> None:
        self.rounds, self.rows, self.most = (
            self.rounds + other.rounds,
            self.rows + other.rows,
            self.most + other.most,
        )
        self.parts, self.missing = self.parts + other.parts, self.missing + other.missing
        self.virtual_s += other.virtual_s

    def watcher(self, swarm: VirtualSwarm) -> Callable[[Seconds, VirtualComputer, Fact], None]:
        villains = swarm.checkers.villains

        def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
            if not isinstance(fact, RoundClosed) or node.name in villains or fact.body.round <= self.seen:
                return
            body, self.seen = fact.body, fact.body.round
            if not body.parts:
                return
            honest = {m.peer for m in body.members if m.may_train and m.peer not in villains}
            self.rounds += 1
            self.virtual_s = now
            self.parts += len(body.parts)
            self.most += len(body.parts) * len(honest)
            for signed in body.parts:
                said = decode_statement(signed.body, signed.signer) if signed is not None else None
                self.missing += said is None
                self.rows += len(honest.intersection(said.contributors)) if isinstance(said, OwnerResult) else 0

        return watch


def play_counted(story: str, seed: int, loss: float, count: Count) -> None:
    """Raises ScenarioFailed where the story's own promises do not hold."""
    scenario = SCENARIOS[story]

    def tell(stage: ScenarioContext) -> None:
        gather = stage.gather

        def gathered(knobs: SwarmKnobs | None = None, *words: Any, **more: Any) -> VirtualSwarm:
            knobs = knobs or SwarmKnobs(stage.peers, run=stage.settings())
            knobs = replace(knobs, network=replace(knobs.network, loss_rate=loss))
            swarm = gather(knobs, *words, **more)
            swarm.world.watchers.append(count.watcher(swarm))
            return swarm

        stage.gather = gathered
        scenario.tell(stage)

    peers, rounds = STORIES[story]
    play(story, Scenario(tell, peers, rounds), seed, peers, rounds, "two-thirds")


def counted(story: str, loss: float, seeds: range) -> dict[str, Any]:
    total, early = Count(), 0
    for seed in seeds:
        count = Count()
        try:
            play_counted(story, seed, loss, count)
        except ScenarioFailed as why:
            print(f"{story} seed {seed}: {str(why).splitlines()[0][:160]}", file=sys.stderr)
            early += 1
        total.add(count)
    return {
        "story": story,
        "loss_rate": loss,
        "rounds": total.rounds,
        "rows_share": total.rows / max(1, total.most),
        "missing": total.missing,
        "parts": total.parts,
        "seconds": round(total.virtual_s / max(1, total.rounds), 1),
        "ended_early": early,
    }


def main() -> None:
    parser = asking(__doc__, "one seed of each story")
    parser.add_argument("--stories", nargs="+", choices=sorted(STORIES), default=list(STORIES))
    parser.add_argument("--seeds", type=int, help="4, with --quick 1")
    parser.add_argument("--losses", type=float, nargs="+", default=[0.01, 0.05])
    options = parser.parse_args()
    for kind in PEEKERS:  # the same villains as before there were these
        MAKERS.pop(kind)
    seeds = range(1, (options.seeds or (1 if options.quick else 4)) + 1)
    figures = []
    if not options.json:
        print("| story | messages lost | rounds | honest rows | parts for nobody | s per round | ended early |")
        print("|---|---|---|---|---|---|---|")
    for story, loss in product(options.stories, options.losses):
        row = counted(story, loss, seeds)
        figures.append(row)
        if not options.json:
            shares = f"{row['rows_share']:.1%} | {row['missing']} of {row['parts']}"
            ends = f"{row['seconds']} | {row['ended_early']} |"
            print(f"| {story} | {loss:.0%} | {row['rounds']} | {shares} | {ends}", flush=True)
    if options.json:
        print(report("reveal", {"seeds": len(seeds)}, figures, versions()))


if __name__ == "__main__":
    main()
