"""A run that goes on from its checkpoint is the run that was never stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised_samples import answers, instruction_row, pair_row, write_columns

from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.workers.supervised_worker import SupervisedWorker

# with its model keys the model has dropout, so that random generators matter
NETWORK_KEYS = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "disable_bias_linear": True,
    "add_qkv_bias": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
}


def steps(stage: SupervisedWorker, count: int) -> list[dict[str, float]]:
    """Figures of the next steps that must repeat exactly."""
    names = ("train/loss", "train/grad_norm", "train/lr", "train/tokens")
    results = [stage.train().metrics.results() for _ in range(count)]
    return [{name: result[name] for name in names} for result in results]


def weights(stage: SupervisedWorker) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: p.detach().clone() for m in stage.role.model.models for name, p in m.named_parameters()}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("sft", {"use_distributed_optimizer": True}),
        ("sft", {"optimizer": "muon", "lr": 1e-3}),
        ("sft", {"async_save": True, "full_shuffle_instruction_dataset": True}),
        ("dpo", {}),  # the reference is built after the policy, and draws from the generators of its dropout
        ("dpo", {"lora_target_modules": ["linear_qkv", "linear_fc1"], "lora_r": 4}),
        ("orm", {"keep_last": 1}),
        ("orm", {"lora_target_modules": ["linear_qkv", "linear_fc2"], "lora_r": 4, "lora_ckpt_filter": True}),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(start: Callable[..., Any], tmp_path: Path, name: str, keys: dict) -> None:
    samples = answers(20, seed=1)  # 6 steps of 8 wrap around twice
    rows = [instruction_row(*sample) for sample in samples]
    if name in ("dpo", "orm"):
        rows = [pair_row(prompt, answer, answer[::-1]) for prompt, answer in samples]
    prefix = write_columns(tmp_path / "data", rows)
    keys = {**NETWORK_KEYS, "no_shuffle": False, "lr_decay_style": "cosine", "train_iters": 6, **keys}
    whole = start(name, prefix, **keys)
    expected = steps(whole, 6)

    folder = tmp_path / "save"
    killed = start(name, prefix, save=str(folder), **keys)
    assert steps(killed, 3) == expected[:3]
    killed.save(3)
    steps(killed, 1)  # made, but never saved
    killed.finish()

    resumed = start(
        name, prefix, **{**keys, "load": str(folder), "pretrained_checkpoint": whole.config.load, "finetune": False}
    )
    assert resumed.resumed_state()["iteration"] == 3
    assert steps(resumed, 3) == expected[3:]
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_a_checkpoint_says_how_many_samples_were_consumed(start: Callable[..., Any], tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "data", [instruction_row(*sample) for sample in answers(20, seed=1)])
    stage = start("sft", prefix, save=str(tmp_path / "save"))
    steps(stage, 2)
    stage.save(2)
    record = json.loads((tmp_path / "save" / "iter_0000002" / "run_state.json").read_text())
    assert record["run_state"]["consumed_samples"] == 16


def test_a_resumed_run_has_the_attention_of_its_checkpoint(start: Callable[..., Any], tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "data", [instruction_row(*sample) for sample in answers(20, seed=1)])
    first = start("sft", prefix, save=str(tmp_path / "save"))
    steps(first, 2)
    first.save(2)
    path = tmp_path / "save" / "iter_0000002" / "run_state.json"
    record = json.loads(path.read_text())
    assert record["run_state"]["cpu_attention"] == first.run.attention.kernel
    for kernel in ("blocks", "torch"):  # one of which this machine's trial did not choose
        record["run_state"]["cpu_attention"] = kernel
        path.write_text(json.dumps({**record, "checksums": False}))
        (path.parent / "checksums.json").unlink(missing_ok=True)
        resumed = start("sft", prefix, load=str(tmp_path / "save"), finetune=False, train_iters=6)
        assert resumed.run.attention.kernel == kernel and "as before the run was resumed" in resumed.run.attention.reason


def test_exports_and_checkpoints_have_the_chat_template_of_the_training(start: Callable[..., Any], tmp_path: Path) -> None:
    template = {"name": "mine", "format_user": {"slots": ["Q {{content}} A "]}}
    (tmp_path / "t.json").write_text(json.dumps([template]))
    prefix = write_columns(tmp_path / "data", [instruction_row(*sample) for sample in answers(20, seed=1)])
    keys = {"prompt_type": "mine", "prompt_type_path": str(tmp_path / "t.json"), "save_hf": True}
    for name, more in (("plain", {}), ("adapter", {"lora_target_modules": ["linear_qkv"], "lora_ckpt_filter": True})):
        stage = start("sft", prefix, save=str(tmp_path / name), **keys, **more)
        steps(stage, 1)
        stage.save(1)
        for folder in (tmp_path / name / "hf" / "latest", tmp_path / name / "huggingface"):
            tokenizer = load_tokenizer(folder)
            messages = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}] * 2
            expected = f"Q 1 + 2 A 3{tokenizer.eos_token}" * 2
            assert tokenizer.apply_chat_template(messages, tokenize=False) == expected


def test_finetune_starts_from_the_weights_alone(start: Callable[..., Any], tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "data", [instruction_row(*sample) for sample in answers(20, seed=1)])
    first = start("sft", prefix, save=str(tmp_path / "save"))
    steps(first, 2)
    first.save(2)
    saved = weights(first)
    second = start("sft", prefix, load=str(tmp_path / "save"), finetune=True)
    assert second.resumed_state() == {} and second.consumed == 0
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(second).items())


def test_the_reference_of_a_resumed_dpo_run_must_be_named(start: Callable[..., Any], tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "data", [pair_row(p, a, a[::-1]) for p, a in answers(20, seed=1)])
    first = start("dpo", prefix, save=str(tmp_path / "save"))
    first.save(0)
    with pytest.raises(ValueError, match="ref_model: not set, and load .* is a checkpoint that the run goes on from"):
        start("dpo", prefix, load=str(tmp_path / "save"), finetune=False)
    config = dataclasses.replace(first.config)
    named = start("dpo", prefix, load=str(tmp_path / "save"), finetune=False, ref_model=config.load)
    assert named.train().metrics.results()["train/loss"] == pytest.approx(0.693147, abs=1e-5)
