"""vLLM inside the training process: generate, take new weights in place, release memory.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

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
from mindspeed_rl.adaptors.engine_hooks import DERIVED, compile_forms_at_once, unlink_message_buffers
from mindspeed_rl.adaptors.vllm_drafts import join_drafts
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.rollout.arguments import (
    SOCKET_PREFIX,
    EngineArguments,
    build_engine_arguments,
    build_prompt,
    build_sampling_params,
    check_prompt,
    check_texts,
    use_socket_folder,
)
from mindspeed_rl.rollout.protocol import LoadsWeights
from mindspeed_rl.rollout.requests import Completion, Sampling
from mindspeed_rl.run.placement import RolloutLayout
from mindspeed_rl.scratch import scratch_folder


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one response.

    Attributes:
        prompt_ids: tokens of the prompt.
        seed: seed of this response: results do not depend on other requests in the batch.
    """

    prompt_ids: list[int]
    seed: int


class VllmEngine:
    """One rank's part of a vLLM engine; the ranks of an inference tensor-parallel group form a replica. See `StepEngine`.

    Building is collective over all ranks, because vLLM creates its process groups then.
    """

    def __init__(
        self,
        hf_folder: str | Path,
        config: GenerateConfig,
        sampling: Sampling,
        *,
        run_id: str,
        kv_bytes_per_token: int,
        engine_arguments: EngineArguments | None = None,
        image_rules: ImageRules | None = None,
    ) -> None:
        """Build the engine with dummy weights; `load_weights` must come before the first `generate`.

        Args:
            hf_folder: folder with config.json (no weights are read).
            config: the engine's keys.
            sampling: sampling parameters of training responses.
            run_id: unique to the run and equal on all its ranks.
            kv_bytes_per_token: bytes per token of the full model's KV cache, whose size follows where the run file sets none.
            engine_arguments: arguments of vLLM that replace those made here.
            image_rules: image rules of a model of images.
        """
        self.hooks = adaptors.engine_hooks()
        self.hooks.patch_libraries()
        self.hooks.before_build(run_id)
        self.sampling, self.image_rules = sampling, image_rules
        distributed = torch.distributed.is_initialized()
        self.layout = RolloutLayout.from_config(config, torch.distributed.get_world_size() if distributed else 1)
        arguments = build_engine_arguments(
            hf_folder,
            config,
            self.hooks,
            self.layout,
            kv_bytes_per_token=kv_bytes_per_token,
            changes=engine_arguments,
            image_rules=image_rules,
        )
        if distributed and self.layout.world_size > 1:
            # vLLM reads this rank's index among the replicas that share experts from the environment of the process
            master = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            os.environ.update(self.layout.engine_environment(torch.distributed.get_rank(), master))
        set_num_threads = torch.set_num_threads
        frozen = gc.get_freeze_count()
        if not frozen:  # vLLM collects garbage several times while it starts: half a second each with the objects of modules
            gc.freeze()
        # vLLM seeds the global generators; once its parts are connected, the files of their sockets are not needed
        with (
            platform.current().preserve_rng_state(),
            scratch_folder(SOCKET_PREFIX) as sockets,
            use_socket_folder(str(sockets)),
        ):
            self._llm = LLM(**arguments)
        if finalizer := vars(self._llm.llm_engine.engine_core).get("_finalizer"):  # vLLM 0.32
            finalizer.atexit = False  # an engine that lasts as long as its process is not taken apart for a second first
        unlink_message_buffers()
        compile_forms_at_once(self._llm)
        # it also freezes all objects for the collector and disables set_num_threads
        torch.set_num_threads = set_num_threads
        if not frozen:  # in a copy of a fork server they stay frozen: to collect its 700,000 would also unshare their pages
            gc.unfreeze()
        self.weight_version, self.syncs_drafts = -1, False
        self.list_replaced: Callable[[torch.nn.Module], Sequence[Tensor]] | None = None
        self._adapter: LoRARequest | None = None
        self._named_adapters: dict[str, LoRARequest] = {}
        self._adapter_ids = itertools.count(1)
        self._has_weights = self._has_cache = True
        self._ids: dict[str, str] = {}  # of running requests: our name -> the engine's

        #: True where the engine captures no graphs although the run file wants them: vLLM falls back by itself
        self.fell_back_to_eager = self._llm.llm_engine.vllm_config.model_config.enforce_eager and not config.enforce_eager

    # ------------------------------------------------------------------ responses

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling | None = None) -> list[Completion]:
        """Return one response for each request, in order. No generator is used but the requests' own.

        Replicas that share experts (`layout.in_step`) must call this equally often, those without requests as well: they make
        empty steps until the last of them has all its responses.

        Args:
            requests: prompts with a seed each; may be empty.
            sampling: replaces the engine's own, for evaluation.

        Raises:
            RuntimeError: no weights were loaded yet.
        """
        completions: dict[str, Completion] = {}
        with platform.current().preserve_rng_state():  # vLLM draws a seed for every token, also where the request has its own
            for index, request in enumerate(requests):
                self.add_request(str(index), request.prompt_ids, sampling or self.sampling, request.seed)
            while self.has_unfinished() if self.layout.in_step else self._ids:
                completions.update(self.step())
        return [completions[str(index)] for index in range(len(requests))]

    def add_request(self, name: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> None:
        """Add a request; the steps from now on work on it.

        Args:
            name: name of the request, unique among those that run.
            seed: seed of this response: results do not depend on other requests in the batch.

        Raises:
            RuntimeError: no weights were loaded yet.
            ValueError: an image cannot be read, or vLLM has other tokens for it.
        """
        if self.weight_version < 0:
            raise RuntimeError("the rollout engine holds dummy weights; push weights before generating.")
        # FINAL_ONLY: else every step makes an output of all tokens so far
        params = build_sampling_params(sampling, seed, output_kind=RequestOutputKind.FINAL_ONLY)
        # all other keys may be left out
        prompt = cast(TokensPrompt, build_prompt(prompt_ids, sampling.images, self.image_rules))
        adapter = self._named_adapters[sampling.adapter] if sampling.adapter else self._adapter
        # vLLM from about 0.16 on adds a suffix to the name, which its outputs leave out
        self._ids[name] = self._llm.llm_engine.add_request(name, prompt, params, lora_request=adapter) or name
        if sampling.images:
            state = self._llm.llm_engine.output_processor.request_states[self._ids[name]]
            try:
                check_prompt(prompt_ids, state.prompt_token_ids or ())
            except ValueError:
                self.abort([name])
                raise

    def has_unfinished(self, busy: bool = False) -> bool:
        """Return True while a replica that shares experts with this one has requests or is busy; collective over them.

        Each computes experts for the others, so each must make every step.

        Args:
            busy: this replica may have requests soon.
        """
        group = self._llm.llm_engine.dp_group
        assert group is not None  # the layout has replicas that share experts
        return ParallelConfig.has_unfinished_dp(group, busy or bool(self._ids))

    def step(self) -> list[tuple[str, Completion]]:
        """Compute a token of every running request, or a chunk of its prompt; return those that have ended, by name.

        Without requests it is an empty step, for the replicas that share experts with this one.
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
                routing, num_tokens = sample.routed_experts, len(output.prompt_token_ids or ()) + len(sample.token_ids) - 1
                if routing is not None and len(routing) != num_tokens:
                    raise RuntimeError(
                        f"this vLLM ({vllm.__version__}) returned the experts of {len(routing)} tokens where {num_tokens} were "
                        "computed; rl_config.router_replay.mode R2 needs none of it"
                    )
                completion = _completion(sample.token_ids, sample.logprobs, truncated=truncated, routing=routing)
                del self._ids[output.request_id]
                ended.append((output.request_id, completion))
        return ended

    def partial_completion(self, name: str) -> Completion:
        """Return the tokens that a request has so far."""
        state = self._llm.llm_engine.output_processor.request_states[self._ids[name]]
        assert state.detokenizer is not None and state.logprobs_processor is not None  # both are there for generation
        chunks = getattr(state, "routed_experts_chunks", None)  # vLLM's, from 0.21 on
        routing = np.concatenate(chunks) if chunks else None
        tokens = list(state.detokenizer.output_token_ids)
        return _completion(tokens, state.logprobs_processor.logprobs, truncated=False, routing=routing)

    def abort(self, names: Iterable[str]) -> None:
        """Abort these requests; names of others are ignored."""
        running = [name for name in names if self._ids.pop(name, None) is not None]
        if running:
            self._llm.llm_engine.abort_request(running)

    def check_request(self, num_tokens: int, sampling: Sampling) -> None:
        """Check that a prompt leaves room for another token, and that the engine can sample so.

        Raises:
            ValueError: one of them does not hold.
        """
        check_texts(sampling, self._llm.llm_engine.vllm_config)
        max_len = self._llm.llm_engine.model_config.max_model_len
        if num_tokens >= max_len:
            raise ValueError(
                f"a prompt of {num_tokens} tokens, with those that were generated, leaves no room for another in "
                f"generate_config.max_model_len ({max_len})"
            )

    def check_freezable(self) -> None:
        """Check that requests can continue under other weights with the keys and values that they have.

        Raises:
            RuntimeError: they cannot.
        """
        config = self._llm.llm_engine.vllm_config
        if config.lora_config is not None:
            raise RuntimeError("a frozen response keeps the adapter that it started with: pause with 'wait' or 'abort'")
        if config.scheduler_config.async_scheduling:
            raise RuntimeError(
                "the weights that sampled the next token of a frozen response are unknown while a step is scheduled ahead "
                "(vLLM's async_scheduling): pause with 'wait' or 'abort'"
            )
        if config.cache_config.enable_prefix_caching:
            raise RuntimeError(
                "cached prefixes cannot be dropped while responses are frozen: set generate_config.enable_prefix_caching: "
                "false, or pause with 'wait' or 'abort'"
            )

    # ------------------------------------------------------------------ weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | Callable[[torch.nn.Module], None], version: int) -> None:
        """Replace all weights.

        Args:
            weights: every full tensor of the model under its HF checkpoint name, of which this rank takes its slices; or a
                function that fills the model's parameters in place, in the layout that `load_weights` of the model expects.
            version: version of the weights, reported with every response sampled from them.

        Raises:
            RuntimeError: a parameter of the engine was given no tensor.
        """

        def fill(model: torch.nn.Module) -> None:
            model = self._join_drafts(model)
            self.hooks.before_load(model)
            if callable(weights):
                weights(model)
            else:
                _load_tensors(model, weights)
            self.hooks.after_load(model)

        self._llm.apply_model(fill)
        # cached prefixes hold keys and values of the old weights; with frozen responses there are none: `check_freezable`
        if not self._ids and not self._llm.reset_prefix_cache():
            raise RuntimeError("weight push: the rollout engine still runs requests, so its prefix cache could not be reset.")
        if self.image_rules is not None:
            # features of images, which the old tower made
            self._llm.llm_engine.engine_core.reset_encoder_cache()
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes, so that later prompts are computed in full; nothing may be running."""
        self._llm.reset_prefix_cache()

    def load_adapter(self, folder: Path, version: int) -> None:
        """Sample later responses with this adapter next to the weights; the one before is removed.

        Args:
            folder: as `peft` writes it; it must exist until the next one is loaded.
            version: version of the weights.

        Raises:
            RuntimeError: the engine did not take it.
        """
        engine = self._llm.llm_engine
        if self._adapter is not None:
            engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = self._add_adapter(f"version {version}", folder)

    def _add_adapter(self, name: str, folder: Path) -> LoRARequest:
        # vLLM counts adapters from 1, and takes an id that was loaded before from its cache
        request = LoRARequest(name, next(self._adapter_ids), str(folder))
        if not self._llm.llm_engine.add_lora(request):
            raise RuntimeError("weight push: the rollout engine did not take the adapter.")
        return request

    def load_named_adapters(self, folders: Mapping[str, Path], *, changed: Collection[str] = ()) -> None:
        """See `StepEngine`.

        Raises:
            RuntimeError: the engine did not take one.
        """
        # where the engine sleeps, its copies are gone
        kept = set() if self.hooks.sleeps else set(folders).difference(changed)
        for name in set(self._named_adapters) - kept:
            self._llm.llm_engine.remove_lora(self._named_adapters.pop(name).lora_int_id)
        for name in folders.keys() - self._named_adapters.keys():
            self._named_adapters[name] = self._add_adapter(name, folders[name])

    def find_adapter_slot(self, name: str = "") -> int:
        """See `StepEngine`."""
        request = self._named_adapters[name] if name else self._adapter
        assert request is not None
        return self._runner.lora_manager._adapter_manager.lora_index_to_id.index(request.lora_int_id)

    def get_model(self) -> torch.nn.Module:
        """Return vLLM's model module of this rank, to be read and not changed; with `syncs_drafts` its drafts' too."""
        return self._join_drafts(self._llm.apply_model(lambda model: model)[0])

    def _join_drafts(self, model: torch.nn.Module) -> torch.nn.Module:
        if not self.syncs_drafts:
            return model
        return self._llm.collective_rpc(lambda worker: join_drafts(model, worker.model_runner))[0]

    # ------------------------------------------------------------------ memory

    def release_memory(self) -> None:
        """Release weights (where the platform can) and KV cache until `restore_memory`."""
        replaced: Sequence[Tensor] = ()
        if self.hooks.sleeps and self.list_replaced is not None:
            replaced = self.list_replaced(self.get_model())
        self.hooks.release(self._llm, replaced)
        # the storages of a sleeping engine keep their sizes without memory
        self._has_weights, self._has_cache = not self.hooks.sleeps, False

    def restore_memory(self, part: Literal["weights", "cache"]) -> None:
        """Allocate weights, whose content is undefined until the next `load_weights`, or the KV cache, empty."""
        if part == "weights":
            self.hooks.restore_weights(self._llm)
            self._has_weights = True
        else:
            self.hooks.restore_cache(self._llm)
            self._has_cache = True

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes on the device now of the weights, of their packed copies for kernels, and of the KV cache."""
        weights, cache = self._list_memory()
        return {
            "rollout weights": _storage_bytes(weights) if self._has_weights else 0,
            "packed weights": self.hooks.packed_bytes(self._runner.model),
            "KV cache": _storage_bytes(cache) if self._has_cache else 0,
        }

    def absent_bytes(self) -> int:
        """Return the bytes of weights and KV cache that sleep, whose storages keep their sizes."""
        weights, cache = self._list_memory()
        return (0 if self._has_weights else _storage_bytes(weights)) + (0 if self._has_cache else _storage_bytes(cache))

    @property
    def _runner(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def _list_memory(self) -> tuple[Sequence[Tensor], Sequence[object]]:
        """Return the tensors of the weights, and the entries of the KV cache."""
        runner = self._runner
        return [*runner.model.parameters(), *runner.model.buffers()], runner.kv_caches


def _load_tensors(model: torch.nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load full tensors; raise RuntimeError where a parameter of the model was given none."""
    loaded = cast(LoadsWeights, model).load_weights(iter(named))
    # a tied head is the embedding, and is not reported as loaded
    tied = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set()
    missing = {name for name, _ in model.named_parameters() if not name.endswith(DERIVED)} - tied - set(loaded)
    if missing:
        raise RuntimeError(
            f"weight push: {len(missing)} parameters of the rollout engine got no tensor, for example {min(missing)}."
        )


def _completion(token_ids: Sequence[int], log_probs: object, *, truncated: bool, routing: np.ndarray | None) -> Completion:
    assert isinstance(log_probs, FlatLogprobs)  # requested by flat_logprobs
    sampled = [log_probs.logprobs[index] for index in log_probs.start_indices]  # the sampled token is first
    return Completion(list(token_ids), sampled, truncated, routing)


def _storage_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of the distinct storages of tensors; these may be in tuples, as keys and values are."""
    sizes: dict[int, int] = {}
    waiting = list(tensors)
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.size()
        else:
            assert isinstance(item, (tuple, list)), type(item)
            waiting += item
    return sum(sizes.values())
