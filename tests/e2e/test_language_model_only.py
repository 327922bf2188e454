"""A model of images that trains on text without its tower: SFT, GRPO, exports, conversion, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tiny_vision
import torch
import transformers
from safetensors.torch import load_file
from scripts import load_script
from test_vision_run import GRPO, SFT, command, metrics

from mindspeed_rl.cli.main import main

DROPPED = ["language_model_only=true", "freeze_vit=true", "freeze_aligner=true"]
REWARD = '''
def even(prompt, response, label, **columns):
    """1 where the first character has an even code."""
    return float(bool(response) and ord(response[0]) % 2 == 0)
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of text, and a tiny Qwen3-VL."""
    folder = tmp_path_factory.mktemp("text")
    tiny_vision.save_for_the_example(load_script("examples/vision/make_task.py"), folder / "model")
    draw = random.Random(3)
    rows = [{"instruction": f"{draw.randint(0, 9)}?", "output": draw.choice("abcd")} for _ in range(64)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evens.py").write_text(REWARD)
    return folder


def drop(group: str) -> list[str]:
    return [f"{group}.{word}" for word in DROPPED]


def train(task: Path, name: str, *words: str) -> None:
    command(
        "train", *SFT, "megatron_training.data_path=text.jsonl", "megatron_training.prompt_type=hf", f"run_dir={name}_run",
        "megatron_training.map_keys={prompt: instruction, query: '', response: output}", f"megatron_training.save={name}",
        "megatron_training.save_interval=3", *words, folder=task,
    )  # fmt: skip


@pytest.mark.slow
def test_text_trains_as_with_a_frozen_tower_and_exports_have_the_published_one(task: Path) -> None:
    train(task, "frozen", "megatron_training.freeze_vit=true", "megatron_training.freeze_aligner=true")
    train(task, "dropped", *drop("megatron_training"))
    losses = [[record["train/loss"] for record in metrics(task / f"{name}_run")] for name in ("frozen", "dropped")]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-6)
    published = load_file(task / "model" / "model.safetensors")
    frozen, dropped = (load_file(task / name / "hf" / "latest" / "model.safetensors") for name in ("frozen", "dropped"))
    assert frozen.keys() == dropped.keys() == published.keys()
    for name, tensor in dropped.items():
        if ".visual." in name:
            assert torch.equal(tensor, published[name]), name
        else:  # an element with almost no gradient takes a step of about the rate, in a direction that rounding decides
            assert (tensor - frozen[name]).abs().mean() < 1e-5, name
    assert any(not torch.equal(dropped[name], published[name]) for name in published)
    folder = task / "dropped" / "hf" / "latest"
    _, notes = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    # a checkpoint of the run has no tower; the conversion takes it from the published folder
    command(
        "convert", "--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", "dropped", "--save-dir", "converted",
        "--hf-cfg-dir", "model", folder=task,
    )  # fmt: skip
    converted = load_file(next((task / "converted").rglob("model.safetensors")))
    assert converted.keys() == dropped.keys() and all(torch.equal(converted[name], dropped[name]) for name in dropped)


@pytest.mark.slow
def test_a_policy_without_its_tower_is_sampled_by_an_engine_without_one(task: Path) -> None:
    command(
        "train", *GRPO, *drop("actor_config"), "megatron_training.data_path=text.jsonl", "megatron_training.image_folder=null",
        "actor_config.load=model", "rl_config.verifier_function=[evens:even]", "actor_config.save_hf=true",
        "rl_config.log_completions=false", folder=task,
    )  # fmt: skip
    records = metrics(task / "grpo_run")
    assert len(records) == 2 and all(record["rollout/log_probs_diff_max"] < 1e-4 for record in records)
    assert all(record["actor/grad_norm"] > 0 for record in records)
    exported, published = (load_file(task / name / "model.safetensors") for name in ("grpo/hf/latest", "model"))
    assert exported.keys() == published.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["actor_config.language_model_only=true"], "language_model_only: true leaves out its tower"),
        ([*drop("actor_config"), "rl_config.is_multimodal=true"], "read without its tower (language_model_only)"),
        (
            [*drop("actor_config"), "actor_config.engine=fsdp", "actor_config.tensor_model_parallel_size=1"],
            "freeze_vit keeps the tower",
        ),
        ([*drop("actor_config"), "megatron_training.max_pixels=784"], "reads no images with language_model_only: true"),
    ],
)
def test_what_contradicts_it_is_refused(
    words: list[str], message: str, task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(task)
    keys = [*GRPO, "actor_config.load=model", "megatron_training.data_path=text.jsonl", "megatron_training.image_folder=null"]
    assert main(["explain", *keys, "rl_config.verifier_function=[evens:even]", *words]) != 0
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
