"""Memory of a server: client models are counted by hand, and so is the room of the engine for their adapters."""

from __future__ import annotations

from mindspeed_rl.config import load_run_config
from mindspeed_rl.planner.devices import DEVICES
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.run.draft import draft

#: hidden 128, MLP 384, four heads of 32 with two for keys; 128 tokens; rank 32, four layers
_LAYER = (128 + 256) + (128 + 128) + (128 + 768) + (384 + 128)
_MODEL = 32 * (4 * _LAYER + 128 + 128)


def _owners(*overrides: str) -> dict[str, int]:
    plan = plan_memory(draft(load_run_config("serve_tiny_cpu", None, list(overrides)), platform="cpu"), DEVICES["cpu"])
    (group,) = plan.groups
    (phase,) = group.phases
    assert phase.name == "serve"
    return phase.owners


def test_a_model_has_four_numbers_in_float32_for_each_of_its_matrices() -> None:
    assert _owners()["client models"] == 4 * _MODEL * 4 * 4
    assert _owners("serve_config.num_models=7")["client models"] == 7 * _MODEL * 4 * 4
    assert _owners("serve_config.sampler_ema_decay=0.9")["client models"] == 4 * _MODEL * 4 * 5


def test_the_engine_has_room_for_the_adapters_of_a_step() -> None:
    # every layer of the engine has A of its own for query, key, value, gate and up
    layer = (128 + 128) + 2 * (128 + 64) + (128 + 128) + 2 * (128 + 384) + (384 + 128)
    adapter = 32 * (4 * layer + 128 + 128) * 4
    assert _owners()["engine adapters"] == 4 * adapter
    assert _owners("serve_config.num_engine_adapters=2")["engine adapters"] == 2 * adapter


def test_nothing_of_a_loop_is_planned() -> None:
    assert not {"optimizer", "reference", "critic"} & set(_owners())
