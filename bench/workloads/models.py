"""A transformer of the size of GPT-2 small, with random weights, of PyTorch's own layers.

Non-goals: training to any purpose, loading weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, CONTEXT = 50257, 1024

torch.backends.mha.set_fastpath_enabled(False)  # one fused kernel for a layer, in inference alone


class Transformer(nn.Module):  # type: ignore[misc]
    """A decoder; the defaults are those of GPT-2 small (124 million weights)."""

    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        shape = (width, heads, 4 * width, 0.0, "gelu")
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(*shape, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Any, last: bool = False) -> Any:
        """Logits at each position of (batch, position) tokens, or behind the last one alone."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, hidden.device, hidden.dtype)
        for one in self.blocks:
            hidden = one(hidden, mask, is_causal=True)
        return self.output(self.norm(hidden[:, -1] if last else hidden))
