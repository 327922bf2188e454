"""What the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from patience import patient

if TYPE_CHECKING:
    from rl_world import World


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tests' task: model/, reward_model/, train.jsonl, heldout.jsonl."""
    from tiny_task import make_task

    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def world(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two workers, data parallel, with all roles: 16 prompts of 8 responses an iteration, one optimizer step.

    It goes with its module: other tests start a Ray of their own in this process.
    """
    from rl_world import World

    shared = [
        "rl_config.actor_resource.num_npus=2",
        "actor_config.tensor_model_parallel_size=1",
        "actor_config.micro_batch_size=16",
        "actor_config.lr=3e-4",
        "actor_config.lr_decay_style=constant",
        "megatron_training.global_batch_size=16",
        "rl_config.mini_batch_size=16",
        f"rl_config.wait_timeout_s={patient(60):.0f}",
        "generate_config.sampling_config.max_tokens=4",
    ]
    world = World(task, tmp_path_factory.mktemp("world"), shared)
    yield world
    world.close()
