"""Declarations of the [model], [data] and [train] settings: what learns, from what, and how."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from atoll.base.arguments import Count, Positive, Share, Whole
from atoll.base.limits import FACTOR_MOST
from atoll.base.workload import BATCH_MOST, STEPS_MOST
from atoll.peer.config.recipe_names import RECIPES
from atoll.peer.config.setting import AmendRule, Bytes, ConfigSection, OffOrDuration, Setting, Text

# fmt: off
COUNTED = "the place in the data is counted in it"


class ModelSection(ConfigSection, frozen=True):
    """What learns. Travels with the run, by name: code never travels."""

    fixed: ClassVar[str] = "every state and every member's copy has this shape"

    name: Annotated[str, Setting(
        "A built-in model. Text: gpt-nano (22 k parameters), gpt-tiny (168 k), gpt-small (1 M), gpt-10m, gpt-30m, "
        "gpt-100m, llama-tiny, llama-10m, llama-100m. Images: cnn-mnist (100 k), resnet18-mnist and "
        'resnet18-cifar (11 M), vgg11-mnist and vgg11-cifar (9 M). Or any size: "gpt:d=64,l=3,h=4,t=64" (width, '
        'layers, heads, context in tokens; v=256), "llama:d=64,l=3,h=4,kv=2,t=64" (also f, theta, tie), '
        '"resnet18:c=10,i=3,w=64" (classes, channels, first width), "vgg11:…" with the same numbers.',
        level="first", usual="gpt-tiny", recipe="model")] = ""
    architecture: Annotated[Literal["built-in", "hf"], Setting(
        '"hf": the causal language model of `transformers` whose files lie in model.weights, of any type that the '
        "library knows; model.name stays empty. Members build it from its configuration, which travels, and need "
        "the extra transformers. Never code of its own; dropout is off. \"built-in\": what model.name names.",
        )] = "built-in"
    weights: Annotated[str, Setting(
        "Folder with config.json and .safetensors to begin from: a Llama as `transformers` saves it, or what "
        "`atoll checkpoint export --hf` wrote. model.name may then be left out. Only the founder needs it. Empty: "
        "random weights.")] = ""
    lora_rank: Annotated[Annotated[int, Meta(ge=0, le=1024)], Setting(
        "Rank of low-rank adapters (LoRA) beside every linear layer of a gpt or llama model, except embedding and "
        "output; 0: none. Then only the adapters are trained, sent and stored. Every member fetches the fixed "
        "model once. The same as lora= in model.name.")] = 0
    only: Annotated[tuple[str, ...], Setting(
        'Shell patterns of the parameters that are trained and sent: ["blocks.2.*"], ["*.lora_*"]. '
        'The rest stays fixed, and every member fetches it once. Empty: the adapters if there '
        "are any, else all. A pattern that matches nothing is refused.", level="expert")] = ()


class DataSection(ConfigSection, frozen=True):
    """What it learns from. The founder names it. The others fetch it from members, unless it is "stdlib"."""

    fixed: ClassVar[str] = "members hold these data, and what was learned from is counted in them"

    source: Annotated[str, Setting(
        'Training data. "stdlib": the sources of Python itself, 12 MB, no download. Or a path: a text file, a '
        "folder of text, records with a text each (.jsonl, .parquet, a folder of them, a data set that `datasets` "
        "of Hugging Face saved), tokens (.npy, .bin of uint16), MNIST as .npz or as a folder of idx files, images "
        "(PNG, JPEG) in one folder per class. Records other than .jsonl need the extra hub.",
        level="first")] = "stdlib"
    column: Annotated[Text, Setting("Field with the text of a record, where data.source holds records.")] = "text"
    tokenizer: Annotated[str, Setting(
        "Path of a tokenizer.json of the library `tokenizers`, or of a folder with one; needs the extra hub. The "
        "founder converts data.source and data.canary to tokens with it; members need neither file nor library. "
        "The model must know as many tokens (v=). Empty: bytes are tokens.")] = ""
    canary: Annotated[str, Setting(
        "Path of data that no member trains on and that validators also evaluate, with a bound of its own. Needs "
        "run.validate_every. Text (8 kB at least) or labeled images that data.source teaches and the model must "
        "not unlearn; the loss of other data rises in training and would send the run back. It travels with the "
        "run.", level="expert")] = ""


class TrainSection(ConfigSection, frozen=True):
    """How it learns. Travels with the run. The recipe decides what is left out."""

    fixed: ClassVar[str] = "members remember earlier rounds as the recipe has it"

    recipe: Annotated[Text, Setting(
        "Training method. It decides every setting of [train] and [sync] that is left out. One of "
        f"{', '.join(RECIPES)}; see atoll docs config.", level="first")] = "diloco"
    inner_steps: Annotated[Count | None, Setting(
        "Optimizer steps of each member between two synchronizations. More steps send fewer bytes; fewer steps "
        "stay closer to synchronous training.",
        "steps", level="first", usual=50, recipe="schedule.inner_steps", passed="builder",
        amend=AmendRule("inner_steps", "{:g} steps a round", fragments=-1))] = None
    batch: Annotated[Count | None, Setting(
        "Samples per step of one member. The default suits two CPU cores.",
        "samples", level="first", usual=4, recipe="batch", passed="builder",
        fixed=COUNTED + "; train.adaptive_batching moves it")] = None
    seq_len: Annotated[Count | None, Setting(
        "Tokens per sample, at most the context of model.name.",
        "tokens", usual=64, recipe="seq_len", passed="builder", fixed=COUNTED)] = None
    lr: Annotated[Positive | None, Setting(
        "Peak learning rate of AdamW. The default suits models below 1 M parameters; take a tenth of it at 30 M. "
        "The rate of Muon follows in proportion. Recipe fedavg: of SGD. Recipes that agree on every step: of that "
        "step.",
        level="first", usual=4e-3, recipe="inner.lr", passed="builder",
        amend=AmendRule("lr", "learning rate {:g}"))] = None
    weight_decay: Annotated[Share | None, Setting(
        "Decoupled weight decay of AdamW.", usual=0.1, recipe="inner.weight_decay", passed="optimizer")] = None
    clip_norm: Annotated[Positive | None, Setting(
        "Largest norm of a step's gradient; longer gradients are scaled down.",
        usual=1.0, recipe="inner.clip_norm", passed="optimizer")] = None
    warmup_steps: Annotated[Whole | None, Setting(
        "Steps until the learning rate is at its peak; at most a tenth of the run.",
        "steps", usual=100, recipe="inner.warmup_steps", passed="optimizer")] = None
    outer_lr: Annotated[Positive | None, Setting(
        "Learning rate of the outer step. The effective step is outer_lr / (1 - outer_momentum): about 2 for 30 "
        "to 50 rounds.",
        usual=1.0, recipe="outer.lr", passed="builder",
        amend=AmendRule("outer_lr", "outer learning rate {:g}"))] = None
    outer_momentum: Annotated[Share | None, Setting(
        "Nesterov momentum of the outer step. The recipe takes 0.5 up to 50 rounds, 0.7 up to 100, then 0.8.",
        usual=0.5, recipe="outer.momentum", passed="builder")] = None
    seed: Annotated[Whole | None, Setting(
        "Seed of the first weights and of the order of the data.", usual=0, recipe="seed", passed="builder")] = None
    precision: Annotated[Literal["fp32", "bf16"], Setting(
        'Number format of forward and backward passes. "bf16": matrix products and convolutions under '
        "torch.autocast; parameters, optimizer and updates stay fp32. For GPUs, and CPUs with bf16 units (amx, "
        "avx512_bf16); others only emulate it. Not with run.audit_rate; run.score_rate can check such runs."
    )] = "fp32"
    compile: Annotated[bool, Setting(
        "Compile the steps of a built-in model with torch.compile when a trainer starts. It takes up to a minute, "
        "and needs a C++ compiler on a CPU. If it fails, steps run uncompiled and atoll.log has the reason. Not "
        "with run.audit_rate: sums are added in another order on every kind of machine.")] = False
    round_time: Annotated[OffOrDuration, Setting(
        'Training time of a round, such as "38min" (INTELLECT-1, arXiv 2412.01152). A member stops at this time '
        "or after train.inner_steps, whichever comes first; slow members take fewer steps and weigh less. The "
        "first round lasts run.first_train at most. 0: steps alone end a round. At most run.train_max. Set "
        "train.total_tokens, too, or learning rates follow the fastest member.",
        amend=AmendRule("round_time_s", "rounds that train for {}"))] = 0.0
    total_tokens: Annotated[Bytes, Setting(
        "Tokens of all members together until the learning rates end; an image counts train.seq_len. Rates then "
        "follow the samples in the vertices, so members may come, go or be slow. train.warmup_steps count as that "
        "share of run.rounds x train.inner_steps. It does not end the run. 0: rates fall over steps.",
        "tokens", amend=AmendRule("total_tokens", "{:,} tokens in all"))] = 0
    target_samples: Annotated[Annotated[int, Meta(ge=0, lt=2**40)], Setting(
        "Approximate samples of a round of all members together: with twice the members each takes half the "
        "steps, between train.inner_steps_min and train.inner_steps. 0: each takes train.inner_steps. Set "
        "train.total_tokens, too, or rates fall by the steps of one member.", "samples", level="expert")] = 0
    adaptive_steps: Annotated[bool, Setting(
        "Shorten rounds as the loss falls: train.inner_steps x the square root of the last round's loss over the "
        "first one's (AdaComm, arXiv 1810.08313), at least train.inner_steps_min. It takes the median member's "
        "loss. Set train.total_tokens, too, or rates stay behind.", level="expert")] = False
    steps_by_speed: Annotated[bool, Setting(
        "Give each member steps in proportion to its reported speed, so that all finish together: "
        "train.inner_steps x its speed / the fastest, rounded down, at least train.inner_steps_min. Where members "
        "may lie, the fastest third does not count. In a private run one wrong clock slows the others to "
        "train.inner_steps_min, so set it. Updates weigh by their samples. Not with train.target_samples.",
        level="expert")] = False
    inner_steps_min: Annotated[Annotated[int, Meta(ge=1, le=STEPS_MOST)], Setting(
        "Least steps of a round with train.target_samples, train.adaptive_steps or train.steps_by_speed. More "
        "than sync.overlap.", "steps", level="expert")] = 1
    adaptive_batching: Annotated[bool, Setting(
        "Let the batch follow the loss, from train.batch on: x 1.2 after a round above 1.1 x train.target_loss, x "
        "0.8 below 0.9 x. It is the same at all members, and learning rates stay. Not with sync.overlap, "
        "sync.quorum or sync.apart.", level="expert")] = False
    target_loss: Annotated[Annotated[float, Meta(ge=0, le=FACTOR_MOST)], Setting(
        "Training loss that train.adaptive_batching aims at, as atoll status shows it. 0: none.",
        "nats", level="expert")] = 0.0
    batch_min: Annotated[Annotated[int, Meta(ge=1, le=BATCH_MOST)], Setting(
        "Least samples of a step with train.adaptive_batching.", "samples", level="expert")] = 1
    batch_max: Annotated[Annotated[int, Meta(ge=1, le=BATCH_MOST)], Setting(
        "Most samples of a step with train.adaptive_batching: what fits the member with the least memory.",
        "samples", level="expert")] = 64
