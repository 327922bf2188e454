"""Answers of an engine that samples their tokens in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.inference.engine_interface import Delta, Finish, Request
from mindspeed_rl.inference.text_stream import StopStringFinder
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.token_sampling import sample_token


@dataclass
class SampledAnswer:
    """An answer in progress.

    Attributes:
        index: index of its request.
        generator: random generator of this answer.
        finder: finds the stop strings.
        max_tokens: limit of its tokens.
        token_ids: generated so far.
        cache: keys and values of all its tokens but the last, where an engine has a cache of its own for each answer.
    """

    index: int
    request: Request
    generator: torch.Generator
    finder: StopStringFinder
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    cache: Any = None

    @classmethod
    def start(
        cls, index: int, request: Request, sampling: Sampling, finder: StopStringFinder, max_length: int
    ) -> SampledAnswer:
        """Start the answer to a request.

        Args:
            max_length: limit of prompt and answer together, in tokens.

        Raises:
            ValueError: the prompt leaves no room for an answer.
        """
        room = max_length - len(request.prompt_ids)
        if room < 1:
            raise ValueError(f"a prompt of {len(request.prompt_ids)} tokens leaves no room in {max_length} (--max-length)")
        generator = torch.Generator().manual_seed(request.seed)
        return cls(index, request, generator, finder, min(request.max_tokens or sampling.max_tokens, room))

    def list_unread(self) -> Sequence[int]:
        """Return the tokens that `cache` lacks: the last one, or all where there is none."""
        return [*self.request.prompt_ids, *self.token_ids] if self.cache is None else self.token_ids[-1:]

    def add(self, logits: Tensor, sampling: Sampling) -> Delta:
        """Add the token after these logits, [vocabulary] float32 on the host."""
        token, log_prob = sample_token(
            logits,
            sampling,
            self.generator,
            self.request.prompt_ids,
            self.token_ids,
            allowed_ids=self.request.allowed_ids,
        )
        self.token_ids.append(token)
        finish: Finish | None = None
        if token in sampling.stop_token_ids or self.finder.ends([token]):
            finish = "stop"
        elif len(self.token_ids) == self.max_tokens:
            finish = "length"
        return Delta(self.index, [token], [log_prob], finish)
