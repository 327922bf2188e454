"""The module of transformers as an inference engine: slow, and for every model that transformers has."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl.inference.engine_interface import Delta, Finish, Request
from mindspeed_rl.inference.model_files import EngineSettings, ModelFiles
from mindspeed_rl.inference.text_stream import StopStringFinder
from mindspeed_rl.rollout.module_engine import ModuleEngine
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.token_sampling import sample_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class _Answer:
    """An answer in progress.

    Attributes:
        index: index of its request.
        unread: tokens that the cache lacks.
    """

    index: int
    request: Request
    generator: torch.Generator
    finder: StopStringFinder
    max_tokens: int
    unread: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    cache: Any = None


class ModuleTextEngine:
    """A full model in this process, which computes one answer at a time; see `Engine`."""

    def __init__(self, settings: EngineSettings, model: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> None:
        """Build the module and load its weights.

        Args:
            settings: settings of the engine.
            model: from `open_model(settings.model)`.
            tokenizer: decodes the end of an answer for stop strings.

        Raises:
            ValueError: the installed transformers has no such model, or it is not computed in this format.
        """
        keys = settings.build_generate_config(model.source.dtype)
        if keys.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype {keys.dtype}: --engine transformers computes in float32 or bfloat16")
        self._engine = ModuleEngine(model.hf_folder, keys, Sampling(1.0, settings.max_model_len, ()))
        self._engine.load_weights(model.named_tensors(), 0)
        self._tokenizer, self._max_rows, self._max_tokens = tokenizer, keys.max_num_seqs, settings.max_model_len

    def stream(
        self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()
    ) -> Generator[Delta, None, None]:
        """See `Engine.stream`.

        Raises:
            ValueError: a prompt has images, or leaves no room for an answer.
        """
        for first in range(0, len(requests), self._max_rows):
            indexes = range(first, min(first + self._max_rows, len(requests)))
            running = [self._start_answer(index, requests[index], sampling, stop_strings) for index in indexes]
            while running:
                deltas = [self._add_token(answer, sampling) for answer in running]
                running = [answer for answer, delta in zip(running, deltas) if delta.finish is None]
                yield from deltas

    def _start_answer(self, index: int, request: Request, sampling: Sampling, stop_strings: Sequence[str]) -> _Answer:
        if request.images:
            raise ValueError("--engine transformers reads only text, and a prompt has images; use --engine vllm")
        room = self._max_tokens - len(request.prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room in {self._max_tokens} (--max-length)"
            )
        limit = min(request.max_tokens or sampling.max_tokens, room)
        finder = StopStringFinder(self._tokenizer, stop_strings)
        return _Answer(index, request, torch.Generator().manual_seed(request.seed), finder, limit, request.prompt_ids)

    def _add_token(self, answer: _Answer, sampling: Sampling) -> Delta:
        request = answer.request
        logits, answer.cache = self._engine.read(answer.unread, answer.cache)
        token, log_prob = sample_token(
            logits, sampling, answer.generator, request.prompt_ids, answer.token_ids, allowed_ids=request.allowed_ids
        )
        answer.token_ids.append(token)
        # a model without a cache reads everything again
        answer.unread = [token] if answer.cache is not None else [*request.prompt_ids, *answer.token_ids]
        finish: Finish | None = None
        if token in sampling.stop_token_ids or answer.finder.ends([token]):
            finish = "stop"
        elif len(answer.token_ids) == answer.max_tokens:
            finish = "length"
        return Delta(answer.index, [token], [log_prob], finish)

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        results = []
        for prompt in prompts:
            log_probs, tokens = self._engine.read(prompt, None)[0].log_softmax(-1).topk(count)
            results.append(list(zip(tokens.tolist(), log_probs.tolist())))
        return results

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`. One sequence at a time: its logits are as many as its tokens times the vocabulary."""
        results = []
        for ids, start in zip(sequences, starts):
            log_probs = self._engine.read_all(ids[:-1])[start - 1 :].log_softmax(-1)
            labels = torch.tensor(ids[start:])
            chosen = log_probs.gather(1, labels[:, None])[:, 0]
            results.append(list(zip(chosen.tolist(), (log_probs.argmax(-1) == labels).tolist())))
        return results

    def close(self) -> None:
        """Do nothing: the engine started no process."""
