"""What the rollout engine cannot do, in one table: run files and commands are held against it before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mindspeed_rl.config.model_metadata import EngineShape
from mindspeed_rl.config.run import RunConfig


@dataclass(frozen=True)
class EngineLimits:
    """What the engine has on a kind of device.

    Attributes:
        head_sizes: widths of an attention head that there are kernels for; empty where every width goes.
        latent_sizes: the same of a latent head, kv_lora_rank + qk_rope_head_dim.
        sequences: answers that it generates at once where nobody says a number.
    """

    head_sizes: tuple[int, ...] = ()
    latent_sizes: tuple[int, ...] = ()
    sequences: int = 256


#: by name of the platform; a test compares them with the engine that is installed
_LIMITS = {
    "cpu": EngineLimits(
        head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),  # vLLM 0.32, CPUAttentionBackend
        latent_sizes=(576,),  # CPUMLABackend
        sequences=32,
    )
}
_OTHERS = EngineLimits()


def engine_limits(platform: str) -> EngineLimits:
    """Return what the engine has on this platform; no limits of attention where it is none of ours or not chosen yet."""
    return _LIMITS.get(platform, _OTHERS)


@dataclass(frozen=True)
class EngineRequest:
    """What is asked of the engine, and the words in which the user asked.

    Attributes:
        tensor, length: devices of a replica; longest prompt and answer, in tokens.
        tensor_key, length_key: the key or flag of each.
        length_origin: what a length follows from that the user did not write; empty otherwise.
    """

    tensor: int
    length: int
    tensor_key: str
    length_key: str
    length_origin: str = ""


@dataclass(frozen=True)
class Obstacle:
    """Why the engine will not run.

    Attributes:
        rule: name of the row of the table.
        message: key or flag, value and what would be right.
    """

    rule: str
    message: str


def engine_obstacles(shape: EngineShape, request: EngineRequest, platform: str) -> Iterator[Obstacle]:
    """Yield what stands against running a model of this shape as it is asked for; nothing about what is not known of it."""
    limits = engine_limits(platform)
    for rule, says in _ROWS.items():
        if message := says(shape, request, limits):
            yield Obstacle(rule, message)


def read_engine_shape(cfg: RunConfig) -> EngineShape:
    """Return what is known of the model that a run generates with: the run file's own keys first, then config.json."""
    actor, facts = cfg.actor_config, cfg.model_metadata
    found = EngineShape(source="the run file") if facts is None else facts.shape
    if actor.num_attention_heads is None:
        return found
    latent = None
    if actor.multi_latent_attention and actor.kv_lora_rank and actor.qk_pos_emb_head_dim:
        latent = actor.kv_lora_rank + actor.qk_pos_emb_head_dim
    width = actor.kv_channels
    if width is None and actor.hidden_size is not None:
        width = actor.hidden_size // actor.num_attention_heads
    return EngineShape(
        source=found.source,
        num_heads=actor.num_attention_heads,
        num_kv_heads=actor.num_query_groups if actor.group_query_attention else actor.num_attention_heads,
        head_size=width if width is not None else found.head_size,
        is_latent=actor.multi_latent_attention,
        latent_size=latent,
        ffn_hidden_size=actor.ffn_hidden_size if actor.ffn_hidden_size is not None else found.ffn_hidden_size,
        max_length=found.max_length,
    )


def can_split(shape: EngineShape, tensor: int) -> bool:
    """Return True where a replica can be split over so many devices."""
    request = EngineRequest(tensor, 0, "", "")
    return not any(row(shape, request, _OTHERS) for row in (_heads, _kv_heads, _ffn))


def _heads(shape: EngineShape, request: EngineRequest, limits: EngineLimits) -> str | None:
    if shape.num_heads is None or shape.num_heads % request.tensor == 0:
        return None
    return (
        f"num_attention_heads ({shape.num_heads}) must be divisible by {request.tensor_key} ({request.tensor}): "
        "the rollout engine splits whole heads"
    )


def _kv_heads(shape: EngineShape, request: EngineRequest, limits: EngineLimits) -> str | None:
    groups = shape.num_kv_heads
    if groups is None or shape.is_latent or groups % request.tensor == 0 or request.tensor % groups == 0:
        return None
    return (
        f"num_query_groups ({groups}) and {request.tensor_key} ({request.tensor}) must divide one another: key/value heads are "
        "split or repeated whole"
    )


def _ffn(shape: EngineShape, request: EngineRequest, limits: EngineLimits) -> str | None:
    if shape.ffn_hidden_size is None or shape.ffn_hidden_size % request.tensor == 0:
        return None
    return (
        f"ffn_hidden_size ({shape.ffn_hidden_size}) must be divisible by {request.tensor_key} ({request.tensor}): "
        "the rollout engine splits the MLP evenly"
    )


def _head_size(shape: EngineShape, request: EngineRequest, limits: EngineLimits) -> str | None:
    if shape.is_latent or shape.head_size is None or not limits.head_sizes or shape.head_size in limits.head_sizes:
        return None
    return (
        f"the width of an attention head (head_dim in config.json, kv_channels in run files) is {shape.head_size} in "
        f"{shape.source}, but on this platform the rollout engine has kernels for {_listed(limits.head_sizes)}"
    )


def _latent_size(shape: EngineShape, request: EngineRequest, limits: EngineLimits) -> str | None:
    if not shape.is_latent or shape.latent_size is None or not limits.latent_sizes or shape.latent_size in limits.latent_sizes:
        return None
    return (
        f"kv_lora_rank + qk_rope_head_dim is {shape.latent_size} in {shape.source}, but on this platform the rollout engine "
        f"has kernels for {_listed(limits.latent_sizes)}"
    )


def _length(shape: EngineShape, request: EngineRequest, limits: EngineLimits) -> str | None:
    if shape.max_length is None or request.length <= shape.max_length:
        return None
    origin = f", from {request.length_origin}" if request.length_origin else ""
    return (
        f"{request.length_key} ({request.length}{origin}) must be at most {shape.max_length}, "
        f"the longest sequence of the model in {shape.source}"
    )


def _listed(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


_Row = Callable[[EngineShape, EngineRequest, EngineLimits], str | None]

_ROWS: dict[str, _Row] = {
    "heads": _heads,
    "kv_heads": _kv_heads,
    "ffn": _ffn,
    "head_size": _head_size,
    "latent_size": _latent_size,
    "length": _length,
}
