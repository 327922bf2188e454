"""Evaluation while training: named sets, several samples, the end at a target, the best checkpoint, and `evaluate` on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished, running
from patience import patient

pytestmark = pytest.mark.slow


def test_the_figures_are_those_of_evaluate_on_the_saved_folder_and_the_run_ends_at_its_target(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    sets = f"megatron_training.eval_sets={{copy: {task / 'heldout.jsonl'}, few: '{task / 'heldout.jsonl'}#4'}}"
    keys = [
        *ONE_PROCESS,
        sets,
        "megatron_training.train_iters=12",
        "megatron_training.save_interval=4",
        "megatron_training.eval_interval=1",
        "megatron_training.eval_n_samples=4",
        "megatron_training.eval_temperature=1.0",
        "megatron_training.eval_metric=eval/copy/accuracy",
        "megatron_training.eval_target=0.6",
        "megatron_training.keep_best=true",
        "megatron_training.seed=7",
        "actor_config.keep_last=1",
        "actor_config.save_hf=true",
        "actor_config.lr=1e-3",
        # the reward's own function beside it, and in an environment: the gap is 0
        "audit.verifier_function=[exact_match]",
        "audit.environment=agent_plugins:OneAnswer",
        "audit.interval=2",
        "audit.num_prompts=6",
    ]
    command = finished(task, tmp_path / "run", *keys)
    save, last = tmp_path / "run" / "save", command.metrics[-1]
    record = json.loads((save / "evaluations.json").read_text())
    assert last["eval/copy/accuracy"] >= 0.6 > max([m["eval/copy/accuracy"] for m in command.metrics[:-1]], default=0.0)
    assert last["iteration"] < 12 and "the run ends: eval/copy/accuracy is" in command.output
    assert record["best"] == {"iteration": last["iteration"], "value": last["eval/copy/accuracy"]}
    assert last["eval/few/prompts"] == 4 and last["eval/copy/pass@1"] == last["eval/copy/accuracy"]
    assert (save / "hf" / "best").resolve() == save / "hf" / f"iter_{last['iteration']:07d}"
    lines = [json.loads(line) for line in (tmp_path / "run" / "run" / "metrics.jsonl").read_text().splitlines()]
    audited = {line["iteration"]: line["audit/gap"] for line in lines if "audit/gap" in line}
    assert set(audited) == {step for step in range(last["iteration"] + 1) if step % 2 == 0} and set(audited.values()) == {0.0}
    assert (tmp_path / "run" / "run" / "audit.jsonl").is_file() and "one_sentence" not in command.output
    assert all(0.0 < line["diversity/sentences_per_prompt"] <= 1.0 for line in command.metrics)
    # the same samples: same seeds, same prompts, same weights
    words = ["--task", "jsonl", "--task-data-path", str(task / "heldout.jsonl"), "--scorer", "exact_match"]
    words += ["--num-return", "4", "--temperature", "1.0", "--seed", "7", "--max-new-tokens", "4", "--dtype", "float32"]
    words += ["--load", str(save / "hf" / "best"), "--output", str(tmp_path / "scores.json"), "--max-length", "64"]
    command_line = [sys.executable, "-m", "mindspeed_rl.cli.main", "evaluate", *words]
    ended = subprocess.run(command_line, capture_output=True, text=True, timeout=patient(300), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    score = json.loads((tmp_path / "scores.json").read_text())["tasks"]["jsonl"]
    figures = {name.removeprefix("eval/copy/"): value for name, value in last.items() if name.startswith("eval/copy/")}
    assert score["accuracy"] == pytest.approx(figures["accuracy"], abs=1e-12)
    assert {f"pass@{k}": value for k, value in score["pass_at"].items()} == pytest.approx(
        {name: value for name, value in figures.items() if name.startswith("pass@")}
    )
    assert score["majority"] == pytest.approx(figures["maj@4"])
    # the same command finds that it has ended
    with running(task, tmp_path / "run", *keys) as again:
        assert again.wait(300) == 0, again.output[-3000:]
    assert len(again.metrics) == len(command.metrics)


def test_supervised_tuning_answers_its_sets_as_evaluate_does(task: Path, tmp_path: Path) -> None:
    answered = [json.loads(line)["labels"] for line in (task / "train.jsonl").read_text().splitlines()]
    rows = [{"prompt": f"{answer}=", "response": answer} for answer in answered]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {
        "stage": "sft", "num_npus": 2, "bf16": False, "seed": 3, "load": str(task / "model"), "finetune": True,
        "tokenizer_name_or_path": str(task / "model"), "data_path": str(tmp_path / "rows.jsonl"),
        "map_keys": {"prompt": "prompt", "response": "response"}, "global_batch_size": 8, "micro_batch_size": 4,
        "seq_length": 32, "train_iters": 3, "lr": 1e-3, "save": str(tmp_path / "save"), "save_hf": True, "eval_interval": 1,
        "tensor_model_parallel_size": 1, "eval_verifier": ["exact_match"], "eval_max_tokens": 4, "keep_best": True,
        "eval_sets": {"copy": str(tmp_path / "questions.jsonl")},
    }  # fmt: skip
    held_out = [json.loads(line) for line in (task / "heldout.jsonl").read_text().splitlines()]
    asked = [{"prompt": row["prompt"], "response": row["labels"]} for row in held_out]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (tmp_path / "run.yaml").write_text(
        json.dumps({"platform": "cpu", "run_dir": str(tmp_path / "run"), "megatron_training": training})
    )

    def command(*words: str) -> str:
        line = [sys.executable, "-m", "mindspeed_rl.cli.main", *words]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=patient(300), check=False, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    command("train", "--config", str(tmp_path / "run.yaml"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    figures = {line["iteration"]: line["eval/copy/accuracy"] for line in lines}
    record = json.loads((tmp_path / "save" / "evaluations.json").read_text())
    best = record["best"]["iteration"]
    assert record["metric"] == "eval/copy/accuracy" and record["best"]["value"] == figures[best] == max(figures.values())
    words = [
        "--task",
        "jsonl",
        "--task-data-path",
        str(tmp_path / "questions.jsonl"),
        "--scorer",
        "exact_match",
        "--max-length",
    ]
    words += [
        "32",
        "--max-new-tokens",
        "4",
        "--dtype",
        "float32",
        "--label-key",
        "response",
        "--output",
        str(tmp_path / "s.json"),
    ]
    command("evaluate", *words, "--load", str(tmp_path / "save" / "hf" / "best"))
    score = json.loads((tmp_path / "s.json").read_text())["tasks"]["jsonl"]
    assert score["accuracy"] == pytest.approx(figures[best], abs=1e-12) and score["total"] == len(asked)
