"""The Megatron model itself as an inference engine, to compare vLLM with: same requests, same answers, own cache.

Importing this imports Megatron, so `adaptors.apply("train")` must have run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.build import build_model
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.generation import CachedModel
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.engine.weights import LocalWeight, list_local_weights
from mindspeed_rl.inference.answer_sampling import SampledAnswer
from mindspeed_rl.inference.engine_interface import Delta, Request
from mindspeed_rl.inference.model_files import EngineSettings, ModelFiles
from mindspeed_rl.inference.text_stream import StopStringFinder
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.models.weights import MemorySource
from mindspeed_rl.rollout.requests import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MegatronEngine:
    """A Megatron model with a cache of keys and values. All ranks of a replica make the same calls in one order.

    Greedy answers are the same as from any other engine, up to rounding; sampled ones have generators of their own, not vLLM's.
    """

    def __init__(self, settings: EngineSettings, model: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> None:
        """Join the process group (of one process where it is the only one), build the model and load its weights.

        Args:
            settings: settings of the engine.
            model: from `open_model(settings.model)`.
            tokenizer: decodes the end of an answer for stop strings.

        Raises:
            ValueError: the layout cannot hold the model.
        """
        keys = settings.build_generate_config(model.source.dtype)
        if keys.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype {keys.dtype}: the Megatron model computes in float32 or bfloat16")
        config = MegatronConfig(
            bf16=keys.dtype == "bfloat16",
            tensor_model_parallel_size=settings.tensor_parallel_size,
            pipeline_model_parallel_size=settings.pipeline_parallel_size,
        )
        plan = plan_model(config, model.hf_folder)
        if plan.model_config.num_moe_experts and settings.tensor_parallel_size > 1:
            raise ValueError(
                f"--tensor-parallel-size {settings.tensor_parallel_size}: experts under tensor parallelism need sequence "
                "parallelism in Megatron, which a pass over one token cannot have; use --pipeline-parallel-size"
            )
        # to leave the process group that it has joined
        self._joined = not dist.is_initialized()
        init_distributed(config, 1)
        built = build_model(config, plan, trainable=False)
        _fill_parameters(built, model.named_tensors())
        self._model = CachedModel(built)
        self._tokenizer, self._max_rows, self._max_tokens = tokenizer, keys.max_num_seqs, settings.max_model_len

    def stream(
        self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()
    ) -> Generator[Delta, None, None]:
        """See `Engine.stream`. Batches have prompts of similar lengths.

        Raises:
            ValueError: a prompt has images, which its cache has no positions for.
        """
        if any(request.images for request in requests):
            raise ValueError("--engine megatron reads only text, and a prompt has images; use --engine vllm")
        # tokens after the length of a batch's shortest prompt are read one by one
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
        for first in range(0, len(order), self._max_rows):
            answers = [
                SampledAnswer.start(
                    index, requests[index], sampling, StopStringFinder(self._tokenizer, stop_strings), self._max_tokens
                )
                for index in order[first : first + self._max_rows]
            ]
            yield from self._batch(answers, sampling)

    def _batch(self, answers: list[SampledAnswer], sampling: Sampling) -> Generator[Delta, None, None]:
        """Generate all sequences in step; see `CachedModel.generate`."""
        prompts = [answer.request.prompt_ids for answer in answers]
        max_len = max(len(prompt) + answer.max_tokens for prompt, answer in zip(prompts, answers))
        deltas: list[Delta] = []

        def choose(row: int, logits: Tensor) -> tuple[int, bool]:
            delta = answers[row].add(logits, sampling)
            deltas.append(delta)
            return delta.token_ids[-1], delta.finish is not None

        for _ in self._model.generate(prompts, max_len, choose):
            yield deltas.pop()

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        results = []
        for first in range(0, len(prompts), self._max_rows):
            part = prompts[first : first + self._max_rows]
            self._model.reset(len(part), max(map(len, part)))
            log_probs, tokens = self._model.logits_at_ends(part).log_softmax(-1).topk(count)
            results += [list(zip(row, values)) for row, values in zip(tokens.tolist(), log_probs.tolist())]
        return results

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`. One sequence at a time: its logits are as many as its tokens times the vocabulary."""
        results = []
        for ids, start in zip(sequences, starts):
            self._model.reset(1, len(ids))
            logits = self._model.next_logits(torch.tensor([ids[:-1]]), everywhere=True)[start - 1 :]
            labels = torch.tensor(ids[start:], device=logits.device)
            log_probs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
            results.append(list(zip(log_probs.tolist(), (logits.argmax(-1) == labels).tolist())))
        return results

    def close(self) -> None:
        """Leave the process group that was joined for this engine."""
        if self._joined:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@torch.no_grad()
def _fill_parameters(model: BuiltModel, named: Iterable[tuple[str, Tensor]]) -> None:
    """Fill this rank's parameters from full tensors under HF names, of which few are in memory at a time.

    Raises:
        ValueError: a parameter got no tensor.
    """
    waiting: dict[str, list[LocalWeight]] = {}
    for weight in list_local_weights(model):
        for name in weight.op.hf:
            waiting.setdefault(name, []).append(weight)
    loaded: dict[str, Tensor] = {}
    for name, tensor in named:
        if name not in waiting:
            continue
        loaded[name] = tensor
        for weight in [weight for weight in waiting[name] if all(part in loaded for part in weight.op.hf)]:
            weight.tensor.copy_(weight.op.read_shard(MemorySource(loaded), weight.num_shards, weight.shard))
            for part in weight.op.hf:
                waiting[part].remove(weight)
        for part in [part for part in loaded if not waiting.get(part)]:
            del loaded[part]
            waiting.pop(part, None)
    missing = [name for name, weights in waiting.items() if weights]
    if missing:
        raise ValueError(f"the model has no tensor for {len(missing)} weights, for example {missing[0]}")
