"""Trainer and rollout engine that part from a depth on: the run's own rows are compared, and the first module is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fault_run import TWO, struck

pytestmark = [pytest.mark.slow, pytest.mark.extra]

#: three tokens of a prompt, and the first bucket of depths after it
START = 3 + 16
LONG = ["generate_config.sampling_config.max_tokens=24", "generate_config.sampling_config.ignore_eos=true"]
#: a model that has learnt a token gives it nearly 1 on both sides
SLOWLY = ["actor_config.lr=1e-6", "actor_config.min_lr=0"]
#: the engine's log-probs are compared in the update, or with those of a pass before it
TWO_STEPS = ["rl_config.mini_batch_size=4", "actor_config.micro_batch_size=8"]


@pytest.mark.parametrize(
    ("keys", "returned", "iteration"),
    [
        # updates of one step are compared in the first three iterations
        pytest.param(["rl_config.log_probs_diff_limit=null"], 0, 3, id="compared in the update"),
        pytest.param(["rl_config.log_probs_diff_limit=null", *TWO_STEPS], 0, 4, id="compared before the update"),
        pytest.param(["rl_config.log_probs_diff_limit=0.01"], 1, 1, id="ended by the limit"),
    ],
)
def test_the_first_module_that_differs_is_named_on_the_recorded_rows(
    keys: list[str], returned: int, iteration: int, task: Path, tmp_path: Path
) -> None:
    keys = [*TWO, *LONG, *keys, "megatron_training.train_iters=4", "actor_config.save=null", *SLOWLY]
    with struck(task, tmp_path, *keys, shares=True) as run:
        (run.faults / "0.json").write_text(json.dumps({"place": "engine.rotary", "how": "turn", "start": START, "stays": True}))
        assert run.wait(600.0) == returned, run.output[-3000:]
        if not returned:
            figures = run.metrics[2]
            assert figures["mismatch/depth/16"] > 0.02 > 100 * figures["mismatch/depth/0"]
            assert "Trainer and rollout differ from token 16 of a response on" in run.output
        rows = json.loads((tmp_path / "run" / "mismatch_rows.json").read_text())
        assert rows["place"] == "mismatch/depth/16" and rows["iteration"] == iteration
        assert all(START <= len(context) < 3 + 24 for context in rows["contexts"])
        assert "up to the tokens of mismatch/depth/16: 4" in run.output
        assert "layers.0.attention is the first to differ" in run.output
    found = json.loads((tmp_path / "run" / "mismatch.json").read_text())
    places = {place["name"]: place["gap"] for place in found["places"]}
    assert places["embedding"] < 1e-5 < 1e-3 < places["layers.0.attention"]
    assert "layers.0.attention" in found["cause"]["sentence"]
