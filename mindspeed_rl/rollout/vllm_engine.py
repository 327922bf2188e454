"""vLLM inside the training process: generate, take new weights in place, give memory back.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import vllm
from torch import Tensor
from vllm import LLM, RequestOutput, TokensPrompt
from vllm.config import ParallelConfig
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from mindspeed_rl import adaptors, platform
from mindspeed_rl.adaptors.engine_hooks import unlink_message_buffers
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.placement import RolloutLayout
from mindspeed_rl.rollout.arguments import build_sampling_params, temporary_socket_folder
from mindspeed_rl.rollout.arguments import engine_arguments as engine_arguments_of
from mindspeed_rl.rollout.loading import load_named
from mindspeed_rl.rollout.requests import Completion, GenerationRequest, Sampling


def _set_place(layout: RolloutLayout) -> None:
    """vLLM reads this rank's place among the replicas that share experts from the environment of the process."""
    if torch.distributed.is_initialized() and layout.world_size > 1:
        master = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        os.environ.update(layout.engine_environment(torch.distributed.get_rank(), master))


class VllmEngine:
    """One replica's share of a vLLM engine: the ranks of an inference tensor-parallel group each hold one.

    Ranks of such a group must call the methods with the same arguments in the same order. Building is collective over the
    whole world, because vLLM creates its process groups then.

    Attributes:
        layout: of all engines of the run.
        sampling: how training responses are drawn.
        weight_version: number of the weights, -1 before the first ones.
    """

    def __init__(
        self,
        hf_folder: str | Path,
        config: GenerateConfig,
        sampling: Sampling,
        *,
        run_id: str,
        kv_bytes_per_token: int,
        engine_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Builds the engine with dummy weights; `load_weights` must come before the first `generate`.

        Args:
            hf_folder: folder with config.json (no weights are read).
            config: the engine's keys.
            sampling: how training responses are drawn; decides which log-probs the engine reports.
            run_id: unique to the run and equal on all its ranks.
            kv_bytes_per_token: of the whole model's KV cache; sizes the cache where the run file does not.
            engine_arguments: arguments of vLLM that take the place of those made here.
        """
        self._hooks = adaptors.engine_hooks()
        self._hooks.before_build(run_id)
        self.sampling = sampling
        distributed = torch.distributed.is_initialized()
        self.layout = RolloutLayout.from_config(config, torch.distributed.get_world_size() if distributed else 1)
        arguments = engine_arguments_of(
            hf_folder,
            config,
            self._hooks,
            self.layout,
            full_distribution=sampling.full_distribution,
            kv_bytes_per_token=kv_bytes_per_token,
            changes=engine_arguments,
        )
        _set_place(self.layout)
        set_num_threads = torch.set_num_threads
        frozen = gc.get_freeze_count()
        with platform.current().kept_rng_state(), temporary_socket_folder():  # vLLM seeds the global generators
            self._llm = LLM(**arguments)
        unlink_message_buffers()
        # it also freezes all objects for the collector and disables set_num_threads
        torch.set_num_threads = set_num_threads
        if not frozen:  # in a copy of a fork server they stay: looking at its 700,000 would also unshare their pages
            gc.unfreeze()
        self.weight_version = -1
        self._adapter: LoRARequest | None = None
        self._has_weights = self._has_cache = True
        self._ids: dict[str, str] = {}  # of what runs: our name -> the engine's

    # ------------------------------------------------------------------ responses

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling | None = None) -> list[Completion]:
        """One response for each request, in order. No generator is drawn from but the requests' own.

        Replicas that share experts (`layout.in_step`) must call this equally often, those without requests as well: until the
        last of them has all its responses, the others make empty steps.

        Args:
            requests: prompts with a seed each; may be none.
            sampling: instead of the engine's own, for evaluation.

        Raises:
            RuntimeError: no weights were loaded yet.
        """
        found: dict[str, Completion] = {}
        with platform.current().kept_rng_state():  # vLLM draws a seed for every token, also where the request has its own
            for number, request in enumerate(requests):
                self.add_request(str(number), request.prompt_ids, sampling or self.sampling, request.seed)
            while self.has_unfinished() if self.layout.in_step else self._ids:
                found.update(self.step())
        return [found[str(number)] for number in range(len(requests))]

    def add_request(self, name: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> None:
        """The request is worked on in the steps from now on.

        Args:
            name: of the request, unlike that of any other that runs.
            seed: of this response alone: results do not depend on what else is in the batch.

        Raises:
            RuntimeError: no weights were loaded yet.
        """
        if self.weight_version < 0:
            raise RuntimeError("the rollout engine holds dummy weights; push weights before generating.")
        # otherwise an output of all tokens so far is made at every step
        params = build_sampling_params(sampling, seed, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = cast(TokensPrompt, {"prompt_token_ids": list(prompt_ids)})  # all other keys may be left out
        # vLLM from about 0.16 on makes the name unique by a suffix, which only the outputs are without
        self._ids[name] = self._llm.llm_engine.add_request(name, prompt, params, lora_request=self._adapter) or name

    def has_unfinished(self, busy: bool = False) -> bool:
        """True while a replica that shares experts with this one has requests, or is busy; collective over these replicas.

        They compute the experts of one another, so that each must take every step.

        Args:
            busy: this replica may have requests soon.
        """
        group = self._llm.llm_engine.dp_group
        assert group is not None  # the layout has replicas that share experts
        return ParallelConfig.has_unfinished_dp(group, busy or bool(self._ids))

    def step(self) -> list[tuple[str, Completion]]:
        """Every request that runs has a token more, or a piece of its prompt; returns those that have ended, by name.

        Without requests it is an empty step for the sake of replicas that share experts with this one.
        """
        if self.layout.in_step and not self._ids:
            self._llm.llm_engine.engine_core.execute_dummy_batch()
            return []
        ended = []
        for output in self._llm.llm_engine.step():
            assert isinstance(output, RequestOutput)
            if output.finished:
                sample = output.outputs[0]
                truncated = sample.finish_reason == "length"
                routing = _whole_routing(sample.routed_experts, len(output.prompt_token_ids or ()) + len(sample.token_ids) - 1)
                completion = _completion(sample.token_ids, sample.logprobs, truncated=truncated, routing=routing)
                del self._ids[output.request_id]
                ended.append((output.request_id, completion))
        return ended

    def partial_completion(self, name: str) -> Completion:
        """The tokens that a request has."""
        state = self._llm.llm_engine.output_processor.request_states[self._ids[name]]
        assert state.detokenizer is not None and state.logprobs_processor is not None  # both are there for generation
        chunks = getattr(state, "routed_experts_chunks", None)  # vLLM's, from 0.21 on
        routing = np.concatenate(chunks) if chunks else None
        tokens = list(state.detokenizer.output_token_ids)
        return _completion(tokens, state.logprobs_processor.logprobs, truncated=False, routing=routing)

    def abort(self, names: Iterable[str]) -> None:
        """These requests run no more; names of others are passed over."""
        known = [name for name in names if self._ids.pop(name, None) is not None]
        if known:
            self._llm.llm_engine.abort_request(known)

    def check(self, num_prompt_tokens: int) -> None:
        """Raises ValueError for a prompt that leaves no room for a token."""
        longest = self._llm.llm_engine.model_config.max_model_len
        if num_prompt_tokens >= longest:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens, with those that were generated, leaves no room for another in "
                f"generate_config.max_model_len ({longest})"
            )

    def check_freezable(self) -> None:
        """Raises RuntimeError where requests cannot go on under other weights with the keys and values that they have."""
        config = self._llm.llm_engine.vllm_config
        if config.lora_config is not None:
            raise RuntimeError("a frozen response keeps the adapter that it began with: pause with 'wait' or 'abort'")
        if config.scheduler_config.async_scheduling:
            raise RuntimeError(
                "a frozen response cannot say which weights drew its next token while a step is scheduled ahead "
                "(vLLM's async_scheduling): pause with 'wait' or 'abort'"
            )
        if config.cache_config.enable_prefix_caching:
            raise RuntimeError(
                "cached prefixes cannot be dropped while responses are frozen: set generate_config.enable_prefix_caching: "
                "false, or pause with 'wait' or 'abort'"
            )

    # ------------------------------------------------------------------ weights

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights.

        Args:
            named: every tensor of the model under its HF checkpoint name, whole; this rank takes its slices.
            version: number of the weights, reported with every response drawn from them.

        Raises:
            RuntimeError: a parameter of the engine was given no tensor.
        """

        self._replace(lambda model: load_named(model, named, self._hooks), version)

    def write_weights(self, write: Callable[[torch.nn.Module], None], version: int) -> None:
        """Has `write` replace all weights, in the layout that `load_weights` of the model expects.

        Args:
            version: number of the weights, reported with every response drawn from them.
        """

        def between_hooks(model: torch.nn.Module) -> None:
            self._hooks.before_load(model)
            write(model)
            self._hooks.after_load(model)

        self._replace(between_hooks, version)

    def _replace(self, change: Callable[[torch.nn.Module], None], version: int) -> None:
        self._llm.apply_model(change)
        # cached prefixes hold keys and values of the old weights; beside frozen responses there are none: `check_freezable`
        if not self._ids and not self._llm.reset_prefix_cache():
            raise RuntimeError("weight push: the rollout engine still runs requests, so its prefix cache could not be reset.")
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        """Prompts that come are computed whole; nothing may be running."""
        self._llm.reset_prefix_cache()

    def load_adapter(self, folder: Path, version: int) -> None:
        """Responses are drawn with this adapter beside the weights; the one before is gone.

        Args:
            folder: as `peft` writes it; stays until the next one is used.
            version: number of the weights.

        Raises:
            RuntimeError: the engine did not take it.
        """
        engine = self._llm.llm_engine
        if self._adapter is not None:
            engine.remove_lora(self._adapter.lora_int_id)
        # vLLM counts adapters from 1, and takes one that it knows by its number from its cache
        self._adapter = LoRARequest(f"version {version}", version + 1, str(folder))
        if not engine.add_lora(self._adapter):
            raise RuntimeError("weight push: the rollout engine did not take the adapter.")

    def find_repacked_parameters(self, model: torch.nn.Module) -> set[str]:
        """Parameters that the platform lays out anew after each load: what is in them before a load is of no use."""
        return self._hooks.repacked(model)

    def get_model(self) -> torch.nn.Module:
        """vLLM's model module of this rank, to be looked at and not changed."""
        return self._llm.apply_model(lambda model: model)[0]

    # ------------------------------------------------------------------ memory

    def release_memory(self) -> None:
        """Gives weights (where the platform can) and KV cache back until `restore_*`."""
        self._hooks.release(self._llm)
        # a sleeping engine's storages keep their sizes while nothing is behind them
        self._has_weights, self._has_cache = not self._hooks.sleeps, False

    def restore_weights(self) -> None:
        """Allocates weight storage again; its content is undefined until the next `load_weights`."""
        self._hooks.restore_weights(self._llm)
        self._has_weights = True

    def restore_cache(self) -> None:
        """Allocates the KV cache again, empty."""
        self._hooks.restore_cache(self._llm)
        self._has_cache = True

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of the weights, of what kernels packed of them and of the KV cache that are on the device now."""
        runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        weights = [*runner.model.parameters(), *runner.model.buffers()] if self._has_weights else []
        return {
            "rollout weights": _storage_bytes(weights),
            "packed weights": self._hooks.packed_bytes(runner.model),
            "KV cache": _storage_bytes(runner.kv_caches) if self._has_cache else 0,
        }


def _completion(token_ids: Sequence[int], found: Any, *, truncated: bool, routing: np.ndarray | None) -> Completion:
    assert isinstance(found, FlatLogprobs)  # flat_logprobs asks for it
    log_probs = [found.logprobs[index] for index in found.start_indices]  # the drawn token is first
    return Completion(list(token_ids), log_probs, truncated, routing)


def _whole_routing(found: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
    """What an engine says of a response, which must be about every token but the last.

    Raises:
        RuntimeError: it is not.
    """
    if found is not None and len(found) != num_tokens:
        raise RuntimeError(
            f"this vLLM ({vllm.__version__}) returned the experts of {len(found)} tokens where {num_tokens} were computed; "
            "rl_config.router_replay.mode R2 needs none of it"
        )
    return found


def _storage_bytes(held: Iterable[Any]) -> int:
    """Of distinct storages behind tensors, which may lie in tuples, as keys and values do."""
    found: dict[int, int] = {}
    waiting = list(held)
    while waiting:
        item = waiting.pop()
        if torch.is_tensor(item):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.size()
        else:
            waiting += item
    return sum(found.values())
