"""A reward model, and so a critic, starts from any language model's weights with a head whose values are 0."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised_samples import answers, instruction_row, pair_row, write_columns

from mindspeed_rl.checkpoint.model_source import check_weights, find_model, lacks_score_head
from mindspeed_rl.cli.convert import main as convert
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.workers.supervised_worker import SupervisedWorker

SAMPLES = answers(8, seed=1)
LORA = {"lora_target_modules": ["linear_qkv"], "lora_r": 4}


@pytest.fixture()
def pairs(tmp_path: Path) -> Path:
    return write_columns(tmp_path / "pairs", [pair_row(prompt, answer, answer[::-1]) for prompt, answer in SAMPLES])


@pytest.fixture()
def instructions(tmp_path: Path) -> Path:
    return write_columns(tmp_path / "instructions", [instruction_row(*sample) for sample in SAMPLES])


def weights(worker: SupervisedWorker) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: p.detach().clone() for m in worker.role.model.models for name, p in m.named_parameters()}


def saved(worker: SupervisedWorker) -> dict[str, torch.Tensor]:
    """The weights after one step, which are in a checkpoint now."""
    worker.train()
    worker.save(1)
    worker.finish()
    return weights(worker)


def assert_fresh(result: dict[str, torch.Tensor], body: dict[str, torch.Tensor]) -> None:
    """The body is the language model's, the head is 0."""
    assert not result["rm_head.weight"].any()
    for name, tensor in result.items():
        if name in body:
            assert torch.equal(tensor, body[name]), name
    assert set(body) - set(result) <= {"output_layer.weight"}


@pytest.mark.parametrize("kind", ["hf", "training", "training with adapters", "torch", "torch_dist"])
def test_a_reward_model_starts_from_any_language_model(
    start: Callable[..., Any], instructions: Path, pairs: Path, tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    keys: dict[str, Any] = {}
    if kind.startswith("training"):
        folder = tmp_path / "sft"
        keys = LORA if kind.endswith("adapters") else {}
        body = saved(start("sft", instructions, save=str(folder), **keys))
    else:
        body = weights(start("sft", instructions))
        folder = tiny_model
        if kind != "hf":
            folder = tmp_path / "converted"
            assert convert(["--load-dir", str(tiny_model), "--save-dir", str(folder), "--ckpt-format", kind]) == 0
    assert lacks_score_head(find_model(MegatronConfig(load=str(folder), tokenizer_name_or_path=str(tiny_model)), "x"))
    assert_fresh(weights(start("orm", pairs, load=str(folder), **keys)), body)


def test_a_head_that_was_trained_is_kept(start: Callable[..., Any], pairs: Path, tiny_model: Path, tmp_path: Path) -> None:
    expected = saved(start("orm", pairs, save=str(tmp_path / "orm")))
    assert expected["rm_head.weight"].any()
    result = start("orm", pairs, load=str(tmp_path / "orm"))
    assert torch.equal(weights(result)["rm_head.weight"], expected["rm_head.weight"])
    adapted = start("orm", pairs, load=str(tmp_path / "orm"), **LORA)
    assert torch.equal(weights(adapted)["rm_head.weight"], expected["rm_head.weight"])


def test_going_on_needs_the_head_and_anything_else_that_is_missing_is_named(
    start: Callable[..., Any], instructions: Path, pairs: Path, tiny_model: Path, tmp_path: Path
) -> None:
    saved(start("sft", instructions, save=str(tmp_path / "sft")))
    with pytest.raises(ValueError, match="was written by stage sft, from which a run of stage orm cannot resume"):
        start("orm", pairs, load=str(tmp_path / "sft"), finetune=False)
    _forget_stage(tmp_path / "sft" / "iter_0000001")
    with pytest.raises(ValueError, match="without a score head to resume with; set finetune: true"):
        start("orm", pairs, load=str(tmp_path / "sft"), finetune=False)
    saved(start("orm", pairs, save=str(tmp_path / "orm")))
    _forget_stage(tmp_path / "orm" / "iter_0000001")
    with pytest.raises(ValueError, match="does not fit this run"):
        start("sft", instructions, load=str(tmp_path / "orm"), tokenizer_name_or_path=str(_untied(tiny_model, tmp_path)))


def _forget_stage(folder: Path) -> None:
    """Make the checkpoint one of an earlier version, which has neither its stage and other keys nor checksums."""
    path = folder / "run_state.json"
    record = json.loads(path.read_text())
    del record["stage"]
    record["run_state"].pop("keys", None)
    record.pop("checksums", None)
    path.write_text(json.dumps(record))
    for sums in folder.glob("*checksums*"):
        sums.unlink()


def _untied(model: Path, tmp_path: Path) -> Path:
    """The same folder, saying that the head is not a copy of the embedding."""
    folder = shutil.copytree(model, tmp_path / "untied")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_weights_with_layers_that_config_json_does_not_count_are_refused(
    start: Callable[..., Any], instructions: Path, pairs: Path, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"], config["layer_types"] = layers - 1, config["layer_types"][: layers - 1]
    (folder / "config.json").write_text(json.dumps(config))
    keys = {"load": str(folder), "tokenizer_name_or_path": str(folder)}
    said = rf"holds 'model.layers.{layers - 1}\..*unknown to a qwen2 .* num_hidden_layers {layers - 1}"
    with pytest.raises(ValueError, match=said):
        start("sft", instructions, **keys)
    with pytest.raises(ValueError, match=said):
        start("orm", pairs, **keys)
    with pytest.raises(ValueError, match=said):
        check_weights(MegatronConfig(), find_model(MegatronConfig(**keys), "actor_config"))
    skipped = check_weights(MegatronConfig(load_checkpoint_loosely=True), find_model(MegatronConfig(**keys), "actor_config"))
    assert len(skipped) == 1 and "tensors unknown to qwen2" in skipped[0]
    start("sft", instructions, load_checkpoint_loosely=True, **keys)
