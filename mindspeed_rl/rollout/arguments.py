"""What vLLM's engines are built with and asked for, in process and in servers alike.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import vllm
from vllm import EngineArgs, SamplingParams, envs

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import EngineHooks
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.placement import RolloutLayout
from mindspeed_rl.models.kv_cache import cpu_cache_bytes
from mindspeed_rl.rollout.requests import Sampling

_SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"
#: how the names of folders with sockets begin
SOCKETS = "mindspeed-rl-vllm-"


def engine_arguments(
    hf_folder: str | Path,
    config: GenerateConfig,
    hooks: EngineHooks,
    layout: RolloutLayout,
    *,
    whole_distribution: bool,
    kv_bytes_per_token: int,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of an engine with dummy weights, as the run file says.

    Args:
        hf_folder: folder with config.json (no weights are read).
        layout: of the engines; a platform's hooks may replace its executor.
        whole_distribution: no token is cut off when training responses are drawn.
        kv_bytes_per_token: of the whole model's KV cache; sizes the cache where the run file does not.
        changes: arguments that take the place of those made here.
    """
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
        "logprobs_mode": "processed_logprobs" if whole_distribution else "raw_logprobs",
        # the model folder's own sampling defaults would change the distribution
        "generation_config": "vllm",
        "disable_log_stats": True,
        # never drawn from: every request brings its own
        "seed": 0,
        **layout.engine_arguments(),
        **hooks.engine_arguments(config),
    }
    if "quantization_config" in json.loads(Path(hf_folder, "config.json").read_text()):
        # the weights that are pushed are in full, whatever the published ones are
        arguments["hf_overrides"] = {"quantization_config": None}
    if platform.current().name == "cpu":
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(config, kv_bytes_per_token)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if hooks.sleeps:
        arguments["enable_sleep_mode"] = True
    return arguments | dict(changes or {})


def routing_arguments(key: str) -> dict[str, Any]:
    """With these an engine says to which experts it sent each token.

    Args:
        key: of the run file that asks for it, for the error.

    Raises:
        ValueError: this vLLM cannot.
    """
    name = "enable_return_routed_experts"
    if name not in inspect.signature(EngineArgs).parameters:
        raise ValueError(f"{key} needs a vLLM that has {name}, from 0.21 on, and this is {vllm.__version__}.")
    return {name: True}


def sampling_params(sampling: Sampling, seed: int, **more: Any) -> SamplingParams:
    """vLLM's words for how a response is drawn: with a generator of its own, and with the log-prob of each drawn token."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # what ends a response is in stop_token_ids alone
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,  # nobody else holds it
        **more,
    )


@contextmanager
def own_socket_folder() -> Iterator[None]:
    """Has vLLM make the sockets by which the parts of an engine meet in a folder that is removed when the block ends.

    Once they have met the files are of no use, and those of a killed process would stay.
    """
    with TemporaryDirectory(prefix=SOCKETS) as folder, sockets_in(folder):
        yield


@contextmanager
def sockets_in(folder: str) -> Iterator[None]:
    """Has vLLM make its sockets in this folder.

    vLLM may have kept the folder of an earlier engine of this process in its copy of the environment, which is dropped.
    """
    before = os.environ.get(_SOCKET_FOLDER)
    os.environ[_SOCKET_FOLDER] = folder
    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()
    try:
        yield
    finally:
        del os.environ[_SOCKET_FOLDER]
        if before is not None:
            os.environ[_SOCKET_FOLDER] = before
