"""The loop around the stages: what happens when, and what is written."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from supervised_samples import answers, instruction_row, write_columns

from mindspeed_rl.config import MegatronConfig, RLConfig
from mindspeed_rl.observability.console import IterationProgress
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.run.phases import Phase
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.run_logger import LogOutputs, RunLogger
from mindspeed_rl.trainers.sft_setup import _derive_throughput
from mindspeed_rl.trainers.supervised import SupervisedTrainer
from mindspeed_rl.trainers.supervised_data import _check_content, list_data_checks
from mindspeed_rl.trainers.termination import Termination
from mindspeed_rl.workers.supervised_worker import SupervisedWorker


class SingleWorker:
    """The calls of a RemoteGroup, made in this process."""

    def __init__(self, worker: SupervisedWorker) -> None:
        self.worker = worker

    def call(self, phase: Phase, *arguments: object) -> list[WorkerReport]:
        return [getattr(self.worker, phase.name)(*arguments)]


def run(worker: SupervisedWorker, folder: Path) -> tuple[list[dict], str]:
    """(lines of metrics.jsonl, console) of a whole run."""
    console = io.StringIO()
    config, plan = worker.config, worker.run.plan
    progress = IterationProgress(plan.train_iters, stream=console, every=config.log_interval)
    outputs = LogOutputs(folder, make_trackers(RLConfig(), folder, {}), progress)
    logger = RunLogger(outputs, partial(_derive_throughput, num_devices=1))
    evaluates = worker.held_out is not None
    SupervisedTrainer(worker.run, SingleWorker(worker), logger, Termination(), evaluates=evaluates).fit()
    logger.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], console.getvalue()


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_columns(tmp_path / "sft", [instruction_row(*sample) for sample in answers(32, seed=1)])


def test_saves_and_evaluations_come_at_their_intervals_and_at_the_end(
    start: Callable[..., Any], prefix: Path, tmp_path: Path
) -> None:
    keys = {"train_iters": 7, "save_interval": 3, "eval_interval": 2, "keep_last": 2, "log_interval": 5, "split": "3,1,0"}
    lines, console = run(start("sft", prefix, save=str(tmp_path / "save"), save_hf=True, **keys), tmp_path)
    assert [line["iteration"] for line in lines] == list(range(1, 8))
    assert [line["iteration"] for line in lines if "eval/loss" in line] == [2, 4, 6, 7]
    assert sorted(path.name for path in (tmp_path / "save").glob("iter_*")) == ["iter_0000006", "iter_0000007"]
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert (tmp_path / "save" / "hf" / "latest" / "config.json").is_file()
    shown = [line.split("|")[0].strip() for line in console.splitlines()]
    assert shown == [f"iteration {number}/7" for number in (2, 4, 5, 6, 7)]
    for name in ("train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s", "train/samples_per_s"):
        assert all(line[name] > 0 for line in lines), name
    assert all(line["train/tflops_per_device"] > 0 and line["train/memory_gib"] > 0 for line in lines)


def test_skip_train_evaluates_and_changes_nothing(start: Callable[..., Any], prefix: Path, tmp_path: Path) -> None:
    worker = start("sft", prefix, train_iters=7, skip_train=True, split="1,1,0", save=str(tmp_path / "save"))
    lines, _ = run(worker, tmp_path)
    assert len(lines) == 1 and lines[0]["eval/loss"] > 0 and "train/loss" not in lines[0]
    assert worker.consumed == 0 and not (tmp_path / "save").exists()


def check_data(stage: str = "sft", **keys: Any) -> None:
    """The checks of files that `explain` and `train` make before anything starts."""
    for check in list_data_checks(MegatronConfig(stage=stage, **keys)):
        check()


def test_missing_data_is_named_before_anything_starts(prefix: Path, tmp_path: Path) -> None:
    check_data(data_path=str(prefix))
    with pytest.raises(ValueError, match="data_path: not set; stage dpo learns from it"):
        check_data("dpo")
    with pytest.raises(
        ValueError, match=r"chosen_input_ids_document.idx does not exist \(found attention_mask, input_ids, labels"
    ):
        check_data("dpo", data_path=str(prefix))
    with pytest.raises(ValueError, match="eval_data_path: .*elsewhere"):
        check_data(data_path=str(prefix), eval_data_path=str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match="data_path: .*sft.idx does not exist .*with _text_document"):
        check_data("pretrain", data_path=[0.5, str(prefix)])


def test_what_files_hold_is_checked_before_anything_starts(start: Callable[..., Any], prefix: Path) -> None:
    run = start("sft", prefix).run
    _check_content(run, "data_path", str(prefix), prefix, 1 << 20, is_raw=False)
    with pytest.raises(ValueError, match=r"data_path: .*input_ids_document\.bin, row 0, position 0: token id \d+ is not"):
        _check_content(run, "data_path", str(prefix), prefix, 2, is_raw=False)


def test_a_pack_without_its_borders_is_refused(start: Callable[..., Any], prefix: Path) -> None:
    run = start("sft", prefix, pack=True, reset_attention_mask=True).run
    with pytest.raises(ValueError, match=r"has no .*sft_packed_sample_lengths_document\.bin, so nothing shows where samples"):
        _check_content(run, "data_path", str(prefix), prefix, 1 << 20, is_raw=False)
