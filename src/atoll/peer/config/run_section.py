"""Declarations of the [run] settings: members, trust, duration, and how members check each other."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from atoll.base.arguments import Peers, Share, Whole
from atoll.base.limits import PEERS_MAX
from atoll.crypto.signer import VoteKind
from atoll.peer.config.setting import AmendRule, ConfigSection, Duration, Setting, Text
from atoll.peer.settings import ERA_ROUNDS, EraRounds, VoteRounds
from atoll.policy.capability_terms import VALIDATE_EVERY_MAX
from atoll.policy.presets import Trust

# fmt: off


class RunSection(ConfigSection, frozen=True):
    """What the run is. Travels with the run."""

    fixed: ClassVar[str] = "votes, trust and membership rest on it, and members cannot vote on what a vertex means"

    name: Annotated[Text, Setting("Display name of the run.", level="first", genesis="name")] = "run"
    rounds: Annotated[Whole | None, Setting(
        "Training rounds until the run is over; 0 runs until it is stopped. The learning rate falls over all of "
        "them.",
        "rounds", level="first", usual=30, recipe="schedule.rounds", passed="builder",
        amend=AmendRule("rounds", "{:g} rounds", fragments=1))] = None
    start_peers: Annotated[Peers, Setting(
        "Voting members needed before the first round trains. 1 starts alone; others join later. Keep it at or "
        "above run.min_peers.",
        "members", level="first", genesis="start_peers",
        amend=AmendRule("start_peers", "{:g} members to begin"))] = 1
    min_peers: Annotated[Peers | None, Setting(
        "Voting members needed for a round to train. With fewer, the run waits. If left out: as many as "
        'sync.statistic needs to withstand one liar; 1 with run.trust = "private" or if run.start_peers is lower.',
        "members", usual=1, genesis="min_peers", amend=AmendRule("min_peers", "{:g} members to go on"))] = None
    trust: Annotated[Trust, Setting(
        'Which lies the run withstands. "private": members may crash but do not lie; more than half must be '
        'present. "community": up to a third may lie; more than two thirds must be present. A robust '
        'sync.statistic withstands poisoned updates, and owners of parts are spot-checked (run.openings). "open": '
        "several owners combine every part and sign their results, disputed parts are recomputed, and proven "
        "liars are expelled. That costs the upload once per owner (run.captured_parts). Settings that it decides: "
        "see atoll docs config.", level="first")] = "private"
    byzantine_tolerance: Annotated[Share | None, Setting(
        "Share of members that may lie without splitting the run. It must agree with run.trust.",
        level="expert", trust="tolerance", genesis="tolerance")] = None
    open_to_all: Annotated[bool, Setting(
        "Let any peer that knows an address join and read without a ticket.", genesis="open_to_all")] = False
    public: Annotated[bool, Setting(
        "Let any peer that knows an address and the run's id read without a ticket: history, members' addresses, "
        "data and model. It still needs a ticket to join.", genesis="public")] = False
    era_rounds: Annotated[EraRounds, Setting(
        "Rounds after which members sign the history with their long-lived identities (ML-DSA-65); 0: never. A "
        "later forger of Ed25519 votes then cannot write another past. No member waits for it. It costs 5 kB per "
        "member each time; small runs also sign when members come and go.",
        "rounds", level="expert", genesis="era_rounds")] = ERA_ROUNDS
    votes: Annotated[VoteKind, Setting(
        'Signature scheme of the statements in a round. "ml-dsa-65" withstands future forgers of Ed25519 in the '
        "newest rounds, too. Keys then take 2 kB and signatures 3.3 kB, instead of 32 and 64 bytes, and fewer "
        "members fit: specs/identity.md.", level="expert")] = "ed25519"
    audit_rate: Annotated[Share | None, Setting(
        "Share of all trainers' rounds that another trainer replays for ten steps (specs/audit.md). 0.05 costs "
        "3.5 % more work; with run.reputation 6 % for regular members and 12 % for those on probation. An audit "
        'transfers 32 bytes per parameter. With run.trust = "community" or "open" a refuted member is expelled; '
        'with "private" atoll status shows it. Only gpt and llama models on the CPU in fp32, without overlap or '
        'fragments. If left out where audits are impossible: 0 with a notice in "community", an error in "open".',
        trust="audit_rate", genesis="audit_rate", amend=AmendRule("audit_rate", "a share of {:g} audited"))] = None
    score_rate: Annotated[Share, Setting(
        "Share of all updates whose effect on the loss three to five other members measure (specs/scoring.md). Up "
        "to four times that for members on probation. It lowers the run.reputation of useless updates, which it "
        "needs, and expels no member. It works where audits do not: bf16, other optimizers, overlap, fragments. "
        "Not for attached loops, eager updates or sparse codecs. A score costs each scorer 512 samples without "
        "gradients (as much as training on 120) and the bytes of one update.",
        level="expert", genesis="score_rate")] = 0.0
    twin_rate: Annotated[Share, Setting(
        "Share of all updates that are made from another member's samples, in secret, and then compared with that "
        "member's (specs/twins.md). Up to four times that for members on probation. It finds updates that their "
        "samples do not explain, decides through run.reputation, which it needs, and expels no member. Only with "
        'train.recipe = "fedavg" or "data_parallel", without run.audit_rate and run.score_rate. This share of '
        "samples is learned from twice, and as many are skipped.", level="expert", genesis="twin_rate")] = 0.0
    checks: Annotated[Annotated[str, Meta(max_length=256)], Setting(
        'Further checks of updates, by their names in atoll/verification/registry.py, each with its share of all '
        'updates: "NAME = 0.1, OTHER = 0.05". Their verdicts change records, with run.reputation.',
        level="expert")] = ""
    reputation: Annotated[bool | None, Setting(
        "Keep a score of every member's record in the vertices (specs/reputation.md). It decides how often a "
        "member is audited, whether it owns parts, and the weight of its updates: at most 1.5 times an equal "
        'share. Claimed numbers of samples then have no effect. Also on with train.recipe = "cooperative".',
        level="expert", trust="reputation", genesis="reputation")] = None
    vote_after_rounds: Annotated[VoteRounds | None, Setting(
        "Rounds in which a later member's update must count before the member votes (specs/membership.md). Until "
        "then it trains, but owns no part and cannot invite. Members with a founder's ticket from before training "
        "began vote at once. 0: all vote as soon as they are ready.",
        "rounds", level="expert", trust="vote_after_rounds", genesis="vote_after_rounds")] = None
    sponsor_rounds: Annotated[VoteRounds | None, Setting(
        "Rounds in which a member's update must count before its vote is independent of its invitation "
        "(specs/membership.md). Until then all members that one invitation brought, directly or not, hold at most "
        "a third of the votes. 0: no such bound.",
        "rounds", level="expert", trust="sponsor_rounds", genesis="sponsor_rounds")] = None
    validate_every: Annotated[Annotated[int, Meta(ge=0, le=VALIDATE_EVERY_MAX)] | None, Setting(
        "Training rounds between two checks of the agreed model on held-out data (specs/validation.md); 0: never. "
        "If more validators than may lie find the model bad, all go back to the last good state. A check costs a "
        "validator 128 samples without gradients, as much as training on 45. Write 0 where held-out loss may rise "
        "by run.validate_margin, as in a run that memorizes its data.",
        "rounds", usual=0, genesis="validation.every")] = None
    validate_margin: Annotated[Annotated[float, Meta(ge=0.01, le=100)], Setting(
        "Share by which a loss may exceed the least loss of the newest 128 rounds before it is bad; 0.1 nats at "
        "least. Make it wider than the worst round to keep. Smaller harm is not seen.", level="expert")] = 0.25
    openings: Annotated[Share | None, Setting(
        "Share of every combined part that its owner must open afterwards, so that others recompute it "
        "(specs/openings.md). Proven liars are expelled; owners that show nothing are removed. Only with "
        'run.trust = "community" or "open". Not with codecs that use more than one block (topk, randk, dct, '
        "compressors).", level="expert", trust="openings", genesis="openings.share")] = None
    captured_parts: Annotated[Share | None, Setting(
        'With run.trust = "open": largest share of parts whose first owners may all be liars, if as many members '
        "lie as the run withstands. Such results are believed in their round; run.openings, which it needs, then "
        "finds them. It sets the number of owners per part: 0.05 means two for up to nine members and three "
        "beyond; 0 means one more than may lie, up to six. Bytes grow with every owner (specs/trust.md). Results "
        "that cannot be opened need 0.", level="expert", trust="captured", genesis="captured")] = None
    sample: Annotated[Share, Setting(
        "Share of the members that train in a round, rounded up (specs/clients.md). The others vote and own "
        "parts. Members with the fewest turns are drawn first. 0 or 1: all train. Where members may lie, at least "
        "as many train as withstand one liar. Not with sync.overlap, sync.fragments or sync.apart.")] = 0.0
    sample_peers: Annotated[Annotated[int, Meta(ge=0, le=PEERS_MAX)], Setting(
        "Number of members that train in a round, in place of run.sample. 0: run.sample decides. With fewer "
        "members all train.", "members")] = 0
    first_train: Annotated[Duration, Setting(
        "Longest training in the first round, where no speed is known yet. The round ends as soon as all are "
        "done, so a large value only costs time if a member hangs.", genesis="round.first_train_s")] = 180.0
    train_max: Annotated[Duration, Setting(
        "Longest training in any round, even if steps are left. Keep it above run.first_train.",
        genesis="round.train_max_s", amend=AmendRule("train_max_s", "rounds that train for {} at most"))] = 3600.0
    suspect: Annotated[Duration, Setting(
        "Silence after which a member is no longer waited for. Keep it at or above 3 x run.beat, and at or below "
        "a fifth of consensus.timeout.", level="expert", genesis="round.suspect_s")] = 6.0
    beat: Annotated[Duration, Setting(
        "Heartbeat period. A shorter one notices silence sooner and costs more messages.",
        level="expert", genesis="round.beat_s")] = 2.0
