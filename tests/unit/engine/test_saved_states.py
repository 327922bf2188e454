"""The state of a checkpoint by HF names: what is read of it, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.checkpoint.other_engine import check_engine
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.checkpoint import CheckpointSaver, iteration_folder
from mindspeed_rl.engine.fsdp.model import find_places
from mindspeed_rl.engine.fsdp.states import derive_noise_seed
from mindspeed_rl.engine.saved_states import AVERAGE, WEIGHTS, open_saved_state
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weight_average import WeightAverage
from mindspeed_rl.models.plan import ModelPlan, plan_model

_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = _ROPE | {"original_max_position_embeddings": 32}
    config = LlamaConfig(vocab_size=67, num_hidden_layers=2, max_position_embeddings=64, rope_parameters=rope, **shape)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    # as folders of earlier releases have it, which transformers completes
    written = json.loads((folder / "config.json").read_text())
    scaling = written.pop("rope_parameters")
    written |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.fixture
def plan(llama: Path) -> ModelPlan:
    return plan_model(MegatronConfig(bf16=False), llama)


def test_a_shape_is_known_without_the_files_of_the_weights(plan: ModelPlan, llama: Path, tmp_path: Path) -> None:
    weights = HfFolder(llama)
    state = {f"{WEIGHTS}.{name}": weights.read(name) for name in find_places(plan)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    source = open_saved_state("fsdp", tmp_path, plan, has_score_head=False).open(WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(source.read(name, 1, 8, 16), weights.read(name)[:, 8:16])
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    assert all(source.shape(name) == weights.shape(name) for name in find_places(plan))
    with pytest.raises(ValueError, match="has no weights of model.layers.7.mlp.up_proj.weight"):
        source.shape("model.layers.7.mlp.up_proj.weight")


def test_the_plan_of_a_model_stays_as_it_is(plan: ModelPlan) -> None:
    hf_config = copy.deepcopy(dict(plan.hf_config))
    find_places(plan)
    assert dict(plan.hf_config) == hf_config


def test_an_average_is_no_unknown_tensor_and_another_is(make_engine: Callable[..., TrainEngine], tmp_path: Path) -> None:
    engine = make_engine()
    engine.average = WeightAverage(engine.list_trained, 0.5)
    CheckpointSaver(engine, tmp_path).save(1, {})
    path, plan = iteration_folder(tmp_path, 1), engine.plan
    saved = open_saved_state("megatron", path, plan, has_score_head=False)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(saved.open(AVERAGE).read(name), saved.open_weights().read(name))  # before the first step
    unbiased = replace(plan, model_config=replace(plan.model_config, add_qkv_bias=False))
    with pytest.raises(ValueError, match=r"holds 'decoder.layers.self_attention.linear_qkv.bias', unknown to qwen2"):
        open_saved_state("megatron", path, unbiased, has_score_head=False)


def test_shards_parameters_and_steps_have_their_own_noise() -> None:
    seeds = {derive_noise_seed(7, step, index, shard) for step in range(4) for index in range(6) for shard in range(200)}
    assert len(seeds) == 4 * 6 * 200 and max(seeds) < 1 << 63
    assert derive_noise_seed(7, 1, 2, 3) == derive_noise_seed(7, 1, 2, 3)  # of replicas


@pytest.mark.parametrize(
    ("keys", "record", "words"),
    [
        ({"mtp_num_layers": 1}, {"engine": "fsdp"}, r"no multi-token-prediction layers \(mtp_num_layers: 1\): set that to 0"),
        ({}, {"engine": "other"}, "saved by engine: other, and this version has megatron and fsdp"),
    ],
)
def test_what_an_engine_lacks_is_found_by_the_record(keys: dict[str, Any], record: dict[str, Any], words: str) -> None:
    config = MegatronConfig(**keys)
    check_engine(config, {"engine": "megatron", "lora": None}, Path("save"))
    with pytest.raises(ValueError, match=words):
        check_engine(config, {"lora": None} | record, Path("save"))
