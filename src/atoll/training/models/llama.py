"""Llama-style model: RMSNorm with gain, rotary positions, SwiGLU, grouped-query attention, no biases.

Tensors have the names and shapes of a LlamaForCausalLM in `transformers`, so an export is a plain copy
(`training/export`). As there, rotary positions rotate the two halves of a head against each other, not adjacent
values as in the first Llama code. Reads at most `seq_len` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# B batch, T tokens, D width, H heads, G key-value heads, K width of a head, V vocabulary

NORM_EPS = 1e-5


class LlamaSize(NamedTuple):
    width: int
    layers: int
    heads: int
    groups: int  # key-value heads: each serves heads / groups query heads
    hidden: int  # width of the gated layer
    seq_len: int
    vocabulary: int
    theta: int = 10_000  # base of the rotary wavelengths
    tied: bool = True  # one table for embedding and output


class LlamaAttention(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.q_proj = nn.Linear(size.width, size.heads * self.head, bias=False)
        self.k_proj = nn.Linear(size.width, size.groups * self.head, bias=False)
        self.v_proj = nn.Linear(size.width, size.groups * self.head, bias=False)
        self.o_proj = nn.Linear(size.heads * self.head, size.width, bias=False)
        self.served = size.heads // size.groups

    def forward(self, h_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        b, t, _ = h_BTD.shape
        q_BHTK = self.q_proj(h_BTD).view(b, t, -1, self.head).transpose(1, 2)
        k_BGTK = self.k_proj(h_BTD).view(b, t, -1, self.head).transpose(1, 2)
        v_BGTK = self.v_proj(h_BTD).view(b, t, -1, self.head).transpose(1, 2)
        k_BHTK = turned(k_BGTK, cos_TK, sin_TK).repeat_interleave(self.served, 1)
        v_BHTK = v_BGTK.repeat_interleave(self.served, 1)
        seen = functional.scaled_dot_product_attention(
            turned(q_BHTK, cos_TK, sin_TK), k_BHTK, v_BHTK, is_causal=True
        )
        return self.o_proj(seen.transpose(1, 2).reshape(b, t, -1))


class SwiGLU(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.hidden, bias=False)
        self.up_proj = nn.Linear(size.width, size.hidden, bias=False)
        self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(h_BTD)) * self.up_proj(h_BTD))


class LlamaLayer(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(size)
        self.mlp = SwiGLU(size)
        self.input_layernorm = nn.RMSNorm(size.width, eps=NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(size.width, eps=NORM_EPS)

    def forward(self, h_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        h_BTD = h_BTD + self.self_attn(self.input_layernorm(h_BTD), cos_TK, sin_TK)
        return h_BTD + self.mlp(self.post_attention_layernorm(h_BTD))


class LlamaStack(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(LlamaLayer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=NORM_EPS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        h_BTD = self.embed_tokens(tokens_BT)
        cos_TK, sin_TK = rotations(self.size.theta, self.size.width // self.size.heads, tokens_BT.shape[1], h_BTD)
        for layer in self.layers:
            h_BTD = layer(h_BTD, cos_TK, sin_TK)
        return self.norm(h_BTD)


class Llama(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size = size
        self.model = LlamaStack(size)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # layers that add to the residual stream start small
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * size.layers) ** 0.5 if last else 0.02)
        if size.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Scores for the next token, (B, T, V)."""
        return self.lm_head(self.model(tokens_BT))


def rotations(theta: int, head: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (T, K), of the angles of every position; the wavelengths are repeated, once per half."""
    exponents = torch.arange(0, head, 2, dtype=torch.float32, device=like.device) / head
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=like.device), theta**-exponents)
    angles_TK = torch.cat([angles, angles], 1)
    return angles_TK.cos().to(like.dtype), angles_TK.sin().to(like.dtype)


def turned(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Every pair (k, k + K/2) rotated by the angle of its position (Su et al. 2021, equation 34)."""
    first, second = x_BHTK.chunk(2, -1)
    return x_BHTK * cos_TK + torch.cat([-second, first], -1) * sin_TK
