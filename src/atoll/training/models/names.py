"""Model names: short names, `family:key=value,…` for any size, and `hf:` with a configuration (`hugging_face.py`).

    gpt:d=64,l=3,h=4,t=64      llama:d=256,l=6,h=8,kv=2,t=256,v=32000      resnet18:c=100,i=3

A name may come from an untrusted genesis, so its form is strict and every number has a bound. The layout of the run
shows the model's memory before any peer builds it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import nn

from atoll.training.models import hugging_face
from atoll.training.models.cnn import SmallCNN
from atoll.training.models.gpt import GPT, GPTSize
from atoll.training.models.llama import Llama, LlamaSize
from atoll.training.models.lora import add_adapters
from atoll.training.models.vision import VGG11, ResNet18, VisionSize

BYTES = 256
Task = Literal["text", "images"]


class ModelOption(NamedTuple):
    about: str
    most: int
    default: int | None = None  # None: required; 0: follows from the others


class ModelFamily(NamedTuple):
    task: Task
    keys: Mapping[str, ModelOption]
    plan: Callable[
        [Mapping[str, int]], Callable[[], nn.Module]
    ]  # numbers -> constructor; ValueError if they do not fit


class NamedModel(NamedTuple):
    """Family, numbers and constructor of a named model."""

    family: str
    numbers: Mapping[str, int]
    build: Callable[[], nn.Module]

    @property
    def task(self) -> Task:
        return FAMILIES[self.family].task if self.family in FAMILIES else "text"

    @property
    def seq_len(self) -> int | None:
        """Maximum tokens per input; None for images."""
        return self.numbers.get("t")


def _gpt(n: Mapping[str, int]) -> Callable[[], nn.Module]:
    _divides(n, "h", "d")
    return partial(GPT, GPTSize(n["d"], n["l"], n["h"], n["t"]), n["v"])


def _llama(n: Mapping[str, int]) -> Callable[[], nn.Module]:
    return partial(Llama, llama_size(n))


def llama_size(n: Mapping[str, int]) -> LlamaSize:
    """The size for the numbers of a name. ValueError if they do not fit each other."""
    n = {**n, "kv": n["kv"] or n["h"]}
    _divides(n, "h", "d")
    _divides(n, "kv", "h")
    if n["d"] // n["h"] % 2:
        raise ValueError(f"a head of {n['d'] // n['h']} values cannot be rotated in pairs; d / h must be even")
    hidden = n["f"] or -(-8 * n["d"] // 3 // 32) * 32  # as many values as a plain layer of 4 d, in multiples of 32
    return LlamaSize(n["d"], n["l"], n["h"], n["kv"], hidden, n["t"], n["v"], n["theta"], bool(n["tie"]))


def _resnet18(n: Mapping[str, int]) -> Callable[[], nn.Module]:
    return partial(ResNet18, VisionSize(n["c"], n["i"], n["w"]))


def _vgg11(n: Mapping[str, int]) -> Callable[[], nn.Module]:
    return partial(VGG11, VisionSize(n["c"], n["i"], n["w"]))


def _divides(n: Mapping[str, int], part: str, whole: str) -> None:
    if n[whole] % n[part]:
        raise ValueError(f"{part}={n[part]} does not divide {whole}={n[whole]}")


WIDTH, LAYERS, HEADS = ModelOption("width", 16_384), ModelOption("layers", 256), ModelOption("heads", 256)
WINDOW, TOKENS = (
    ModelOption("tokens read at once", 2**17),
    ModelOption("different tokens; 256 for bytes", 2**20, BYTES),
)
ADAPTERS = ModelOption("rank of adapters beside every linear layer; none unless said", 1024, 0)
CLASSES, CHANNELS = ModelOption("classes", 2**16, 10), ModelOption("channels, 1 gray or 3", 3, 3)
IMAGES = {"c": CLASSES, "i": CHANNELS, "w": ModelOption("width of the first layer", 512, 64)}
FAMILIES: dict[str, ModelFamily] = {
    "gpt": ModelFamily(
        "text", {"d": WIDTH, "l": LAYERS, "h": HEADS, "t": WINDOW, "v": TOKENS, "lora": ADAPTERS}, _gpt
    ),
    "llama": ModelFamily(
        "text",
        {
            **{"d": WIDTH, "l": LAYERS, "h": HEADS},
            "kv": ModelOption("key-value heads; as many as heads unless said", 256, 0),
            "f": ModelOption("width of the gated layer; 8/3 d unless said", 2**17, 0),
            **{"t": WINDOW, "v": TOKENS},
            "theta": ModelOption("base of the rotary wavelengths", 10**8, 10_000),
            "tie": ModelOption("1: one table reads and writes, 0: two", 1, 1),
            "lora": ADAPTERS,
        },
        _llama,
    ),
    "resnet18": ModelFamily("images", IMAGES, _resnet18),
    "vgg11": ModelFamily("images", IMAGES, _vgg11),
    "cnn": ModelFamily("images", {}, lambda _: SmallCNN),
}
ZERO_ALLOWED = {"tie"}

MODELS: dict[str, str] = {
    "gpt-nano": "gpt:d=32,l=1,h=2,t=32",  # 22 k parameters, for tests
    "gpt-tiny": "gpt:d=64,l=3,h=4,t=64",  # 168 k, the demo: a round takes seconds
    "gpt-small": "gpt:d=128,l=5,h=4,t=128",  # 1.0 M, a laptop
    "gpt-10m": "gpt:d=320,l=8,h=5,t=256",  # 10 M
    "gpt-30m": "gpt:d=512,l=10,h=8,t=256",  # 32 M, one small GPU
    "gpt-100m": "gpt:d=768,l=14,h=12,t=512",  # 100 M
    "llama-tiny": "llama:d=64,l=3,h=4,kv=2,t=64",  # 150 k
    "llama-10m": "llama:d=320,l=8,h=5,t=256",  # 10 M
    "llama-100m": "llama:d=768,l=14,h=12,kv=4,t=512",  # 89 M
    "cnn-mnist": "cnn",  # 100 k
    "resnet18-mnist": "resnet18:i=1",  # 11 M
    "resnet18-cifar": "resnet18:i=3",  # 11 M
    "vgg11-mnist": "vgg11:i=1",  # 9 M
    "vgg11-cifar": "vgg11:i=3",  # 9 M
}
NUMBER = re.compile(r"([a-z]+)=(0|[1-9]\d{0,8})", re.ASCII)


def spec_of(name: str) -> NamedModel:
    """The model of that name. ValueError if there is none."""
    family, colon, rest = MODELS.get(name, name).partition(":")
    if colon and family == hugging_face.FAMILY:
        return NamedModel(family, hugging_face.numbers_of(name), partial(hugging_face.build, name))
    if family not in FAMILIES or (name == family and not FAMILIES[family].keys):
        near = difflib.get_close_matches(name[:80], MODELS, 1, 0.6)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        known = f"known are {', '.join(MODELS)}, and sizes like {EXAMPLE}"
        raise ValueError(f"no built-in model is called {name[:80]!r}{meant}; {known}")
    keys, given = FAMILIES[family].keys, dict[str, int]()
    for word in rest.split(",") if colon else []:
        match = NUMBER.fullmatch(word)
        if match is None or match[1] not in keys or match[1] in given:
            raise ValueError(
                f"{name[:80]!r}: {word[:20]!r} is no option of {family}, or repeated; write {_form(family)}"
            )
        given[match[1]] = int(match[2])
    for key, about in keys.items():
        value = given.setdefault(key, -1 if about.default is None else about.default)
        if value < 0:
            raise ValueError(f"{name[:80]!r} lacks {key}, {about.about}; write {_form(family)}")
        if value > about.most or (value == 0 and about.default != 0 and key not in ZERO_ALLOWED):
            raise ValueError(f"{name[:80]!r}: {key}={value}, {about.about}, must be 1 to {about.most}")
    build, rank = FAMILIES[family].plan(given), given.get("lora")
    if rank:
        return NamedModel(family, given, lambda: add_adapters(build(), rank))
    return NamedModel(family, {key: value for key, value in given.items() if key != "lora"}, build)


def label_of(name: str) -> str:
    """The name for people: without the configuration of a Hugging Face model."""
    if not name.startswith(f"{hugging_face.FAMILY}:"):
        return name
    return f"{hugging_face.FAMILY}:{hugging_face.config_of(name)['model_type'][:80]}"


def with_adapters(name: str, rank: int) -> str:
    """The name of the same model with adapters of this rank; 0: without. ValueError if it has no adapters."""
    spec = spec_of(name)
    if rank and (spec.family not in FAMILIES or "lora" not in FAMILIES[spec.family].keys):
        having = " and ".join(family for family, known in FAMILIES.items() if "lora" in known.keys)
        raise ValueError(f"{label_of(name)} takes no adapters; models of {having} do")
    family, _, rest = MODELS.get(name, name).partition(":")
    words = [word for word in rest.split(",") if not word.startswith("lora=")] + [f"lora={rank}"] * bool(rank)
    return name if rank == spec.numbers.get("lora", 0) else f"{family}:{','.join(words)}"


EXAMPLE = MODELS["gpt-tiny"]


def _form(family: str) -> str:
    keys: dict[str, Any] = {k: about.about for k, about in FAMILIES[family].keys.items()}
    return f"{family}:" + ",".join(f"{key}=<{about}>" for key, about in keys.items())
