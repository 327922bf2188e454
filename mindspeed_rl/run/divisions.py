"""The two divisions of a run's devices between trainers and rollout servers: the run file's, and the one with moved devices."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.config.keys.rl import Resource, RLConfig
from mindspeed_rl.config.run import RunConfig


def moves_devices(cfg: RunConfig) -> bool:
    """Return True where devices of the rollout may train, and both sides have devices to be counted."""
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised or not rl.elastic_training_devices or rl.rollout_resource is None:
        return False
    return None not in (rl.actor_resource.num_npus, rl.rollout_resource.num_npus)


def list_moved_keys(rl: RLConfig) -> dict[str, int]:
    """Return the keys that a user would set for the division in which devices of the rollout train, by dotted name."""
    assert rl.rollout_resource is not None
    actor, rollout, moved = rl.actor_resource.num_npus, rl.rollout_resource.num_npus, rl.elastic_training_devices
    assert actor is not None and rollout is not None
    return {
        "rl_config.actor_resource.num_npus": actor + moved,
        "rl_config.rollout_resource.num_npus": rollout - moved,
        "rl_config.elastic_training_devices": 0,
    }


def move_devices(cfg: RunConfig) -> RunConfig:
    """Return the run file with these keys."""
    rl = cfg.rl_config
    assert rl is not None
    actor, rollout, _ = list_moved_keys(rl).values()
    # keys that have no effect there are left out
    own = frozenset(name for name in cfg.set_keys.get("rl_config", ()) if not name.startswith("elastic_training_"))
    rl = replace(
        rl, actor_resource=replace(rl.actor_resource, num_npus=actor), rollout_resource=Resource(num_npus=rollout),
        elastic_training_devices=0,
    )  # fmt: skip
    return replace(cfg, rl_config=rl, set_keys={**cfg.set_keys, "rl_config": own})
