"""The loop around the stages: what happens when, and what is written."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised_samples import answers, instruction_row, write_columns
from transformers import AutoModelForCausalLM

from mindspeed_rl.config import MegatronConfig, RLConfig, build_run_config
from mindspeed_rl.observability.console import IterationProgress
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.run.rules.validation import validate
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.answer_evaluation import AnswerEvaluator, derive_answer_rewards, load_answer_sets
from mindspeed_rl.trainers.run_logger import LogOutputs, RunLogger
from mindspeed_rl.trainers.sft_setup import _derive_throughput
from mindspeed_rl.trainers.supervised import SupervisedTrainer
from mindspeed_rl.trainers.supervised_data import _check_content, list_data_checks
from mindspeed_rl.trainers.termination import Termination
from mindspeed_rl.workers.answers import AnswerRequest
from mindspeed_rl.workers.supervised_worker import SupervisedWorker


class SingleWorker:
    """The calls of a RemoteGroup, made in this process."""

    def __init__(self, worker: SupervisedWorker) -> None:
        self.worker = worker

    def call(self, phase: Phase, *arguments: object) -> list[WorkerReport]:
        return [getattr(self.worker, phase.name)(*arguments)]


def run(
    worker: SupervisedWorker, folder: Path, eval_sets: dict[str, Any] | None = None, pool: RewardPool | None = None
) -> tuple[list[dict], str]:
    """(lines of metrics.jsonl, console) of a whole run."""
    console = io.StringIO()
    config, plan = worker.config, worker.run.plan
    progress = IterationProgress(plan.train_iters, stream=console, every=config.log_interval)
    outputs = LogOutputs(folder, make_trackers(RLConfig(), folder, {}), progress)
    logger = RunLogger(outputs, partial(_derive_throughput, num_devices=1))
    evaluates = worker.held_out is not None
    single = SingleWorker(worker)
    answers = AnswerEvaluator(worker.run, eval_sets or {}, worker.stage.tokenizer, pool, single)
    SupervisedTrainer(worker.run, single, logger, Termination(), answers=answers, evaluates=evaluates).fit()
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


def greedy(folder: Path, prompt_ids: list[int], count: int) -> list[int]:
    """The answer of transformers with saved weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt_ids])
    made = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
    return made[0, len(prompt_ids) :].tolist()


def test_answers_to_held_out_prompts_are_those_of_the_weights_and_leave_training_as_it_is(
    start: Callable[..., Any], prefix: Path, tmp_path: Path
) -> None:
    keys = {"train_iters": 4, "eval_interval": 2, "attention_dropout": 0.1, "hidden_dropout": 0.1}
    plain, _ = run(start("sft", prefix, **keys), tmp_path / "plain")
    questions = tmp_path / "questions.jsonl"
    rows = [{"prompt": "two words", "labels": "x"}, {"prompt": "a longer prompt than the first", "labels": "y"}]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {"eval_sets": {"few": str(questions)}, "eval_verifier": ["exact_match"], "eval_max_tokens": 5}
    save = tmp_path / "save"
    worker = start("sft", prefix, save=str(save), save_hf=True, save_interval=2, **keys, **sets)
    prompts = load_answer_sets(worker.run, worker.stage.tokenizer)
    with RewardPool.from_config(derive_answer_rewards(worker.run), max_tokens=5) as pool:
        lines, _ = run(worker, tmp_path / "answered", prompts, pool)
        answers = AnswerEvaluator(worker.run, prompts, worker.stage.tokenizer, pool, SingleWorker(worker))
        (_, made), *_ = answers._workers.call(
            Phases.GENERATE_ANSWERS, [AnswerRequest(prompts["few"][i]["prompt_ids"], i) for i in range(2)], answers._sampling
        )
    assert [line["iteration"] for line in lines if "eval/few/accuracy" in line] == [2, 4]
    assert lines[-1]["eval/few/prompts"] == 2 and 0 <= lines[-1]["eval/few/accuracy"] <= 1
    # dropout stays on, and draws what it drew
    assert [line["train/loss"] for line in lines] == [line["train/loss"] for line in plain]
    stops = set(answers._sampling.stop_token_ids)
    for index, answer in enumerate(made):
        expected = greedy(save / "hf" / "latest", list(prompts["few"][index]["prompt_ids"]), 5)
        end = next((place + 1 for place, token in enumerate(expected) if token in stops), len(expected))
        assert answer.token_ids == expected[:end]
        assert answer.truncated == (expected[end - 1] not in stops)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "eval_verifier must name a reward function"),
        ({"eval_verifier": ["gsm8k"], "eval_max_tokens": 64}, "leaves no room for a prompt"),
        ({"eval_verifier": ["gsm8k"], "engine": "fsdp"}, "without a cache"),
        ({"eval_verifier": ["gsm8k"], "tensor_model_parallel_size": 2, "sequence_parallel": True}, "one token"),
        ({"eval_verifier": ["gsm8k"], "context_parallel_size": 2}, "one token cannot be split"),
    ],
)
def test_a_run_that_cannot_answer_says_why(keys: dict[str, Any], sentence: str) -> None:
    training = {"stage": "sft", "seq_length": 64, "eval_sets": {"few": "x.jsonl"}, **keys}
    found = validate(draft(build_run_config({"megatron_training": training})))
    assert sentence in "\n".join(map(str, found))


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
