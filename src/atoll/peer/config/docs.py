"""Descriptions of all keys of run.toml: unit, reason for the default, related keys.

The commented file of `atoll init`, docs/config.md and the advice in errors use these texts.

Not responsible for: refusing values (`validate.py`).
"""

from __future__ import annotations

from typing import Any

ABOUT = {  # unit, why this default, which other key it must agree with
    "run.name": ("Display name of the run."),
    "run.rounds": (
        "Training rounds until the run is over; 0 goes on until it is stopped. The learning rate falls "
        "over all of them."
    ),
    "run.start_peers": (
        "Members that vote, or will, needed before the first round trains; 1 starts alone and lets others come. "
        "Keep at or above run.min_peers."
    ),
    "run.min_peers": (
        "Members that vote, or will, needed for any round to train; below that members only assemble. Left out: as "
        'many as sync.statistic needs to withstand one liar, with run.trust other than "private" and '
        "run.start_peers that high; else 1."
    ),
    "run.trust": (
        '"private": members may crash but do not lie, and more than half must be present. "community": up to a '
        "third may lie about what was agreed, and more than two thirds must be present. sync.statistic withstands "
        'poisoned updates, and owners of parts are spot-checked (run.openings). "open": several owners combine '
        "every part and sign their results, disputed parts are opened and recomputed, and proven liars are "
        "expelled. Costs the upload as many times: run.captured_parts. What it stands for where other keys are "
        "left out: docs/config.md, at the end."
    ),
    "run.byzantine_tolerance": (
        'Share of members that may lie without splitting the run: 0 with trust = "private", 0.33 with '
        '"community" and "open"; the two must agree.'
    ),
    "run.open_to_all": "True: a peer that knows an address may join, and read, without a ticket.",
    "run.public": (
        "True: a peer that knows an address and the run's id may read history, members' addresses, data and model "
        "without a ticket. It still needs one to join."
    ),
    "run.era_rounds": (
        "Rounds after which members sign the history with their long-lived identities (ML-DSA-65), so that a "
        "future forger of Ed25519 votes cannot write another past; 0: never. No member waits for it; small runs "
        "also sign when members come and go. 5 kB per member each time."
    ),
    "run.votes": (
        'How members sign their statements in a round: "ed25519", or "ml-dsa-65", which withstands future forgers '
        "of Ed25519 also in the newest rounds, which no identity has signed yet. Keys take 2 kB and signatures 3.3 "
        "kB then, instead of 32 and 64 bytes, and fewer members find room: specs/identity.md."
    ),
    "run.audit_rate": (
        "Share of all rounds of all trainers of which another trainer, drawn by the vertex, takes ten steps again "
        "(specs/audit.md); 0.05 costs 3.5 % more work, where records are kept 6 % for regular members and 12 % for "
        'those on probation. Left out: 0.02 with run.trust = "community", or 0, with a notice, where the recipe '
        'cannot be audited; 0.05 with "open", which is refused there unless you write 0 (run.score_rate can look '
        "at bf16, Muon and overlap instead). A member that enough auditors refute is expelled where run.trust is "
        '"community" or "open", and shown by status where it is "private". For gpt and llama models under recipes '
        "without overlap or fragments; 32 bytes per parameter travel for each audit."
    ),
    "run.score_rate": (
        "Share of all updates along which others, three to five drawn by the vertex, take a step to see whether "
        "the loss falls on what their author was told to learn from, and more there than elsewhere "
        "(specs/scoring.md); up to four times that for members on probation. Decides through run.reputation, which "
        "it needs, and expels no member. Works where audits do not: bf16, other optimizers, overlap, fragments; "
        "not for attached loops, eager updates or sparse codecs. A score costs each scorer 512 samples without "
        "gradients, as much as training on 120, and the bytes of one update."
    ),
    "run.twin_rate": (
        "Share of all updates that their author makes of another member's samples, unknown to the others until all "
        "have committed; three to five others then hold the two against each other, and where they differ take the "
        "round again (specs/twins.md). Finds members that send another update than their samples make, at about "
        "this rate, up to four times that on probation. Decides through run.reputation, which it needs, and expels "
        'no member. Only where rounds begin with one optimizer state at all members: train.recipe = "fedavg" or '
        '"data_parallel"; elsewhere run.score_rate looks. Not with run.audit_rate or run.score_rate. So large a '
        "share of samples is not learned from, another is learned from twice."
    ),
    "run.reputation": (
        "True: vertices keep a score of every member's record (specs/reputation.md). It decides how often it is "
        "audited, whether it owns parts, and what its rows weigh: after sync.statistic looked for liars, and never "
        "more than half as much again as an equal share. Samples that members claim then move nothing. Left out: "
        'true with run.trust = "community" and "open", and with train.recipe = "cooperative".'
    ),
    "run.vote_after_rounds": (
        "Rounds in which a member's update must have counted before it votes, if it came after training began or "
        "by another member's ticket; until then it trains, owns no part and cannot invite (specs/membership.md). A "
        "member with a founder's ticket from before training began votes at once. 0: all vote as soon as they are "
        'ready. Left out: 10 with run.trust = "community" and "open".'
    ),
    "run.sponsor_rounds": (
        "Rounds in which a member's update must have counted before its vote no longer counts among those of its "
        "invitation: all that one invited member brought in, directly or not, hold at most a third of the votes "
        "together until then (specs/membership.md). 0: no such bound. Left out: 50 with "
        'run.trust = "community" and "open".'
    ),
    "run.validate_every": (
        "Training rounds after which members look at the agreed model: some, drawn by the vertex, sign its loss on "
        "held-out data, and if more than may lie find it bad, all go back to the last state that was found good "
        '(specs/validation.md). 0: never. Left out: with run.trust = "community" or "open" about every 100 steps, '
        'every 16 rounds at most; never with "private". Costs a validator 128 samples without gradients each time, '
        "as much as training on 45. Write 0 where held-out loss may rise by run.validate_margin, as it does in a "
        "run that learns its data by heart."
    ),
    "run.validate_margin": (
        "How far above the least loss of the newest 128 rounds a loss is bad, as a share of it, and 0.1 nats at "
        "least. Wide enough for the worst round that you would keep; harm below it is not seen."
    ),
    "run.openings": (
        "Share of every combined part that its owner must open to others after the round, with run.trust = "
        '"community" or "open": drawn blocks of all rows, from which the same blocks of the sum are made again. '
        "Proven liars are expelled, owners that show nothing are sent away. Left out it is 0.03 there; what that "
        "finds: specs/openings.md. Not with codecs that look beyond a block (topk, randk, dct, compressors ...)."
    ),
    "run.captured_parts": (
        'With run.trust = "open": the largest share of parts with only liars as first owners, if as many members '
        "lie as the run withstands. Their equal results are believed in their round; openings then find and expel "
        "them (run.openings, which it needs). It sets the number of owners that combine every part: left out it is "
        "0.05, two owners for up to nine members and three beyond, where 0, for which no such part exists, takes "
        "one owner more than may lie, up to six. Bytes grow with every owner: specs/trust.md. A run with results "
        "that cannot be opened has 0. An owner that crashed keeps its place unless all who made its part are gone "
        "or silent."
    ),
    "run.sample": (
        "Share of the members that train in a round, rounded up; the others vote, own parts and miss nothing "
        "(specs/clients.md). Each round is drawn by the one before, members with the fewest turns first. 0 or 1: "
        'all train. With run.trust = "community" or "open" as many at least as withstand one liar, and liars are '
        "then counted among those that are drawn. Not with sync.overlap, sync.fragments or sync.apart."
    ),
    "run.sample_peers": (
        "The same as a number of members: 10 of twenty sites. 0: run.sample says it. With fewer members than that "
        "all train."
    ),
    "run.first_train": (
        "How long the first round may train, since no speed is known yet. It ends as soon as all are done, so a "
        "large value costs nothing unless a member hangs."
    ),
    "run.train_max": "A round's training ends here even if steps are left. Keep above run.first_train.",
    "run.suspect": (
        "Silence after which a member is no longer waited for. Keep at or above 3 x run.beat and at or "
        "below a fifth of consensus.timeout."
    ),
    "run.beat": "Heartbeat period. Shorter notices silence sooner and costs more messages.",
    "model.name": (
        "A built-in model. Text: gpt-nano (22 k parameters), gpt-tiny (168 k), gpt-small (1 M), gpt-10m, "
        "gpt-30m, gpt-100m, llama-tiny, llama-10m, llama-100m. Images: cnn-mnist (100 k), resnet18-mnist and "
        'resnet18-cifar (11 M), vgg11-mnist and vgg11-cifar (9 M). Or any size: "gpt:d=64,l=3,h=4,t=64" (width, '
        'layers, heads, tokens read at once; v=256), "llama:d=64,l=3,h=4,kv=2,t=64" (also f, theta, tie), '
        '"resnet18:c=10,i=3,w=64" (classes, channels, first width), "vgg11:…" alike.'
    ),
    "model.weights": (
        "A folder with a config.json and .safetensors to begin from: a Llama as `transformers` saves it, or what "
        "atoll checkpoint export --hf wrote. model.name may then be left out. Only the founder needs it. Empty: "
        "fresh weights."
    ),
    "model.lora_rank": (
        "Rank of low-rank adapters (LoRA) beside every linear layer of a gpt or llama model, except those that "
        "read or write tokens. 0: none. With them they alone are trained, travel and are kept; the model itself, "
        "from model.weights or fresh, is fetched once by every member and stays as it is. The same as lora= in "
        "model.name."
    ),
    "model.only": (
        'Shell patterns that name what is trained and travels: ["blocks.2.*"], ["*.lora_*", "model.norm.*"]. The '
        "rest is the base: it stays as it is, and every member fetches it once. Empty: adapters if the model has "
        "some, else everything. A pattern that matches nothing is refused, with names that would."
    ),
    "data.source": (
        '"stdlib": the sources of Python itself, 12 MB, no download. Or a path: a text file, a folder of '
        "text, records with a text each (.jsonl, .parquet, a folder of them, a data set that Hugging Face's "
        "`datasets` saved; all but .jsonl need the extra hub), tokens (.npy, .bin of uint16), MNIST as .npz or as "
        "a folder of idx files, images (PNG, JPEG) in one folder per class."
    ),
    "data.column": "The text of every record, where data.source holds records.",
    "data.tokenizer": (
        "A path: a tokenizer.json of Hugging Face's library `tokenizers`, or a folder that has one (the extra "
        "hub). The founder makes tokens of data.source and data.canary with it, and genesis names it; members need "
        "neither the file nor the library. The model must know as many tokens (v=). Empty: bytes are tokens."
    ),
    "data.canary": (
        "A path, of the same kinds: data that no member learns from and that validators evaluate, too "
        "(run.validate_every), with a bound of its own. Text (8 kB at least) or labelled pictures that the model "
        "must not unlearn, and that data.source teaches: the loss of anything else rises while the model learns, "
        "and would send the run back. Travels with the run. Empty: none."
    ),
    "train.recipe": (
        '"diloco": AdamW inside, Nesterov outside, compressed pseudo-gradients (arXiv 2311.08105). '
        '"demo": the same, tuned for `atoll demo`. "local_sgd": no outer momentum. "opendiloco": fp16, 500 steps. '
        '"intellect1": int8, 100 steps (arXiv 2412.01152). '
        '"streaming": four fragments in turn, 4 steps of overlap, 2 bits both ways (arXiv 2501.18512). '
        '"auto": the same '
        "with Muon inside and an outer momentum that settles over the last 0.3 of the run. "
        '"eager": training never waits, a mean is taken in when the next round ends (arXiv 2502.12996). '
        '"muloco": Muon inside, 2 bits both ways (arXiv 2505.23725). '
        "Where members do not trust each other, or rows are "
        "handed on, these three have answers in int8. "
        '"fedavg": SGD inside, plain means (arXiv 1602.05629). '
        '"sparseloco": one value of 64 in 2 bits, rows gathered and clipped, no outer momentum (arXiv 2508.15706). '
        '"cooperative": peers keep half of their own parameters, the mean weighs members by their '
        "records (run.reputation), momentum follows agreement; three at least "
        '(arXiv 1808.07576). "decoupled": rounds wait for a quorum and a grace, four fragments, mean length times '
        'mean direction (arXiv 2604.21428). "data_parallel": the mean gradient of every step in fp32, AdamW on the '
        'agreed parameters. "parameter_server": the same through one member (sync.topology = "star"). '
        '"demo_": DeMo (arXiv 2411.19870), every step the largest cosine waves of the gathered '
        "gradient, the agreed parameters move by the sign of their mean. "
        '"powersgd": every step low-rank factors of the gathered gradient (arXiv 1905.13727), AdamW on the agreed '
        'parameters. "pipelined": as data_parallel, but the next gradients are computed while a round is agreed, '
        "each of parameters three rounds old, which wants a smaller train.lr (arXiv 1811.03619). "
        "These five agree on every single step: for fast links; their train.lr is that of the agreed "
        "step. "
        '"sparta": after every step 0.5 % of the values are averaged, others in each round, and members keep their '
        "own of the rest until the last one, which averages all; before it the agreed model is behind what members "
        "hold. "
        '"des_loc": plain means in fp32, of moments, too, in every third and sixth round (arXiv 2505.22549). '
        '"delayed_nesterov": a round begins to share as soon as one member has its steps, all others hand over '
        "what they have and count by it, and the momentum is felt once per run.start_peers of full updates (arXiv "
        "2401.09135). "
        '"sparseloco", "cooperative", "decoupled", "delayed_nesterov", "demo_" and "powersgd" need '
        'run.trust = "private". '
        "The others of training/recipe/methods run in one process only (atoll.experiment): not yet here."
    ),
    "train.inner_steps": (
        "Steps of each peer between two synchronisations. More saves bytes, fewer stay closer to "
        "synchronous training."
    ),
    "train.batch": "Samples per step of one peer. Small, for two cores.",
    "train.seq_len": "Tokens per sample, at most what the model was built for.",
    "train.lr": (
        "Peak learning rate of AdamW, for models below 1 M parameters; a tenth of it at 30 M. Muon's follows in "
        "proportion; of the recipe fedavg it is that of SGD."
    ),
    "train.weight_decay": "Decoupled weight decay of AdamW.",
    "train.clip_norm": "What a step's gradient norm is clipped to: one bad batch costs no round.",
    "train.warmup_steps": "Steps until the learning rate is at its peak; at most a tenth of the run.",
    "train.outer_lr": (
        "Outer step size. outer_lr / (1 - outer_momentum) is the effective step: about 2 for 30 to 50 rounds."
    ),
    "train.outer_momentum": (
        "Outer Nesterov momentum. With the recipe: 0.5 up to 50 rounds, 0.7 up to 100, then 0.8."
    ),
    "train.seed": "Of the first weights and of the order of the data.",
    "train.precision": (
        'Of forward and backward passes. "bf16": matrix products and convolutions under torch.autocast; '
        "parameters, optimizer and updates stay fp32, so all else is as ever. For GPUs, and processors with bf16 "
        "units (amx, avx512_bf16); others only emulate it. Not with run.audit_rate; run.score_rate looks instead."
    ),
    "train.compile": (
        "Let torch.compile make the steps of a built-in model, at the start of every trainer: it takes up to a "
        "minute, and a C++ compiler on a CPU. Where that fails steps run uncompiled, and atoll.log says why. Its "
        "sums are added in another order on every kind of machine, so not with run.audit_rate."
    ),
    "train.round_time": (
        "Rounds in minutes: a member trains for so long, or until it has taken train.inner_steps, whichever comes "
        'first; "38min" (INTELLECT-1, arXiv 2412.01152). The slow take fewer steps and weigh less. Counts from '
        "when a trainer runs; the first round lasts run.first_train at most. 0: steps alone end a "
        "round. At most run.train_max. Set train.total_tokens too: rates by steps would follow the fastest member."
    ),
    "train.total_tokens": (
        "Tokens that all members together learn from until the learning rates are at their end (a picture counts "
        "train.seq_len). Rates then follow the samples in vertices, whatever members come, go or are slow; "
        "train.warmup_steps count as that share of run.rounds x train.inner_steps. Does not end the run: "
        "run.rounds does. 0: rates fall over steps."
    ),
    "train.target_samples": (
        "Samples that a round learns from, about, however many members there are: with twice as many each takes "
        "half the steps, between train.inner_steps_min and train.inner_steps. 0: each takes train.inner_steps. Set "
        "train.total_tokens too, or rates fall by what one member takes."
    ),
    "train.adaptive_steps": (
        "Let rounds shorten as the loss falls: train.inner_steps times the square root of the last round's loss "
        "over the first one's (AdaComm, arXiv 1810.08313), at least train.inner_steps_min. Of the median member, "
        "as vertices hold it. Set train.total_tokens too, or rates stay behind."
    ),
    "train.steps_by_speed": (
        "Ask each member for the share of train.inner_steps that its speed is of the fastest's, so that all arrive "
        "together: floor(steps x its speed / the fastest), at least train.inner_steps_min. Speeds are those that "
        "members last reported; the fastest third does not count where members may lie, and in a private run one "
        "wrong clock brings the others down to train.inner_steps_min: set it. Updates weigh by their samples. Not "
        "with train.target_samples."
    ),
    "train.inner_steps_min": (
        "Steps of a round, at the least, with train.target_samples, train.adaptive_steps or train.steps_by_speed. "
        "More than sync.overlap."
    ),
    "train.adaptive_batching": (
        "Let the batch follow the loss: x 1.2 after a round whose loss is above 1.1 x train.target_loss, x 0.8 "
        "below 0.9 x, from train.batch on, the same at all members. Rates stay as they are. Not with sync.overlap, "
        "sync.quorum or sync.apart."
    ),
    "train.target_loss": "Of train.adaptive_batching: nats, training loss as atoll status shows it. 0: none.",
    "train.batch_min": "Samples of a step, at the least, with train.adaptive_batching.",
    "train.batch_max": "The same, at the most: what the member with the least memory can hold.",
    "sync.up": (
        'Codec from a member to the owner of a part: "fp32", "int8", "2bit", "topk+int8+zstd", …; see '
        "specs/codecs.md. Strong ones need error feedback."
    ),
    "sync.down": ("Codec of the result for all members. Its losses are final: nothing feeds them back."),
    "sync.error_feedback": "Share of what a codec lost that the next update makes good.",
    "sync.overlap": (
        "Inner steps that a trainer goes on from its own parameters while a round is agreed; then it waits. What "
        "is agreed is merged when it comes, and these steps are part of the next round. 0 stands still meanwhile. "
        "Enough is the time of an exchange divided by that of a step; 4 of 32 cost 0.5 % of loss. Keep below "
        "train.inner_steps / sync.fragments. Costs the trainer memory for one more copy of the model."
    ),
    "sync.fragments": (
        "Slices of the model that take turns: a round carries one of them and takes train.inner_steps / "
        "sync.fragments steps, a run has run.rounds x sync.fragments rounds, and the last one carries everything. "
        "The bytes are the same, but come in smaller waves: for thin links. It must divide train.inner_steps."
    ),
    "sync.phases": (
        'Changes of rhythm, by shares of the run: "0.8:16,0.9:8:int8:int8" has rounds of 16 steps from 0.8 of its '
        "run.rounds x train.inner_steps steps on, and of 8 with these codecs (up, down; left out: as before) from "
        '0.9; "0.9:8:topk:0.1+int8" has one with a number. Rounds are then more than run.rounds. Shorter ones at '
        "the end average the last steps away. Not with fragments, overlap, sync.quorum, sync.apart, audits, scores "
        "or rounds that follow the run."
    ),
    "sync.pipeline_depth": "Pieces of an update on their way at once. Not yet: the transport decides; keep 3.",
    "sync.compression_ratio": 'Share of values that "topk" and "randk" keep, unless it is named: "topk:0.05".',
    "sync.compression_level": 'Effort of "zstd", unless it is named ("zstd:9"): 3, 5 or 9.',
    "sync.topology": (
        'How updates are reduced (specs/topologies.md). "auto" is a hierarchy if names say that members are in '
        'several places ("eu/ada", "us/bob"), else what the planner finds cheapest on the links that members '
        'measured and agreed on, and a butterfly until these are known. "hierarchical", "tree" and "ring" '
        'combine rows on the way, so they need run.trust = "private".'
    ),
    "sync.statistic": (
        'Rule that combines the rows of a part. "mean": weighted by samples, any liar can move it. "median", '
        '"trimmed_mean", "meamed": per value, withstanding run.byzantine_tolerance of the members. "robust" (a '
        'covariance filter, and the one to take), "krum", "multi_krum", "geometric_median", "centered_clipping", '
        '"mda", "clipped_caf" (that filter after long rows were shortened, the one to take if members\' data have '
        "little in common, as those of hospitals or phones may; it stops no backdoor): whole updates are weighed "
        'by their distances, which owners of parts add up; one more small message per part, at most 64 rows. "nnm '
        '+ trimmed_mean", "nnm + median", "nnm + meamed", "nnm + krum", "nnm + multi_krum", "nnm + '
        'geometric_median", "nnm + centered_clipping": by these distances every row becomes the mean of those '
        "nearest to it, all but as many as may lie, before the rule looks. With all of these every row counts "
        "once, whatever number of samples it claims. They need rows that reach owners directly, more than twice as "
        "many as there may be liars (Krum three more than twice), and memory for one decoded MiB of every row. "
        'Rules by distance need run.trust = "community". A part with fewer rows counts for no member in that '
        'round, which the round reports. Left out: "robust" with run.trust = "community", "trimmed_mean" with '
        '"open"; a mean where run.start_peers, or run.min_peers if written, are too few for it.'
    ),
    "sync.quorum": (
        "Updates after which the others are waited for no longer than sync.grace: members that still train hand "
        "over their steps so far, and what comes too late is part of their next update; a recipe that agrees on "
        'every step drops it. 0 waits for all, as long as training may last. Needs run.trust = "private" and a '
        "butterfly or star, since the first member decides how long a round is."
    ),
    "sync.grace": (
        "Steps of a median member that the others may be later; a twelfth of an owner's window is added, for "
        "messages under way. With sync.quorum only. As long as a step of the slowest, or it may never count."
    ),
    "sync.apart": (
        'What a member without a quorum does, once an attempt has failed (specs/apart.md). "wait": it stands still '
        'after sync.overlap steps. "merge": it trains on, and what it did is sent with its next update when it is '
        'back, as one more update in length at the most, at the weight of one. "drop": it trains on, and these '
        "steps are given up then. Not with audits, fragments or the recipes eager and cooperative."
    ),
    "sync.apart_rounds": (
        "Rounds' worth of steps that such a member takes at most. What it sends is as long for one as for many; "
        "more of them make its direction surer, and staler."
    ),
    "consensus.protocol": (
        'How members agree on a round. "bft": two phases of signed votes, a rotating proposer, and the quorum that '
        'run.trust asks for. "raft": one phase, one hop and half of the votes less, and a leader that stays while '
        "it lives (specs/raft.md); for clusters with members that crash but never lie, so only with run.trust = "
        '"private". Both keep a history that strangers can verify. "snow" is refused: it is no finality below '
        "2,000 peers with k = 10, alpha = 8, beta = 150, and leaves no certificate; where a run has two branches "
        "it tells on which most members are (specs/branches.md), whatever stands here."
    ),
    "consensus.timeout": (
        "From the end of training until an attempt is given up: a fifth for each of three owners of a "
        "part, the rest for proposal and votes. Every further attempt waits half as long again. A "
        "deadline for trouble: a healthy round never waits for it."
    ),
    "consensus.timeout_min": (
        "What consensus.timeout shrinks to, at the least, for the waits in a first attempt where rounds have shown "
        "to be fast: silent owners then cost seconds, not a minute. The default leaves time to repeat lost "
        "messages, once a second, before a member is late. As long as consensus.timeout or longer: it never "
        "shrinks."
    ),
    "consensus.max_retries": (
        "Failed attempts after which status calls the round troubled. Attempts go on by the clock: giving "
        "up could only split the run."
    ),
    "network.listen_addresses": (
        "Where this peer listens; /tcp/0 picks a free port. The default is reached from this computer "
        "only, /ip4/0.0.0.0/tcp/7071 from everywhere."
    ),
    "network.announce_addresses": (
        "Addresses for others to dial if they differ from those listened on: behind a router or a port mapping."
    ),
    "network.upload_bytes_s": (
        "Bytes a second that this peer sends at most, to all others together; 0: no cap. 2500000 leaves half of a "
        "40 Mbit/s uplink free. Votes and heartbeats count but never wait; keep it high enough for an update to "
        "leave well within consensus.timeout."
    ),
    "network.enable_nat_traversal": "Punch holes through routers. Not yet: keep false.",
    "network.enable_relay": "Reach and be reached through other members. Not yet: keep false.",
    "keep.newest": (
        "Number of rounds before the head with states that stay on this disk: `atoll checkpoint rollback` can go "
        "back to them, `export` writes them elsewhere. A state takes 8 bytes per parameter; keep.bytes_max bounds "
        "them all."
    ),
    "keep.every_rounds": (
        "Besides, the state of every such round stays, the newest 64 of them: the farther back, the later damage "
        "may be noticed. `atoll checkpoint list` says which are here."
    ),
    "keep.updates": (
        "Rounds with encoded updates that stay here, so that `atoll blame --round` can report without which member "
        "a round would have been better; 0: none. Each takes the bytes of two updates, this peer's own and its "
        "share of all others' (three or more where owners check each other): 50 MB a round for 25 million values "
        "in int8. Other members need it, too: a row is shown by its author or the owner of its part. Up to 200, "
        "and no more than keep.newest, since a round is made again from the state before it."
    ),
    "keep.bytes_max": (
        "Bytes that kept updates, what verdicts rest on (a fourth at most) and these older states may take "
        "together; states give way first, oldest before newest. 0 keeps the head and what the last minute needed. "
        "Pieces come first and are not given up."
    ),
    "keep.coded": (
        'Empty: states of every keep.every_rounds-th round lie whole at every member. "6/10": each is cut into 10 '
        "pieces, one per member that the vertex draws, and any 6 make it again, so 4 members may vanish; no member "
        "holds it whole, all together hold 10/6 of it (specs/pieces.md). Fixed when the run is founded, together "
        "with keep.every_rounds and keep.repair_after; needs as many voting members as pieces, with fewer states "
        "stay whole, and pip install 'atoll[coded]' at each. Where members may lie take more to spare: \"3/10\"."
    ),
    "keep.repair_after": (
        "Run time for which a holder of pieces may be away before other members make its pieces anew, each out of "
        "as many bytes as the state has. Longer than a night's sleep saves traffic, shorter loses fewer at a time. "
        "Those get a second more for each MiB of a large state."
    ),
    "node.name": "What others call this peer. Empty: the computer's name.",
    "node.group": (
        'Owner of this peer\'s data, such as a hospital, where rounds are sampled and run.trust is "private": '
        "groups come to equally many turns, however many members each has, and in a group its members do. Stands "
        "behind an @ in the name that others see, from the first start on. Empty: a group by itself."
    ),
    "node.threads": (
        "Threads of the trainer; 0: the cores, divided by the peers that run here. Too many cost up to 8x "
        "CPU per step."
    ),
    "node.device": (
        'Where the trainer computes: "cpu", "cuda" (the first GPU), or "cuda:1". Untried on a real GPU. The steps '
        "of a GPU cannot be audited (run.audit_rate): no other machine computes the same bits."
    ),
}

RECIPE: dict[str, Any] = {  # what the recipe "diloco" and the trust "private" have where a key is left out
    "run.rounds": 30,
    "run.min_peers": 1,
    "run.byzantine_tolerance": 0.0,
    "run.audit_rate": 0.0,
    "run.reputation": False,
    "run.vote_after_rounds": 0,
    "run.sponsor_rounds": 0,
    "run.validate_every": 0,
    "run.openings": 0.0,
    "run.captured_parts": 0.0,
    "model.name": "gpt-tiny",
    "train.inner_steps": 50,
    "train.batch": 4,
    "train.seq_len": 64,
    "train.lr": 4e-3,
    "train.weight_decay": 0.1,
    "train.clip_norm": 1.0,
    "train.warmup_steps": 100,
    "train.outer_lr": 1.0,
    "train.outer_momentum": 0.5,
    "train.seed": 0,
    "sync.up": "int8",
    "sync.down": "int8",
    "sync.error_feedback": 1.0,
    "sync.overlap": 0,
    "sync.fragments": 1,
    "sync.statistic": "mean",
    "sync.quorum": 0,
    "sync.grace": 0,
}

REPLACED = {  # names people know from elsewhere, and what to write here
    "sync_frequency": "train.inner_steps: peers synchronize once per this many steps",
    "initial_peers": "a ticket: atoll join TICKET",
    "bootstrap_peers": "a ticket: atoll join TICKET",
    "learning_rate": "train.lr",
    "local_steps": "train.inner_steps",
    "batch_size": "train.batch",
    "world_size": "run.start_peers",
    "compression": "sync.up and sync.down",
}
