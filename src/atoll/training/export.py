"""Export of an agreed model in the layout of Hugging Face model repositories.

    model.safetensors   tensors by name
    config.json         the architecture; `transformers` reads it if the model is a Llama
    README.md           the model card: contributors, rounds, bytes, loss
    tokenizer.json      the run's tokenizer, if it has one, and tokenizer_config.json for `transformers`

If a run exchanged a part of a built-in model (`model.only`, adapters), the rest is its base, a blob of the run.
Both are put together, and adapters are added to the weights beside them, so the export is the plain model. If the
base is not available (custom loops, observers), the export has `adapters.safetensors` and `base.json`, which names
every tensor of the matching base by its digest. Tied tensors are stored once.
Invariants:
- The card states only facts from the history.
- Adapters alone are never exported as a model.
- `transformers` is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from atoll.base.errors import PeerFault
from atoll.base.ids import one_line
from atoll.base.units import bytes_text, count_text
from atoll.crypto.digest import Buffer, digest
from atoll.training.data.tokens import EndToken, end_of
from atoll.training.exchange.layout import ModelLayout, base_digest, difference, flatten, layout_of, unflatten
from atoll.training.models import build_model, hugging_face, label_of, spec_of, with_adapters
from atoll.training.models.frozen_base import build_with_base
from atoll.training.models.llama import NORM_EPS
from atoll.training.models.lora import merge_adapters
from atoll.training.models.names import BYTES, NamedModel, llama_size
from atoll.training.recipe.state import SharedState, export_pieces

CARD_DOMAIN = b"atoll/card/1\0"


class CardContributor(NamedTuple):
    name: str
    rounds: int
    steps: int
    samples: int


class ModelCard(NamedTuple):
    """Facts of the model card. None: unknown to the folder it was read from."""

    run: str
    round: int
    vertex: str  # hex, as the next two
    state: str
    genesis: str
    model: str  # a built-in name, or "attached"
    data: str
    inner_steps: int
    codecs: tuple[str, str]
    trained: int  # rounds
    contributors: tuple[CardContributor, ...] = ()
    loss_first: float | None = None
    loss_last: float | None = None
    sent_bytes: int | None = None  # bytes sent by the peer of the folder
    data_parallel_bytes: int | None = None  # bytes that data parallelism would have sent
    tokenizer: str = ""  # hex id of the blob in genesis; empty if tokens are bytes
    beside: str = ""  # description of the trained part, if only a part was trained
    config: dict[str, Any] | None = None  # of an attached Hugging Face model
    validated: tuple[tuple[str, float], ...] = ()  # validators' results for this state: (name, value)


def tensor_file(layout: ModelLayout) -> str:
    """Name of the file with the agreed tensors: adapters must not be mistaken for a model."""
    return "adapters.safetensors" if layout.held else "model.safetensors"


def hugging_face_files(
    state: SharedState, layout: ModelLayout, story: ModelCard, tokenizer: bytes = b"", base: bytes = b""
) -> dict[str, Sequence[Buffer]]:
    """Content by file name. `tokenizer` and `base` are the bytes named by story and layout, if available.

    PeerFault if the base belongs to another model.
    """
    if base:
        return _whole_files(state, layout, story, tokenizer, base)
    spec = spec_of(story.model) if story.model != "attached" else None
    if spec is not None and spec.family == hugging_face.FAMILY:
        config = hugging_face.config_of(story.model) | {"dtype": "float32"}
        spec, story = None, story._replace(config=config, model=label_of(story.model))
    end = end_of(tokenizer)
    config = story.config or _config(spec, story.model, end)
    told = {"config.json": config} if not layout.held else {"base.json": _base(layout)}
    if tokenizer:
        told["tokenizer_config.json"] = _tokenizer_config(spec, end)
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in told.items()}
    texts["README.md"] = _card(spec, layout, story, bool(tokenizer))
    files: dict[str, Sequence[Buffer]] = {tensor_file(layout): export_pieces(state, layout)}
    files |= {name: (text.encode(),) for name, text in texts.items()}
    return files | ({"tokenizer.json": (tokenizer,)} if tokenizer else {})


def _whole_files(
    state: SharedState, layout: ModelLayout, story: ModelCard, tokenizer: bytes, base: bytes
) -> dict[str, Sequence[Buffer]]:
    """The files of the exchanged tensors and their base together, as if all tensors had been exchanged."""
    trained, theirs = build_with_base(story.model, 0, base)
    if difference(layout, theirs):
        raise PeerFault("", "the base of this run is another model's")
    unflatten(state.anchor_F, state.counters_K, trained, layout)
    model = build_model(with_adapters(story.model, 0), 0)
    model.load_state_dict(merge_adapters(trained.state_dict()))
    whole = layout_of(model)
    about = story._replace(
        model=with_adapters(story.model, 0),
        beside=f"Trained were {count_text(layout.parameters)} parameters of `{label_of(story.model)}`, beside a "
        f"base of {count_text(layout.base_values)} values that stayed as it was, `{base_digest(layout).hex()}`. "
        "Here they are one model.",
    )
    flat_F, counters_K = flatten(model, whole)
    return hugging_face_files(replace(state, anchor_F=flat_F, counters_K=counters_K), whole, about, tokenizer)


def _tokenizer_config(spec: NamedModel | None, end: EndToken | None) -> dict[str, Any]:
    told: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if spec is not None and spec.seq_len is not None:
        told["model_max_length"] = spec.seq_len
    return told | ({"eos_token": end.text} if end is not None else {})


def _base(layout: ModelLayout) -> dict[str, Any]:
    tensors = [
        {"name": one.name, "shape": list(one.shape), "dtype": one.dtype, "blake3": one.digest.hex()}
        for one in layout.held
    ]
    return {"base": base_digest(layout).hex(), "tensors": tensors}


def _config(spec: NamedModel | None, name: str, end: EndToken | None) -> dict[str, Any]:
    if spec is None or spec.family != "llama":
        numbers = dict(spec.numbers) if spec is not None else {}
        return {"model_type": "atoll", "atoll_model": name, **({"atoll_numbers": numbers} if numbers else {})}
    size = llama_size(spec.numbers)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "atoll_model": name,
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.groups,
        "head_dim": size.width // size.heads,
        "max_position_embeddings": size.seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": float(size.theta),  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": float(size.theta)},  # transformers 5
        "tie_word_embeddings": size.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end.number if end is not None else None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _card(spec: NamedModel | None, layout: ModelLayout, story: ModelCard, tokenizer_here: bool) -> str:
    llama, text = spec is not None and spec.family == "llama", spec is not None and spec.task == "text"
    lines = [
        "---",
        *(["library_name: transformers"] if llama or story.config else []),
        "tags:",
        "- atoll",
        "- distributed-training",
    ]
    lines += [*(["pipeline_tag: text-generation"] if llama else []), "---", "", f"# {_one_line(story.run)}", ""]
    what = f"`{story.model}`, {count_text(layout.parameters)} parameters"
    if layout.held:
        what = (
            f"Adapters alone, {count_text(layout.parameters)} parameters: not a model, but what was trained beside "
            f"a frozen base of {count_text(layout.base_values)} values, which is not in here. They were"
        )
    lines += [
        f"{what}{'' if layout.held else ','} trained together by "
        f"{_many(len(story.contributors), 'peer')} with Atoll, on {_one_line(story.data)}.",
        "",
        "| | |",
        "|---|---|",
        f"| training rounds | {story.trained}, of at most {story.inner_steps} steps per peer |",
        f"| samples | {sum(c.samples for c in story.contributors):,} |",
    ]
    if story.loss_first is not None and story.loss_last is not None:
        unit = "token" if text else "sample"
        lines.append(
            f"| training loss | {story.loss_first:.4f} in the first round, {story.loss_last:.4f} in the last, "
            f"nats per {unit} |"
        )
    if story.validated:
        found = ", ".join(f"{name} {value:.4f}" for name, value in story.validated)
        lines.append(f"| held-out data, by drawn members | {found} |")
    lines.append(f"| updates traveled as | {story.codecs[0]}, answers as {story.codecs[1]} |")
    if story.sent_bytes is not None and story.data_parallel_bytes is not None:
        lines.append(
            f"| bytes sent by one peer | {bytes_text(story.sent_bytes)}; data-parallel training would have sent "
            f"{bytes_text(story.data_parallel_bytes)} |"
        )
    lines += ["", "## Contributors", ""]
    if story.contributors:
        lines += ["| peer | rounds | steps | samples |", "|---|---|---|---|"]
        lines += [f"| {_one_line(c.name)} | {c.rounds} | {c.steps:,} | {c.samples:,} |" for c in story.contributors]
    else:
        lines.append("None yet: these are the first weights.")
    lines += [
        "",
        "Losses, steps and samples are as contributors signed them.",
        "",
        "## Use",
        "",
        *(_use_adapters(layout) if layout.held else _use(spec, story, tokenizer_here)),
    ]
    lines += ["", story.beside] if story.beside else []
    lines += [
        *("", "## Provenance", ""),
        f"Round {story.round} of the run with an id of digest `{_named(story.genesis)}`: vertex "
        f"`{_named(story.vertex) if story.vertex == story.genesis else story.vertex}`, state `{story.state}`. A "
        "holder of the run's history can check it: `atoll verify`.",
    ]
    return "\n".join(lines) + "\n"


def _named(run_id: str) -> str:
    """A digest of the run id for the card: connections to the run begin with the id itself."""
    return digest(CARD_DOMAIN + run_id.encode()).hex()


def _use(spec: NamedModel | None, story: ModelCard, tokenizer_here: bool) -> list[str]:
    if story.config is not None:
        name = _one_line(str(next(iter(story.config.get("architectures", ())), "AutoModel")))
        return ["```python", f"from transformers import {name}", "", f'model = {name}.from_pretrained(".")', "```"]
    if spec is None:
        return [
            "The tensors are those of its members' own PyTorch model, by name: `load_state_dict(strict=False)`."
        ]
    lines = ["```python"]
    if spec.family == "llama":
        lines += ["from transformers import LlamaForCausalLM", "", 'model = LlamaForCausalLM.from_pretrained(".")']
    else:
        lines += [
            *("from safetensors.torch import load_file", "from atoll.training.models import build_model", ""),
            f'model = build_model("{story.model}", seed=0)',
            'model.load_state_dict(load_file("model.safetensors"))',
        ]
    lines.append("```")
    if story.tokenizer and tokenizer_here:
        lines += ["", "Tokens are those of `tokenizer.json`: `Tokenizer.from_file` of the library `tokenizers`."]
        lines += ["In `transformers`: `AutoTokenizer.from_pretrained`."] if spec.family == "llama" else []
    elif story.tokenizer:
        lines += [
            "",
            f"The run's tokenizer, blob `{story.tokenizer}`, was not in the folder that this was read from.",
        ]
    elif spec.numbers.get("v") == BYTES:
        lines += ["", 'Tokens are bytes, there is no tokenizer: `torch.tensor([list("text".encode())])`.']
    if spec.family != "llama":
        lines += ["", "`transformers` does not know this architecture."]
    return lines


def _use_adapters(layout: ModelLayout) -> list[str]:
    base = base_digest(layout).hex()
    return [
        f"They belong to the base `{base}`, and to no other: `base.json` lists its {len(layout.held)} tensors "
        "with shape, dtype and the BLAKE3 digest of their bytes. Build the model as its members did, load their "
        "base, then",
        "",
        "```python",
        *(
            "from safetensors.torch import load_file",
            "from atoll.training.exchange.layout import base_digest, layout_of",
            "",
        ),
        'adapters = load_file("adapters.safetensors")',
        f'assert base_digest(layout_of(model, only=list(adapters))).hex() == "{base}"',
        "model.load_state_dict(adapters, strict=False)",
        "```",
    ]


def _one_line(text: str) -> str:
    """Members choose their own names, so a name must not break out of its place in the card."""
    return "".join(" " if c in "|`<>[]" else c for c in one_line(text)).strip() or "unnamed"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
