"""Declarations of the [sync] and [consensus] settings: how updates travel, and how members agree on a round."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from atoll.base.arguments import Count, Share, Whole
from atoll.base.limits import APART_ROUNDS_MAX, PEERS_MAX
from atoll.peer.config.setting import AmendRule, ConfigSection, Duration, Setting
from atoll.peer.settings import TopologyName
from atoll.policy.fault_tolerance import StatisticName

# fmt: off


class UpdateExchangeSection(ConfigSection, frozen=True):
    """How updates travel. Travels with the run."""

    fixed: ClassVar[str] = "error feedback was accumulated with it, and members decode each other's bytes by it"

    up: Annotated[str | None, Setting(
        'Codec of an update, from a member to the owner of a part: "fp32", "int8", "2bit", "topk+int8+zstd", …; '
        "specs/codecs.md lists all. Strong codecs need sync.error_feedback.",
        usual="int8", recipe="coding.up", passed="builder")] = None
    down: Annotated[str | None, Setting(
        "Codec of a result, from the owner to all members. What it loses is lost: nothing feeds it back.",
        usual="int8", recipe="coding.down", passed="builder")] = None
    error_feedback: Annotated[Share | None, Setting(
        "Share of a codec's error that the next update carries.",
        level="expert", usual=1.0, recipe="coding.beta")] = None
    overlap: Annotated[Whole | None, Setting(
        "Steps that a trainer goes on while a round is agreed; then it waits. The agreed result is merged when it "
        "arrives, and these steps belong to the next round. 0: the trainer waits at once. Take the time of an "
        "exchange divided by that of a step; 4 of 32 steps cost 0.5 % of the loss. Keep it below "
        "train.inner_steps / sync.fragments. It costs memory for one more copy of the model.",
        "steps", usual=0, recipe="schedule.overlap")] = None
    fragments: Annotated[Count | None, Setting(
        "Slices of the model that take turns. A round carries one slice and takes train.inner_steps / "
        "sync.fragments steps; a run has run.rounds x sync.fragments rounds, and the last one carries everything. "
        "The total bytes stay the same, in smaller bursts: for slow links. It must divide train.inner_steps.",
        usual=1, recipe="schedule.fragments")] = None
    phases: Annotated[str, Setting(
        'Changes of round length or codecs, by shares of the run. "0.8:16,0.9:8:int8:int8": rounds of 16 steps '
        "from 0.8 of all steps (run.rounds x train.inner_steps) on, and of 8 steps with these codecs (up, down) "
        'from 0.9 on. "0.9:8:topk:0.1+int8" has a codec with a number. The run then has more rounds than '
        "run.rounds. Short rounds at the end average the noise of the last steps. Not with sync.fragments, "
        "sync.overlap, sync.quorum, sync.apart, audits, scores or rounds that adapt their work.",
        level="expert")] = ""
    compression_ratio: Annotated[Share, Setting(
        'Share of values that the codecs "topk" and "randk" keep where they have no number of their own '
        '("topk:0.05").', level="expert")] = 0.1
    compression_level: Annotated[Literal[3, 5, 9], Setting(
        'Effort of the codec "zstd" where it has no number of its own ("zstd:9").', level="expert")] = 3
    topology: Annotated[TopologyName, Setting(
        'Path of updates (specs/topologies.md). "auto": a hierarchy if names give several places ("eu/ada", '
        '"us/bob"); else the cheapest one for the links that members measured and agreed on; a butterfly until '
        'these are known. "hierarchical", "tree" and "ring" add up updates on the way, so they need run.trust = '
        '"private".', genesis="topology")] = "auto"
    statistic: Annotated[StatisticName | None, Setting(
        'Rule that combines the updates of a part. "mean": weighted by samples; one liar can move it. Value by '
        'value, against run.byzantine_tolerance: "median", "trimmed_mean", "meamed". By distances between whole '
        'updates, only with run.trust = "community" and up to 64 updates: "robust" (a covariance filter, the '
        'recommended one), "krum", "multi_krum", "geometric_median", "centered_clipping", "mda", "clipped_caf" '
        '(for members whose data differ, such as hospitals; stops no backdoor). "nnm + RULE" first replaces every '
        "update by the mean of its nearest ones. All but the mean count every update once, need updates sent "
        "directly to owners, more than twice as many as liars (Krum: three more), and memory for one decoded MiB "
        'of each. A part with fewer updates changes for no member. If left out: "robust" in "community", '
        '"trimmed_mean" in "open", "mean" with too few members.', usual="mean", genesis="statistic")] = None
    quorum: Annotated[Annotated[int, Meta(ge=0, le=PEERS_MAX)] | None, Setting(
        "Updates after which the others get sync.grace: members that still train then send the steps that they "
        "have. A late update becomes part of the next one; recipes that agree on every step drop it. 0: wait for "
        'all, as long as training may last. Needs run.trust = "private" and a butterfly or star.',
        "updates", usual=0, recipe="reducer.quorum",
        amend=AmendRule("updates", "{:g} updates before the slow are left behind"))] = None
    grace: Annotated[Whole | None, Setting(
        "Steps of a median member that the others may be later, with sync.quorum. A twelfth of an owner's window "
        "is added for messages under way. Cover a step of the slowest member, or its updates may never count.",
        "steps", usual=0, recipe="reducer.grace", amend=AmendRule("grace", "{:g} steps of grace for them"))] = None
    apart: Annotated[Literal["wait", "merge", "drop"], Setting(
        'What a member without a quorum does after a failed attempt (specs/apart.md). "wait": it stops after '
        'sync.overlap steps. "merge": it trains on, and its next update includes that work, at the length and '
        'weight of one update. "drop": it trains on, and gives these steps up on return. Not with audits, '
        "sync.fragments or the recipes eager and cooperative.", level="expert")] = "wait"
    apart_rounds: Annotated[Annotated[int, Meta(ge=1, le=APART_ROUNDS_MAX)], Setting(
        "Most rounds' worth of steps that a member trains apart. More make its update's direction surer and "
        "staler, not longer.", "rounds", level="expert")] = 10


class ConsensusSection(ConfigSection, frozen=True):
    """How members agree on every round. Travels with the run, except max_retries."""

    fixed: ClassVar[str] = "members cannot vote on what a vertex means"

    protocol: Annotated[str, Setting(
        'How members agree on a round. "bft": two phases of signed votes, a rotating proposer, and the quorum of '
        'run.trust. "raft": one phase and a stable leader, one hop and half of the votes less (specs/raft.md); '
        'only with run.trust = "private", where members crash but never lie. "snow" is refused: its decisions are '
        "only probable, and strangers cannot verify them.", level="expert")] = "bft"
    timeout: Annotated[Duration, Setting(
        "Time from the end of training until an attempt is given up: a fifth for each of three owners of a part, "
        "the rest for proposal and votes. Every further attempt waits half as long again. A healthy round never "
        "waits for it.", amend=AmendRule("owner_s", "{} for an owner of a part to answer", factor=1 / 5))] = 30.0
    timeout_min: Annotated[Duration, Setting(
        "Least value to which consensus.timeout shrinks in a first attempt when recent rounds were fast; silent "
        "owners then cost seconds, not a minute. The default leaves time to repeat lost messages once a second. "
        "At or above consensus.timeout: it never shrinks.",
        level="expert",
        amend=AmendRule("window_min_s", "{} at the least for an owner of a part to answer", factor=1 / 5))] = 7.5
    max_retries: Annotated[Count, Setting(
        "Failed attempts after which atoll status calls the round troubled. Attempts go on: giving up could only "
        "split the run.", "attempts", level="expert")] = 3
