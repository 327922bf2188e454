"""Routed experts out of vLLM's CPU build (0.32): there only Model Runner V2 hands them out, which needs Triton.

- the refusal (config.VllmConfig._verify_aux_output_compatibility): asks for that runner and for prefix caching;
- what a step routed (v1.worker.cpu_model_runner.CPUModelRunner.execute_model, sample_tokens): vLLM's own capturer is bound to
  the model's routers, and its rows are kept by slot of the KV cache, as vLLM 0.21 to 0.23 keeps them: tokens of a cached
  prefix have theirs in the slots that they share.

The scheduler and all behind it are vLLM's. It can go when the CPU build has Triton or V1's runner hands routed experts out;
`tests/unit/adaptors` fails when it is no longer needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_applied = False


def apply() -> None:
    """Engines of this process take `enable_return_routed_experts`. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def check(self: Any) -> None:
        if self.aux_output_config.enabled and not self.model_config.is_moe:
            raise ValueError("routed experts can only be returned by a model with experts.")

    config: Any = VllmConfig
    config._verify_aux_output_compatibility = check
    runner: Any = CPUModelRunner
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(self: Any, scheduler_output: Any, *others: Any, **keywords: Any) -> Any:
        if not self.vllm_config.aux_output_config.enabled:
            return execute(self, scheduler_output, *others, **keywords)
        if not hasattr(self, "_routed_slots"):
            self._routed_slots = _RoutedSlots(self)
        result = execute(self, scheduler_output, *others, **keywords)
        if scheduler_output.total_num_scheduled_tokens:
            self._routed_slots.keep(scheduler_output)
        return result

    def sample_tokens(self: Any, *others: Any, **keywords: Any) -> Any:
        output = sample(self, *others, **keywords)
        if self.vllm_config.aux_output_config.enabled and (found := self._routed_slots.take()):
            output.aux_output_connector_output = found
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    _applied = True


class _RoutedSlots:
    """What was routed for the token in each slot of a runner's KV cache."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        config = runner.vllm_config
        self._runner = runner
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(runner.model, self._capturer)
        (group,) = runner.kv_cache_config.kv_cache_groups  # the models that are trained here have attention of one kind
        self._block_size = group.kv_cache_spec.block_size
        shape = (runner.kv_cache_config.num_blocks * self._block_size, *self._capturer.shape_per_token)
        self._slots = np.zeros(shape, dtype=self._capturer.output_dtype_name)
        self._found: dict[str, Any] = {}

    def keep(self, scheduler_output: Any) -> None:
        """The step that was just made is kept, and what it completes is there to be taken."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        batch = self._runner.input_batch
        rows = self._capturer.snapshot_routing_data(scheduler_output.total_num_scheduled_tokens).numpy()
        starts = scheduler_output.aux_output_connector_metadata.requests
        counts = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
        slots = [
            self._slots_of(number, int(batch.num_computed_tokens_cpu[number]) + count) for number, count in enumerate(counts)
        ]
        first = 0
        for places, count in zip(slots, counts):
            self._slots[places[len(places) - count :]] = rows[first : first + count]
            first += count
        # only now: a request may share a prefix that another one has computed in this very step
        for name, places in zip(batch.req_ids, slots):
            self._found[name] = AuxRequestOutput(starts[name], self._slots[places[starts[name] :]])

    def take(self) -> dict[str, Any]:
        """By request, the tokens that nobody has been told of yet."""
        found, self._found = self._found, {}
        return found

    def _slots_of(self, number: int, count: int) -> np.ndarray:
        """Where the first tokens of the batch's request with this number lie."""
        blocks = self._runner.input_batch.block_table[0].get_numpy_array()[number]
        positions = np.arange(count)
        return blocks[positions // self._block_size] * self._block_size + positions % self._block_size
