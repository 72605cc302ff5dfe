"""A transformer of the size of GPT-2 small and a ResNet-50, with random weights, in plain PyTorch.

Non-goals: training to any purpose, loading weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 50257, 1024, 768, 12, 12


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a two-layer network, each after a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Any) -> Any:
        """(batch, position, width) to the same shape."""
        batch, length, width = hidden.shape
        projected = self.queries_keys_values(self.before_attention(hidden))
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in projected.split(width, dim=2)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.network(self.before_network(hidden))


class Transformer(nn.Module):  # type: ignore[misc]
    """A decoder; the defaults are those of GPT-2 small (124 million weights)."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.output.weight = self.tokens.weight

    def hidden(self, tokens: Any) -> Any:
        """The last layer's values of (batch, position) tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))

    def forward(self, tokens: Any) -> Any:
        """Logits at each position."""
        return self.output(self.hidden(tokens))

    def next_token(self, tokens: Any) -> Any:
        """The likeliest token behind the last position."""
        return self.output(self.hidden(tokens)[:, -1]).argmax(dim=-1)


class Bottleneck(nn.Module):  # type: ignore[misc]
    """Three convolutions around a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.path = nn.Sequential(
            *_convolution(inputs, inner, 1, 1), nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride), nn.ReLU(inplace=True),
            *_convolution(inner, outputs, 1, 1),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, image: Any) -> Any:
        """Through the block."""
        return functional.relu(self.path(image) + self.shortcut(image))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 by default: stages of so many bottlenecks."""
    parts: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, depth in enumerate(depths):
        for number in range(depth):
            parts.append(Bottleneck(inputs, 64 << stage, 2 if number == 0 and stage > 0 else 1))
            inputs = 256 << stage
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
