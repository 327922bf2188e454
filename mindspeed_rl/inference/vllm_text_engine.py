"""The rollout engine, with weights from disk, for inference: streaming, stop strings, next-token distributions.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, cast

from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.inference.engine_interface import Delta, Request
from mindspeed_rl.inference.model_files import EngineSettings, ModelFiles
from mindspeed_rl.inference.text_stream import StopStringFinder
from mindspeed_rl.models.costs import kv_bytes_per_token
from mindspeed_rl.rollout.arguments import build_prompt
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.inputs import TokensPrompt


class VllmTextEngine(VllmEngine):
    """A vLLM engine in this process, with its weights; ranks of a tensor-parallel group make the same calls in one order."""

    def __init__(
        self, settings: EngineSettings, model: ModelFiles, tokenizer: PreTrainedTokenizerBase, *, run_id: str | None = None
    ) -> None:
        """Build the engine and load the weights.

        Args:
            settings: settings of the engine.
            model: from `open_model(settings.model)`.
            tokenizer: decodes the end of an answer for stop strings.
            run_id: equal on all ranks that build engines together; needed with tensor parallelism only.
        """
        config = settings.build_generate_config(model.source.dtype)
        bytes_per_value = 4 if config.dtype == "float32" else 2
        super().__init__(
            model.hf_folder,
            config,
            # unused: every request has its own
            Sampling(temperature=0.0, max_tokens=1, stop_token_ids=()),
            run_id=run_id or uuid.uuid4().hex[:12],
            kv_bytes_per_token=kv_bytes_per_token(model.model_config, bytes_per_value),
            # vLLM refuses to return more log-probs than were announced
            engine_arguments={"max_logprobs": settings.max_log_probs},
            image_rules=ImageRules.read(model.hf_folder),
        )
        # log-probs are the untempered model's
        self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler.tempers_log_probs = False
        self._tokenizer = tokenizer
        self._num_requests = 0
        self.load_weights(model.named_tensors(), version=0)

    def stream(
        self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()
    ) -> Generator[Delta, None, None]:
        """See `Engine.stream`."""
        engine = self._llm.llm_engine
        indexes: dict[str, int] = {}
        finders = [StopStringFinder(self._tokenizer, stop_strings) for _ in requests] if stop_strings else []
        for index, request in enumerate(requests):
            max_tokens = request.max_tokens or sampling.max_tokens
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                max_tokens=max_tokens,
                min_tokens=min(sampling.min_tokens, max_tokens),
                stop_token_ids=list(sampling.stop_token_ids),
                # vLLM refuses an empty list
                allowed_token_ids=list(request.allowed_ids) or None,
                seed=request.seed,
                # only the sampled token's
                logprobs=0,
                # text_stream makes text and stop strings of tokens, alike for every engine
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            name = str(self._num_requests)
            self._num_requests += 1
            prompt = cast("TokensPrompt", build_prompt(request.prompt_ids, request.images, self.image_rules))
            engine.add_request(name, prompt, params)
            indexes[name] = index
        try:
            while indexes:
                for output in engine.step():
                    assert isinstance(output, RequestOutput)
                    delta = _build_delta(indexes[output.request_id], output)
                    if delta.finish is None and finders and finders[delta.index].ends(delta.token_ids):
                        engine.abort_request([output.request_id])
                        delta = Delta(delta.index, delta.token_ids, delta.log_probs, "stop")
                    if delta.finish is not None:
                        del indexes[output.request_id]
                    yield delta
        finally:
            if indexes:
                engine.abort_request(list(indexes))

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, detokenize=False)
        outputs = self._llm.generate([_prompt(list(ids)) for ids in prompts], params, use_tqdm=False)
        candidates = []
        for output in outputs:
            log_probs = output.outputs[0].logprobs
            assert log_probs is not None  # they were requested
            ranked = sorted(((token, entry.logprob) for token, entry in log_probs[0].items()), key=lambda item: -item[1])
            candidates.append(ranked[:count])
        return candidates

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`; one token less than the longest sequence fits, because vLLM generates one."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate([_prompt(list(ids)) for ids in sequences], params, use_tqdm=False)
        scores = []
        for ids, start, output in zip(sequences, starts, outputs):
            assert output.prompt_logprobs is not None  # they were requested
            entries = [(output.prompt_logprobs[index], ids[index]) for index in range(start, len(ids))]
            scores.append([(entry[token].logprob, entry[token].rank == 1) for entry, token in entries if entry is not None])
        return scores

    def close(self) -> None:
        """Do nothing: the engine ends with this process."""


def _prompt(token_ids: list[int]) -> TokensPrompt:
    # its other keys are optional by typing.NotRequired, which came with Python 3.11
    return cast("TokensPrompt", {"prompt_token_ids": token_ids})


def _build_delta(index: int, output: RequestOutput) -> Delta:
    sample = output.outputs[0]
    token_ids = list(sample.token_ids)
    log_probs = [step[token].logprob for step, token in zip(sample.logprobs or (), token_ids) if step is not None]
    finish = None if sample.finish_reason is None else "length" if sample.finish_reason == "length" else "stop"
    return Delta(index, token_ids, log_probs, finish)
