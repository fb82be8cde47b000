"""Initial weights from a model folder: an `export --hf`, or a model saved by `transformers`.

    config.json        the architecture
    *.safetensors      its tensors by name, in one file or several

Only the founder of a run reads it: the first state travels as a blob. Every tensor of the model must be there and
no other.
Invariants:
- Nothing is unpickled or downloaded, and no code beside the weights is run.
"""

from __future__ import annotations

import json
from math import isclose
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll.training.models import hugging_face
from atoll.training.models.llama import NORM_EPS
from atoll.training.models.lora import ADAPTER
from atoll.training.models.names import WINDOW, label_of, spec_of

SHOWN = 4  # names in an error message
COMPUTED = ("rotary_emb.inv_freq",)  # computed values that older files contain


def name_in(folder: Path) -> str:
    """The built-in name of the model in this folder. ValueError if it is not a built-in model."""
    told = _config(folder)
    if isinstance(told.get("atoll_model"), str):
        spec_of(told["atoll_model"])
        return told["atoll_model"]
    if told.get("model_type") != "llama":
        raise ValueError(
            f"{folder} holds a {told.get('model_type', 'model without a type')}: only Llamas, and models that "
            'atoll exported, are built-in models; model.architecture = "hf" trains any other causal language model'
        )
    try:
        return _llama(told)
    except (KeyError, TypeError, ZeroDivisionError, OverflowError) as why:
        raise ValueError(f"{folder / 'config.json'} does not describe a Llama completely: {why!r}") from None


def hugging_face_name_in(folder: Path) -> str:
    """The name of the `transformers` model in this folder. ValueError if runs cannot train it here."""
    try:
        name = hugging_face.name_of(_config(folder))
        hugging_face.check_buildable(name)
    except ValueError as why:
        raise ValueError(f"{folder} holds no model that this run can train: {why}") from None
    return name


def load_weights(model: nn.Module, name: str, folder: Path) -> None:
    """Copy the weights into this model, named `name`, in fp32. ValueError if they belong to another model."""
    if spec_of(name).family == hugging_face.FAMILY:
        if hugging_face_name_in(folder) != name:
            raise ValueError(f"{folder} holds a model of another configuration than {label_of(name)}")
        model.load_state_dict(_finite(hugging_face.weights_in(name, folder), folder))
        return
    theirs, ours = spec_of(name_in(folder)), spec_of(name)
    free = {"lora"} | ({"t"} if ours.family == "llama" else set[str]())  # rotary positions have no table
    if theirs.family != ours.family or any(theirs.numbers[k] != v for k, v in _full(ours.numbers) if k not in free):
        raise ValueError(f'{folder} holds {name_in(folder)}, not {name}: write model.name = "{name_in(folder)}"')
    found = {k: v for k, v in _tensors(folder).items() if not k.endswith(COMPUTED)}
    wanted = model.state_dict()
    twin = {"lm_head.weight": "model.embed_tokens.weight"} if ours.numbers.get("tie") else dict[str, str]()
    wanted = {k: v for k, v in wanted.items() if not k.endswith(ADAPTER) or k in found}  # adapters may be new
    lacking = [k for k in wanted if k not in found and twin.get(k) not in found]
    wrong = [k for k, v in found.items() if k not in wanted or v.shape != wanted[k].shape]
    if lacking or wrong:
        raise ValueError(f"the weights in {folder} are not {name}: lacking {_some(lacking)}; wrong {_some(wrong)}")
    found = _finite(found, folder)
    model.load_state_dict({k: v.to(wanted[k].dtype) for k, v in found.items()}, strict=False)


def _finite(found: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    if endless := [k for k, v in found.items() if v.is_floating_point() and not bool(v.isfinite().all())]:
        raise ValueError(f"the weights in {folder} are not finite: {_some(endless)}")
    return found


def _full(numbers: Any) -> list[tuple[str, int]]:
    """Numbers without those that follow from others: shapes of tensors check these."""
    return [(key, value) for key, value in numbers.items() if key not in ("kv", "f")]


def _llama(told: dict[str, Any]) -> str:
    rotary = told.get("rope_parameters") or {}
    theta = rotary.get("rope_theta", told.get("rope_theta", 10_000))
    scaled = told.get("rope_scaling") or rotary.get("rope_type", "default") != "default"
    width, heads = told["hidden_size"], told["num_attention_heads"]
    head = told.get("head_dim") or width // heads
    unlike = {
        "its positions are scaled (rope_scaling)": bool(scaled),
        f"its wavelengths have the base {theta}, which is not an integer": theta != int(theta),
        "its layers have biases": bool(told.get("attention_bias") or told.get("mlp_bias")),
        f"it uses {told.get('hidden_act')}": told.get("hidden_act", "silu") != "silu",
        f"rms_norm_eps is {told.get('rms_norm_eps')}, here it is {NORM_EPS}": not isclose(
            told.get("rms_norm_eps", 1e-6), NORM_EPS
        ),
        "its heads are not hidden_size / num_attention_heads wide": head != width // heads,
    }
    if problems := [problem for problem, is_so in unlike.items() if is_so]:
        raise ValueError(f"this Llama differs from the built-in ones: {'; '.join(problems)}")
    numbers = {
        **{"d": width, "l": told["num_hidden_layers"], "h": heads, "kv": told.get("num_key_value_heads") or heads},
        **{"f": told["intermediate_size"], "t": min(told["max_position_embeddings"], WINDOW.most)},
        **{"v": told["vocab_size"], "theta": int(theta), "tie": int(told.get("tie_word_embeddings", False))},
    }
    name = "llama:" + ",".join(f"{key}={value}" for key, value in numbers.items())
    spec_of(name)
    return name


def _config(folder: Path) -> dict[str, Any]:
    if (folder / "adapters.safetensors").exists():
        raise ValueError(f"{folder} holds adapters, not a model: load them in a custom loop, as in its README")
    try:
        told = json.loads((folder / "config.json").read_bytes())
    except OSError:
        raise ValueError(f"there is no config.json in {folder}; name a folder that holds a model") from None
    except (ValueError, RecursionError) as why:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {why}") from None
    if not isinstance(told, dict):
        raise ValueError(f"{folder / 'config.json'} does not describe a model")
    return told


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no .safetensors in {folder}; other formats may hold code and are not read")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except SafetensorError as why:
            raise ValueError(f"{file} is not a safetensors file: {why}") from None
    return found


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "nothing") + rest
