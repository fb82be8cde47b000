"""Byte-level GPT: pre-norm, RMSNorm without gain, ReLU², tied embedding, learned positions, no biases.

ReLU² and gainless RMSNorm follow modded-nanogpt; the shape is that of the optimizer study quoted by the recipes.
Output projections start at zero, so the first loss is ln 256 = 5.55 and no warm-up is wasted.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

# B batch, T tokens, D width, H heads, V vocabulary


class GPTSize(NamedTuple):
    width: int
    layers: int
    heads: int
    seq_len: int


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.normal_(self.qkv.weight, std=width**-0.5)
        nn.init.normal_(self.up.weight, std=width**-0.5)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, h_BTD: Tensor) -> Tensor:
        b, t, d = h_BTD.shape
        qkv = self.qkv(functional.rms_norm(h_BTD, (d,))).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h_BTD = h_BTD + self.out(seen.transpose(1, 2).reshape(b, t, d))
        return h_BTD + self.down(functional.relu(self.up(functional.rms_norm(h_BTD, (d,)))).square())


class GPT(nn.Module):
    def __init__(self, size: GPTSize, vocabulary: int) -> None:
        super().__init__()
        self.size, self.vocabulary = size, vocabulary
        self.token = nn.Embedding(vocabulary, size.width)
        self.position = nn.Embedding(size.seq_len, size.width)
        self.blocks = nn.ModuleList(GPTBlock(size.width, size.heads) for _ in range(size.layers))
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Scores for the next token, (B, T, V)."""
        h_BTD = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return functional.linear(functional.rms_norm(h_BTD, (self.size.width,)), self.token.weight)
