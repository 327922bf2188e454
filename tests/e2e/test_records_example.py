"""The example of records with a toy model: data, the supervised baseline, GRPO, and the comparison by transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["megatron_training.bf16=false", "megatron_training.train_iters=2", "megatron_training.save_interval=2"]
SMALL += ["megatron_training.eval_interval=2"]
GRPO = ["generate_config.dtype=float32", "generate_config.max_model_len=400", "rl_config.max_prompt_length=300"]
GRPO += ["rl_config.n_samples_per_prompt=2", "generate_config.kv_cache_memory_gib=0.2", "generate_config.max_num_seqs=32"]


def run(folder: Path, *words: str, code: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=patient(300), check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_every_step_of_the_example_works_together(tmp_path: Path) -> None:
    for name in ("mindspeed_rl", "examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    work = tmp_path / "runs/records"
    run(tmp_path, "examples/records/make_records.py", "runs/records")
    command = ("-m", "mindspeed_rl.cli.main")
    run(tmp_path, *command, "new", "toy")
    (tmp_path / "toy/model").rename(work / "model")
    sft = run(
        tmp_path, *command, "train", "--config-name", "examples/records/sft.yaml", *SMALL, "megatron_training.seq_length=512"
    )
    assert "question and answer rows" in sft and "⟦{" in sft
    pairs = []
    for seed in (1, 2):
        names = [f"run_dir=runs/records/run_{seed}", f"actor_config.save=runs/records/grpo_{seed}"]
        changes = [*SMALL, *GRPO, *names, f"megatron_training.seed={seed}"]
        run(tmp_path, *command, "train", "--config-name", "examples/records/run.yaml", *changes)
        lines = [json.loads(line) for line in (work / f"run_{seed}/metrics.jsonl").read_text().splitlines()]
        assert all("eval/record" in line and "eval/exact_record" in line for line in lines if line["iteration"] in (0, 2))
        pairs.append(f"runs/records/run_{seed}=runs/records/grpo_{seed}/hf/latest")
    # a model of two iterations has learnt nothing, which the script reports
    table = run(tmp_path, "examples/records/compare.py", "runs/records", "float32", *pairs, code=1)
    assert "| GRPO, 2 seed(s) | 0 % (0 to 0) | 0 % (0 to 0) |" in table and "| supervised fine-tuning |" in table
    assert "records that are exactly right" in (work / "curve.svg").read_text()
