"""vLLM inside the training process: generate, take new weights in place, give memory back.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from vllm import LLM, SamplingParams, TokensPrompt, envs
from vllm.logprobs import FlatLogprobs

from mindspeed_rl import adaptors, platform
from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.rollout_layout import RolloutLayout, rollout_layout
from mindspeed_rl.models.kv_cache import cpu_cache_bytes
from mindspeed_rl.rollout.requests import Completion, GenerationRequest, Sampling

_SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"


@contextmanager
def _own_socket_folder() -> Iterator[None]:
    """Has vLLM make the sockets by which the ranks of an engine meet in a folder that is removed when the block ends.

    Once they have met the files are of no use, and those of a killed process would stay. vLLM may have kept the folder of an
    earlier engine of this process in its copy of the environment, which is dropped.
    """
    before = os.environ.get(_SOCKET_FOLDER)
    with TemporaryDirectory(prefix="mindspeed-rl-vllm-") as folder:
        os.environ[_SOCKET_FOLDER] = folder
        if hasattr(envs, "disable_envs_cache"):
            envs.disable_envs_cache()
        try:
            yield
        finally:
            del os.environ[_SOCKET_FOLDER]
            if before is not None:
                os.environ[_SOCKET_FOLDER] = before


def _set_place(layout: RolloutLayout) -> None:
    """vLLM reads this rank's place among the replicas that share experts from the environment of the process."""
    if torch.distributed.is_initialized():
        master = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        os.environ.update(layout.engine_environment(torch.distributed.get_rank(), master))


class LoadsWeights(Protocol):
    """What all of vLLM's models can do."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        """Takes tensors under HF names; the names of the parameters that were filled."""
        ...


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
        self.layout = rollout_layout(config, torch.distributed.get_world_size() if distributed else 1)
        arguments: dict[str, Any] = {
            "model": str(hf_folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": config.dtype,
            "enforce_eager": config.enforce_eager,
            "trust_remote_code": config.trust_remote_code,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            # vLLM refuses less: a step holds a token a sequence and, without chunked prefill, a whole prompt
            "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len),
            "enable_prefix_caching": config.enable_prefix_caching,
            "enable_chunked_prefill": True,
            # tempered log-probs, as the trainer computes them; with cut-offs those would be renormalised over what is kept
            "logprobs_mode": "processed_logprobs" if sampling.whole_distribution else "raw_logprobs",
            # the model folder's own sampling defaults would change the distribution
            "generation_config": "vllm",
            "disable_log_stats": True,
            # never drawn from: every request brings its own
            "seed": 0,
            **self.layout.engine_arguments(),
            **self._hooks.engine_arguments(config),
        }
        if "quantization_config" in json.loads(Path(hf_folder, "config.json").read_text()):
            # the weights that are pushed are in full, whatever the published ones are
            arguments["hf_overrides"] = {"quantization_config": None}
        if platform.current().name == "cpu":
            arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(config, kv_bytes_per_token)
        else:
            arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        if self._hooks.sleeps:
            arguments["enable_sleep_mode"] = True
        arguments.update(engine_arguments or {})
        _set_place(self.layout)
        set_num_threads = torch.set_num_threads
        with platform.current().kept_rng_state(), _own_socket_folder():  # vLLM seeds the global generators
            self._llm = LLM(**arguments)
        # it also freezes all objects for the collector and disables set_num_threads
        torch.set_num_threads = set_num_threads
        gc.unfreeze()
        self.weight_version = -1

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
        if self.weight_version < 0:
            raise RuntimeError("the rollout engine holds dummy weights; push weights before generating.")
        sampling = sampling or self.sampling
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # what ends a response is in stop_token_ids alone
                seed=request.seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                skip_clone=True,  # nobody else holds it
            )
            for request in requests
        ]
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

        def load(model: torch.nn.Module) -> None:
            loaded = cast(LoadsWeights, model).load_weights(iter(named))  # no base class of vLLM's models says it
            # a tied head is the embedding, and is not reported as loaded
            tied = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set()
            missing = {name for name, _ in model.named_parameters() if not name.endswith(DERIVED)} - tied - set(loaded)
            if missing:
                raise RuntimeError(
                    f"weight push: {len(missing)} parameters of the rollout engine got no tensor, for example {min(missing)}."
                )

        self.write_weights(load, version)

    def write_weights(self, write: Callable[[torch.nn.Module], None], version: int) -> None:
        """Has `write` replace all weights, in the layout that `load_weights` of the model expects.

        Args:
            version: number of the weights, reported with every response drawn from them.
        """

        def replace(model: torch.nn.Module) -> None:
            self._hooks.before_load(model)
            write(model)
            self._hooks.after_load(model)

        self._llm.apply_model(replace)
        # cached prefixes hold keys and values of the old weights
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("weight push: the rollout engine still runs requests, so its prefix cache could not be reset.")
        self.weight_version = version

    def repacked_parameters(self, model: torch.nn.Module) -> set[str]:
        """Parameters that the platform lays out anew after each load: what is in them before a load is of no use."""
        return self._hooks.repacked(model)

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
