"""Named scenarios of a virtual swarm, each replayed by its name and seed.

    calm         no faults: every round counts all members
    churn        loss, joins, leaves, kills, sleeps, partitions, lost writes, drifting clocks; then peace
    apart        a minority is cut off for many rounds, trains on, and its work is counted once
    clocks       churn with clocks that drift apart much faster
    overlap      churn while trainers go on during agreement
    rollback     churn while the run is sent back to earlier states again and again
    pauses       churn while the run is paused and resumed again and again
    amendments   churn while settings change and the run is sent back; one member forges such orders
    weighed      churn with rows weighed by distances, and owners that answer twice
    paced        churn with time limits that follow the pace of the run
    growth       two founders, four joiners by ticket; then one is lost for good
    blackout     all peers stop at once, again and again, and resume from disk
    late_joiner  a peer joins a long run
    frozen       one member sleeps for ten seconds and comes back
    liars        up to a third of the voters lie; no honest peer is harmed
    replayers    a third repeat old reports of joining and leaving; no member is moved by it
    strangers    peers without a ticket request everything; they receive nothing and end no peer
    owners       up to a third of the owners lie about their parts; each is soon out
    framers      a third accuse all others of lying; no member believes them
    watched      no liars where owners watch each other, and messages are lost
    audits       a third of the trainers cheat, refuse or audit falsely; cheats are out, no honest member is
    accusers     a third of the auditors find every trainer guilty; no member leaves
    keepers      a third try bodies to propose next as well, and to escape audits; they get their turns, no more
    audited_churn  churn with every round audited
    reputation   poor trainers, cheats, a newcomer, a returner: all agree on scores, villains weigh little
    reputed_churn  churn with records kept
    audited      no cheats where rounds are audited, and messages are lost
    slow         no liars, some are slow, messages are lost: no member is accused of anything
    straggler_churn  churn with rounds that go on without the slow
    clients      trainers are drawn; some rest, decline or die: all groups of data get their turns
    sampled_churn  churn with drawn trainers
    straggler    one of four is four times slower: no member waits for it, and its steps count
    by_speed     one of four is four times slower and takes a quarter of the steps: all finish together
    oceans       members on several continents train for 38 minutes a round; overlap hides an exchange
    equal_links  links that all become slower at once: members own equal shares
    slow_uplink  one uplink is eight times slower: its member owns little, and no exchange waits longer than it must
    slow_downlink  one downlink is eight times slower, and shares stay equal
    changing_link  one link becomes eight times slower and recovers: its share follows within some rounds
    poisoners    a third know all rows and send the worst known attacks; the statistic's proof holds
    siege        every kind of villain at once, nearly a third, in bad weather: their influence stays bounded
    siege_opened  siege with opened results, and fewer witnesses per part
    validated    a third poison a mean and lie as validators; the run leaves every bad state
    wolves       a third of the validators find everything bad; the run never goes back
    scores       a third send useless updates, or score falsely; no honest member is on probation
    scored_churn  churn with scored updates
    twins        a third do not learn from their samples, hide, or judge falsely; no honest member is convicted
    twinned_churn  churn while members replay each other's samples
    validated_churn  churn while one member poisons a mean now and then
    pieces       older states are stored in pieces; a holder corrupts its own, two leave, as many vanish as may
    pieces_churn  churn with older states in pieces, and rollbacks to them
    accomplices  liars own parts by themselves and agree on lies; openings find both, and no honest member leaves
    openings     a third of the owners sum wrongly, and blocks are opened; each is out, no honest member is
    recruiter    one invited peer invites itself twelve times; it gets no more votes than agreement withstands
    slanderers   a third of the checkers find every owner guilty; no member leaves
    opened       no liars where blocks are opened, and messages are lost
    real_keys    churn in a small swarm with Ed25519 sessions and ML-DSA identities
    broken_links  one link after the other breaks: rows go around it, and all count
    branches     two branches of a run meet, a fifth lie about their preference; no peer changes sides
    data_churn   churn while members read one data set: each sample is counted, or recorded as dropped or repeated
    post_quantum  churn with sessions that sign with ML-DSA-65 as well

A failing run ends with one line that replays it, with as few faults as still make it fail.
"""

from __future__ import annotations

from atoll.peer.settings import TopologyName
from atoll.simulation.fault_schedule import FaultSelection
from atoll.simulation.scenarios.all_owners_lost import orphans
from atoll.simulation.scenarios.archive import pieces
from atoll.simulation.scenarios.basic import blackout, broken_links, calm, frozen, growth, late_joiner
from atoll.simulation.scenarios.byzantine import liars, replayers
from atoll.simulation.scenarios.churn import (
    amendments,
    audited_churn,
    churn,
    clocks,
    data_churn,
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
from atoll.simulation.scenarios.slow_links import changing_link, equal_links, slow, slow_downlink, slow_uplink
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
    "run_scenario",
]

SCENARIOS: dict[str, Scenario] = {
    "calm": Scenario(calm, peers=8, rounds=20),
    "churn": Scenario(churn, peers=24, rounds=50),
    "apart": Scenario(apart, peers=7, rounds=0),
    "branches": Scenario(branches, peers=20, rounds=0),
    "clocks": Scenario(clocks, peers=7, rounds=12),
    "data_churn": Scenario(data_churn, peers=6, rounds=10),
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
    "equal_links": Scenario(equal_links, peers=4, rounds=12),
    "slow_uplink": Scenario(slow_uplink, peers=4, rounds=10),
    "slow_downlink": Scenario(slow_downlink, peers=4, rounds=10),
    "changing_link": Scenario(changing_link, peers=4, rounds=21),
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
    *,
    faults: FaultSelection | None = None,
) -> ScenarioReport:
    """Play one scenario. Raises ScenarioFailed, with the line that replays it last, if an invariant breaks.

    Raises ScenarioUnsupported for Raft or relayed rows if members of the scenario may lie.
    """
    scenario = SCENARIOS[name]
    size, length = peers or scenario.peers, rounds or scenario.rounds
    return play(name, scenario, seed, size, length, quorum, protocol=protocol, topology=topology, faults=faults)
