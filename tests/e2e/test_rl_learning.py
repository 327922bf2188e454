"""Every run file of the tiny model learns, and with the sign of the advantages turned it unlearns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.config.run_files import find_project_configs

if TYPE_CHECKING:
    from rl_world import World

ITERATIONS = 5
SEVERAL_STEPS = ["rl_config.mini_batch_size=8"]
SMALLER = {
    "bnpo": SEVERAL_STEPS,
    "cispo": SEVERAL_STEPS,
    "dapo": [*SEVERAL_STEPS, "rl_config.filter_groups_train_batch_size=16", "rl_config.filter_groups_max_batches=50"],
    "gspo": [
        *SEVERAL_STEPS,
        "megatron_training.global_batch_size=64",
        "rl_config.steps_per_generation=2",
        "actor_config.micro_batch_size=4",
    ],
    "ppo": [*SEVERAL_STEPS, "rl_config.critic_warmup=1"],
    "sapo": SEVERAL_STEPS,
}
SMALLER["gspo_token"] = SMALLER["gspo"]


def run_files() -> list[str]:
    """The tiny run files with rollouts."""
    names = sorted(path.stem for path in find_project_configs().glob("*_tiny_cpu.yaml"))
    rewarded = [name for name in names if not load_run_config(name).is_supervised]
    return [name.removesuffix("_tiny_cpu") for name in rewarded if name != "distill_tiny_cpu"]  # it learns from a teacher


def accuracy(world: World, name: str, *, flip: bool) -> tuple[float, float]:
    """Share of right answers to held-out prompts before and after the run, both sampled as in training."""
    held_out = ["rl_config.eval_greedy=false", f"megatron_training.eval_data_path={world.held_out}"]
    run = world.run(f"{name}_tiny_cpu", *SMALLER.get(name, []), *held_out, iterations=ITERATIONS, flip=flip)
    return run.first["eval/accuracy"], run.metrics[-1]["eval/accuracy"]


#: a baseline of the group, a critic, a sampled baseline, a ratio of sequences: the others take their sign in the same places
CONTROLS = ("grpo", "ppo", "remax", "gspo")
NAMES = [name if name in CONTROLS else pytest.param(name, marks=pytest.mark.slow) for name in run_files()]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_file_learns_the_task(world: World, name: str) -> None:
    before, after = accuracy(world, name, flip=False)
    assert 0.3 < before < 0.7 and after > 0.85


@pytest.mark.parametrize("name", NAMES)
def test_with_the_sign_of_the_advantages_turned_it_unlearns_the_task(world: World, name: str) -> None:
    before, after = accuracy(world, name, flip=True)
    assert 0.3 < before < 0.7 and after < 0.15
