"""The module of transformers as an inference engine: slow, and for every model that transformers has."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch

from mindspeed_rl.inference.answer_sampling import SampledAnswer
from mindspeed_rl.inference.engine_interface import Delta, Request
from mindspeed_rl.inference.model_files import EngineSettings, ModelFiles
from mindspeed_rl.inference.text_stream import StopStringFinder
from mindspeed_rl.rollout.module_engine import ModuleEngine
from mindspeed_rl.rollout.requests import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        if any(request.images for request in requests):
            raise ValueError("--engine transformers reads only text, and a prompt has images; use --engine vllm")
        for first in range(0, len(requests), self._max_rows):
            indexes = range(first, min(first + self._max_rows, len(requests)))
            running = [
                SampledAnswer.start(
                    index, requests[index], sampling, StopStringFinder(self._tokenizer, stop_strings), self._max_tokens
                )
                for index in indexes
            ]
            while running:
                deltas = [self._add_token(answer, sampling) for answer in running]
                running = [answer for answer, delta in zip(running, deltas) if delta.finish is None]
                yield from deltas

    def _add_token(self, answer: SampledAnswer, sampling: Sampling) -> Delta:
        logits, answer.cache = self._engine.read(answer.list_unread(), answer.cache)
        return answer.add(logits, sampling)

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
