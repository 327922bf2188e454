"""The moving average of trained weights, of both engines, against its formula in float64; its checkpoints; its swap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import ROWS, negative_log_prob
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatching
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.interface import Engine, StateFiles
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weight_average import WeightAverage
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.workers.engines import PassSettings, build_engine

DECAY = 0.75
LORA = {"lora_target_modules": ["linear_qkv", "linear_proj"], "lora_r": 2, "lora_alpha": 4}
Make = Callable[[], tuple[Engine, StateFiles | None]]


@pytest.fixture(scope="module")
def make_sharded(training_world: None, tmp_path_factory: pytest.TempPathFactory) -> Make:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("sharded")
    Qwen2ForCausalLM(Qwen2Config(vocab_size=67, num_hidden_layers=2, **shape)).save_pretrained(folder)
    config = MegatronConfig(engine="fsdp", bf16=False, lr=1e-2, train_iters=10, lr_decay_style="constant")

    def make() -> tuple[Engine, StateFiles | None]:
        passes = PassSettings(packed=True, pad_id=0, temperature=1.0)
        built = build_engine(config, plan_model(config, folder), folder, passes, trains=True)
        built.engine.load(HfFolder(folder))
        built.engine.start_training(1)
        return built.engine, built.files

    return make


@pytest.fixture(params=["float32", "bfloat16", "adapters", "fsdp"])
def make(request: pytest.FixtureRequest, make_engine: Callable[..., TrainEngine], make_sharded: Make) -> Make:
    keys: dict[str, Any] = {"float32": {}, "bfloat16": {"bf16": True}, "adapters": LORA}.get(request.param, {})
    return make_sharded if request.param == "fsdp" else lambda: (make_engine(**keys), None)


def step(engine: Engine) -> None:
    engine.train_step(ROWS, MicroBatching(1), negative_log_prob)


def copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def start(make: Make) -> tuple[Engine, StateFiles | None]:
    engine, files = make()
    engine.average = WeightAverage(engine.list_trained, DECAY)
    return engine, files


def check_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_average_is_that_of_its_formula_and_changes_no_step(make: Make) -> None:
    (engine, _), (plain, _) = start(make), make()
    expected = {name: weight.double() for name, weight in copy(engine.list_trained()).items()}
    assert all(("lora_" in name) == any("lora_" in other for other in expected) for name in expected)
    for _ in range(3):
        step(engine)
        step(plain)
        weights = engine.list_trained()
        expected = {name: DECAY * old + (1 - DECAY) * weights[name].double() for name, old in expected.items()}
    assert engine.average is not None
    for name, value in engine.average.values.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-8)
    check_same(engine.list_trained(), plain.list_trained())


def test_the_model_has_the_average_within_the_block_and_its_own_bits_after(make: Make) -> None:
    engine, _ = start(make)
    step(engine)
    before = copy(engine.list_trained())
    assert engine.average is not None
    with pytest.raises(RuntimeError, match="in the block"), engine.average.in_place():
        inside = copy(engine.list_trained())
        raise RuntimeError("in the block")
    check_same(engine.list_trained(), before)
    check_same(inside, {name: value.to(before[name].dtype) for name, value in engine.average.values.items()})
    assert any(not torch.equal(inside[name], before[name]) for name in before)


def test_a_checkpoint_resumes_the_average_to_the_bit(make: Make, tmp_path: Path) -> None:
    (through, files), (resumed, others) = start(make), start(make)
    step(through)
    step(through)
    saver = CheckpointSaver(through, tmp_path, files)
    saver.save(2, {})
    saver.finish()
    step(through)
    load_checkpoint(resumed, tmp_path, files=others)
    step(resumed)
    assert through.average is not None and resumed.average is not None
    check_same(resumed.average.values, through.average.values)


def test_a_checkpoint_without_an_average_starts_one_from_its_weights(make: Make, tmp_path: Path) -> None:
    (plain, files), (resumed, others) = make(), start(make)
    step(plain)
    saver = CheckpointSaver(plain, tmp_path, files)
    saver.save(1, {})
    saver.finish()
    load_checkpoint(resumed, tmp_path, files=others)
    assert resumed.average is not None
    check_same(resumed.average.values, {name: weight.float() for name, weight in plain.list_trained().items()})
