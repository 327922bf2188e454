"""How the next token is drawn from logits: what vLLM's sampler does with the same settings, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl.rollout.requests import Sampling


def draw(
    logits: Tensor, sampling: Sampling, generator: torch.Generator, allowed_ids: tuple[int, ...] = ()
) -> tuple[int, float]:
    """(token, its log-prob under the untempered model) of one sequence.

    Args:
        logits: [vocabulary] float32, on the host.
        generator: of this answer alone.
        allowed_ids: tokens to choose from; empty allows all.
    """
    log_probs = logits.log_softmax(-1)
    kept = logits
    if allowed_ids:
        kept = torch.full_like(logits, float("-inf"))
        kept[list(allowed_ids)] = logits[list(allowed_ids)]
    if sampling.temperature == 0.0:
        token = int(kept.argmax())
    else:
        token = int(torch.multinomial(cut(kept / sampling.temperature, sampling).softmax(-1), 1, generator=generator))
    return token, float(log_probs[token])


def cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tempered logits with those at minus infinity that top-k, top-p and min-p leave out."""
    if 0 < sampling.top_k < logits.numel():
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # mass before the token; the most likely one stays
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), float("-inf"))
    if sampling.min_p > 0.0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.max(), float("-inf"))
    return logits
