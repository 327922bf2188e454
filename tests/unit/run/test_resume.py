"""A run says where it begins, refuses to do nothing, and says how to go on when it ends before its time."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import checkpoint, run
from safetensors.torch import save_file

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.model_source import (
    ModelSource,
    check_critic_start,
    check_reward_start,
    find_model,
)
from mindspeed_rl.checkpoint.newest import list_old
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.effects import find_warnings
from mindspeed_rl.run.ref_model import resolve_rollout_ref
from mindspeed_rl.run.resume import describe_resume, find_resume_point, resume_from_save, select_sound_checkpoint

RL, SUPERVISED = {"kl": {}, "rollout": {}}, {"consumed_samples": 8}


@pytest.mark.parametrize(("stage", "state"), [("ray_grpo", RL), ("sft", SUPERVISED)])
def test_a_checkpoint_is_gone_on_with_unless_only_its_weights_are_asked_for(
    tmp_path: Path, stage: str, state: dict[str, Any]
) -> None:
    source = checkpoint(tmp_path, 4, state, stage)
    assert str(find_resume_point(run(stage), source)) == f"resumes after iteration 4 of {tmp_path}"
    assert str(find_resume_point(run(stage, finetune=True), source)) == f"starts from the weights of {tmp_path}"
    for kind in ("hf", "megatron"):
        other = ModelSource(tmp_path, tmp_path, kind)
        assert str(find_resume_point(run(stage), other)) == f"starts from the weights of {tmp_path}"


@pytest.mark.parametrize(("stage", "state"), [("ray_grpo", RL), ("sft", SUPERVISED)])
def test_one_of_several_adapters_is_not_taken_without_a_word(tmp_path: Path, stage: str, state: dict[str, Any]) -> None:
    source = checkpoint(tmp_path, 4, state, stage)
    (record,) = tmp_path.glob("iter_*/run_state.json")
    for names in ([], ["solver"]):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"adapters": names}))
        assert find_resume_point(run(stage, finetune=True), source).iteration == 0
    record.write_text(json.dumps(json.loads(record.read_text()) | {"adapters": ["solver", "critic"]}))
    with pytest.raises(ValueError, match="has the adapters solver, critic, and the run would take only the first; set rl"):
        find_resume_point(run(stage, finetune=True), source)


@pytest.mark.parametrize(
    ("stage", "state", "written", "group"),
    [
        ("ray_grpo", SUPERVISED, "sft", "actor_config"),
        ("ray_grpo", SUPERVISED, None, "actor_config"),
        ("sft", RL, "ray_grpo", "megatron_training"),
        ("dpo", SUPERVISED, "sft", "megatron_training"),
    ],
)
def test_another_stage_s_checkpoint_needs_finetune(
    tmp_path: Path, stage: str, state: dict[str, Any], written: str | None, group: str
) -> None:
    source = checkpoint(tmp_path, 4, state, written)
    with pytest.raises(ValueError) as caught:
        find_resume_point(run(stage), source)
    assert f"{group}.load: {tmp_path} was written by" in str(caught.value)
    assert f"set {group}.finetune: true to start from its weights" in str(caught.value)
    assert find_resume_point(run(stage, finetune=True), source).iteration == 0


@pytest.mark.parametrize(("stage", "state"), [("ray_grpo", RL), ("sft", SUPERVISED)])
def test_a_run_with_nothing_left_to_do_is_refused(tmp_path: Path, stage: str, state: dict[str, Any]) -> None:
    source = checkpoint(tmp_path, 10, state, stage)
    with pytest.raises(ValueError, match=r"train_iters: 10, but the run would resume after iteration 10 of .* nothing is left"):
        find_resume_point(run(stage), source)
    assert find_resume_point(run(stage, iters=11), source).iteration == 10


def sound_checkpoint(folder: Path, iteration: int, state: dict[str, Any], stage: str) -> ModelSource:
    """A checkpoint with sums, as a run writes it."""
    source = checkpoint(folder, iteration, state, stage)
    inside = folder / f"iter_{iteration:07d}"
    record = json.loads((inside / "run_state.json").read_text()) | {"checksums": True}
    (inside / "run_state.json").write_text(json.dumps(record))
    (inside / "__0_0.distcp").write_bytes(b"weights" * 100)
    checksums.write(inside, checksums.take_lists(inside))
    return source


def test_a_truncated_or_missing_file_is_found_before_anything_starts(tmp_path: Path) -> None:
    source = sound_checkpoint(tmp_path, 4, RL, "ray_grpo")
    assert find_resume_point(run("ray_grpo"), source).iteration == 4
    file = tmp_path / "iter_0000004" / "__0_0.distcp"
    file.write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"actor_config.load: .*__0_0.distcp has 7 bytes, but was written with 700"):
        find_resume_point(run("ray_grpo"), source)
    file.unlink()
    with pytest.raises(ValueError, match=r"__0_0.distcp is missing; load_previous: true resumes from the one before"):
        find_resume_point(run("ray_grpo"), source)
    file.write_bytes(b"weights" * 100)
    for text in ("{", "[1]", '{"iteration": 4, "checksums": true}'):
        (tmp_path / "iter_0000004" / "run_state.json").write_text(text)
        with pytest.raises(ValueError, match=r"actor_config.load: .*run_state.json"):
            find_resume_point(run("ray_grpo"), source)


def test_the_checkpoint_before_a_damaged_one_is_taken_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for iteration in (2, 4, 6):
        source = sound_checkpoint(tmp_path, iteration, RL, "ray_grpo")
    plain, asked = (run("ray_grpo", load=str(tmp_path), load_previous=wish) for wish in (False, True))
    assert select_sound_checkpoint(plain) is plain
    assert select_sound_checkpoint(asked).config.actor_config.load_iteration == 6
    (tmp_path / "iter_0000006" / "__0_0.distcp").write_bytes(b"weighty" * 100)
    (tmp_path / "iter_0000004" / "__0_0.distcp").unlink()
    capsys.readouterr()
    taken = select_sound_checkpoint(asked)
    said = capsys.readouterr().out
    assert "iteration 6 is passed over (load_previous): " in said and "__0_0.distcp is damaged" in said
    assert "iteration 4 is passed over" in said and "__0_0.distcp is missing" in said
    assert taken.config.actor_config.load_iteration == 2
    source = ModelSource(tmp_path, tmp_path, "training", taken.config.actor_config.load_iteration)
    assert find_resume_point(taken, source).iteration == 2
    (tmp_path / "iter_0000002" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=f"actor_config.load_previous: no checkpoint in {tmp_path} is sound"):
        select_sound_checkpoint(asked)


def test_a_run_does_not_begin_anew_beside_checkpoints_that_nobody_names(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, RL, "ray_grpo")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    config = MegatronConfig(load=str(tmp_path), pretrained_checkpoint="/model")
    with pytest.raises(ValueError, match=r"actor_config.load: .*checkpointed_iteration.txt: missing, but .* iterations 10"):
        find_model(config, "actor_config")
    with pytest.raises(ValueError, match=r"has no checkpoint of iteration 7 \(load_iteration\); it has 10"):
        find_model(MegatronConfig(load=str(tmp_path), load_iteration=7), "actor_config")


def test_only_an_evaluation_is_left_to_do_after_the_last_iteration(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, 10, SUPERVISED, "sft")
    assert find_resume_point(run("sft", skip_train=True, split="90,10,0"), source).iteration == 10


def test_an_interrupted_run_says_describe_resume(tmp_path: Path) -> None:
    begun, save = time.time() - 5, str(tmp_path / "save")
    assert describe_resume(run("ray_grpo"), begun) == "there is no checkpoint to resume from: actor_config.save is not set."
    fresh = run("ray_grpo", save=save, load="/model", finetune=True, save_interval=2)
    assert "to resume from yet" in describe_resume(fresh, begun) and "every 2 iterations" in describe_resume(fresh, begun)
    checkpoint(Path(save), 4, RL, "ray_grpo")
    assert describe_resume(fresh, begun) == (
        f"to resume after iteration 4, give the same command with actor_config.load={save} actor_config.finetune=false "
        "actor_config.pretrained_checkpoint=/model"
    )
    again = run("ray_grpo", save=save, load=save, pretrained_checkpoint="/model")
    assert describe_resume(again, begun) == "to resume after iteration 4, give the same command again."
    os.utime(Path(save, "latest_checkpointed_iteration.txt"), (0, 0))  # another run's, long ago
    assert "no checkpoint to resume from yet" in describe_resume(fresh, begun)
    assert "give the same command again" in describe_resume(again, begun)


@pytest.mark.parametrize(
    ("finetune", "goes_on_after", "said"),
    [
        (False, None, "the actor starts anew; set critic_config.finetune: true"),
        (True, 4, "holds no critic of that iteration to go on with"),
        (False, 5, "holds no critic of that iteration to go on with"),
        (True, None, None),
        (False, 4, None),
    ],
)
def test_actor_and_critic_begin_alike(tmp_path: Path, finetune: bool, goes_on_after: int | None, said: str | None) -> None:
    source, config = checkpoint(tmp_path, 4, RL, "ray_ppo"), MegatronConfig(finetune=finetune)
    if said is None:
        check_critic_start(config, source, goes_on_after)
        return
    with pytest.raises(ValueError, match=said):
        check_critic_start(config, source, goes_on_after)


def test_an_interrupted_run_with_a_critic_names_both_checkpoints(tmp_path: Path) -> None:
    save = str(tmp_path / "save")
    checkpoint(Path(save), 4, RL, "ray_ppo")
    critic = {"finetune": True, "load": "/model", "micro_batch_size": 8}
    ppo = {"save": save, "load": "/model", "finetune": True, "rl_config": {"adv_estimator": "gae"}}
    assert "critic_config.save is not set" in describe_resume(run("ray_ppo", critic_config=critic, **ppo), 0.0)
    said = describe_resume(run("ray_ppo", critic_config={**critic, "save": "/critic"}, **ppo), 0.0)
    assert said.endswith("critic_config.load=/critic critic_config.finetune=false")


def test_a_critic_that_started_elsewhere_resumes_from_its_save_beside_an_actor_that_loads_its_own(tmp_path: Path) -> None:
    begun, save = time.time() - 5, str(tmp_path / "save")
    checkpoint(Path(save), 6, RL, "ray_ppo")
    own = {"save": save, "load": save, "pretrained_checkpoint": "/model", "rl_config": {"adv_estimator": "gae"}}
    elsewhere = {"finetune": True, "load": "/model", "save": "/critic", "micro_batch_size": 8}
    started = run("ray_ppo", critic_config=elsewhere, **own)
    resumed = resume_from_save(started, begun).config
    assert resumed.actor_config == started.config.actor_config
    critic = resumed.critic_config
    assert critic is not None
    assert (critic.load, critic.finetune, critic.pretrained_checkpoint) == ("/critic", False, "/model")
    said = describe_resume(started, begun)
    assert said.endswith("6, give the same command with critic_config.load=/critic critic_config.finetune=false")
    # an iteration that the run file names is where it started
    fifth = {"load": "/critic", "save": "/critic", "load_iteration": 5, "micro_batch_size": 8}
    named = run("ray_ppo", critic_config=fifth, **own)
    critic = resume_from_save(named, begun).config.critic_config
    assert critic is not None and (critic.load, critic.load_iteration) == ("/critic", None)
    assert resume_from_save(named, time.time() + 1000) is named  # nothing was saved since


def hf(folder: Path, *names: str) -> ModelSource:
    """A Hugging Face folder with tensors of these names."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return ModelSource(folder, folder, "hf")


def test_the_reference_is_what_the_actor_started_from_before_any_resume(tmp_path: Path) -> None:
    start = hf(tmp_path / "start", "lm_head.weight")
    going_on = checkpoint(tmp_path / "actor", 4, RL, "ray_grpo")
    (tmp_path / "actor" / "huggingface").mkdir()
    (tmp_path / "actor" / "huggingface" / "config.json").write_text("{}")
    fresh = run("ray_grpo", load=str(start.weights))
    assert resolve_rollout_ref(fresh, start, None)[1:] == (start, None)
    resumed = run("ray_grpo", load=str(going_on.weights), pretrained_checkpoint=str(start.weights))
    assert resolve_rollout_ref(resumed, going_on, 4)[1:] == (start, None)
    with pytest.raises(ValueError, match="the actor goes on from .*, so the reference cannot be taken from there"):
        resolve_rollout_ref(run("ray_grpo", load=str(going_on.weights)), going_on, 4)
    checkpoint(tmp_path / "actor" / "reference", 4, {}, None)
    (tmp_path / "actor" / "reference" / "huggingface").mkdir()
    (tmp_path / "actor" / "reference" / "huggingface" / "config.json").write_text("{}")
    moving = run("ray_grpo", load=str(going_on.weights), rl_config={"sync_ref_model": True})
    _, source, iteration = resolve_rollout_ref(moving, going_on, 4)
    assert (source.weights, iteration) == (tmp_path / "actor" / "reference", 4)


def test_a_reference_that_is_not_where_the_keys_say_is_named_with_its_key(tmp_path: Path) -> None:
    start = hf(tmp_path / "start", "lm_head.weight")
    missing, mode = str(tmp_path / "missing"), "ref_model_load_path"
    with pytest.raises(ValueError, match=rf"^actor_config.pretrained_checkpoint: {missing!r} does not exist"):
        resolve_rollout_ref(run("ray_grpo", load=str(start.weights), pretrained_checkpoint=missing), start, None)
    rl = {"integrated_mode_config": {mode: missing}}
    with pytest.raises(ValueError, match=rf"^rl_config.integrated_mode_config.{mode}: {missing!r} does not exist"):
        resolve_rollout_ref(run("ray_grpo", load=str(start.weights), rl_config=rl), start, None)


def test_a_reward_model_without_a_score_needs_words_to_judge_in(tmp_path: Path) -> None:
    source = hf(tmp_path / "lm", "lm_head.weight")
    with pytest.raises(ValueError, match=r"reward_config.load: .* has no score.weight"):
        check_reward_start(MegatronConfig(), source)
    check_reward_start(MegatronConfig(reward_tokens=["+", "-"]), source)
    check_reward_start(MegatronConfig(), hf(tmp_path / "reward", "score.weight"))


@pytest.mark.parametrize(("critic", "shared"), [("x/save", None), ("./x/../x/save/", None), (None, "x/save")])
def test_actor_and_critic_do_not_save_into_one_folder(critic: str | None, shared: str | None) -> None:
    keys = {"finetune": True, "load": "/model", "micro_batch_size": 8} | ({} if critic is None else {"save": critic})
    actor = {"save": "x/save", "load": "/model", "finetune": True, "rl_config": {"adv_estimator": "gae"}}
    planned = run("ray_ppo", critic_config=keys, megatron_training={"save": shared} if shared else None, **actor)
    written = critic or shared
    assert (planned.config.actor_config.save, planned.config.critic_config.save) == ("x/save", f"{written.rstrip('/')}/critic")
    folder = f"{written} is the actor's folder; the checkpoints of the critic are in {written.rstrip('/')}/critic"
    assert f"critic_config.save: {folder}" in find_warnings(planned)
    again = draft(planned.config)
    assert again.config.critic_config == planned.config.critic_config and find_warnings(again) == find_warnings(planned)
    own = run("ray_ppo", critic_config=keys | {"save": "x/save/critic"}, **actor)
    assert own.config.critic_config.save == "x/save/critic" and not any("critic" in text for text in find_warnings(own))
    grpo = run("ray_grpo", critic_config=keys | {"save": "x/save"}, **{**actor, "rl_config": {}}).config
    assert grpo.critic_config.save == "x/save"  # no critic is trained


def test_a_lost_hugging_face_folder_is_left_to_write_after_the_last_iteration(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, 10, RL, "ray_grpo")
    last = run("ray_grpo", load=str(tmp_path), save=str(tmp_path), save_hf=True)
    assert find_resume_point(last, source).iteration == 10
    (tmp_path / "hf" / "iter_0000010").mkdir(parents=True)
    (tmp_path / "hf" / "latest").symlink_to("iter_0000005")  # killed before the link was there
    assert find_resume_point(last, source).iteration == 10
    (tmp_path / "hf" / "latest").unlink()
    (tmp_path / "hf" / "latest").symlink_to("iter_0000010")
    with pytest.raises(ValueError, match="nothing is left to do"):
        find_resume_point(last, source)


@pytest.mark.parametrize("stage", ["ray_grpo", "sft"])
def test_the_checkpoint_of_another_stage_may_be_the_start_of_a_run_that_can_resume(tmp_path: Path, stage: str) -> None:
    start, save = tmp_path / "start", tmp_path / "save"
    written = checkpoint(start, 4, SUPERVISED, "dpo")
    (start / "huggingface").mkdir()
    (start / "huggingface" / "config.json").write_text("{}")
    shutil.copytree(start / "huggingface", save / "huggingface")
    group = "megatron_training" if stage == "sft" else "actor_config"
    keys: dict[str, Any] = {"load": str(save), "save": str(save), "pretrained_checkpoint": str(start)}
    source = find_model(run(stage, **keys).config.actor_config, group)
    assert (source.weights, source.kind) == (written.weights, "training")
    assert str(find_resume_point(run(stage, **keys), source)) == f"starts from the weights of {start}"
    # once it has a checkpoint of its own, that is resumed
    checkpoint(save, 2, SUPERVISED if stage == "sft" else RL, stage)
    source = find_model(run(stage, **keys).config.actor_config, group)
    assert find_resume_point(run(stage, **keys), source).iteration == 2


def test_old_checkpoints_are_those_that_keep_last_leaves_out(tmp_path: Path) -> None:
    for name in ("iter_0000002", "iter_0000004", "iter_0000006", "iter_0000008", "iter_0000009.partial"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_old(tmp_path, 6, 2)] == ["iter_0000002"]  # 8 is of a run that was restarted from 4
    assert list_old(tmp_path, 6, None) == [] and len(list_old(tmp_path, 8, 1)) == 3


def test_a_first_checkpoint_that_was_complete_and_not_yet_named_is_resumed(tmp_path: Path) -> None:
    sound_checkpoint(tmp_path, 4, RL, "ray_grpo")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    keys: dict[str, Any] = {"load": str(tmp_path), "tokenizer_name_or_path": str(tmp_path / "model")}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    source = find_model(run("ray_grpo", **keys).config.actor_config, "actor_config")
    assert find_resume_point(run("ray_grpo", **keys), source).iteration == 4
    sound_checkpoint(tmp_path, 8, RL, "ray_grpo")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ValueError, match="missing, but the folder holds iterations 4, 8"):
        find_model(run("ray_grpo", **keys).config.actor_config, "actor_config")
