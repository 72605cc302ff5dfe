"""A Llama with random weights that serves requests in slots, by PyTorch alone, for `nvshare.bench.servers`.

Each step decodes all slots of a batch of a fixed size, and a free slot takes its next request between two steps
(continuous batching).  Prompts are read one at a time.  Both are CUDA graphs.

Invariants: shapes never change, so that the tokens of a request depend on nothing but its prompt and the size of the
batch: a card that is shared may not change one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from nvshare.bench.workloads.serving import LARGE, PROMPT_TOKENS, SMALL, TOKENS

CONTEXT = PROMPT_TOKENS + TOKENS


class Llama:
    """Weights, and a cache of keys and values that has a slot for each request under way."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.shape = shape = LARGE if device.type == "cuda" else SMALL
        self.device, self.kind = device, torch.bfloat16 if device.type == "cuda" else torch.float32
        chance = torch.Generator(device).manual_seed(61)

        def random(*sides: int) -> Any:
            return torch.randn(*sides, generator=chance, device=device, dtype=self.kind).mul_(0.02)

        width, heads = shape["hidden_size"], shape["num_attention_heads"]
        self.heads, self.keys, self.side = heads, shape["num_key_value_heads"], shape["head_dim"]
        self.table, self.output = random(shape["vocab_size"], width), random(width, shape["vocab_size"])
        self.layers = [
            (
                random(width, (heads + 2 * self.keys) * self.side), random(heads * self.side, width),
                random(width, 2 * shape["intermediate_size"]), random(shape["intermediate_size"], width),
            )
            for _ in range(shape["num_hidden_layers"])
        ]  # fmt: skip
        self.ones = torch.ones(width, device=device, dtype=self.kind)
        steps = torch.arange(0, self.side, 2, device=device) / self.side
        angles = torch.arange(CONTEXT, device=device)[:, None] / shape["rope_theta"] ** steps
        self.angles = torch.stack((angles.cos(), angles.sin())).to(self.kind)
        slot = 2 * len(self.layers) * self.keys * CONTEXT * self.side * self.table.element_size()
        weights = sum(each.nbytes for layer in self.layers for each in layer) + self.table.nbytes + self.output.nbytes
        slots = max(32, (size - weights) // slot)
        self.cache = torch.zeros(
            len(self.layers), 2, slots, self.keys, CONTEXT, self.side, device=device, dtype=self.kind
        )

    def _turned(self, vectors: Any, positions: Any) -> Any:
        """Rotary positions; (..., position, side)."""
        cos, sin = self.angles[:, positions].unbind()
        left, right = vectors.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def _hidden(self, tokens: Any, attend: Callable[[int, Any, Any, Any], Any]) -> Any:
        """All layers over (batch, position) tokens; `attend` has the cache."""
        hidden = self.table[tokens]
        for number, (mix, out, up, down) in enumerate(self.layers):
            parts = (self._normal(hidden) @ mix).unflatten(-1, (-1, self.side)).transpose(1, 2)
            asked, keys, values = parts.split((self.heads, self.keys, self.keys), 1)
            hidden = hidden + attend(number, asked, keys, values).transpose(1, 2).flatten(2) @ out
            gate, inner = (self._normal(hidden) @ up).chunk(2, -1)
            hidden = hidden + (functional.silu(gate) * inner) @ down
        return self._normal(hidden)

    def _normal(self, hidden: Any) -> Any:
        return functional.rms_norm(hidden, self.ones.shape, self.ones, 1e-5)

    def read(self, prompt: Any, slot: Any) -> Any:
        """The first token after a prompt (1, PROMPT_TOKENS), whose keys and values go to the slot."""
        positions = torch.arange(PROMPT_TOKENS, device=self.device)

        def attend(layer: int, asked: Any, keys: Any, values: Any) -> Any:
            asked, keys = self._turned(asked, positions), self._turned(keys, positions)
            for cache, new in zip(self.cache[layer], (keys, values), strict=True):
                cache[:, :, :PROMPT_TOKENS].index_copy_(0, slot, new)
            return functional.scaled_dot_product_attention(asked, keys, values, is_causal=True, enable_gqa=True)

        return (self._hidden(prompt, attend)[:, -1] @ self.output).argmax(-1)

    def decode(self, tokens: Any, positions: Any) -> Any:
        """The next token of each slot: `tokens` stand at `positions`."""
        count, group = len(tokens), self.heads // self.keys
        slots = torch.arange(count, device=self.device)
        later = torch.arange(CONTEXT, device=self.device) > positions[:, None]
        bias = torch.zeros(later.shape, device=self.device, dtype=self.kind).masked_fill_(later, float("-inf"))
        bias = bias[:, None, None].expand(count, self.keys, group, CONTEXT)

        def attend(layer: int, asked: Any, keys: Any, values: Any) -> Any:
            where = positions[:, None, None]
            asked, keys = self._turned(asked, where), self._turned(keys, where)
            for cache, new in zip(self.cache[layer], (keys, values), strict=True):
                cache[slots, :, positions] = new[:, :, 0]
            # The heads that share a key are queries of it: no copy of the keys, and a kernel that takes a bias.
            asked = asked.reshape(count, self.keys, group, self.side)
            known, seen = self.cache[layer, :, :count]
            mixed = functional.scaled_dot_product_attention(asked, known, seen, bias)
            return mixed.reshape(count, self.heads, 1, self.side)

        return (self._hidden(tokens[:, None], attend)[:, 0] @ self.output).argmax(-1)


class Batch:
    """The slots of one size of batch."""

    def __init__(self, model: Llama, count: int) -> None:
        self._tokens, self._positions = (torch.zeros(count, dtype=torch.long, device=model.device) for _ in range(2))
        self._prompt = torch.zeros(1, PROMPT_TOKENS, dtype=torch.long, device=model.device)
        self._slot = torch.zeros(1, dtype=torch.long, device=model.device)

        def read() -> None:
            self._tokens.index_copy_(0, self._slot, model.read(self._prompt, self._slot))
            self._positions.index_fill_(0, self._slot, PROMPT_TOKENS)

        def decode() -> None:
            self._tokens.copy_(model.decode(self._tokens, self._positions))
            self._positions.add_(1).clamp_(max=CONTEXT - 1)

        self._read, self._decode = _graphed(read, model.device), _graphed(decode, model.device)

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        """Reads a prompt; its first token."""
        self._prompt.copy_(torch.tensor([prompt]))
        self._slot.fill_(slot)
        self._read()
        return int(self._tokens[slot])

    def step(self) -> list[int]:
        """The next token of each slot."""
        self._decode()
        tokens: list[int] = self._tokens.tolist()
        return tokens


def _graphed(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return work
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay  # type: ignore[no-any-return]
