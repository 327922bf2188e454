"""Values of keys that a run file does not write and that depend on the rest of it; what is written always stays."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from mindspeed_rl.config.keys.turns import response_limit, response_limit_key
from mindspeed_rl.config.rules.engine_limits import engine_limits, shape_of_run, splits
from mindspeed_rl.config.run import Derivation, RunConfig
from mindspeed_rl.config.sizes import own_rollout_devices, read_sizes, rollout_servers, world_size

#: devices of a rollout replica at most, which is MindSpeed-RL's fixed value
_MOST_TENSOR = 8


def derive(cfg: RunConfig) -> dict[str, Derivation]:
    """Fill in keys of generate_config that the run file leaves out; return them by dotted name."""
    found: dict[str, Derivation] = {}
    if cfg.generate_config is None or cfg.rl_config is None or cfg.is_supervised:
        return found
    written = cfg.set_keys.get("generate_config", frozenset())
    # in this order: the number of replicas follows from the first
    for name, of in (("infer_tensor_parallel_size", _tensor), ("max_model_len", _length), ("max_num_seqs", _sequences)):
        if name in written:
            continue
        for derivation in of(cfg):
            setattr(cfg.generate_config, name, derivation.value)
            found[f"generate_config.{name}"] = derivation
    return found


def _tensor(cfg: RunConfig) -> Iterator[Derivation]:
    if rollout_servers(cfg):
        yield Derivation(1, "it is the business of the servers that vllm_server_host names")
        return
    actor = cfg.actor_config
    split = actor.tensor_model_parallel_size * actor.pipeline_model_parallel_size
    world = own_rollout_devices(cfg) or world_size(cfg) or split  # a run whose devices are still to be named has as many
    if world < 1 or split < 1:
        return
    shape, most = shape_of_run(cfg), min(split, _MOST_TENSOR)
    value = next(size for size in range(most, 0, -1) if world % size == 0 and splits(shape, size))
    yield Derivation(
        value,
        f"the actor's weights lie on {split} device(s), and {world} generate"
        if own_rollout_devices(cfg)
        else f"the actor's weights lie on {split} of the {world} device(s)",
    )


def _length(cfg: RunConfig) -> Iterator[Derivation]:
    assert cfg.rl_config is not None and cfg.generate_config is not None
    prompt, response = cfg.rl_config.max_prompt_length, response_limit(cfg)
    needed, seq_length = prompt + response, cfg.actor_config.seq_length or 0
    source = f"max_prompt_length {prompt} + {response_limit_key(cfg).rpartition('.')[2]} {response}"
    yield Derivation(needed, source) if needed >= seq_length else Derivation(seq_length, f"seq_length {seq_length}")


def _sequences(cfg: RunConfig) -> Iterator[Derivation]:
    if cfg.actor_config.global_batch_size is None or world_size(cfg) is None:
        return
    sizes = read_sizes(cfg)
    if not sizes.can_divide:
        return
    share = Fraction(sizes.rollout_samples) / Fraction(sizes.rollout.dp_size)
    if share < 1:
        return
    most = engine_limits(cfg.platform).sequences  # beyond this a device gains little, and memory for them runs out
    value = min(-(-share.numerator // share.denominator), most)
    bound = f", at most {most}" if value == most else ""
    yield Derivation(value, f"{sizes.rollout_samples} responses of a rollout over {sizes.rollout.dp_size} replica(s){bound}")
