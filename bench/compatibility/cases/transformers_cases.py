"""Hugging Face transformers: text generation with random weights.

Non-goals: anything of nvshare; weights from elsewhere."""

from __future__ import annotations

import torch
import transformers

from nvshare.bench.compatibility.cases import Outcome, Program


def generation() -> Program:
    """A small GPT-2 by configuration, greedy."""
    torch.manual_seed(29)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=128, n_head=4, vocab_size=512, n_positions=128, bos_token_id=0, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).cuda().eval()
    prompt = torch.arange(8, device="cuda")[None]

    def generate(tokens: int) -> torch.Tensor:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )

    def check() -> Outcome:
        outcome = Outcome()
        outcome.bytes_of(generate(48).cpu().numpy())
        return outcome

    return Program(check, lambda: generate(8), torch.cuda.synchronize)


CASES = {"generate": generation}
