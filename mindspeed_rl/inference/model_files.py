"""The model of an inference engine and its settings: a Hugging Face folder or a checkpoint, with or without an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.checkpoint.command import check_target_modules
from mindspeed_rl.checkpoint.dist import DistFolder
from mindspeed_rl.checkpoint.hf import write_config
from mindspeed_rl.checkpoint.jobs import LoraShards, Transform
from mindspeed_rl.checkpoint.lora import check_scale, is_peft_folder, open_peft
from mindspeed_rl.checkpoint.mcore import TRACKER_NAME, Adapters, MegatronFolder, iteration_folder
from mindspeed_rl.checkpoint.source import ModelOptions, Source, open_hf, open_megatron
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.model_metadata import describe_inner_adapters
from mindspeed_rl.files import describe_missing, read_json
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.run.rules.engine_limits import engine_limits
from mindspeed_rl.scratch import make_process_folder


@dataclass(frozen=True)
class ModelSettings:
    """The configured model.

    Attributes:
        load: Hugging Face folder, or checkpoint folder of any Megatron form (its latest iteration, or `iteration`).
        hf_folder: with config.json and tokenizer of a checkpoint; None takes those in the checkpoint.
        lora_load: adapter to merge: a PEFT folder, or a checkpoint with LoRA weights.
        lora_r, lora_alpha: checked against the adapter; alpha is needed where the adapter does not state it.
        lora_target_modules: checked against the adapter, Megatron's names.
        loosely: tensors that the model does not have are skipped.
        by_module: transformers' module computes the model, of any family that it has.
        trusts_code: Python code of the folder may be run for that.
    """

    load: Path
    hf_folder: Path | None = None
    iteration: int | None = None
    lora_load: Path | None = None
    lora_r: int | None = None
    lora_alpha: float | None = None
    lora_target_modules: tuple[str, ...] = ()
    loosely: bool = False
    by_module: bool = False
    trusts_code: bool = False


@dataclass(frozen=True)
class ModelFiles:
    """An opened model: every tensor can be streamed under its Hugging Face name.

    Attributes:
        hf_folder: has config.json.
        source: the opened checkpoint.
        transform: merges the adapter of `lora_load`, None without one.
    """

    hf_folder: Path
    source: Source
    transform: Transform | None = None

    @property
    def model_config(self) -> ModelConfig:
        """Shape of the model."""
        return self.source.model_config

    def describe(self) -> str:
        """Return one line for the console."""
        adapted = ", adapter merged" if self.transform is not None or self.source.adapters else ""
        kind = {"hf": "Hugging Face", "mcore": "Megatron", "legacy": "Megatron legacy", "torch_dist": "torch_dist"}
        return f"{self.source.path} ({kind[self.source.kind]}, {self.source.architecture.name}{adapted})"

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of every weight; one stored parameter is in memory at a time."""
        copies: dict[str, list[str]] = {}
        for copy, owner in self.source.architecture.hf_copies(self.model_config).items():
            copies.setdefault(owner, []).append(copy)
        stored = {name for group in self.source.groups for name in group.hf}
        for group in self.source.groups:
            for name, tensor in group.load().items():
                if self.transform is not None:
                    tensor = self.transform(name, tensor)
                yield name, tensor
                # HF repeats tensors that a Megatron source stores once
                for copy in copies.get(name, ()):
                    if copy not in stored:
                        yield copy, tensor


class _MegatronMerge:
    """A transform that adds Megatron adapters to their Hugging Face weights, in float32."""

    def __init__(self, adapters: Adapters, scale: float) -> None:
        self._adapters = {name: adapter for adapter in adapters.values() for name in adapter[0].hf}
        self._scale = scale
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._adapters:
            return tensor
        op, a, b = self._adapters[name]
        if self._last[0] != op.mcore:  # query, key and value (gate and up) come one after another: one product serves them
            full_a, full_b = LoraShards(a, b, self._scale).join_shards(op)
            self._last = (op.mcore, op.shards_to_hf([self._scale * (full_b.float() @ full_a.float())]))
        return (tensor.float() + self._last[1][name]).to(tensor.dtype)


def open_model(settings: ModelSettings, *, verified: bool = False) -> ModelFiles:
    """Open a model and check it; no weights are read yet, but for the checksums of their files.

    Args:
        settings: settings of the model.
        verified: another process has checked the files against their checksums.

    Raises:
        ValueError: the model is not usable, its shape is unknown, or adapter and base do not fit.
    """
    path = settings.load
    _check_kind(path, settings.iteration)
    options = ModelOptions(hf_folder=settings.hf_folder, iteration=settings.iteration, loosely=settings.loosely)
    if _is_hf(path):
        if settings.iteration is not None:
            raise ValueError(f"--load-iteration {settings.iteration}: {path} is a Hugging Face folder, which has no iterations")
        source = open_hf(path, options, by_module=settings.by_module, trusts_code=settings.trusts_code)
    else:
        source = open_megatron(path, options, verified=verified)
    source, transform = _with_adapter(source, settings)
    folder = source.companions
    if folder is None:  # the checkpoint's own settings have the config; vLLM reads it from a file
        folder = make_process_folder("mindspeed-rl-config-")
        write_config(folder, source.hf_config)
    return ModelFiles(folder, source, transform)


def _is_hf(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _check_kind(path: Path, iteration: int | None) -> None:
    """Raise ValueError for folders that look loadable and are not a language model with its weights."""
    if not path.is_dir():
        raise ValueError(f"--load {path} is not a folder" if path.exists() else f"--load: {describe_missing(path)}")
    if is_peft_folder(path):
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        raise ValueError(f"--load {path} is an adapter: pass it as --lora-load, and its base ({base}) as --load")
    if _is_hf(path):
        names = read_json(path / "config.json").get("architectures") or []
        if any(name.endswith("ForSequenceClassification") for name in names):
            raise ValueError(f"--load {path} is a reward model ({names[0]}), which generates no text; give a language model")
        return
    if not any((path / name).is_file() for name in (TRACKER_NAME, "metadata.json")) and not any(path.glob("mp_rank_*")):
        raise ValueError(
            f"--load {path} holds neither a Hugging Face model (config.json, *.safetensors) nor a checkpoint ({TRACKER_NAME})"
            f"{describe_inner_adapters(path)}"
        )
    record = iteration_folder(path, iteration) / "run_state.json"
    lora = read_json(record).get("lora") if record.is_file() else None
    if lora is not None and not lora["with_base"]:
        raise ValueError(
            f"--load {path} holds only adapters (lora_ckpt_filter): pass it as --lora-load, and the base as --load"
        )


def _with_adapter(source: Source, settings: ModelSettings) -> tuple[Source, Transform | None]:
    """Return the source with its own adapter merged, or the transform that merges another one."""
    path, r, alpha = settings.lora_load, settings.lora_r, settings.lora_alpha
    if path is None:
        if source.adapters:
            check_target_modules(settings.lora_target_modules, source.adapters)
            return source.merge_adapters(check_scale(r, alpha, source.adapters, source.lora)), None
        if r is not None or alpha is not None or settings.lora_target_modules:
            raise ValueError(f"--lora-r, --lora-alpha and --lora-target-modules need an adapter: {source.path} holds none")
        return source, None
    if source.adapters:
        raise ValueError(f"--lora-load {path}: {source.path} has adapters of its own; merge them first (mindspeed-rl convert)")
    if is_peft_folder(path):
        if settings.lora_target_modules:
            raise ValueError("--lora-target-modules checks Megatron adapters; a PEFT folder says its modules itself")
        return source, open_peft(path, source.architecture.weight_ops(source.model_config), r, alpha)
    if not path.is_dir():
        raise ValueError(f"--lora-load {path} is not a folder")
    adapters, stated = _megatron_adapters(path, source)
    check_target_modules(settings.lora_target_modules, adapters)
    return source, _MegatronMerge(adapters, check_scale(r, alpha, adapters, stated))


def _megatron_adapters(path: Path, source: Source) -> tuple[Adapters, tuple[int | None, float | None]]:
    """Read the LoRA weights of a checkpoint in any layout, and the (r, alpha) that it states."""
    if (iteration_folder(path) / "metadata.json").is_file():
        dist_folder = DistFolder(path)
        adapters = dist_folder.adapters(source.architecture, source.model_config)
        return adapters, (dist_folder.args.lora_r, dist_folder.args.lora_alpha)
    folder = MegatronFolder(path)
    adapters = folder.adapters(source.architecture, source.model_config, folder.layout(source.model_config))
    return adapters, (folder.args.lora_r, folder.args.lora_alpha)


_DTYPES = {torch.float32: "float32", torch.float16: "float16"}


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine.

    Attributes:
        max_model_len: limit of prompt and answer, in tokens.
        dtype: "auto" takes the checkpoint's.
        max_num_seqs: answers that are generated at the same time; None takes 32 on the CPU, 256 on devices.
        kind: vLLM, the Megatron model itself, or transformers' module.
        tensor_parallel_size: devices of one engine.
        pipeline_parallel_size: stages of a Megatron model.
        data_parallel_size: engines that share the requests.
        enable_prefix_caching: share the KV cache of equal prompt prefixes.
        max_log_probs: upper limit of `count` in `next_tokens`.
        max_images, max_videos: limits of the images and videos in a prompt.
    """

    model: ModelSettings
    tokenizer: str
    max_model_len: int
    dtype: str = "auto"
    max_num_seqs: int | None = None
    kind: Literal["vllm", "megatron", "transformers"] = "vllm"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_gib: float | None = None
    enforce_eager: bool = True
    trust_remote_code: bool = False
    enable_prefix_caching: bool = True
    max_log_probs: int = 20
    max_images: int = 1
    max_videos: int = 0

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def build_generate_config(self, model_dtype: torch.dtype) -> GenerateConfig:
        """Return the settings as keys of a run file."""
        default_seqs = engine_limits(platform.current().name).sequences
        return GenerateConfig(
            infer_tensor_parallel_size=self.tensor_parallel_size,
            max_num_seqs=self.max_num_seqs or default_seqs,
            max_model_len=self.max_model_len,
            # pyrefly: ignore[bad-argument-type]  # float16 too: vLLM takes it, run files do not
            dtype=_DTYPES.get(model_dtype, "bfloat16") if self.dtype == "auto" else self.dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_gib=self.kv_cache_memory_gib,
            enforce_eager=self.enforce_eager,
            trust_remote_code=self.trust_remote_code,
            enable_prefix_caching=self.enable_prefix_caching,
            limit_mm_image_per_prompt=self.max_images,
            limit_mm_video_per_prompt=self.max_videos,
        )
