"""Codec names: single codecs or chains, such as `topk:0.1+int8+zstd:3`, parsed alike by all peers.

A chain is read from the vector to the wire: first the stages that select or transform values, then one codec that
makes bytes of them (default bf16), then at most one compressor. A name may come from an untrusted genesis, so its
form is strict. A codec needs neither a kernel nor a form for other devices (`compiled/`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from torch import empty

from atoll.base.arguments import did_you_mean
from atoll.training.codec.byte_compression import AUTO, METHODS, compressed_codec
from atoll.training.codec.changed_tensors import THRESHOLD, changed
from atoll.training.codec.compiled.device import on_devices
from atoll.training.codec.core import NOTHING, Codec, SharedKnowledge
from atoll.training.codec.dct import dct
from atoll.training.codec.delta import delta
from atoll.training.codec.e3m0 import E3M0
from atoll.training.codec.fp32 import FP32
from atoll.training.codec.half_precision import BF16, FP16
from atoll.training.codec.index_coding import GAPS
from atoll.training.codec.int4 import INT4
from atoll.training.codec.int8 import INT8
from atoll.training.codec.low_rank import RANK_MAX, low_rank
from atoll.training.codec.random_k import random_k
from atoll.training.codec.sign import SIGN
from atoll.training.codec.sparse import sparse
from atoll.training.codec.top_k import top_k
from atoll.training.codec.two_bit import TWO_BIT
from atoll.training.codec.two_means import TWO_MEANS

CODECS = {codec.name: on_devices(codec) for codec in (FP32, FP16, BF16, INT8, INT4, E3M0, TWO_BIT, TWO_MEANS, SIGN)}

# stages before a codec: (argument after the colon, inner codec, shared knowledge) -> codec
WRAPS: dict[str, Callable[[Any, Codec, SharedKnowledge], Codec]] = {
    "topk": lambda ratio, inner, known: top_k(ratio, inner),
    "topk-rice": lambda ratio, inner, known: top_k(ratio, inner, GAPS),
    "randk": lambda ratio, inner, known: random_k(ratio, inner, known.seed),
    "lowrank": lambda rank, inner, known: low_rank(rank, inner, known.shapes, known.reference_N),
    "sparse": lambda nothing, inner, known: sparse(inner),
    "dct": lambda nothing, inner, known: dct(inner),
    "delta": lambda nothing, inner, known: delta(inner, known.reference_N),
    "changed": lambda threshold, inner, known: changed(threshold, inner, known.sizes, known.wholes),
}

NICKNAMES = {
    "sparseloco": "topk:64/4096+2means",  # 2508.15706: 0.16 bit per value; with error feedback 0.95
    "demo": "dct+topk:32/4096+2means",  # 2411.19870, chunk 64 x 64, k = 32; with error feedback 0.999
    "zstd": "zstd:3",
}

COMPRESSORS = (*METHODS, AUTO)
STAGES_MAX = 6  # a longer chain compresses nothing more
RATIO_FORM = re.compile(r"(?:0\.\d{1,6}|\d{1,4}/[1-9]\d{0,3}|1)", re.ASCII)
# also accepts the output of repr
THRESHOLD_FORM = re.compile(r"[01](?:\.\d{1,7})?|\d(?:\.\d{1,3})?e-\d{1,2}", re.ASCII)
RANK_FORM = re.compile(r"[1-9]\d?", re.ASCII)
RATIO_MIN = Fraction(1, 256)  # below it indices cost more than their values


def codec_named(name: str, known: SharedKnowledge = NOTHING) -> Codec:
    """The codec of that name. ValueError if there is none, or it needs more than `known` holds."""
    stages = [stage for word in name.split("+") for stage in NICKNAMES.get(word, word).split("+")]
    if len(stages) > STAGES_MAX:
        raise ValueError(f"{name[:80]!r} chains more than {STAGES_MAX} codecs")
    method = stages.pop() if stages[-1] in COMPRESSORS else None
    codec = CODECS[stages.pop()] if stages and stages[-1] in CODECS else BF16
    for stage in reversed(stages):
        codec = _wrap(stage)(codec, known)
    return compressed_codec(method, codec, known.link_bytes_s) if method else codec


def check_codec_name(name: str) -> None:
    """ValueError if there is no codec of that name, with any shared knowledge."""
    codec_named(name, SharedKnowledge(seed=b"any", reference_N=empty(0), shapes=()))


def _wrap(stage: str) -> Callable[[Codec, SharedKnowledge], Codec]:
    word, colon, argument = stage.partition(":")
    if stage in CODECS or stage in COMPRESSORS:
        raise ValueError(f"{stage} is in the wrong position; a chain is like topk:0.1+int8+zstd:3")
    if word not in WRAPS or (colon and word not in ARGUMENTS):
        names = [*CODECS, *WRAPS, *COMPRESSORS, *NICKNAMES]
        meant = did_you_mean(stage[:40], names)
        raise ValueError(f"no codec is called {stage[:40]!r}{meant}; known are {', '.join(names)}")
    if word not in ARGUMENTS:
        return partial(WRAPS[word], None)
    read, default = ARGUMENTS[word]
    return partial(WRAPS[word], read(argument, stage) if colon else default)


def _ratio(text: str, stage: str) -> Fraction:
    ratio = Fraction(text) if RATIO_FORM.fullmatch(text) else Fraction(0)
    if not RATIO_MIN <= ratio <= 1:
        raise ValueError(f"{stage[:40]!r} needs a share between 1/256 and 1, such as 0.1 or 64/4096")
    return ratio


def _rank(text: str, stage: str) -> int:
    if not RANK_FORM.fullmatch(text) or int(text) > RANK_MAX:
        raise ValueError(f"{stage[:40]!r} needs a rank between 1 and {RANK_MAX}, such as lowrank:4")
    return int(text)


def _threshold(text: str, stage: str) -> float:
    threshold = float(text) if THRESHOLD_FORM.fullmatch(text) else -1.0
    if not 0 <= threshold <= 1:
        raise ValueError(f"{stage[:40]!r} needs a norm between 0 and 1, such as changed:1e-5")
    return threshold


# stages with an argument: (parser, default)
ARGUMENTS: dict[str, tuple[Callable[[str, str], Any], Any]] = {
    "topk": (_ratio, Fraction(1, 10)),
    "topk-rice": (_ratio, Fraction(1, 10)),
    "randk": (_ratio, Fraction(1, 10)),
    "lowrank": (_rank, 4),
    "changed": (_threshold, THRESHOLD),
}
