"""How many honest rows count where rows are shown only to those who have committed or passed.

    python bench/reveal.py                      the table of bench/RESULTS.md, "Commit, then reveal"
    python bench/reveal.py --stories slow --seeds 1

Plays stories of the simulator in which members may lie, and counts in every vertex that trained: of the rows that
honest members present could have in its parts, how many it has. Virtual time and seeds: the same everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.base.ids import Seconds
from atoll.base.machine import Fact
from atoll.node.facts import RoundClosed
from atoll.sim.scenarios import SCENARIOS
from atoll.sim.scenarios.stage import Scenario, ScenarioFailed, Stage, play
from atoll.sim.swarm import Swarm, SwarmKnobs
from atoll.sim.world import Node
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Answered

STORIES = {"slow": (7, 20), "liars": (7, 15), "owners": (7, 8), "siege": (10, 20)}  # members, rounds


@dataclass
class Count:
    """Over the vertices of a story that trained."""

    rounds: int = 0
    rows: int = 0  # honest ones in their parts
    most: int = 0  # if every honest trainer present counted in every part
    parts: int = 0
    missing: int = 0  # parts that count for nobody
    seen: int = -1

    def watcher(self, swarm: Swarm) -> Callable[[Seconds, Node, Fact], None]:
        villains = swarm.checkers.villains

        def watch(now: Seconds, node: Node, fact: Fact) -> None:
            if not isinstance(fact, RoundClosed) or node.name in villains or fact.body.round <= self.seen:
                return
            body, self.seen = fact.body, fact.body.round
            if not body.parts:
                return
            honest = {m.peer for m in body.members if m.trains and m.peer not in villains}
            self.rounds += 1
            self.parts += len(body.parts)
            self.most += len(body.parts) * len(honest)
            for signed in body.parts:
                said = decode_statement(signed.body, signed.signer) if signed is not None else None
                self.missing += said is None
                self.rows += len(honest.intersection(said.contributors)) if isinstance(said, Answered) else 0

        return watch


def counted(story: str, seed: int, loss: float) -> str:
    count, scenario = Count(), SCENARIOS[story]

    def tell(stage: Stage) -> None:
        gather = stage.gather

        def gathered(knobs: SwarmKnobs | None = None, *words: object, **more: object) -> Swarm:
            knobs = knobs or SwarmKnobs(stage.peers, run=stage.settings())
            knobs = replace(knobs, network=replace(knobs.network, loss_rate=loss))
            swarm = gather(knobs, *words, **more)  # pyright: ignore[reportArgumentType]
            swarm.world.watchers.append(count.watcher(swarm))
            return swarm

        stage.gather = gathered
        scenario.tell(stage)

    peers, rounds = STORIES[story]
    try:
        report = play(story, Scenario(tell, peers, rounds), seed, peers, rounds, "two-thirds")
        end = f"{report.attempts_failed} | {report.virtual_s / max(1, report.rounds):.1f} | {report.digest}"
    except ScenarioFailed as why:
        end = f"failed: {str(why).splitlines()[0][:200]}"
    share = count.rows / max(1, count.most)
    return f"| {story} | {seed} | {loss:.0%} | {count.rounds} | {share:.2%} | {count.missing} of {count.parts} | {end} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--stories", nargs="+", choices=sorted(STORIES), default=list(STORIES))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--losses", type=float, nargs="+", default=[0.01, 0.05])
    options = parser.parse_args()
    print("| story | seed | loss | rounds | honest rows that count | parts missing | failed attempts | s per round | digest |")
    print("|---|---|---|---|---|---|---|---|---|")
    for story in options.stories:
        for loss in options.losses:
            for seed in range(1, options.seeds + 1):
                print(counted(story, seed, loss), flush=True)


if __name__ == "__main__":
    main()
