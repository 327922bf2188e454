"""vLLM's engine of a service: requests of many adapters in one batch, with all that a `SampleCall` asks for.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from vllm import RequestOutput, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from mindspeed_rl.rollout.arguments import EngineArguments
from mindspeed_rl.rollout.requests import derive_seed
from mindspeed_rl.rollout.vllm_engine import VllmEngine
from mindspeed_rl.service.backend import Sample, SampleCall, SampleResult, StopReason, TopTokens

#: log-probs of a position by token, as vLLM returns them
_AtPosition = Mapping[int, Any]


@dataclass
class _Running:
    """A call whose samples are in the engine.

    Attributes:
        left: names of the requests that have not ended.
        outputs: results of its samples, by index.
    """

    call: SampleCall
    left: set[str]
    outputs: dict[int, RequestOutput] = field(default_factory=dict)


class SamplingEngine(VllmEngine):
    """An engine whose calls each name an adapter, or none for the base.

    A sample depends on the call's seed and its own index, not on what else is in the engine.
    """

    def __init__(self, *args: Any, engine_arguments: EngineArguments | None = None, **keywords: Any) -> None:
        # stop strings are compared with decoded tokens
        changes = {"skip_tokenizer_init": False, "max_logprobs": -1, **(engine_arguments or {})}
        super().__init__(*args, engine_arguments=changes, **keywords)
        # log-probs are the untempered model's, as passes of training compute them
        self._runner.sampler.tempers_log_probs = False
        self._running: dict[str, _Running] = {}
        self._owner: dict[str, tuple[str, int]] = {}  # request -> call and index of the sample
        self._adapters: dict[int, LoRARequest] = {}
        self._next_adapter = 1

    # ------------------------------------------------------------------ adapters

    def add_adapter(self, folder: Path) -> int:
        """Return the id of an adapter in a PEFT folder, which must exist until `drop_adapter`; it is loaded when used."""
        index = self._next_adapter
        self._next_adapter += 1
        # vLLM takes an id that was loaded before from its cache, so each is used once
        self._adapters[index] = LoRARequest(f"adapter {index}", index, str(folder))
        return index

    def drop_adapter(self, index: int) -> None:
        """Forget an adapter that no running call names."""
        self._adapters.pop(index)
        self._llm.llm_engine.remove_lora(index)

    # ------------------------------------------------------------------ calls

    def start(self, name: str, call: SampleCall, adapter: int | None, end_tokens: Sequence[int]) -> None:
        """Add the samples of a call, whose name no other running call has.

        Args:
            adapter: from `add_adapter`; None for the base.
            end_tokens: end tokens of the model.
        """
        seed = secrets.randbits(31) if call.seed is None else call.seed
        running = _Running(call, set())
        self._running[name] = running
        engine, max_len = self._llm.llm_engine, self._llm.llm_engine.model_config.max_model_len
        for index in range(call.num_samples):
            request = f"{name}/{index}"
            params = SamplingParams(
                temperature=call.temperature,
                top_p=call.top_p,
                top_k=call.top_k,
                # a call for only the prompt makes a token that is left out
                max_tokens=max(1, max_len - len(call.prompt) if call.max_tokens is None else call.max_tokens),
                stop_token_ids=[*call.stop_tokens, *(end_tokens if call.ends_at_eos else ())],
                ignore_eos=True,  # only stop_token_ids end a sample
                stop=list(call.stop_strings),
                seed=derive_seed(f"{seed}/{index}"),
                logprobs=call.top_log_probs,
                prompt_logprobs=_count_prompt_log_probs(call) if index == 0 else None,
                detokenize=bool(call.stop_strings),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = cast(TokensPrompt, {"prompt_token_ids": [int(token) for token in call.prompt]})
            lora = None if adapter is None else self._adapters[adapter]
            self._ids[request] = engine.add_request(request, prompt, params, lora_request=lora) or request
            self._owner[request] = (name, index)
            running.left.add(request)

    @property
    def has_calls(self) -> bool:
        """Return whether a step has work."""
        return bool(self._running)

    def step_calls(self) -> list[tuple[str, SampleResult]]:
        """Compute a token of every sample, or a part of its prompt; return the calls that have ended, by name."""
        ended: list[tuple[str, SampleResult]] = []
        for output in self._llm.llm_engine.step():
            assert isinstance(output, RequestOutput)
            if not output.finished or output.request_id not in self._owner:
                continue
            name, index = self._owner.pop(output.request_id)
            del self._ids[output.request_id]
            running = self._running[name]
            running.outputs[index] = output
            running.left.discard(output.request_id)
            if not running.left:
                del self._running[name]
                ended.append((name, _build_result(running)))
        return ended

    def abort_call(self, name: str) -> None:
        """Abort a call; nothing happens where it has ended."""
        running = self._running.pop(name, None)
        if running is not None:
            for request in running.left:
                del self._owner[request]
            self.abort(running.left)


def _count_prompt_log_probs(call: SampleCall) -> int | None:
    """Return vLLM's number of tokens per position of the prompt; None where none is asked for, -1 for the vocabulary."""
    if call.target_log_probs is not None:
        return -1
    return call.top_prompt_log_probs if call.prompt_log_probs or call.top_prompt_log_probs else None


def _list_top(at: _AtPosition, count: int) -> TopTokens:
    ranked = sorted(((token, float(entry.logprob)) for token, entry in at.items()), key=lambda item: (-item[1], item[0]))
    return tuple(ranked[:count])


def _build_result(running: _Running) -> SampleResult:
    call, outputs = running.call, [running.outputs[index] for index in sorted(running.outputs)]
    samples = tuple(_build_sample(call, output) for output in outputs)
    positions = cast("Sequence[_AtPosition | None] | None", outputs[0].prompt_logprobs)
    if positions is None:
        return SampleResult(samples)
    pairs = list(zip(call.prompt, positions, strict=True))
    log_probs = tuple(None if at is None else float(at[token].logprob) for token, at in pairs)
    top = tuple(None if at is None else _list_top(at, call.top_prompt_log_probs) for _, at in pairs)
    targets = call.target_log_probs
    at_targets = None
    if targets is not None:
        at_targets = np.zeros(targets.shape, np.float32)
        for row, column in np.argwhere(targets != -1):  # of which there may be few
            at_targets[row, column] = (positions[row + 1] or {})[int(targets[row, column])].logprob
    return SampleResult(
        samples,
        log_probs if call.prompt_log_probs else None,
        top if call.top_prompt_log_probs else None,
        at_targets,
    )


def _build_sample(call: SampleCall, output: RequestOutput) -> Sample:
    result = output.outputs[0]
    count = 0 if call.max_tokens == 0 else len(result.token_ids)
    tokens = tuple(int(token) for token in result.token_ids[:count])
    positions = cast("Sequence[_AtPosition]", result.logprobs or ())
    log_probs = tuple(float(at[token].logprob) for token, at in zip(tokens, positions))
    top = tuple(_list_top(at, call.top_log_probs) for at in positions[:count]) if call.top_log_probs else None
    reason: StopReason = "length" if result.finish_reason == "length" else "stop"
    return Sample(tokens, log_probs, reason, top)
