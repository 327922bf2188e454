"""Limits of the rollout engine, in one table: run files and commands are checked against it before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.model_metadata import EngineShape
from mindspeed_rl.config.run import RunConfig


@dataclass(frozen=True)
class _EngineLimits:
    """Limits of the engine on a kind of device.

    Attributes:
        head_sizes: supported widths of an attention head; empty where every width is.
        latent_sizes: the same of a latent head, kv_lora_rank + qk_rope_head_dim.
        linear_size: smallest width of a head of gated delta nets; 0 where every width is supported.
        linear_dtypes: formats of their weights; empty for all.
        linear_prefixes: whether prompts share a cached prefix of them.
        linear_drafts: methods of drafts (`speculative_config`) that change nothing of what they compute; None for all.
        linear_block: tokens of which the keys of an attention layer must divide one of their states in bytes; 0 without.
        sparse: whether latent attention may attend to chosen tokens only.
        sequences: default number of responses that are generated at once.
    """

    head_sizes: tuple[int, ...] = ()
    latent_sizes: tuple[int, ...] = ()
    linear_size: int = 0
    linear_dtypes: tuple[str, ...] = ()
    linear_prefixes: bool = True
    linear_drafts: tuple[str, ...] | None = None
    linear_block: int = 0
    sparse: bool = True
    sequences: int = 256


#: temperatures above 0 that vLLM 0.18 to 0.32 samples with; it raises lower ones to the first, and 0.32 refuses higher ones
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0

#: by name of the platform; a test compares them with the engine that is installed
_LIMITS = {
    "cpu": _EngineLimits(
        head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),  # vLLM 0.32, CPUAttentionBackend
        latent_sizes=(576,),  # CPUMLABackend
        linear_size=64,  # gdn_attention.py asks for these two
        linear_dtypes=("bfloat16",),
        linear_prefixes=False,  # their states are kept between chunks of a prompt, and here a prompt is not cut (vllm_cpu.py)
        # a draft model writes its keys into their states: vLLM gives it the blocks of the first group of layers
        linear_drafts=("mtp", "ngram", "suffix"),
        sparse=False,  # vLLM 0.32 has no backend of sparse attention there
        sequences=32,
    ),
    "npu": _EngineLimits(
        linear_dtypes=("bfloat16",),  # vllm-ascend 0.23 asserts it for prompts, its recurrent operator takes nothing else
        linear_prefixes=False,  # no run has proven the states that it keeps with them
        linear_drafts=(),  # recurrent_gated_delta_rule.h finds a state by the place of a token in the step
        linear_block=128,  # patch_mamba_config.py: blocks of the cache and states lie in one piece of memory
    ),
    "cuda": _EngineLimits(linear_drafts=()),  # no run has compared them
}
_OTHERS = _EngineLimits()


def engine_limits(platform: str) -> _EngineLimits:
    """Return the limits on this platform; none of attention where it is unknown or not chosen yet."""
    return _LIMITS.get(platform, _OTHERS)


def lacks_model(shape: EngineShape, platform: str) -> str:
    """Return what a model of this shape has that vLLM does not compute on this platform at all; empty where it does."""
    return "sparse attention" if shape.is_sparse and not engine_limits(platform).sparse else ""


def can_cache_prefixes(platform: str, *, is_linear: bool) -> bool:
    """Return whether prompts to a model, with gated delta nets or without, can share a cached prefix on this platform."""
    return not is_linear or engine_limits(platform).linear_prefixes


def explain_drafts(shape: EngineShape, method: str, platform: str) -> str:
    """Return why drafts of a method cannot be used with a model of this shape, after their key; "" if they can."""
    methods = engine_limits(platform).linear_drafts
    if not method or shape.linear_heads is None or methods is None or method in methods:
        return ""
    listed = f"only {', '.join(methods)} are" if methods else "none is"
    model = f"gated delta nets, which the model in {shape.source} has"
    return f"cannot be used with {model}: of drafts {listed} proven on {platform}"


@dataclass(frozen=True)
class EngineRequest:
    """A model's use of the engine, and the keys or flags that request it.

    Attributes:
        tensor, length: devices of a replica; maximum tokens of prompt and response.
        tensor_key, length_key: the key or flag of each.
        length_origin: what a length follows from that the user did not write; empty otherwise.
        dtype, dtype_key: format of the weights; empty where it is not known yet.
        prefixes_key: the key that asks for cached prefixes; empty without them.
        drafts, drafts_key: method of drafts, and the key that asks for them; empty without.
    """

    tensor: int
    length: int
    tensor_key: str
    length_key: str
    length_origin: str = ""
    dtype: str = ""
    dtype_key: str = ""
    prefixes_key: str = ""
    drafts: str = ""
    drafts_key: str = ""


@dataclass(frozen=True)
class _Obstacle:
    """A reason why the engine cannot run a model.

    Attributes:
        rule: name of the row of the table.
        message: key or flag, its value and the allowed values.
    """

    rule: str
    message: str


def engine_obstacles(shape: EngineShape, request: EngineRequest, platform: str) -> Iterator[_Obstacle]:
    """Yield the obstacles to running a model of this shape as requested; unknown values of the shape are not an obstacle."""
    limits, source = engine_limits(platform), shape.source
    tensor, groups = f"{request.tensor_key} ({request.tensor})", shape.num_kv_heads
    width, latent, linear = shape.head_size, shape.latent_size, shape.linear_size

    def divide(rule: str, name: str, size: int | None, share: str) -> Iterator[_Obstacle]:
        if size is not None and size % request.tensor:
            yield _Obstacle(rule, f"{name} ({size}) must be divisible by {tensor}: the rollout engine splits {share}")

    yield from divide("heads", "num_attention_heads", shape.num_heads, "whole heads")
    if groups is not None and not shape.is_latent and groups % request.tensor and request.tensor % groups:
        text = f"num_query_groups ({groups}) and {tensor} must divide one another: key/value heads are split or repeated whole"
        yield _Obstacle("kv_heads", text)
    yield from divide("ffn", "ffn_hidden_size", shape.ffn_hidden_size, "the MLP evenly")
    if not shape.is_latent and _lacks_kernel(width, limits.head_sizes):
        yield _Obstacle(
            "head_size",
            f"the width of an attention head (head_dim in config.json, kv_channels in run files) is {width} in {source}, but "
            f"on this platform the rollout engine has kernels for {_listed(limits.head_sizes)}",
        )
    if shape.is_latent and _lacks_kernel(latent, limits.latent_sizes):
        yield _Obstacle(
            "latent_size",
            f"kv_lora_rank + qk_rope_head_dim is {latent} in {source}, but on this platform the rollout engine has kernels for "
            f"{_listed(limits.latent_sizes)}",
        )
    yield from divide("linear_heads", "linear_num_key_heads", shape.linear_heads, "whole heads of the gated delta nets")
    if linear is not None and linear < limits.linear_size:
        yield _Obstacle(
            "linear_size",
            f"linear_key_head_dim and linear_value_head_dim must be at least {limits.linear_size} for the rollout engine on "
            f"this platform; one is {linear} in {source}",
        )
    if shape.linear_heads is not None and limits.linear_dtypes and request.dtype not in ("", *limits.linear_dtypes):
        yield _Obstacle(
            "linear_dtype",
            f"{request.dtype_key} ({request.dtype}) must be {' or '.join(limits.linear_dtypes)}: on this platform the rollout "
            f"engine computes gated delta nets, which the model in {source} has, in no other format",
        )
    if request.prefixes_key and not can_cache_prefixes(platform, is_linear=shape.linear_heads is not None):
        yield _Obstacle(
            "linear_prefixes",
            f"{request.prefixes_key} must be false: on this platform the rollout engine caches no prefixes of gated delta "
            f"nets, which the model in {source} has",
        )
    if reason := explain_drafts(shape, request.drafts, platform):
        yield _Obstacle("linear_drafts", f"{request.drafts_key} (method: {request.drafts}) {reason}")
    if limits.linear_block and shape.linear_state is not None and groups is not None and width is not None:
        state, keys = shape.linear_state // request.tensor, limits.linear_block * max(groups // request.tensor, 1) * width * 2
        if state % keys:
            yield _Obstacle(
                "linear_state",
                f"the state of a gated delta net of the model in {source} has {state} bytes with {tensor}, which must be a "
                f"multiple of {keys}, the keys of {limits.linear_block} tokens of an attention layer: on this platform the "
                "rollout engine has both in one piece of memory",
            )
    if shape.max_length is not None and request.length > shape.max_length:
        origin = f", from {request.length_origin}" if request.length_origin else ""
        yield _Obstacle(
            "length",
            f"{request.length_key} ({request.length}{origin}) must be at most {shape.max_length}, the longest sequence of the "
            f"model in {source}",
        )


def check_engine(shape: EngineShape, request: EngineRequest, platform: str) -> None:
    """Check that the engine can run a model of this shape as requested, for a command without a run file.

    Raises:
        ValueError: it cannot; every obstacle is named.
    """
    if obstacles := [obstacle.message for obstacle in engine_obstacles(shape, request, platform)]:
        raise ValueError("; ".join(obstacles))


def _lacks_kernel(size: int | None, supported: tuple[int, ...]) -> bool:
    return size is not None and bool(supported) and size not in supported


def _listed(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


def read_engine_shape(cfg: RunConfig) -> EngineShape:
    """Return the shape of the model that a run generates with: from the run file's keys, else from config.json."""
    metadata = cfg.model_metadata.get("actor_config")
    return complete_shape(EngineShape(source="the run file") if metadata is None else metadata.shape, cfg.actor_config)


def complete_shape(stored: EngineShape, actor: MegatronConfig) -> EngineShape:
    """Return the shape of a model whose model keys are known; what they leave open is from config.json."""
    if actor.num_attention_heads is None:
        return stored
    latent = None
    if actor.multi_latent_attention and actor.kv_lora_rank and actor.qk_pos_emb_head_dim:
        latent = actor.kv_lora_rank + actor.qk_pos_emb_head_dim
    has_states = actor.linear_attention_freq is not None
    width = actor.kv_channels
    if width is None and actor.hidden_size is not None:
        width = actor.hidden_size // actor.num_attention_heads
    return EngineShape(
        source=stored.source,
        num_heads=actor.num_attention_heads,
        num_kv_heads=actor.num_query_groups if actor.group_query_attention else actor.num_attention_heads,
        head_size=width if width is not None else stored.head_size,
        is_latent=actor.multi_latent_attention,
        latent_size=latent,
        ffn_hidden_size=actor.ffn_hidden_size if actor.ffn_hidden_size is not None else stored.ffn_hidden_size,
        max_length=stored.max_length,
        is_sparse=stored.is_sparse,
        linear_heads=actor.linear_num_key_heads if has_states else stored.linear_heads,
        linear_size=min(actor.linear_key_head_dim, actor.linear_value_head_dim) if has_states else stored.linear_size,
        linear_state=stored.linear_state,
        vocab_size=stored.vocab_size,
    )
