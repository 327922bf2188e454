"""Supervised stages on transformers' modules under FSDP2: the losses and updates are those on Megatron."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from supervised_samples import answers, instruction_row, pair_row, text, write_columns

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.cli import engine_parity
from mindspeed_rl.data.indexed import IndexedWriter, column_prefix
from mindspeed_rl.workers.supervised_worker import SupervisedWorker

_GOOD, _BAD = 90, 91
#: stage -> its keys; adam_eps hides updates of gradients that are only rounding
_STAGES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"dpo_loss_type": "sigmoid"},
    "simpo": {},
    "orpo": {},
    "cpo": {},
    "kto": {},
    "pretrain": {"seq_length": 32},
    "prm": {"reward_tokens": [text(_GOOD), text(_BAD)]},
}


def _write(folder: Path, stage: str) -> Path:
    samples = answers(16, seed=2)
    if stage == "pretrain":
        return _write_documents(folder / "documents", [prompt + answer for prompt, answer in answers(200, seed=2)])
    if stage == "prm":
        rows = [{**instruction_row(prompt, answer), "labels": _judge(prompt, answer)} for prompt, answer in samples]
        return write_columns(folder / "steps", rows)
    if stage == "kto":
        judged = [{**instruction_row(*sample), "desirable": [index % 3 > 0]} for index, sample in enumerate(samples)]
        return write_columns(folder / "judged", judged)
    if stage == "sft":
        return write_columns(folder / "rows", [instruction_row(*sample) for sample in samples])
    chosen, rejected = answers(16, seed=3), answers(16, seed=4)
    rows = [pair_row(prompt, good, bad) for (prompt, good), (_, bad) in zip(chosen, rejected)]
    return write_columns(folder / "pairs", rows)


def _judge(prompt: list[int], answer: list[int]) -> list[int]:
    """Labels of a process reward model: a judgement of the prompt's end and one of the answer's."""
    judged = [-100] * (len(prompt) + len(answer))
    judged[len(prompt) - 1], judged[-1] = _GOOD, _BAD
    return judged


def _write_documents(prefix: Path, documents: list[list[int]]) -> Path:
    path = column_prefix(prefix, "text", packed=False)
    writer = IndexedWriter(path)
    for document in documents:
        writer.add_documents(np.array(document, dtype=np.int32), [len(document)])
    writer.close()
    return Path(path)


def _read(worker: SupervisedWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.role.stream.named_tensors()}


@pytest.mark.parametrize("stage", _STAGES)
def test_a_stage_trains_as_on_megatron(start: Callable[..., SupervisedWorker], tmp_path: Path, stage: str) -> None:
    data = _write(tmp_path, stage)
    keys = {"adam_eps": 1e-5, **_STAGES[stage]}
    ours, theirs = (start(stage, data, engine=engine, **keys) for engine in ("fsdp", "megatron"))
    for _ in range(2):
        metrics, expected = (worker.train().metrics.results() for worker in (ours, theirs))
        names = [name for name in expected if name.startswith("train/") and "memory" not in name]
        # a divergence is a small difference of sums of log-probs
        assert {name: metrics[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-5, abs=1e-5
        )
    weights = _read(ours)
    for name, weight in _read(theirs).items():
        assert (weights[name] - weight).abs().max() <= 1e-5 * weight.abs().max() + 1e-7, name


_ADAPTED = {"lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "lora_r": 4}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "orm"])
def test_a_stage_trains_adapters_as_on_megatron(start: Callable[..., SupervisedWorker], tmp_path: Path, stage: str) -> None:
    data = _write(tmp_path, "dpo" if stage == "orm" else stage)
    keys = {"adam_eps": 1e-5, **_STAGES.get(stage, {}), **_ADAPTED}
    ours, theirs = (start(stage, data, engine=engine, **keys) for engine in ("fsdp", "megatron"))
    assert ours.ref is None
    for _ in range(3):
        metrics, expected = (worker.train().metrics.results() for worker in (ours, theirs))
        assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
    weights = _read(ours)
    for name, weight in _read(theirs).items():
        assert (weights[name] - weight).abs().max() <= 1e-5 * weight.abs().max() + 1e-7, name


@pytest.mark.slow
def test_adapters_are_exported_and_train_on_with_the_other_engine(
    start: Callable[..., SupervisedWorker], tmp_path: Path, tiny_model: Path
) -> None:
    data, save = _write(tmp_path, "sft"), tmp_path / "save"
    keys: dict[str, Any] = {"save_hf": True, "lora_ckpt_filter": True, **_ADAPTED}
    worker = start("sft", data, engine="fsdp", save=str(save), **keys)
    worker.train()
    worker.save(1)
    trained = _read(worker)
    exported = save / "hf" / "latest"
    assert (exported / "adapter_config.json").is_file()
    resumed = start(
        "sft",
        data,
        engine="fsdp",
        save=str(save),
        **keys | {"load": str(save), "finetune": False, "pretrained_checkpoint": str(tiny_model)},
    )
    assert resumed.consumed == 8
    assert all(torch.equal(value, trained[name]) for name, value in _read(resumed).items())
    for engine in ("fsdp", "megatron"):
        other = _read(start("sft", data, engine=engine, load=str(exported), **_ADAPTED))
        assert all((value - trained[name]).abs().max() < 1e-6 for name, value in other.items())


@pytest.mark.parametrize("stage", ["sft", "orm"])
def test_a_stage_saves_a_folder_and_resumes(start: Callable[..., SupervisedWorker], tmp_path: Path, stage: str) -> None:
    data, save = _write(tmp_path, stage), tmp_path / "save"
    keys: dict[str, Any] = {"engine": "fsdp", "save": str(save), "save_hf": True}
    worker = start(stage, data, **keys)
    worker.train()
    worker.save(1)
    expected = _read(worker)
    folder = HfFolder(save / "hf" / "latest")
    assert all(torch.equal(folder.read(name), value) for name, value in expected.items())
    resumed = start(stage, data, **keys | {"load": str(save), "finetune": False})
    assert resumed.resumed_state()["iteration"] == 1 and resumed.consumed == 8
    assert all(torch.equal(value, expected[name]) for name, value in _read(resumed).items())
    first, again = (side.train().metrics.results() for side in (worker, resumed))
    assert first["train/loss"] == again["train/loss"] and first["train/grad_norm"] == again["train/grad_norm"]
    after = _read(worker)
    assert all(torch.equal(value, after[name]) for name, value in _read(resumed).items())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@pytest.mark.parametrize("stage", ["sft", "orm"])
def test_a_run_of_one_engine_resumes_on_the_other(
    start: Callable[..., SupervisedWorker], tmp_path: Path, stage: str, engine: str
) -> None:
    data, save = _write(tmp_path, stage), tmp_path / "save"
    other = {"megatron": "fsdp", "fsdp": "megatron"}[engine]
    worker = start(stage, data, engine=engine, save=str(save), adam_eps=1e-5)
    worker.train()
    worker.save(1)
    expected = _read(worker)
    resumed = start(stage, data, engine=other, load=str(save), finetune=False, adam_eps=1e-5)
    assert resumed.resumed_state()["iteration"] == 1 and resumed.consumed == 8
    assert all(torch.equal(value, expected[name]) for name, value in _read(resumed).items())
    first, again = (side.train().metrics.results() for side in (worker, resumed))
    assert again["train/loss"] == pytest.approx(first["train/loss"], rel=1e-5)
    assert again["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-5)
    if stage == "sft":  # a reward model starts from its weights, with a head of zeros
        scored = _read(start("orm", _write(tmp_path, "dpo"), engine=other, load=str(save)))
        assert not scored["score.weight"].any()
        kept = scored.keys() & expected.keys()
        assert len(kept) > 10 and all(torch.equal(scored[name], expected[name]) for name in kept)


def test_a_value_head_trains_as_on_megatron(start: Callable[..., SupervisedWorker], tmp_path: Path) -> None:
    data = _write(tmp_path, "dpo")
    reports = []
    for engine in ("fsdp", "megatron"):
        worker = start("orm", data, engine=engine, adam_eps=1e-5)
        reports.append([worker.train().metrics.results() for _ in range(2)])
    for ours, theirs in zip(*reports):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-5)


def _write_run(folder: Path, model: Path) -> list[str]:
    run = {
        "platform": "cpu",
        "megatron_training": {"stage": "sft", "load": str(model), "tokenizer_name_or_path": str(model), "lr": 1e-3},
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    return ["run", "--config-dir", str(folder), "--json", str(folder / "differences.json")]


def test_the_command_names_its_engines(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for engines in ("megatron", "megatron,deepspeed", "fsdp,fsdp"):
        with pytest.raises(SystemExit) as stop:
            engine_parity.main([*_write_run(tmp_path, tiny_model), "--engines", engines])
        assert stop.value.code == 2 and "--engines" in capsys.readouterr().err
