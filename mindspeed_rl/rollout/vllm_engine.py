"""vLLM inside the training process: generate, take new weights in place, give memory back.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from vllm import LLM, TokensPrompt
from vllm.logprobs import FlatLogprobs

from mindspeed_rl import adaptors, platform
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.rollout.arguments import engine_arguments as engine_arguments_of
from mindspeed_rl.rollout.arguments import own_socket_folder, sampling_params
from mindspeed_rl.rollout.loading import load_named
from mindspeed_rl.rollout.requests import Completion, GenerationRequest, Sampling


class VllmEngine:
    """One replica's share of a vLLM engine: the ranks of an inference tensor-parallel group each hold one.

    Ranks of such a group must call the methods with the same arguments in the same order. Building is collective over the
    whole world, because vLLM creates its process groups then.
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
        tp_size = config.infer_tensor_parallel_size
        arguments = engine_arguments_of(
            hf_folder,
            config,
            self._hooks,
            whole_distribution=sampling.whole_distribution,
            kv_bytes_per_token=kv_bytes_per_token,
            # every rank of the training world runs this very code: no executor may start processes of its own
            changes={"distributed_executor_backend": "external_launcher" if tp_size > 1 else "uni"}
            | self._hooks.engine_arguments(config)
            | dict(engine_arguments or {}),
        )
        set_num_threads = torch.set_num_threads
        with platform.current().kept_rng_state(), own_socket_folder():  # vLLM seeds the global generators
            self._llm = LLM(**arguments)
        # it also freezes all objects for the collector and disables set_num_threads
        torch.set_num_threads = set_num_threads
        gc.unfreeze()
        self.weight_version = -1

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling | None = None) -> list[Completion]:
        """One response for each request, in order. No generator is drawn from but the requests' own.

        Args:
            requests: prompts with a seed each.
            sampling: instead of the engine's own, for evaluation.

        Raises:
            RuntimeError: no weights were loaded yet.
        """
        if self.weight_version < 0:
            raise RuntimeError("the rollout engine holds dummy weights; push weights before generating.")
        sampling = sampling or self.sampling
        params = [sampling_params(sampling, request.seed) for request in requests]
        # all other keys may be left out
        prompts = [cast(TokensPrompt, {"prompt_token_ids": request.prompt_ids}) for request in requests]
        completions = []
        with platform.current().kept_rng_state():  # vLLM draws a seed for every token, also where the request has its own
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            sample = output.outputs[0]
            token_ids = list(sample.token_ids)
            found = sample.logprobs
            assert isinstance(found, FlatLogprobs)  # flat_logprobs asks for it
            log_probs = [found.logprobs[index] for index in found.start_indices]  # the drawn token is first
            completions.append(Completion(token_ids, log_probs, truncated=sample.finish_reason == "length"))
        return completions

    # ------------------------------------------------------------------ weights

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights.

        Args:
            named: every tensor of the model under its HF checkpoint name, whole; this rank takes its slices.
            version: number of the weights, reported with every response drawn from them.

        Raises:
            RuntimeError: a parameter of the engine was given no tensor.
        """

        self._llm.apply_model(lambda model: load_named(model, named, self._hooks))
        # cached prefixes hold keys and values of the old weights
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("weight push: the rollout engine still runs requests, so its prefix cache could not be reset.")
        self.weight_version = version

    def read_model(self) -> torch.nn.Module:
        """vLLM's model module of this rank, to be looked at and not changed."""
        return self._llm.apply_model(lambda model: model)[0]

    # ------------------------------------------------------------------ memory

    def release_memory(self) -> None:
        """Gives weights (where the platform can) and KV cache back until `restore_*`."""
        self._hooks.release(self._llm)

    def restore_weights(self) -> None:
        """Allocates weight storage again; its content is undefined until the next `load_weights`."""
        self._hooks.restore_weights(self._llm)

    def restore_cache(self) -> None:
        """Allocates the KV cache again, empty."""
        self._hooks.restore_cache(self._llm)
