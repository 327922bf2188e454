"""Routed experts out of vLLM's CPU build (0.32): there only Model Runner V2 hands them out, which needs Triton.

- the refusal (config.VllmConfig._verify_aux_output_compatibility): asks for that runner and for prefix caching;
- what a step routed (v1.worker.cpu_model_runner.CPUModelRunner.execute_model, sample_tokens): vLLM's own capturer is bound to
  the model's routers, and its rows are kept by slot of the KV cache, as vLLM 0.21 to 0.23 keeps them: tokens of a cached
  prefix have theirs in the slots that they share. With gated delta nets the slots are those of full attention.

The scheduler and all behind it are vLLM's. It can go when the CPU build has Triton or V1's runner hands routed experts out;
`tests/unit/adaptors` fails when it is no longer needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_applied = False


def apply() -> None:
    """Let engines of this process take `enable_return_routed_experts`. Imports vLLM; idempotent."""
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

    def execute_model(self: Any, scheduler_output: Any, *others: object, **keywords: object) -> object:
        if not self.vllm_config.aux_output_config.enabled:
            return execute(self, scheduler_output, *others, **keywords)
        if not hasattr(self, "_routed_slots"):
            self._routed_slots = _RoutedSlots(self)
        result = execute(self, scheduler_output, *others, **keywords)
        if scheduler_output.total_num_scheduled_tokens:
            self._routed_slots.store(scheduler_output)
        return result

    def sample_tokens(self: Any, *others: object, **keywords: object) -> object:
        output = sample(self, *others, **keywords)
        if self.vllm_config.aux_output_config.enabled and (routed := self._routed_slots.take()):
            output.aux_output_connector_output = routed
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    _applied = True


class _RoutedSlots:
    """Experts of the token in each slot of a runner's KV cache."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        config = runner.vllm_config
        self._runner = runner
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(runner.model, self._capturer)
        # a slot per token: a delta net has one of a sequence, and those of a window are given to later tokens
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        full = [index for index, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        if not full and len(specs) > 1:
            raise RuntimeError("router replay R3: no layer of this model attends to all tokens, whose slots hold their experts")
        self._group = full[0] if full else 0
        #: of the table, whose blocks may be parts of those that the specification has
        self._block_size = runner.input_batch.block_table[self._group].block_size
        num_slots = runner.kv_cache_config.num_blocks * specs[self._group].block_size
        shape = (num_slots, *self._capturer.shape_per_token)
        self._slots = np.zeros(shape, dtype=self._capturer.output_dtype_name)
        self._pending: dict[str, Any] = {}

    def store(self, scheduler_output: Any) -> None:
        """Store the experts of the step that was just made, and each request's for `take`."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        batch = self._runner.input_batch
        rows = self._capturer.snapshot_routing_data(scheduler_output.total_num_scheduled_tokens).numpy()
        starts = scheduler_output.aux_output_connector_metadata.requests
        counts = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
        slots = [
            self._find_slots(index, int(batch.num_computed_tokens_cpu[index]) + count) for index, count in enumerate(counts)
        ]
        first = 0
        for positions, count in zip(slots, counts):
            self._slots[positions[len(positions) - count :]] = rows[first : first + count]
            first += count
        # only now: a request may share a prefix that another one has computed in this very step
        for name, positions in zip(batch.req_ids, slots):
            self._pending[name] = AuxRequestOutput(starts[name], self._slots[positions[starts[name] :]])

    def take(self) -> dict[str, Any]:
        """Return the experts of the tokens that were not returned yet, by request."""
        pending, self._pending = self._pending, {}
        return pending

    def _find_slots(self, index: int, count: int) -> np.ndarray:
        """Return the slots of the first tokens of the batch's request with this index."""
        blocks = self._runner.input_batch.block_table[self._group].get_numpy_array()[index]
        positions = np.arange(count)
        return blocks[positions // self._block_size] * self._block_size + positions % self._block_size
