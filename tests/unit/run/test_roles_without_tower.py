"""Runs in which a role leaves out its tower: no role misses the images of the actor's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rl.config import load_run_config
from mindspeed_rl.config.model_metadata import EngineShape, ModelMetadata
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import validate

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SEPARATE = "rl_config.use_integrated_worker=false"
IMAGES, TEXT = True, False


def find(words: list[str], **reads_images: bool) -> str:
    """Messages about towers; `reads_images`: whether the model in the files of a role reads images, where they are here."""
    config = load_run_config("grpo_qwen25_vl_7b_A2", CONFIGS, words)
    files = {
        f"{role}_config": ModelMetadata(role, EngineShape(source=role), reads, f"/models/{role}")
        for role, reads in reads_images.items()
    }
    found = validate(draft(replace(config, model_metadata=files)))
    return "\n".join(item.message for item in found if "language_model_only" in item.message)


@pytest.mark.parametrize("role", ["ref", "reward", "critic", "teacher"])
@pytest.mark.parametrize("files", [{}, {"actor": IMAGES}])
def test_a_role_that_reads_the_actors_rows_keeps_its_tower(role: str, files: dict[str, bool]) -> None:
    words = [SEPARATE, f"+{role}_config.language_model_only=true"]
    assert f"{role}_config.language_model_only is true, but actor_config.language_model_only is not" in find(words, **files)
    assert not find([*words, "+actor_config.language_model_only=true"], **files)


def test_a_role_without_its_tower_serves_an_actor_of_text() -> None:
    assert not find([SEPARATE, "+teacher_config.language_model_only=true"], actor=TEXT, teacher=IMAGES)


def test_a_model_of_text_has_no_tower_to_leave_out() -> None:
    message = "language_model_only is true, but {} has no vision tower to leave out"
    assert message.format("reward") in find([SEPARATE, "+reward_config.language_model_only=true"], actor=IMAGES, reward=TEXT)
    assert message.format("actor") in find(["+actor_config.language_model_only=true"], actor=TEXT)
    # the key of all roles also concerns the actor, which has one
    shared = [SEPARATE, "+reward_config.load=r", "+megatron_training.language_model_only=true"]
    assert not find(shared, actor=IMAGES, reward=TEXT)
