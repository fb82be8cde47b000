"""Named stories of a virtual swarm, each replayed by its name and seed.

    calm         nothing goes wrong: everybody is counted in every round
    churn        loss, joins, leaves, kills, sleeps, partitions, lost writes, drifting clocks; then peace
    apart        a minority is cut off for many rounds, trains on, and its work is counted once
    clocks       churn where clocks run apart much faster
    overlap      churn where trainers go on while a round is agreed
    rollback     churn while the run is sent back to earlier states again and again
    pauses       churn while the run is paused and goes on again and again
    amendments   churn while numbers of the run change and it is sent back, and one changes them in another's name
    weighed      churn where distances weigh rows, and owners speak twice
    paced        churn where windows follow the pace of the run
    growth       two founders, four joiners by ticket; then one is lost for good
    blackout     everybody stops at once, again and again, and goes on from disk
    late_joiner  somebody comes when the run is long
    frozen       one member sleeps for ten seconds and comes back
    liars        a third of the voters lie, at most; nobody honest is harmed
    replayers    a third repeat what others once said of coming and going; nobody is moved by it
    strangers    peers without a ticket ask for all and refuse all; they are told nothing and end no peer
    owners       a third of the owners lie about their parts, at most; each is soon out
    framers      a third call everybody else liars; nobody is believed
    watched      nobody lies where owners watch each other, and messages are lost
    audits       a third of the trainers cheat, refuse or audit falsely; cheats are out, nobody honest is
    accusers     a third of the auditors find everybody guilty; nobody leaves
    keepers      a third try bodies to propose next as well, and to escape audits; they have their turns and no more
    audited_churn  churn where every round is audited
    reputation   poor trainers, cheats, a newcomer, one who returns: all agree on scores, villains weigh little
    reputed_churn  churn where records are kept
    audited      nobody cheats where rounds are audited, and messages are lost
    slow         nobody lies, some are slow, messages are lost: nobody is accused of anything
    straggler_churn  churn where rounds go on without the slow
    clients      who trains is drawn; some rest, decline or die: all groups of data come to their turns
    sampled_churn  churn where who trains is drawn
    straggler    one of four is four times slower: nobody waits for it, and its steps count
    by_speed     one of four is four times slower and takes a quarter of the steps: all arrive together
    oceans       members on several continents train for 38 minutes a round; an exchange is hidden behind the next
    poisoners    a third know all rows and send what the literature has worst; the statistic's proof holds
    siege        every kind of villain at once, nearly a third, in bad weather: their influence stays bounded
    siege_opened  siege where answers are opened, and fewer witnesses watch each part
    validated    a third poison a mean and lie as validators; the run leaves every bad state
    wolves       a third of the validators find everything bad; nobody goes back
    scores       a third send updates that teach nothing, or score falsely; nobody honest is on probation
    scored_churn  churn where updates are scored
    twins        a third do not learn from their samples, hide, or judge falsely; nobody honest is found
    twinned_churn  churn where members take each other's samples
    validated_churn  churn while one member poisons a mean now and then
    pieces       older states lie in pieces; a holder corrupts its own, two leave, then as many vanish as may
    pieces_churn  churn where older states lie in pieces, and the run is sent back to them
    accomplices  liars own parts by themselves and say the same there; openings find both, and nobody honest leaves
    openings     a third of the owners sum wrongly, and blocks are opened; each is out, nobody honest is
    recruiter    one who was invited invites itself twelve times; it gets no more votes than agreement withstands
    slanderers   a third of the checkers find every owner guilty; nobody leaves
    opened       nobody lies where blocks are opened, and messages are lost
    real_keys    churn in a small swarm with Ed25519 sessions and ML-DSA identities
    broken_links  one link after the other breaks: rows go around it, and all count
    branches     two branches of a run meet, a fifth lie about which they prefer; nobody changes sides
    post_quantum  churn where sessions sign with ML-DSA-65, too

A failing run ends with one line that replays it.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from atoll.peer.round.topology_choice import TOPOLOGIES
from atoll.peer.settings import TopologyName
from atoll.simulation.scenarios.all_owners_lost import orphans
from atoll.simulation.scenarios.archive import pieces
from atoll.simulation.scenarios.basic import blackout, broken_links, calm, frozen, growth, late_joiner
from atoll.simulation.scenarios.byzantine import liars, replayers
from atoll.simulation.scenarios.churn import (
    amendments,
    audited_churn,
    churn,
    clocks,
    overlap,
    paced,
    pauses,
    pieces_churn,
    post_quantum,
    real_keys,
    reputed_churn,
    rollback,
    sampled_churn,
    scored_churn,
    straggler_churn,
    twinned_churn,
    validated_churn,
    weighed,
)
from atoll.simulation.scenarios.colluding_poisoners import poisoners
from atoll.simulation.scenarios.forks import branches
from atoll.simulation.scenarios.harness import (
    Scenario,
    ScenarioContext,
    ScenarioFailed,
    ScenarioReport,
    ScenarioUnsupported,
    play,
)
from atoll.simulation.scenarios.loss_scoring import scores
from atoll.simulation.scenarios.lying_owners import framers, owners, watched
from atoll.simulation.scenarios.mixed_byzantine import siege, siege_opened
from atoll.simulation.scenarios.partition_training import apart
from atoll.simulation.scenarios.recruiter import recruiter
from atoll.simulation.scenarios.redundant_training import twins
from atoll.simulation.scenarios.replay_audits import accusers, audited, audits, keepers
from atoll.simulation.scenarios.reputation import reputation
from atoll.simulation.scenarios.sampled_members import clients
from atoll.simulation.scenarios.slow_links import slow
from atoll.simulation.scenarios.state_validation import validated, wolves
from atoll.simulation.scenarios.straggler import by_speed, straggler
from atoll.simulation.scenarios.strangers import strangers
from atoll.simulation.scenarios.sum_check import accomplices, opened, openings, slanderers
from atoll.simulation.scenarios.wide_area import oceans

__all__ = [
    "SCENARIOS",
    "ScenarioContext",
    "ScenarioFailed",
    "ScenarioReport",
    "ScenarioUnsupported",
    "main",
    "run_scenario",
]

SCENARIOS: dict[str, Scenario] = {
    "calm": Scenario(calm, peers=8, rounds=20),
    "churn": Scenario(churn, peers=24, rounds=50),
    "apart": Scenario(apart, peers=7, rounds=0),
    "branches": Scenario(branches, peers=20, rounds=0),
    "clocks": Scenario(clocks, peers=7, rounds=12),
    "overlap": Scenario(overlap, peers=12, rounds=15),
    "rollback": Scenario(rollback, peers=8, rounds=30),
    "pauses": Scenario(pauses, peers=8, rounds=20),
    "amendments": Scenario(amendments, peers=8, rounds=30),
    "weighed": Scenario(weighed, peers=8, rounds=12),
    "paced": Scenario(paced, peers=8, rounds=20),
    "growth": Scenario(growth, peers=2, rounds=12),
    "blackout": Scenario(blackout, peers=5, rounds=20),
    "late_joiner": Scenario(late_joiner, peers=4, rounds=300),
    "frozen": Scenario(frozen, peers=5, rounds=10),
    "liars": Scenario(liars, peers=7, rounds=15),
    "replayers": Scenario(replayers, peers=7, rounds=16),
    "strangers": Scenario(strangers, peers=4, rounds=6),
    "owners": Scenario(owners, peers=7, rounds=4),
    "orphans": Scenario(orphans, peers=20, rounds=3),
    "framers": Scenario(framers, peers=7, rounds=6),
    "watched": Scenario(watched, peers=7, rounds=20),
    "audits": Scenario(audits, peers=7, rounds=36),
    "accusers": Scenario(accusers, peers=7, rounds=12),
    "keepers": Scenario(keepers, peers=10, rounds=40),
    "audited_churn": Scenario(audited_churn, peers=8, rounds=12),
    "audited": Scenario(audited, peers=5, rounds=20),
    "slow": Scenario(slow, peers=7, rounds=20),
    "broken_links": Scenario(broken_links, peers=7, rounds=16),
    "straggler": Scenario(straggler, peers=4, rounds=20),
    "by_speed": Scenario(by_speed, peers=4, rounds=20),
    "oceans": Scenario(oceans, peers=8, rounds=5),
    "straggler_churn": Scenario(straggler_churn, peers=8, rounds=15),
    "clients": Scenario(clients, peers=7, rounds=40),
    "sampled_churn": Scenario(sampled_churn, peers=8, rounds=15),
    "poisoners": Scenario(poisoners, peers=7, rounds=6),
    "siege": Scenario(siege, peers=100, rounds=100),
    "siege_opened": Scenario(siege_opened, peers=10, rounds=6),
    "reputation": Scenario(reputation, peers=7, rounds=36),
    "reputed_churn": Scenario(reputed_churn, peers=8, rounds=15),
    "validated": Scenario(validated, peers=7, rounds=36),
    "wolves": Scenario(wolves, peers=7, rounds=16),
    "validated_churn": Scenario(validated_churn, peers=8, rounds=24),
    "scores": Scenario(scores, peers=7, rounds=24),
    "twins": Scenario(twins, peers=7, rounds=24),
    "twinned_churn": Scenario(twinned_churn, peers=8, rounds=15),
    "scored_churn": Scenario(scored_churn, peers=8, rounds=15),
    "pieces": Scenario(pieces, peers=13, rounds=14),
    "pieces_churn": Scenario(pieces_churn, peers=8, rounds=30),
    "openings": Scenario(openings, peers=7, rounds=30),
    "accomplices": Scenario(accomplices, peers=8, rounds=20),
    "recruiter": Scenario(recruiter, peers=4, rounds=12),
    "slanderers": Scenario(slanderers, peers=7, rounds=12),
    "opened": Scenario(opened, peers=7, rounds=30),
    "real_keys": Scenario(real_keys, peers=5, rounds=12),
    "post_quantum": Scenario(post_quantum, peers=6, rounds=12),
}


def run_scenario(
    name: str,
    seed: int,
    peers: int | None = None,
    rounds: int | None = None,
    quorum: str = "",
    protocol: str = "bft",
    topology: TopologyName | None = None,
) -> ScenarioReport:
    """Play one scenario. Raises ScenarioFailed, whose last line replays it, if what should never happen did.

    Raises CannotBeTold where members of the story may lie and are to agree by Raft or to hand on each other's rows.
    """
    scenario = SCENARIOS[name]
    size, length = peers or scenario.peers, rounds or scenario.rounds
    return play(name, scenario, seed, size, length, quorum, protocol, topology)


def main(argv: list[str] | None = None) -> int:
    """`atoll simulate NAME [--seed N] [--seeds COUNT] [--quorum RULE] [--protocol raft] …`."""
    parser = argparse.ArgumentParser(prog="atoll simulate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("name", choices=[*SCENARIOS, "all"])
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to play, one after the other")
    parser.add_argument("--peers", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--quorum", choices=["majority", "two-thirds"], default="")
    parser.add_argument("--protocol", choices=["bft", "raft"], default="bft", help="by which members agree")
    parser.add_argument("--topology", choices=TOPOLOGIES, default=None, help="by which rows are reduced")
    parser.add_argument("--json", action="store_true", help="one object per run instead of a line for people")
    options = parser.parse_args(argv)
    names = list(SCENARIOS) if options.name == "all" else [options.name]
    failures = 0
    for name in names:
        for seed in range(options.seed, options.seed + options.seeds):
            try:
                by = options.protocol, options.topology
                report = run_scenario(name, seed, options.peers, options.rounds, options.quorum, *by)
            except ScenarioUnsupported as why:
                if options.name != "all":
                    parser.error(str(why))
                continue
            except ScenarioFailed as failure:
                failures += 1
                print(failure, file=sys.stderr, flush=True)
                continue
            print(msgspec.json.encode(report).decode() if options.json else report.line, flush=True)
    return 5 if failures else 0
