"""Model, tokenizer and template, opened before anything is generated, and the start of the engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mindspeed_rl import adaptors, platform, registry
from mindspeed_rl.checkpoint.trained_template import read_trained_prompt_type
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.model_metadata import VISION_VARIABLE, EngineShape, read_model_metadata
from mindspeed_rl.config.threads import decide_threads
from mindspeed_rl.data.images import ImageReader, ImageRules
from mindspeed_rl.data.templates import HF_TEMPLATE, PLAIN_TEMPLATE, Thinking
from mindspeed_rl.data.tokenizer import check_tokenizer, load_tokenizer
from mindspeed_rl.importing import collecting_seldom
from mindspeed_rl.inference.engine_interface import Engine
from mindspeed_rl.inference.model_files import EngineSettings, ModelFiles, ModelSettings, open_model
from mindspeed_rl.inference.prompt_format import PromptFormat, choose_template
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.model_keys import fill_model_keys
from mindspeed_rl.models.module_family import ModuleArchitecture
from mindspeed_rl.observability.logging import set_up_logging
from mindspeed_rl.run.rules.engine_limits import EngineRequest, can_cache_prefixes, check_engine, complete_shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: scope of the adaptors and class of each
_ENGINES: dict[str, tuple[adaptors.Scope, str]] = {
    "vllm": ("rollout", "mindspeed_rl.inference.vllm_text_engine:VllmTextEngine"),
    "megatron": ("train", "mindspeed_rl.inference.megatron_engine:MegatronEngine"),
    "transformers": ("rollout", "mindspeed_rl.inference.module_text_engine:ModuleTextEngine"),
}
#: a process group of one process, so any free port works
_SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Configured model, engine and prompts: the flags that generate, chat and evaluate share, under their names.

    Attributes:
        hf_cfg_dir: folder of a checkpoint's config.json; None takes `tokenizer_name_or_path` if it has one.
        tokenizer_name_or_path: None takes the model's.
        max_length: limit of the tokens of prompt and answer; None takes the model's own.
        graph: compile and capture graphs.
        no_chat_template: plain text, whatever the model was trained with.
        engine: vLLM, the Megatron model itself, or transformers' module.
        pipeline_model_parallel_size: stages of a Megatron model.
    """

    # model
    load: Path
    load_iteration: int | None
    hf_cfg_dir: Path | None
    tokenizer_name_or_path: str | None
    tokenizer_not_use_fast: bool
    trust_remote_code: bool
    load_checkpoint_loosely: bool
    lora_load: Path | None
    lora_r: int | None
    lora_alpha: float | None
    lora_target_modules: Sequence[str]
    # engine
    platform: str
    dtype: str
    tensor_parallel_size: int
    data_parallel_size: int
    max_length: int | None
    max_num_seqs: int | None
    gpu_memory_utilization: float
    kv_cache_memory_gib: float | None
    graph: bool
    engine: Literal["vllm", "megatron", "transformers"]
    pipeline_model_parallel_size: int
    # prompts
    prompt_type: str | None
    prompt_type_path: str | None
    hf_chat_template: bool
    enable_thinking: Thinking
    no_chat_template: bool
    chat_template_kwargs: Mapping[str, object] | None
    add_eos_token: Sequence[str]
    stop_token_ids: Sequence[int]

    def build_model_settings(self) -> ModelSettings:
        """Return the settings of the model."""
        folder = None if self.hf_cfg_dir is None else self.hf_cfg_dir.expanduser()
        if folder is None and self.tokenizer_name_or_path is not None:
            tokenizer = Path(self.tokenizer_name_or_path).expanduser()
            folder = tokenizer if (tokenizer / "config.json").is_file() else None
        return ModelSettings(
            load=self.load.expanduser(),
            hf_folder=folder,
            iteration=self.load_iteration,
            lora_load=None if self.lora_load is None else self.lora_load.expanduser(),
            lora_r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_target_modules=tuple(self.lora_target_modules),
            loosely=self.load_checkpoint_loosely,
            by_module=self.engine == "transformers",
            trusts_code=self.trust_remote_code,
        )


@dataclass(frozen=True)
class Session:
    """The resolved options before the engine starts.

    Attributes:
        settings: settings of the engine, with the limit of prompt and answer.
        warnings: sentences about the tokenizer that are worth reading, and no reason to stop.
    """

    model: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    prompt_format: PromptFormat
    settings: EngineSettings
    platform_name: str
    warnings: tuple[str, ...] = ()

    def needed_length(self, longest_prompt: int, max_new_tokens: int) -> int:
        """Return max_model_len for prompts and answers of these lengths.

        Raises:
            ValueError: it is more than the model or --max-length allows.
        """
        max_len = self.settings.max_model_len
        if longest_prompt >= max_len:
            raise ValueError(
                f"the longest prompt has {longest_prompt} tokens, but prompt and answer together may have {max_len} "
                "(--max-length, or the model's max_position_embeddings)"
            )
        return min(longest_prompt + max_new_tokens, max_len)

    @contextlib.contextmanager
    def running_engine(
        self, *, max_model_len: int, max_log_probs: int, max_images: int = 1, max_videos: int = 0
    ) -> Iterator[Engine]:
        """Build the engine and load its weights; it ends with the block.

        Args:
            max_model_len: needed limit of prompt and answer.
            max_log_probs: see `EngineSettings`.
            max_images, max_videos: see `EngineSettings`.
        """
        lengths = {"max_model_len": max_model_len, "max_log_probs": max_log_probs}
        settings = replace(self.settings, **lengths, max_images=max_images, max_videos=max_videos)
        if settings.num_devices > 1:
            # imports Ray, which one device does not need
            from mindspeed_rl.inference.engine_group import running_engine_group

            with running_engine_group(settings, self.platform_name) as engine:
                yield engine
        else:
            scope, target = _ENGINES[settings.kind]
            adaptors.apply(scope)
            if scope == "train":
                adaptors.configure(MegatronConfig())
                os.environ.update(_SINGLE_PROCESS)
            with collecting_seldom():
                # by name: it imports vLLM or Megatron, which need their adaptors and the platform's environment first
                engine: Engine = registry.load(target, f"--engine {settings.kind}")(settings, self.model, self.tokenizer)
            try:
                yield engine
            finally:
                engine.close()


def _read_shape(model: ModelFiles, engine: str) -> EngineShape:
    """Return the model's sizes for the limits of an engine, as those of a run are read: model keys, and config.json."""
    metadata = read_model_metadata(MegatronConfig(load=str(model.hf_folder)))
    stored = EngineShape(source="") if metadata is None else metadata.shape
    if engine == "vllm":  # the others compute what only transformers has
        keys = MegatronConfig(num_layers=model.model_config.num_layers)
        stored = complete_shape(stored, fill_model_keys(keys, model.model_config, model.hf_folder, frozenset()))
    return replace(stored, source=str(model.source.path), max_length=model.model_config.max_position_embeddings)


def _find_trained_template(adapter: Path | None, folder: Path) -> str | None:
    """Return the template that the model was trained with, by the record of its export; None without one."""
    places = [folder] if adapter is None else [adapter.expanduser(), folder]
    return next((name for place in places if (name := read_trained_prompt_type(place)) is not None), None)


def _build_prompt_format(
    options: SessionOptions, model: ModelFiles, tokenizer: PreTrainedTokenizerBase, *, chats: bool
) -> PromptFormat:
    """Choose the template, and build what makes prompts of texts and images."""
    rules = ImageRules.read(model.hf_folder)
    name = choose_template(tokenizer, options.prompt_type, options.hf_chat_template)
    if name is None and not options.no_chat_template:
        name = _find_trained_template(options.lora_load, model.hf_folder)
    if name is None and chats:
        has_own = tokenizer.chat_template and not options.no_chat_template
        name = HF_TEMPLATE if has_own else PLAIN_TEMPLATE
    return PromptFormat(
        tokenizer,
        name,
        template_path=options.prompt_type_path,
        thinking=options.enable_thinking,
        arguments=options.chat_template_kwargs,
        hf_folder=model.hf_folder,
        end_tokens=options.add_eos_token,
        end_ids=options.stop_token_ids,
        image_reader=None if rules is None else ImageReader.build(rules, tokenizer),
        vocab_size=model.model_config.vocab_size,
    )


def _check_attention(engine: str, device: str, config: ModelConfig, max_len: int) -> None:
    """Raise ValueError where the engine does not compute the attention of a model."""
    if engine == "megatron" and config.linear_attention is not None:
        raise ValueError(
            "--engine megatron: its cache has no states of gated delta nets, which this model has; use --engine vllm"
        )
    if (sparse := config.sparse_attention) is None:
        return
    if engine == "vllm" and device == "cpu":
        raise ValueError(
            f"--engine vllm: vLLM's CPU build has no sparse attention, which this model has; use --engine transformers, "
            f"which is slow, or megatron with --max-length up to {sparse.topk}, where it equals full attention"
        )
    if engine == "megatron" and max_len > sparse.topk:
        raise ValueError(
            f"--engine megatron: its cache has no keys of this model's indexer, so --max-length ({max_len}) can be up to "
            f"{sparse.topk} (index_topk of config.json), where all tokens are attended to"
        )


def open_session(options: SessionOptions, *, chats: bool = False) -> Session:
    """Open model, tokenizer and template, and set up this process for its platform; nothing large is read yet.

    Args:
        chats: several turns need a template: without one that is named or known from training, it is the tokenizer's own, else
            one that joins the texts of the turns.

    Raises:
        ValueError: a folder, adapter, tokenizer or template is not usable.
    """
    device = platform.select(options.platform)
    # pipeline stages compute a token one after another, so each may use the cores of all of them
    device.use_threads(decide_threads(None, options.tensor_parallel_size * options.data_parallel_size, os.environ).count)
    for name, value in device.worker_env().items():
        # the user's environment wins
        os.environ.setdefault(name, value)
    if options.graph:
        # the CPU platform's environment switches off the compilation that --graph needs
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
    num_devices = options.tensor_parallel_size * options.data_parallel_size
    if options.engine == "transformers" and num_devices > 1:
        raise ValueError(f"--engine transformers has a full model on one device, and not on {num_devices}; use --engine vllm")
    model_settings = options.build_model_settings()
    model = open_model(model_settings)
    heads = model.model_config.num_attention_heads
    if heads % options.tensor_parallel_size:
        raise ValueError(f"--tensor-parallel-size {options.tensor_parallel_size} does not divide the model's {heads} heads")
    set_up_logging(None)
    if model.model_config.vision is not None:
        os.environ[VISION_VARIABLE] = "1"
        adaptors.apply(_ENGINES[options.engine][0])  # before transformers looks for torchvision
    tokenizer_path = options.tokenizer_name_or_path or str(model.hf_folder)
    with collecting_seldom():
        tokenizer = load_tokenizer(
            tokenizer_path, trust_remote_code=options.trust_remote_code, use_fast=not options.tokenizer_not_use_fast
        )
    warnings = check_tokenizer(tokenizer, {str(model.source.path): model.model_config.vocab_size}, tokenizer_path, pads=False)
    prompt_format = _build_prompt_format(options, model, tokenizer, chats=chats)
    max_len = options.max_length or model.model_config.max_position_embeddings
    _check_attention(options.engine, device.name, model.model_config, max_len)
    shape = _read_shape(model, options.engine)
    settings = EngineSettings(
        model=model_settings,
        tokenizer=tokenizer_path,
        max_model_len=max_len,
        dtype=options.dtype,
        kind=options.engine,
        pipeline_parallel_size=options.pipeline_model_parallel_size,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=options.tensor_parallel_size,
        data_parallel_size=options.data_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_gib=options.kv_cache_memory_gib,
        enforce_eager=not options.graph,
        trust_remote_code=options.trust_remote_code,
        enable_prefix_caching=can_cache_prefixes(device.name, is_linear=shape.linear_heads is not None),
    )
    size, dtype = options.tensor_parallel_size, settings.build_generate_config(model.source.dtype).dtype
    request = EngineRequest(size, max_len, "--tensor-parallel-size", "--max-length", dtype=dtype, dtype_key="--dtype")
    if options.engine == "vllm":
        check_engine(shape, request, device.name)
    elif options.engine == "transformers" and isinstance(model.source.architecture, ModuleArchitecture):
        model.source.architecture.check_rollout(dtype, "--dtype")
    return Session(model, tokenizer, prompt_format, settings, device.name, tuple(warnings))
