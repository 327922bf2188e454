"""`mindspeed-rl train` with transformers' modules under FSDP2, beside the same run on Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_command import FIGURES, Command, finished
from safetensors.torch import load_file

ITERATIONS = "megatron_training.train_iters=2"
LAYOUT = ["actor_config.tensor_model_parallel_size=1", "rl_config.use_prefix_grouper=false"]
FSDP = [*LAYOUT, "megatron_training.engine=fsdp"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def by_fsdp(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Two workers with a shard of actor and reference each."""
    return finished(task, tmp_path_factory.mktemp("fsdp"), ITERATIONS, *FSDP)


def test_both_engines_make_the_same_run(task: Path, by_fsdp: Command, tmp_path: Path) -> None:
    by_megatron = finished(task, tmp_path, ITERATIONS, *LAYOUT)
    for ours, theirs in zip(by_fsdp.metrics, by_megatron.metrics, strict=True):
        for name in FIGURES:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        assert ours["rollout/proven_parameters"] == theirs["rollout/proven_parameters"]
    weights = [
        load_file(command.folder / "save" / "hf" / "iter_0000002" / "model.safetensors") for command in (by_fsdp, by_megatron)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        assert (weights[0][name] - value).abs().max() <= 1e-5 * value.abs().max() + 1e-7, name


def test_trainer_and_rollout_agree_about_log_probs(by_fsdp: Command) -> None:
    assert max(record["rollout/log_probs_diff_max"] for record in by_fsdp.metrics) < 1e-4


def test_a_run_resumes_on_one_device(task: Path, by_fsdp: Command) -> None:
    changes = ("megatron_training.train_iters=3", *FSDP, "rl_config.actor_resource.num_npus=1")
    resumed = finished(task, by_fsdp.folder, *changes, timeout_s=400)
    assert "resumes after iteration 2 of" in resumed.output
    assert resumed.metrics[-1]["iteration"] == 3 and resumed.metrics[-1]["actor/grad_norm"] > 0.0
