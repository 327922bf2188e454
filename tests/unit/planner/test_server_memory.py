"""Memory of a server: client models are counted by hand, and so is the room of the engine for their adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rl.cli.main import main
from mindspeed_rl.config import load_run_config
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.planner.devices import DEVICES
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.server import plan_server
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


def test_every_rank_has_all_of_a_model_and_a_gradient_of_each_pass() -> None:
    two = ("rl_config.actor_resource.num_npus=2", "actor_config.tensor_model_parallel_size=2")
    assert _owners(*two)["client models"] == _owners()["client models"]
    # up to four passes are computed together
    assert _owners()["gradients"] == _owners("serve_config.num_models=7")["gradients"] == 4 * _MODEL * 4
    assert _owners("serve_config.num_models=2", *two)["gradients"] == 2 * _MODEL * 4


def test_the_engine_has_room_for_the_adapters_of_a_step() -> None:
    # every layer of the engine has A of its own for query, key, value, gate and up
    layer = (128 + 128) + 2 * (128 + 64) + (128 + 128) + 2 * (128 + 384) + (384 + 128)
    adapter = 32 * (4 * layer + 128 + 128) * 4
    assert _owners()["engine adapters"] == 4 * adapter
    assert _owners("serve_config.num_engine_adapters=2")["engine adapters"] == 2 * adapter


def test_a_model_of_full_weights_has_five_numbers_for_each_weight_on_the_cpu() -> None:
    full = ("actor_config.lora_target_modules=null", "generate_config.lora_push=merged", "serve_config.num_models=1")
    owners = _owners(*full)
    # query, key and value with their biases, output, gate and up, down, two norms
    layer = (128 + 1) * 256 + 128 * 128 + 128 * 768 + 384 * 128 + 2 * 128
    # float32 weights, gradient, two moments and the base's weights in host memory, which the device is; a tied head
    assert owners["client models"] == 5 * 4 * (128 * 128 + 4 * layer + 128)
    assert "engine adapters" not in owners


def test_nothing_of_a_loop_is_planned() -> None:
    assert not {"optimizer", "reference", "critic"} & set(_owners())


_WORDS = ["--config-name", "serve_tiny_cpu", "serve_config.num_models=4000"]


def test_a_server_that_does_not_fit_is_refused_with_the_models_that_would() -> None:
    run, four = (
        draft(load_run_config("serve_tiny_cpu", None, [f"serve_config.num_models={count}"]), platform="cpu")
        for count in (4000, 4)
    )
    plan = plan_server(run, DEVICES["cpu"])
    # a model is on the device once for training and once in the engine; the rest does not depend on their number
    layer = (128 + 128) + 2 * (128 + 64) + (128 + 128) + 2 * (128 + 384) + (384 + 128)
    assert plan.model_bytes == 16 * _MODEL + 4 * 32 * (4 * layer + 256)
    room = DEVICES["cpu"].memory - plan_memory(four, DEVICES["cpu"]).fullest.peak.total
    assert plan.max_models == 4 + room // plan.model_bytes
    with pytest.raises(ConfigError, match=rf"memory: .*num_models 4000; .* MiB for each model. {plan.max_models} would fit"):
        plan.check()
    plan_server(draft(load_run_config("serve_tiny_cpu"), platform="cpu"), DEVICES["cpu"]).check()
    none = plan_server(run, replace(DEVICES["cpu"], memory=1 << 29))
    assert none.max_models == 0 and "Not even one fits" in none.describe()


def test_plan_explain_and_promise_have_the_models_that_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where files of the run are, as after the quickstart, the plan is of this machine
    assert main(["plan", "memory", *_WORDS, "--json"]) == 1
    server = json.loads(capsys.readouterr().out)["server"]
    assert server["models"] == 4000 and 0 < server["max_models"] < 4000
    text = f"{server['max_models']} would fit"
    assert main(["plan", *_WORDS]) == 1
    shown = capsys.readouterr().out
    assert text in shown and "trainer_mode" not in shown, "a server has no iterations"
    assert main(["promise", "serve_tiny_cpu", "--strict", _WORDS[-1]]) == 1
    assert text in capsys.readouterr().out
    assert main(["explain", *_WORDS]) == 0
    assert text in capsys.readouterr().out
    assert main(["plan", "time", *_WORDS]) == 2
    assert "plan memory has its bytes" in capsys.readouterr().err
