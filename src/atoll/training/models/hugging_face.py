"""Causal language models of the library `transformers`: their configuration travels as the model's name.

    hf:{"architectures":["GPT2LMHeadModel"],"model_type":"gpt2","n_embd":64,…}

Only the founder has the folder with the weights. The name is the `config.json` of that folder without what depends
on the computer. Every member builds the model from it with its own `transformers`, and the run's layout then shows
whether both built the same one.
Invariants:
- The name may come from an untrusted genesis: its size, depth and numbers are bounded.
- Equal inputs give equal losses: dropout is off.
- No code, kernel or weight outside the installed library is loaded; a configuration that asks for it is refused.
Not responsible for: models of other tasks, quantized weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FAMILY = "hf"
NAME_MAX = 2**14  # characters: a configuration has 1,000 to 4,000
DEPTH_MAX = 6  # of lists and objects in each other
NUMBER_MAX = 10**8  # wavelengths of rotary positions have up to ten millions
COUNT_MAX = 8192  # layers, blocks and experts: each is a module
COUNTED = ("layer", "block", "expert")
VOCABULARY_MAX, WINDOW_MAX = 2**20, 2**24
WINDOWS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
TYPE = re.compile(r"[a-zA-Z][\w.-]{0,63}", re.ASCII)
LOCAL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")  # of the computer that wrote the file
REFUSED = {  # key -> what it asks for
    "auto_map": "code of its own, which is never run",
    "quantization_config": "quantized weights, which cannot be trained",
    "attn_implementation": "a kernel by name",
    "experts_implementation": "a kernel by name",
}


def name_of(config: dict[str, Any]) -> str:
    """The name of the model with this `config.json`. ValueError if runs cannot train it."""
    told = {key: value for key, value in config.items() if key not in LOCAL}
    name = f"{FAMILY}:" + json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    config_of(name)
    return name


def config_of(name: str) -> dict[str, Any]:
    """The configuration in this name. ValueError if it is out of bounds, or asks for more than a built model."""
    text = name.removeprefix(f"{FAMILY}:")
    if len(text) > NAME_MAX:
        raise ValueError(f"its configuration has {len(text)} characters; a run has room for {NAME_MAX}")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its configuration is not JSON") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or not TYPE.fullmatch(kind):
        raise ValueError("its configuration has no model_type of a model")
    for key, value in _entries("", config):
        if key in REFUSED or key.startswith("_"):
            raise ValueError(
                f"its configuration asks for {REFUSED.get(key, 'internals of the library')} ({key[:40]!r})"
            )
        most = COUNT_MAX if any(word in key for word in COUNTED) else NUMBER_MAX
        if isinstance(value, int | float) and not abs(value) <= most:  # nan is not below either
            raise ValueError(f"its configuration has {key[:40]!r} = {str(value)[:20]}; {most:,} is the most")
    if not 0 < _whole(config, "vocab_size") <= VOCABULARY_MAX:
        raise ValueError(
            f"its configuration has no vocab_size of 1 to {VOCABULARY_MAX:,}: it is no plain text model"
        )
    return config


def numbers_of(name: str) -> dict[str, int]:
    """Vocabulary and longest window, under the keys of the built-in models."""
    config = config_of(name)
    windows = [size for key in WINDOWS if (size := _whole(config, key)) > 0]
    return {"v": _whole(config, "vocab_size"), **({"t": min(windows[0], WINDOW_MAX)} if windows else {})}


def library_problem(name: str) -> str:
    """Why this computer cannot build the model; empty if it can, or if the model is not of this family."""
    if not name.startswith(f"{FAMILY}:") or find_spec("transformers") is not None:
        return ""
    kind = config_of(name)["model_type"]
    return f"its model ({kind}) is built by the library transformers, which is not installed here"


def check_buildable(name: str) -> None:
    """ValueError if the library is missing here, or knows no causal language model of this configuration."""
    if problem := library_problem(name):
        raise ValueError(f"{problem}: pip install transformers")
    _configuration(name)


def build(name: str) -> nn.Module:
    """The model with random weights in fp32. ValueError as `check_buildable`."""
    check_buildable(name)
    auto, config = _library(), _configuration(name)
    try:
        return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as why:  # its models fail in many ways
        if "allocate memory" in str(why):
            raise
        raise ValueError(f"transformers cannot build this {config.model_type}: {str(why)[:300]}") from None


def weights_in(name: str, folder: Path) -> dict[str, Tensor]:
    """The weights in this folder by the names of the model, in fp32. ValueError if they are not the model's."""
    try:
        model, told = _library().from_pretrained(
            folder,
            config=_configuration(name),
            **{"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True},
            **{"local_files_only": True, "trust_remote_code": False},
        )
    except (OSError, ValueError, RuntimeError, KeyError) as why:
        raise ValueError(f"transformers cannot read the weights in {folder}: {str(why).splitlines()[0]}") from None
    if _looks_ahead(model):
        raise ValueError(f"the model in {folder} scores a token with those after it: it is not causal")
    wrong = {what: sorted(map(str, told[f"{what}_keys"])) for what in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        texts = [f"{what} {', '.join(names[:4])}" for what, names in wrong.items() if names]
        raise ValueError(f"the weights in {folder} are not those of its config.json: {'; '.join(texts)}")
    return model.state_dict()


def _configuration(name: str) -> Any:
    """The library's configuration object. ValueError if it knows no causal language model of this type."""
    _library()
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config = config_of(name)
    config |= {key: 0.0 for key, value in config.items() if _is_random(key, value)}
    kind = config.pop("model_type")
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"the installed transformers has no causal language model of the type {kind[:80]!r}")
    try:
        return CONFIG_MAPPING[kind].from_dict(config)
    except Exception as why:  # its classes check their fields in many ways
        raise ValueError(f"transformers refuses this configuration of a {kind}: {str(why)[:300]}") from None


@torch.no_grad()
def _looks_ahead(model: nn.Module) -> bool:
    """Whether another last token changes earlier scores: encoders can be built as causal models, too."""
    tokens_2T = torch.zeros(2, 4, dtype=torch.long)
    tokens_2T[1, -1] = 1
    first, second = model(input_ids=tokens_2T).logits[:, :-1]
    return not torch.allclose(first, second, atol=1e-4)


def _is_random(key: str, value: Any) -> bool:
    """Whether this number makes steps random (dropout): members that take a step again must come to the same."""
    return isinstance(value, int | float) and ("drop" in key or "jitter" in key)


def _library() -> Any:
    """`AutoModelForCausalLM`. In processes of Atoll it never asks the network, not even for kernels."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _whole(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _entries(key: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every value that is no list or object, with the nearest key above it. ValueError if they are too deep."""
    if depth > DEPTH_MAX:
        raise ValueError("its configuration is nested too deeply")
    if isinstance(value, dict):
        for name, below in value.items():
            yield name, None
            yield from _entries(name, below, depth + 1)
    elif isinstance(value, list):
        for below in value:
            yield from _entries(key, below, depth + 1)
    else:
        yield key, value
