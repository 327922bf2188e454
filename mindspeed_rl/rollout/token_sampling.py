"""The next token of a sequence from its logits, as vLLM's sampler chooses it: for engines that compute logits themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_rl.rollout.requests import Sampling


def sample_token(
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int] = (),
    *,
    allowed_ids: Sequence[int] | None = None,
    temperature: float = 1.0,
) -> tuple[int, float]:
    """Sample (token, its log-prob under the full distribution, before penalties and cut-offs) of one sequence.

    Args:
        logits: [vocabulary] float32, on the host.
        sampling: sampling parameters of the answer.
        generator: random generator of this answer.
        prompt_ids: tokens of the prompt.
        token_ids: token ids of the answer so far.
        allowed_ids: the tokens to choose from; None for all.
        temperature: divides the logits for the log-prob.
    """
    log_probs = (logits / temperature).log_softmax(-1)
    logits = _penalize(logits, sampling, prompt_ids, token_ids)
    allowed = logits
    if allowed_ids:
        chosen = list(allowed_ids)
        allowed = torch.full_like(logits, float("-inf"))
        allowed[chosen] = logits[chosen]
    if sampling.temperature == 0.0:
        token = int(allowed.argmax())
    else:
        token = int(
            torch.multinomial(_cut_logits(allowed / sampling.temperature, sampling).softmax(-1), 1, generator=generator)
        )
    return token, float(log_probs[token])


def _penalize(logits: Tensor, sampling: Sampling, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """Return logits with the penalties on repeated tokens, and no stop token before `min_tokens`, as vLLM's sampler has them.

    A token of the prompt or the answer is divided by repetition_penalty (multiplied where negative). Each of its occurrences in
    the answer subtracts frequency_penalty, and all of them together presence_penalty.
    """
    if sampling.repetition_penalty == 1.0 and not (sampling.presence_penalty or sampling.frequency_penalty):
        if len(token_ids) >= sampling.min_tokens:
            return logits
    logits = logits.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt_ids, *token_ids}))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    counts = torch.bincount(torch.tensor(token_ids, dtype=torch.long), minlength=logits.numel())
    logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    if len(token_ids) < sampling.min_tokens:
        logits[list(sampling.stop_token_ids)] = float("-inf")
    return logits


def _cut_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Set tempered logits to minus infinity where top-k, top-p and min-p leave them out, as vLLM's sampler does."""
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
