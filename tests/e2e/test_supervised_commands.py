"""From raw files to trained models: every supervised stage's tiny run file, and runs through Ray that are gone on with."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import patient
from scripts import load_script
from shared_forks import shared

from mindspeed_rl import adaptors, platform
from mindspeed_rl.cli import preprocess
from mindspeed_rl.config import RunConfig, load_run_config
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.runtime.cluster import _set_environment
from mindspeed_rl.runtime.device_memory import DeviceMemoryError
from mindspeed_rl.runtime.fork_server import TRAINING, fork_server

# preprocessing imports Megatron into this process, which trains afterwards
platform.select("cpu")
adaptors.apply("train")

from mindspeed_rl.engine.checkpoint import _find_newest_iteration  # noqa: E402  (Megatron must be imported after the adaptor)

STAGES = ("pretrain", "sft", "dpo", "simpo", "orm", "prm")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's folder: a random model and data for every stage, written by the scripts that users run."""
    folder = tmp_path_factory.mktemp("stages")
    for name in ("make_task", "make_stage_data"):
        load_script(f"examples/quickstart/{name}.py").main(folder)
    (folder / "data").mkdir()
    common = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder / "model"), "--workers", "1"]
    kinds = {
        ("sft", "sft"): ["--prompt-type", "hf", "--handler-name", "AlpacaStyleInstructionHandler"],
        ("pairs", "pairs"): ["--prompt-type", "hf", "--handler-name", "AlpacaStylePairwiseHandler"],
        ("documents", "documents"): ["--handler-name", "GeneralPretrainHandler", "--json-keys", "text", "--append-eod"],
        ("steps", "steps"): ["--handler-name", "AlpacaStyleProcessRewardHandler", "--placeholder-token", "#"]
        + ["--reward-tokens", "y", "n"],
    }  # fmt: skip
    for (raw, prefix), options in kinds.items():
        files = ["--input", str(folder / "raw" / f"{raw}.jsonl"), "--output-prefix", str(folder / "data" / prefix)]
        assert preprocess.main([*common, *files, *options]) == 0
    return folder


def load(work: Path, stage: str, *overrides: str) -> RunConfig:
    """The stage's run file, short, on the files of `work`; starts from the random model."""
    name = f"{stage}_tiny_cpu"
    prefix = load_run_config(name).megatron_training.data_path
    keys = {
        "load": work / "model",
        "tokenizer_name_or_path": work / "model",
        "data_path": str(prefix).replace("./runs/quickstart", str(work)).replace("'", ""),
        "save": work / stage,
        "train_iters": 2,
        "eval_interval": 2,
        "eval_iters": 1,
    }
    return load_run_config(name, None, [*(f"megatron_training.{key}={value}" for key, value in keys.items()), *overrides])


@pytest.mark.parametrize("stage", STAGES)
def test_the_run_file_of_every_stage_trains(single_process_world: None, work: Path, stage: str) -> None:
    from mindspeed_rl.run.models import plan_models
    from mindspeed_rl.workers.supervised_worker import SupervisedWorker

    cfg = load(work, stage, "megatron_training.num_npus=1", "megatron_training.tensor_model_parallel_size=1")
    worker = SupervisedWorker(plan_models(resolve(cfg, platform="cpu")), rank=0)
    losses = [worker.train().metrics.results()["train/loss"] for _ in range(2)]
    assert all(0 < loss < 10 for loss in losses) and losses[0] != losses[1]
    if worker.held_out is not None:
        assert worker.evaluate().metrics.results()["eval/loss"] > 0


def test_memory_of_a_supervised_stage_is_told_by_owner_and_so_is_its_end(single_process_world: None, work: Path) -> None:
    from mindspeed_rl.run.models import plan_models
    from mindspeed_rl.workers.supervised_worker import SupervisedWorker

    alone = ("megatron_training.num_npus=1", "megatron_training.tensor_model_parallel_size=1")
    worker = SupervisedWorker(plan_models(resolve(load(work, "dpo", *alone), platform="cpu")), rank=0)
    result = worker.train().metrics.results()
    count = sum(weight.tensor.numel() for weight in worker.role.stream.local_weights.values())
    for owner in ("weights", "gradients", "reference"):  # float32 all of them
        assert result[f"memory/update/{owner}_gib"] * 2**30 == pytest.approx(4 * count, rel=0.05)
    assert result["memory/update/optimizer_gib"] * 2**30 == pytest.approx(8 * count, rel=0.05)  # two moments

    def more_than_there_is() -> Iterator[list[Any]]:
        raise MemoryError("no")
        yield

    worker._batches = more_than_there_is()
    with pytest.raises(DeviceMemoryError, match=r"^out of memory in phase update: .* GiB, .* GiB, .* GiB\.$") as raised:
        worker.train()
    assert {"weights", "gradients", "optimizer", "reference"} < set(raised.value.owners)


def run(work: Path, *overrides: str) -> tuple[Path, list[dict]]:
    """Runs stage sft through Ray with two workers; returns the run folder and the lines of metrics.jsonl."""
    from mindspeed_rl.trainers.launch import launch

    sft = resolve(load(work, "sft", "megatron_training.split='95,5,0'", *overrides), platform="cpu")
    with _set_environment(**shared(TRAINING)), fork_server("cpu", TRAINING), launch(sft) as trainer:
        trainer.fit()
    folder = sft.folder
    return folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_sft_through_ray_trains_evaluates_saves_and_goes_on(work: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    layout = "megatron_training.tensor_model_parallel_size=2"
    folder, lines = run(work, f"run_dir={work / 'first'}", layout, "rl_config.use_tensorboard=true")
    assert [line["iteration"] for line in lines] == [1, 2]
    assert lines[1]["eval/loss"] > 0 and "eval/loss" not in lines[0]
    assert {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s", "train/tflops_per_device"} <= set(lines[0])
    assert "Outcome: finished" in (folder / "report.md").read_text()
    assert list((folder / "tensorboard").iterdir())
    assert (work / "sft" / "hf" / "latest" / "model.safetensors").is_file()

    again = ["megatron_training.finetune=false", f"megatron_training.load={work / 'sft'}", "megatron_training.train_iters=3"]
    _, more = run(work, f"run_dir={work / 'second'}", *again)  # two replicas now, of one device each
    assert [line["iteration"] for line in more] == [3]
    assert more[0]["train/samples"] == 128


# ---------------------------------------------------------------- killed and gone on with


def command(work: Path, folder: Path) -> list[str]:
    """`mindspeed-rl train` of stage sft with two workers, which goes on from its own checkpoints if there are any."""
    keys = {
        "load": folder / "save",
        "pretrained_checkpoint": work / "model",
        "finetune": "false",
        "tokenizer_name_or_path": work / "model",
        "data_path": work / "data" / "sft",
        "save": folder / "save",
        "save_interval": 4,
        "async_save": "true",
        "keep_last": 2,
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "train_iters": 40,
        "lr_decay_style": "cosine",
    }
    words = [
        sys.executable,
        "-m",
        "mindspeed_rl.cli.main",
        "train",
        "--config-name",
        "sft_tiny_cpu",
        f"run_dir={folder / 'run'}",
    ]
    return words + [f"megatron_training.{key}={value}" for key, value in keys.items()]


def finish(work: Path, folder: Path, *changes: str) -> dict[int, dict[str, float]]:
    """Runs the command to its end; returns what metrics.jsonl says of each iteration that must repeat exactly."""
    ended = subprocess.run(
        [*command(work, folder), *changes],
        env={**os.environ, "OMP_NUM_THREADS": "1", **shared(TRAINING)},
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return figures(folder)


def figures(folder: Path) -> dict[int, dict[str, float]]:
    """Iteration -> loss, gradient norm, learning rate and tokens; the last record of each iteration counts."""
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "train/grad_norm", "train/lr", "train/tokens")
    return {record["iteration"]: {name: record[name] for name in names} for record in records}


@pytest.mark.slow
def test_muon_learns_as_a_command_and_resumes_to_the_bit(work: Path, tmp_path: Path) -> None:
    keys = ["optimizer=muon", "muon_extra_scale_factor=0.2", "use_distributed_optimizer=false", "lr=2e-3", "save_interval=12"]
    keys = [f"megatron_training.{key}" for key in [*keys, "train_iters=24"]]
    expected = finish(work, tmp_path / "whole", *keys)
    losses = [expected[iteration]["train/loss"] for iteration in range(1, 25)]
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    resumed = [*keys, f"megatron_training.load={tmp_path / 'whole' / 'save'}", "megatron_training.load_iteration=12"]
    result = finish(work, tmp_path / "resumed", *resumed)
    assert result == {iteration: expected[iteration] for iteration in range(13, 25)}
    weights = "save/hf/latest/model.safetensors"
    assert (tmp_path / "resumed" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(work: Path) -> tuple[Path, dict[int, dict[str, float]]]:
    """Folder and figures of the run that nobody killed."""
    return work / "uninterrupted", finish(work, work / "uninterrupted")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a worker", "the command"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(work: Path, uninterrupted: tuple, tmp_path: Path, victim: str) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    moment = random.randint(6, 24)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(command(work, tmp_path), env=environment, stdout=output, stderr=output)
    try:
        while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < moment):
            time.sleep(0.02)
        below = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in below if "WorkerProcess" in " ".join(child.cmdline())]
        assert len(workers) == 2, (tmp_path / "output.txt").read_text()
        # the agents of a Ray whose driver was killed leave when they next look for it, maybe minutes later
        rest = below if victim == "a worker" else [child for child in below if "Agent" not in " ".join(child.cmdline())]
        (workers[1] if victim == "a worker" else process).kill()
        assert process.wait(patient(60)) == (1 if victim == "a worker" else -9)
        assert not psutil.wait_procs(rest, timeout=patient(60))[1], "processes outlived the run"
    finally:
        process.kill()
    if victim == "a worker":
        assert "failed in train: its process died" in (tmp_path / "output.txt").read_text()
    before = figures(tmp_path)
    assert max(before) < 40

    folder, expected = uninterrupted
    result = before | finish(work, tmp_path)
    assert result == expected, f"killed after {moment} records"
    weights = "save/hf/latest/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (folder / weights).read_bytes()
    assert _find_newest_iteration(tmp_path / "save") == 40


@pytest.mark.slow
def test_a_run_that_tolerates_faults_goes_on_by_itself(work: Path, uninterrupted: tuple, tmp_path: Path) -> None:
    metrics, seen = tmp_path / "run" / "metrics.jsonl", tmp_path / "output.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    tolerant = ["rl_config.fault_tolerance.enabled=true", "rl_config.fault_tolerance.heartbeat_interval_s=1"]
    with seen.open("w") as output:
        process = subprocess.Popen([*command(work, tmp_path), *tolerant], env=environment, stdout=output, stderr=output)
    try:
        for moment, how in ((9, "kill"), (21, "suspend")):
            while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < moment):
                time.sleep(0.02)
            below = psutil.Process(process.pid).children(recursive=True)
            workers = [child for child in below if "WorkerProcess" in " ".join(child.cmdline())]
            getattr(workers[1], how)()
            count = 1 if how == "kill" else 2
            while process.poll() is None and seen.read_text().count("the run resumes after iteration") < count:
                time.sleep(0.2)
            assert not psutil.wait_procs(workers, timeout=patient(30))[1], "workers outlived their world"
        assert process.wait(patient(300)) == 0, seen.read_text()[-3000:]
    finally:
        process.kill()
    said = seen.read_text()
    assert "failed in train: its process died" in said and "is stopped (SIGSTOP, or a debugger)" in said
    assert [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()] == list(range(1, 41))
    folder, expected = uninterrupted
    assert figures(tmp_path) == expected
    weights = "save/hf/latest/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (folder / weights).read_bytes()
