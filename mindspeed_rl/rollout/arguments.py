"""Arguments of vLLM's engines and of their requests, in process and in servers alike.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams, envs
from vllm.config import LoadConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import EngineHooks
from mindspeed_rl.adaptors.vllm_float32_head import FLOAT32_HEAD
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.data.images import ImageRules, StoredVideo, collapse_image_tokens, open_image, prepare_images
from mindspeed_rl.files import read_json
from mindspeed_rl.models import architecture_for, list_classes
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.costs import cpu_cache_bytes, read_draft_bytes, state_bytes_per_sequence
from mindspeed_rl.models.model_config import read_linear_attention
from mindspeed_rl.models.plan import read_any_model
from mindspeed_rl.models.quantized_names import is_quantized
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.run.placement import RolloutLayout

_SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"
#: prefix of the names of folders with sockets
SOCKET_PREFIX = "mindspeed-rl-vllm-"


#: keyword arguments of vLLM's `EngineArgs`, which has fields of many types
EngineArguments = dict[str, Any]


def build_engine_arguments(
    hf_folder: str | Path,
    config: GenerateConfig,
    hooks: EngineHooks,
    layout: RolloutLayout,
    *,
    kv_bytes_per_token: int,
    changes: EngineArguments | None = None,
    image_rules: ImageRules | None = None,
) -> EngineArguments:
    """Return the keyword arguments of an engine with dummy weights, as configured in the run file.

    Args:
        hf_folder: folder with config.json (no weights are read).
        layout: layout of the engines; a platform's hooks may replace its executor.
        kv_bytes_per_token: bytes per token of the full model's KV cache, whose size follows where the run file sets none.
        changes: arguments that replace those made here.
        image_rules: image rules of a model of images.
    """
    arguments: EngineArguments = {
        "model": str(hf_folder),
        "load_format": "dummy",
        # texts that end a response, and the form of one, are compared with decoded tokens
        "skip_tokenizer_init": not (config.sampling_config.stop or config.sampling_config.structured_output),
        "dtype": config.dtype,
        "enforce_eager": config.enforce_eager,
        "trust_remote_code": config.trust_remote_code,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        # vLLM refuses less than a token a sequence; a rule refuses a run file with less
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": True,
        # log-probs of the full distribution, at the temperature of the request: `adaptors.vllm_log_probs`
        "logprobs_mode": "raw_logprobs",
        # the model folder's own sampling defaults would change the distribution
        "generation_config": "vllm",
        "disable_log_stats": True,
        # unused: every request has its own
        "seed": 0,
        **layout.engine_arguments(),
        **hooks.engine_arguments(config),
    }
    if image_rules is not None:
        arguments |= _image_arguments(config, image_rules)
    hf_config = read_json(Path(hf_folder, "config.json"))
    if image_rules is None and "vision_config" in hf_config:
        # without prompts that have images, vLLM builds no tower
        arguments["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    # a model of images has the sizes of its language model in a part
    hf_config |= hf_config.get("text_config", {})
    overrides = _override_config(config, hooks, Path(hf_folder), hf_config)
    if platform.current().name == "cpu":
        arguments["kv_cache_memory_bytes"] = _measure_cpu_cache(config, hf_config, kv_bytes_per_token)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if not arguments["enable_chunked_prefill"]:  # a step holds a full prompt
        arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], config.max_model_len)
    compilation = dict(config.compilation_config or {})
    if config.cudagraph_capture_sizes is not None:
        compilation["cudagraph_capture_sizes"] = list(config.cudagraph_capture_sizes)
    # vLLM keeps its own default where a value is empty
    optional = {
        "hf_overrides": overrides,
        "kv_cache_dtype": config.kv_cache_dtype if config.kv_cache_dtype != "auto" else None,
        "compilation_config": compilation,
        "enable_sleep_mode": hooks.sleeps,
        # the trainer sends only the weights of the policy
        "speculative_config": None if config.drafts is None else config.drafts | {"draft_load_config": LoadConfig()},
    }
    arguments |= {name: value for name, value in optional.items() if value}
    arguments |= dict(config.engine_kwargs or {}) | dict(changes or {})
    hooks.check_arguments(config, arguments)
    return arguments


def _image_arguments(config: GenerateConfig, image_rules: ImageRules) -> EngineArguments:
    arguments: EngineArguments = {
        # its processor of images has the tokenizer as a part
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": config.limit_mm_image_per_prompt, "video": config.limit_mm_video_per_prompt},
        # else it starts by encoding images of the largest size, to measure memory that is configured here
        "skip_mm_profiling": True,
    }
    video = image_rules.video
    if config.limit_mm_video_per_prompt and video is not None and not video.normalizes_as_images:
        raise ValueError(
            f"{video.folder}: the processors of images and videos have different image_mean or image_std, and vLLM normalizes"
            " both alike; give video_preprocessor_config.json those of preprocessor_config.json"
        )
    if not image_rules.own_limits:
        low, high = image_rules.min_pixels, image_rules.max_pixels
        arguments["mm_processor_kwargs"] = {"size": {"shortest_edge": low, "longest_edge": high}}
    return arguments


def _override_config(
    config: GenerateConfig, hooks: EngineHooks, hf_folder: Path, hf_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of config.json that the engine reads otherwise."""
    overrides = hooks.override_config(hf_config)
    if (named := hf_config.get("architectures")) and (classes := list_classes(hf_config)) != named:
        # vLLM knows no class with a mark of what saved it
        overrides["architectures"] = classes or [architecture_for(hf_config).hf_classes[0]]
    if "quantization_config" in hf_config or config.quantization is not None:
        # the format of the trainer's weights, also where the published ones are quantized
        overrides["quantization_config"] = (
            None
            if config.quantization is None
            else hooks.quantization_config(config.quantization, partial(_list_quantized, config, hf_folder))
        )
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) == "dynamic" and "alpha" not in rope:
        # up to `max_position_embeddings` these are the plain ones, which the trainer computes; vLLM changes them everywhere
        base = rope.get("rope_theta", hf_config.get("rope_theta", 10000.0))
        axes = {name: value for name, value in overrides.get("rope_parameters", {}).items() if name.startswith("mrope_")}
        overrides |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": base, **axes}}
    if config.fp32_lm_head:
        overrides[FLOAT32_HEAD] = True
    return overrides


def _list_quantized(config: GenerateConfig, hf_folder: Path) -> dict[str, bool]:
    """Return the HF names of the weights of a model, each expert's by itself -> True for those that are quantized."""
    architecture, model_config, _ = read_any_model(hf_folder, trusts_code=config.trust_remote_code)
    ops = architecture.weight_ops(model_config, ExpertPacking("grouped", 1))
    return {name: is_quantized(name) for op in ops for name in op.hf}


def _measure_cpu_cache(config: GenerateConfig, hf_config: Mapping[str, Any], kv_bytes_per_token: int) -> int:
    """Return the bytes of the caches of an engine on the CPU."""
    state_bytes = 0
    if "linear_num_value_heads" in hf_config:
        linear = read_linear_attention(hf_config, hf_config["num_hidden_layers"])
        itemsize = 4 if config.dtype == "float32" else 2
        state_bytes = state_bytes_per_sequence(linear, itemsize, drafts=config.num_draft_tokens)
    kv_bytes_per_token += read_draft_bytes(config, config.cache_itemsize)[1]
    return cpu_cache_bytes(config, kv_bytes_per_token, state_bytes)


def build_prompt(prompt_ids: Sequence[int], images: Sequence[str], rules: ImageRules | None) -> dict[str, Any]:
    """Return vLLM's prompt of these tokens, with the images and videos whose tokens are among them.

    vLLM takes one token for each and writes all of them itself, by the same processor. It gets the frames of a video as they
    are in the clip, sampled and resized.

    Raises:
        ValueError: an image cannot be read, or its tokens are not there.
    """
    if not images or rules is None:
        return {"prompt_token_ids": list(prompt_ids)}
    stored = prepare_images(rules, images)
    videos = [_describe_video(one) for one in stored if isinstance(one, StoredVideo)]
    pictures = [open_image(one.key) for one in stored if not isinstance(one, StoredVideo)]
    data = {"image": pictures, "video": videos}
    prompt: dict[str, Any] = {
        "prompt_token_ids": collapse_image_tokens(prompt_ids, stored),
        "multi_modal_data": {kind: some for kind, some in data.items() if some},
    }
    if videos:
        prompt["mm_processor_kwargs"] = {"videos_kwargs": {"do_resize": False}}
    return prompt


def check_prompt(prompt_ids: Sequence[int], taken_ids: Sequence[int]) -> None:
    """Check that an engine computes a prompt with images or videos on the tokens that the trainer has.

    vLLM writes the tokens of media itself, times of videos by its tokenizer: transformers gives it the class of the model's
    type, whatever tokenizer_config.json names.

    Raises:
        ValueError: it computes other ones.
    """
    if list(taken_ids) == list(prompt_ids):
        return
    pairs = enumerate(itertools.zip_longest(prompt_ids, taken_ids))
    index, (ours, theirs) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"the rollout engine computes a prompt with images or videos on other tokens ({len(taken_ids)}) than the trainer "
        f"({len(prompt_ids)}): token {index} is {theirs} there and {ours} here; its processor or its tokenizer differs from "
        "the folder's files. Use the published ones of this model, tokenizer_config.json with its tokenizer_class too"
    )


def _describe_video(video: StoredVideo) -> tuple[np.ndarray, dict[str, object]]:
    """Return the frames of a video and what vLLM and the processor read about it: the times of its frames."""
    clip = video.clip
    return video.read_frames(), {
        "fps": clip.fps,
        "total_num_frames": clip.num_frames,
        "duration": clip.num_frames / clip.fps,
        "frames_indices": list(clip.indices),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def check_texts(sampling: Sampling, vllm_config: VllmConfig) -> None:
    """Check that an engine can end a response by a text, or give it a form; a rule checks the run file's.

    Raises:
        ValueError: it makes drafts, whose tokens after the text would belong to the response too.
    """
    if vllm_config.speculative_config is not None and (sampling.stop or sampling.structured_output):
        what = "stop texts" if sampling.stop else "a form"
        raise ValueError(
            f"a request has {what}, and the engine checks several tokens in a step (generate_config.speculative_config): leave "
            "one of them out"
        )


def build_sampling_params(sampling: Sampling, seed: int, *, output_kind: RequestOutputKind) -> SamplingParams:
    """Return vLLM's parameters of a response: with a generator of its own, and with the log-prob of each sampled token."""
    form = StructuredOutputsParams(**json.loads(sampling.structured_output)) if sampling.structured_output else None
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=min(sampling.min_tokens, sampling.max_tokens),
        stop=list(sampling.stop),
        structured_outputs=form,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only stop_token_ids end a response
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_clone=True,  # it is used once
        output_kind=output_kind,
    )


@contextmanager
def use_socket_folder(folder: str) -> Iterator[None]:
    """Make vLLM open the sockets between the parts of an engine in this folder; elsewhere a killed process's would stay.

    vLLM may have cached the folder of an earlier engine of this process with its environment; that cache is dropped.
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
