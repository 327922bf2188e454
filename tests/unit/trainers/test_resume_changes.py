"""A run that resumes with another run file: what may not change is refused, and all else goes on where the run stood."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resumed_runs as points
import test_group_rollout as groups
from supervised_samples import answers, instruction_row, write_columns

from mindspeed_rl.config.keys import collect_keys
from mindspeed_rl.run.resume import ResumePoint, find_resume_point
from mindspeed_rl.run.rules.resume_rules import KeyChange, find_changes, list_keys_on_resume
from mindspeed_rl.trainers.prompt_loader import PromptLoader
from mindspeed_rl.trainers.prompt_sampling import PromptOrder
from mindspeed_rl.trainers.rollout import FilteredRollout, GroupFilter, SynchronousRollout
from mindspeed_rl.trainers.schedule import Schedule


def test_every_key_is_classified_where_it_is_declared() -> None:
    assert [name for name, key in collect_keys().items() if key.on_resume is None] == []


# ---------------------------------------------------------------------- positions in the prompts


class Recorded:
    """A data plane that notes the labels of the prompts that it is given."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def clear(self, size: int) -> None:
        pass

    def put(self, columns: dict[str, Any], rows: range) -> None:
        self.labels += columns["labels"]


def loader_of(batch: int, plane: Any, *, size: int = 20, seed: int = 1, shuffle: bool = True) -> PromptLoader:
    run = points.run("ray_grpo")
    plan = dataclasses.replace(run.plan, num_prompts=batch, n_samples_per_prompt=1)
    order, prompts = PromptOrder.from_config(run.rl), [groups.prompt(number) for number in range(size)]
    return PromptLoader(prompts, plane, plan, order, seed=seed, shuffle=shuffle)


def test_with_another_batch_every_prompt_of_a_pass_comes_once() -> None:
    plane = Recorded()
    first = loader_of(4, plane)
    for _ in range(2):
        first.put()
    then = loader_of(6, plane)
    then.load_state_dict(json.loads(json.dumps(first.state_dict())), 2)
    for _ in range(2):
        then.put()
    assert sorted(map(int, plane.labels)) == list(range(20))
    # the order equals the order of a run that never stopped
    undisturbed = Recorded()
    alone = loader_of(4, undisturbed)
    for _ in range(5):
        alone.put()
    assert plane.labels == undisturbed.labels


@pytest.mark.parametrize("change", [{"size": 21}, {"seed": 2}, {"shuffle": False}])
def test_other_data_or_another_order_begins_with_a_new_pass(change: dict[str, Any]) -> None:
    plane, expected = Recorded(), Recorded()
    first = loader_of(4, plane)
    first.put()
    state = json.loads(json.dumps(first.state_dict()))
    plane.labels.clear()
    other = loader_of(4, plane, **change)
    other.load_state_dict(state, 1)
    begins = loader_of(4, expected, **change)
    for _ in range(2):
        other.put()
        begins.put()
    assert plane.labels == expected.labels
    # and the next resume continues that pass
    third = loader_of(4, plane, **change)
    third.load_state_dict(json.loads(json.dumps(other.state_dict())), 3)
    third.put()
    begins.put()
    assert plane.labels == expected.labels


def resumed_in_flight(tmp_path: Path, *keys: str, changed: Any = ()) -> tuple[Any, groups.Source]:
    """Save an async run after one iteration, with one prompt in flight, and resume it with these keys."""
    run = groups.run_of(tmp_path, "rl_config.trainer_mode=async")
    rollout, _, _ = groups.rollout_of(run)
    rollout.before_push(0)
    rollout.after_push(0)
    rollout.run(0)
    state = json.loads(json.dumps(rollout.state_dict()))
    (tmp_path / "save" / "iter_0000001").mkdir()
    (tmp_path / "save" / "in_flight.partial").rename(tmp_path / "save" / "iter_0000001" / "in_flight")
    other, source, _ = groups.rollout_of(groups.run_of(tmp_path, "rl_config.trainer_mode=async", *keys))
    other.load_state_dict(state, ResumePoint(tmp_path / "save", 1, changes=changed))
    other.before_push(1)
    return state, source


def test_responses_in_flight_that_do_not_fit_start_anew_for_the_same_prompts(tmp_path: Path) -> None:
    change = KeyChange("rl_config.n_samples_per_prompt", "in_flight", "2", "4")
    _, source = resumed_in_flight(tmp_path, "rl_config.n_samples_per_prompt=4", changed=[change])
    assert source.restored is not None
    restored, next_prompt, num_taken = source.restored
    assert [(group.index, group.samples) for group in restored] == [(4, [None] * 4)] and (next_prompt, num_taken) == (5, 4)


def test_another_batch_leaves_admission_as_far_ahead_as_the_mode_allows(tmp_path: Path) -> None:
    keys = ["megatron_training.global_batch_size=8", "rl_config.mini_batch_size=8"]
    _, source = resumed_in_flight(tmp_path, *keys)
    assert source.restored is not None
    # one iteration has trained: with batches of 8 that counts as 8, whatever the position in the prompts
    assert source.restored[1:] == (5, 8) and [group.index for group in source.restored[0]] == [4]


def test_a_run_without_servers_trains_the_prompts_in_flight_first(tmp_path: Path) -> None:
    state, _ = resumed_in_flight(tmp_path)
    plane = Recorded()
    loader = loader_of(3, plane, size=100, shuffle=False)
    nothing: Any = None
    rollout = SynchronousRollout(nothing, nothing, loader, 3, blocking=True)
    rollout.load_state_dict(state, ResumePoint(tmp_path, 1))
    loader.put()
    loader.put()
    assert plane.labels == ["4", "5", "6", "7", "8", "9"]


@pytest.mark.parametrize("saved", [{}, {"next_prompt": 8, "in_flight": []}])
def test_a_filter_may_be_switched_on(tmp_path: Path, saved: dict[str, Any]) -> None:
    run = groups.run_of(tmp_path, "rl_config.dynamic_sample=true")
    loader, nothing = loader_of(4, Recorded(), size=100, shuffle=False), Any
    model: Any = nothing
    chosen = GroupFilter.from_config(run.rl, 2, Schedule(run).objective, {})
    assert chosen is not None
    rollout = FilteredRollout(run, model, loader, model, chosen, model)
    rollout.load_state_dict(saved, ResumePoint(tmp_path, 2))
    assert rollout.state_dict() | {"order": None} == {
        "next_prompt": 8, "in_flight": [], "pass_start": 0, "order": None, "draws": 2,
    }  # fmt: skip


def test_a_fixed_kl_coefficient_is_that_of_the_run_file(tmp_path: Path) -> None:
    before, after = (points.run("ray_grpo", rl_config={"init_kl_coef": coef}) for coef in (0.1, 0.3))
    adapted = points.run("ray_grpo", rl_config={"init_kl_coef": 0.3, "kl_ctrl_type": "adaptive", "kl_target": 0.1})
    state = json.loads(json.dumps(Schedule(before).state_dict(1)))
    for run, expected in ((after, 0.3), (adapted, 0.1)):
        schedule = Schedule(run)
        schedule.load_state_dict(state)
        assert schedule.kl.coef == expected


# ---------------------------------------------------------------------- what is refused, and what is said


def point(tmp_path: Path, saved: dict[str, Any], now: dict[str, Any], stage: str = "ray_grpo") -> ResumePoint:
    """Resume a run that was saved with some keys of the actor with others."""
    state = {"kl": {}, "rollout": {}, "consumed_samples": 8, "keys": list_keys_on_resume(points.run(stage, **saved).config)}
    source = points.checkpoint(tmp_path, 4, json.loads(json.dumps(state)), stage)
    return find_resume_point(points.run(stage, **now), source)


LORA = {"lora_target_modules": ["linear_qkv"]}


@pytest.mark.parametrize(
    ("stage", "saved", "now", "key"),
    [
        ("ray_grpo", {}, LORA, "lora_target_modules"),
        ("ray_grpo", LORA, {}, "lora_target_modules"),
        ("sft", LORA, {}, "lora_target_modules"),
        ("ray_grpo", LORA, LORA | {"lora_r": 4}, "lora_r"),
        ("sft", {"bf16": True}, {"bf16": False}, "bf16"),
    ],
)
def test_what_the_training_state_is_of_is_refused_before_workers_start(
    tmp_path: Path, stage: str, saved: dict[str, Any], now: dict[str, Any], key: str
) -> None:
    group = "megatron_training" if stage == "sft" else "actor_config"
    named = rf"{group}.load: .*changed since that checkpoint: .*{group}.{key} .* -> .*finetune: true"
    with pytest.raises(ValueError, match=named):
        point(tmp_path, saved, now, stage)


OWN = {"first": "solver", "second": "critic"}


@pytest.mark.parametrize(("saved", "now"), [(OWN, None), (None, OWN), (OWN, {"second": "critic", "first": "solver"})])
@pytest.mark.parametrize("no_load_optim", [False, True])
def test_adapters_of_roles_are_not_taken_for_others(tmp_path: Path, saved: Any, now: Any, no_load_optim: bool) -> None:
    # the folder of the run has the first adapter, so the order counts
    plain = points.run("ray_grpo", lora_ckpt_filter=True, no_load_optim=no_load_optim, **LORA)

    def run_with(adapters: Any) -> Any:
        rl = dataclasses.replace(plain.rl, role_adapters=adapters)
        return dataclasses.replace(plain, config=dataclasses.replace(plain.config, rl_config=rl))

    state = {"kl": {}, "rollout": {}, "keys": list_keys_on_resume(run_with(saved).config)}
    source = points.checkpoint(tmp_path, 4, json.loads(json.dumps(state)), "ray_grpo")
    (tmp_path / "adapters/critic/iter_0000004").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"changed since that checkpoint: rl_config.role_adapters .* -> .*finetune: true"):
        find_resume_point(run_with(now), source)
    assert find_resume_point(run_with(saved), source).iteration == 4
    if saved is not None:
        (tmp_path / "adapters/critic/iter_0000004").rename(tmp_path / "adapters/critic/iter_0000003")
        with pytest.raises(ValueError, match="adapters/critic/iter_0000004 is missing, .* of rl_config.role_adapters; set"):
            find_resume_point(run_with(saved), source)


def test_weights_of_an_adapter_that_a_checkpoint_lacks_are_refused(tmp_path: Path) -> None:
    plain = points.run("ray_grpo", lora_ckpt_filter=True, finetune=True, **LORA)
    source = points.checkpoint(tmp_path, 4, {"kl": {}, "rollout": {}}, "ray_grpo")
    file = tmp_path / "iter_0000004/run_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"adapters": ["solver", "critic"]}))
    for names, refused in ((["critic", "solver"], False), (["critic", "judge"], True)):
        rl = dataclasses.replace(plain.rl, role_adapters=dict(zip(["first", "second"], names)))
        run = dataclasses.replace(plain, config=dataclasses.replace(plain.config, rl_config=rl))
        with pytest.raises(ValueError, match="not 'judge' of rl_config") if refused else contextlib.nullcontext():
            assert find_resume_point(run, source).iteration == 0


def test_only_parts_of_the_shape_follow_the_model_where_they_are_not_set() -> None:
    names = [name for name, key in collect_keys().items() if key.on_resume == "fixed" and key.default is None]
    refused = set()
    for name in names:
        for saved, value in ((None, {"a": "b"}), ({"a": "b"}, None)):
            changed = [change.name for change in find_changes({name: saved}, {name: value})]
            assert changed in ([], [name])
            refused |= set(changed)
    lora = {"megatron_training.lora_target_modules", "rl_config.role_adapters"}
    assert refused == lora | {"megatron_training.stage", "megatron_training.noop_layers"}
    assert find_changes({"megatron_training.num_layers": 4}, {"megatron_training.num_layers": 5})


def test_no_load_optim_takes_such_weights(tmp_path: Path) -> None:
    assert point(tmp_path, {}, LORA | {"no_load_optim": True}).iteration == 4


@pytest.mark.parametrize(
    ("saved", "now", "sentence"),
    [
        ({"lr": 1e-4}, {"lr": 1e-3}, "actor_config.lr 0.0001 -> 0.001: the learning rate follows the new curve"),
        ({"iters": 10}, {"iters": 20}, "actor_config.train_iters 10 -> 20: the learning rate follows"),
        ({"iters": 10, "lr_decay_style": "constant"}, {"iters": 20, "lr_decay_style": "constant"}, None),
        ({}, {"seed": 7}, None),  # said when the prompts are read
        ({"hidden_dropout": 0.1}, {"hidden_dropout": 0.1, "sigterm_grace_s": 5.0}, None),
        (
            {"rl_config": {"init_kl_coef": 0.1, "kl_ctrl_type": "adaptive"}},
            {"rl_config": {"init_kl_coef": 0.2, "kl_ctrl_type": "adaptive"}},
            "rl_config.init_kl_coef 0.1 -> 0.2: an adaptive KL coefficient continues from its last value",
        ),
        # a run that restarts by itself names what it started from, which its first run had in `load`
        ({"load": "/model"}, {"pretrained_checkpoint": "/model"}, None),
        ({"pretrained_checkpoint": "/one"}, {"pretrained_checkpoint": "/two"}, "the KL divergence is that to another"),
        ({}, {"rl_config": {"mini_batch_size": 4, "n_samples_per_prompt": 8, "verifier_function": ["acc"]}}, None),
        ({}, {"rl_config": {"sync_ref_model": True}}, "rl_config.sync_ref_model false -> true: the KL divergence is that to"),
    ],
)
def test_a_change_that_the_state_does_not_carry_is_said(
    tmp_path: Path, saved: dict[str, Any], now: dict[str, Any], sentence: str | None
) -> None:
    resume = point(tmp_path, saved, now)
    assert resume.iteration == 4
    if sentence is None:
        assert str(resume) == f"resumes after iteration 4 of {tmp_path}"
    else:
        assert sentence in str(resume).splitlines()[1]


def test_other_prompts_are_said_with_the_key_that_changed(tmp_path: Path) -> None:
    resume = point(tmp_path, {"seed": 1}, {"seed": 7})
    resume.state["rollout"]["order"] = [20, 5, 1, 1]  # type: ignore[index]
    assert "actor_config.seed 1 -> 7: these are other data" in resume.describe_order_change([20, 5, 7, 1])
    assert resume.describe_order_change([20, 5, 1, 1]) == ""
    same_keys = point(tmp_path / "same", {}, {})
    same_keys.state["rollout"]["order"] = [20, 5, 1, 1]  # type: ignore[index]
    assert "the content of data_path" in same_keys.describe_order_change([20, 6, 1, 1])


# ---------------------------------------------------------------------- supervised stages


def test_samples_are_counted_whatever_the_batch_and_other_samples_begin_anew(start: Callable[..., Any], tmp_path: Path) -> None:
    save = str(tmp_path / "save")
    first, second = (
        write_columns(tmp_path / name, [instruction_row(*sample) for sample in answers(24, seed=seed)])
        for name, seed in (("first", 1), ("second", 2))
    )
    stage = start("sft", first, save=save, no_shuffle=False, seed=3)
    stage.train()
    stage.save(1)
    keys = {"save": save, "load": save, "finetune": False, "seed": 3, "no_shuffle": False}

    def read(worker: Any, count: int) -> list[list[int]]:
        return [item["input_ids"].tolist() for _ in range(count) for item in next(worker._batches)]

    undisturbed = read(start("sft", first, no_shuffle=False, seed=3), 3)
    assert read(start("sft", first, global_batch_size=4, **keys), 4) == undisturbed[8:]
    # a file with other samples begins with its first
    fresh = read(start("sft", second, no_shuffle=False, seed=3), 3)
    assert read(start("sft", second, **keys), 3) == fresh
