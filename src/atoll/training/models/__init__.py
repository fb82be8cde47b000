"""Built-in models, by name: a run between untrusted peers can request them, since code never travels.

`build_model` gives equal weights for equal seeds only on one machine and torch version. A run's first weights are
therefore a blob in genesis, and only the founder uses the seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.training.data import Data
from atoll.training.data.text import TextDataset
from atoll.training.data.tokens import end_of, numbers_to_text, text_to_numbers
from atoll.training.exchange.layout import ModelLayout, layout_of
from atoll.training.models.gpt import GPT
from atoll.training.models.llama import Llama
from atoll.training.models.names import BYTES, FAMILIES, MODELS, Task, label_of, spec_of, with_adapters

LOOKED_AT = 2**20  # tokens checked in a file that may be larger than memory


def build_model(name: str, seed: int) -> nn.Module:
    """A freshly initialized model; torch's global generator keeps its state."""
    spec = spec_of(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return spec.build()


ADAPTER_NAMES = ("*.lora_*",)


def exchanged_patterns(name: str, only: Sequence[str] = ()) -> Sequence[str]:
    """Patterns of the tensors that a run of this model exchanges: `only`, else its adapters; empty: all tensors."""
    return only or (ADAPTER_NAMES if spec_of(name).numbers.get("lora") else ())


def shape_of(name: str, only: Sequence[str] = ()) -> ModelLayout:
    """The layout of a model, or of the tensors in `only`, without values: no memory, whatever its size."""
    with torch.device("meta"):
        return layout_of(spec_of(name).build(), only, bound=False)


def task_of(name: str) -> Task:
    return spec_of(name).task


def misfit(name: str, data: Data) -> str:
    """Why this model cannot learn from this data, and the remedy; empty if it can."""
    spec, name = spec_of(name), label_of(name)
    if isinstance(data, TextDataset) != (spec.task == "text"):
        theirs = "text" if isinstance(data, TextDataset) else "images"
        return f"{name} learns from {spec.task}, the data is {theirs}"
    if isinstance(data, TextDataset):
        largest = max(int(tokens[:LOOKED_AT].max(initial=0)) for tokens in data)
        fits, remedy = largest < spec.numbers["v"], "; set v=" if spec.family in FAMILIES else ""
        return "" if fits else f"{name} has {spec.numbers['v']} tokens, the data has token {largest}{remedy}"
    pixels, channels = data.train_images.shape[1:3], (*data.train_images.shape, 1)[3]
    classes = 1 + int(max(data.train_labels.max(), data.validation_labels.max()))
    if spec.family == "cnn" and (pixels != (28, 28) or channels != 1):
        return f"{name} reads gray images of 28 x 28; these are {pixels[0]} x {pixels[1]} with {channels} channels"
    if channels != spec.numbers.get("i", 1):
        return f"{name} reads images of {spec.numbers['i']} channels, the data has {channels}; set i={channels}"
    knows = spec.numbers.get("c", 10)
    return "" if classes <= knows else f"{name} has {knows} classes, the data has {classes}; set c={classes}"


def tokens_misfit(name: str, tokens: int) -> tuple[str, str] | None:
    """(problem, remedy) if this model cannot learn from a vocabulary of `tokens`; None if it can."""
    spec = spec_of(name)
    if spec.task != "text":
        return f"{name} learns from images, but a tokenizer needs text", "leave out data.tokenizer"
    if tokens <= spec.numbers["v"]:
        return None
    if spec.family not in FAMILIES:
        problem = f"{label_of(name)} has {spec.numbers['v']} tokens, the tokenizer has {tokens}"
        return problem, "name the tokenizer.json that belongs to this model as data.tokenizer"
    if tokens > FAMILIES[spec.family].keys["v"].most:
        return f"the tokenizer has {tokens} tokens, more than any built-in model", "choose another data.tokenizer"
    numbers = {key: value for key, value in spec.numbers.items() if value or key == "tie"} | {"v": tokens}
    size = f"{spec.family}:" + ",".join(f"{key}={value}" for key, value in numbers.items())
    return f"{name} has {spec.numbers['v']} tokens, the tokenizer has {tokens}", f'write model.name = "{size}"'


def scores_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Scores of every class or token, (B, C) or (B, T, V)."""
    found = model(inputs)
    return found if isinstance(found, Tensor) else found.logits


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy in nats, over tokens or images: inputs (B, …), targets (B,) or (B, T)."""
    inputs, targets = batch
    scores = scores_of(model, inputs)
    flat = scores.float().reshape(-1, scores.shape[-1])  # bf16 keeps 8 bits, too few for the sum over classes
    return nn.functional.cross_entropy(flat, targets.reshape(-1))


def generate_text(model: nn.Module, prompt: str, n: int, seed: int) -> str:
    """`prompt` continued by `n` bytes, drawn with a generator of its own."""
    vocabulary = _text_model(model)[0]
    if vocabulary != BYTES:
        raise ValueError(f"this model generates one of {vocabulary} tokens, not bytes: there is no text to show")
    return generate_sample(model, prompt, n, seed)


def generate_sample(model: nn.Module, prompt: str, n: int, seed: int, tokenizer: bytes = b"") -> str:
    """`prompt` continued by `n` tokens of this `tokenizer.json`; without one, by bytes.

    ValueError if this is no text model, or if the library of the tokenizer is missing.
    """
    _, seq_len = _text_model(model)
    if not tokenizer:
        return bytes(generate(model, seq_len, list(prompt.encode()) or [10], n, seed)).decode(errors="replace")
    numbers = text_to_numbers(tokenizer, prompt) or [end.number if (end := end_of(tokenizer)) is not None else 0]
    return numbers_to_text(tokenizer, generate(model, seq_len, numbers, n, seed))


def _text_model(model: nn.Module) -> tuple[int, int]:
    """(vocabulary, longest window) of a text model. ValueError for another one."""
    if not isinstance(model, GPT | Llama):
        raise ValueError("only built-in text models generate text")
    return (model.vocabulary if isinstance(model, GPT) else model.size.vocabulary), model.size.seq_len


@torch.no_grad()
def generate(
    model: nn.Module, seq_len: int, prompt: Sequence[int], n: int, seed: int, temperature: float = 0.8
) -> list[int]:
    """The tokens of the prompt, which is not empty, and `n` more."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    text = list(prompt)
    for _ in range(n):
        window_1T = torch.tensor([text[-seq_len:]], device=device)
        scores_V = model(window_1T)[0, -1].float().cpu() / temperature
        text.append(int(torch.multinomial(scores_V.softmax(0), 1, generator=generator)))
    return text


__all__ = [
    "MODELS",
    "build_model",
    "generate_sample",
    "generate_text",
    "label_of",
    "loss_of",
    "misfit",
    "scores_of",
    "shape_of",
    "spec_of",
    "task_of",
    "tokens_misfit",
    "with_adapters",
]
