"""The numbers of the batch plan, against the guide's worked examples and against values worked out by hand."""

from __future__ import annotations

import pytest
from sample_runs import completion_level, prompt_level

from mindspeed_rl.config import ConfigError, build_run_config
from mindspeed_rl.run import Run
from mindspeed_rl.run.batch_sizes import batch_table
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.effects import find_warnings
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.rules.validation import validate

# (world, tp, micro, batch, steps, generations) -> dp, generation batch, rollout prompts, train prompts, both for each dp group
GUIDE = [
    pytest.param((8, 2, 1, 16, 2, 4), (4, 32, 8, 4, 2, 1), id="example 1"),
    pytest.param((16, 2, 1, 32, 1, 4), (8, 32, 8, 8, 1, 1), id="example 2, cure A"),
    pytest.param((16, 2, 1, 32, 2, 4), (8, 64, 16, 8, 2, 1), id="example 2, cure C"),
    pytest.param((16, 2, 2, 64, 2, 4), (8, 128, 32, 16, 4, 2), id="example 3, larger batch"),
    pytest.param((16, 2, 2, 32, 2, 2), (8, 64, 32, 16, 4, 2), id="example 3, fewer generations"),
]


def guide_run(world: int, tp: int, micro: int, batch: int, steps: int, generations: int) -> Run:
    return completion_level(world=world, tp=tp, micro=micro, batch=batch, steps=steps, generations=generations)


@pytest.mark.parametrize(("given", "expected"), GUIDE)
def test_the_guides_sound_examples_give_its_numbers(given: tuple, expected: tuple) -> None:
    run = guide_run(*given)
    plan = run.plan
    dp, generated, rollout, train, rollout_each, train_each = expected
    assert (plan.dp_size, plan.num_samples, plan.num_prompts) == (dp, generated, rollout)
    table = batch_table(run.sizes, None)
    assert table["generation_batch_size"] == generated
    assert (table["num_rollout_prompts"], table["num_train_prompts"]) == (rollout, train)
    assert (table["num_rollout_prompts_per_dp_group"], table["num_prompts_per_dp_group"]) == (rollout_each, train_each)
    assert plan.num_optimizer_steps == given[4]


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        # Two nodes: 16 / (4 x 8) = 0.5 prompts for each data-parallel group.
        pytest.param((16, 2, 1, 16, 2, 4), {"train_prompt_each"}, id="example 2"),
        pytest.param((16, 2, 1, 16, 4, 4), {"train_prompt_each"}, id="example 2, cure B"),
        # One prompt for each data-parallel group does not fill a micro-batch of 2.
        pytest.param((16, 2, 2, 32, 2, 4), {"train_micro_batches"}, id="example 3"),
        # 4 rollout prompts for 8 data-parallel groups.
        pytest.param(
            (16, 2, 1, 16, 1, 4), {"rollout_prompts_per_dp", "rollout_prompt_each", "train_prompt_each"}, id="problems 1, 2"
        ),
        # 3 rollout prompts for each group, micro-batch 2.
        pytest.param((16, 2, 2, 96, 1, 4), {"rollout_micro_batches", "train_micro_batches"}, id="problems 3, 4"),
    ],
)
def test_the_guides_broken_examples_break_the_rules_it_names(given: tuple, rules: set[str]) -> None:
    assert {violation.rule for violation in validate(guide_run(*given))} == rules


@pytest.mark.parametrize(
    ("rule", "run", "rl"),
    [
        # 24 completions / 4 = 6 rollout prompts on dp_size 4
        ("rollout_prompts_per_dp", {"world": 8, "batch": 16, "generations": 4}, {"generation_batch_size": 24}),
        # 8 / 4 = 2 rollout prompts on dp_size 4
        ("rollout_prompt_each", {"world": 8, "batch": 16, "generations": 4}, {"generation_batch_size": 8}),
        # 16 / 4 / 4 = 1 rollout prompt for each group, micro-batch 2
        ("rollout_micro_batches", {"world": 8, "batch": 16, "generations": 4, "micro": 2}, {}),
        # 8 / 4 / 4 = 0.5 train prompts for each group
        ("train_prompt_each", {"world": 8, "batch": 8, "generations": 4, "steps": 2}, {}),
        # 16 / 4 / 4 = 1 train prompt for each group, micro-batch 2; 2 rollout prompts
        ("train_micro_batches", {"world": 8, "batch": 16, "generations": 4, "steps": 2, "micro": 2}, {}),
        # 40 completions are two and a half steps of 16
        ("whole_steps", {"world": 2, "batch": 16, "generations": 4}, {"generation_batch_size": 40}),
        ("group_of_two", {"world": 8, "batch": 16, "generations": 1}, {}),
        # half a completion for each device
        ("completion_per_device", {"world": 8, "tp": 8, "batch": 4, "generations": 4}, {}),
    ],
)
def test_each_of_the_guides_eight_constraints_is_checked(rule: str, run: dict, rl: dict) -> None:
    results = {violation.rule: violation for violation in validate(completion_level(**run, rl_config=rl))}
    assert rule in results and results[rule].suggestions


def test_an_error_of_the_guide_names_the_numbers_it_comes_from() -> None:
    text = "\n".join(str(violation) for violation in validate(guide_run(16, 2, 1, 16, 1, 4)))
    assert "num_rollout_prompts (4) = generation_batch_size (16) / num_generations (4) must be divisible by dp_size (8)" in text
    assert "num_rollout_prompts_per_dp_group (0.5) = num_rollout_prompts (4) / dp_size (8) must be at least 1" in text
    text = "\n".join(str(violation) for violation in validate(guide_run(16, 2, 2, 96, 1, 4)))
    assert "num_rollout_prompts_per_dp_group (3)" in text and "micro_batch_size (2)" in text


def test_a_group_of_one_is_refused() -> None:
    (violation,) = validate(guide_run(8, 2, 1, 16, 1, 1))
    assert violation.rule == "group_of_two" and "rl_config.num_generations (1) must be at least 2" in violation.message


def test_fewer_completions_than_devices_are_refused() -> None:
    # 4 completions on 8 devices, one data-parallel group: half a completion for each device.
    rules = {violation.rule: violation for violation in validate(completion_level(world=8, tp=8, batch=4, generations=4))}
    assert set(rules) == {"completion_per_device"}
    assert (
        "per_device_generation_batch_size = generation_batch_size (4) / world_size (8) = 0.5"
        in rules["completion_per_device"].message
    )


def test_the_rollout_size_may_be_given_directly_but_not_twice() -> None:
    direct = completion_level(world=8, batch=16, generations=4, rl_config={"generation_batch_size": 32})
    plan = direct.plan
    assert (plan.num_samples, plan.num_optimizer_steps) == (32, 2)
    twice = completion_level(world=8, batch=16, generations=4, steps=2, rl_config={"generation_batch_size": 32})
    (violation,) = validate(twice)
    assert violation.rule == "one_rollout_size"
    assert "rl_config.generation_batch_size (32) and rl_config.steps_per_generation (2)" in violation.message


def test_a_rollout_is_a_whole_number_of_steps() -> None:
    run = completion_level(world=8, batch=16, generations=4, rl_config={"generation_batch_size": 40})
    rules = {violation.rule for violation in validate(run)}
    assert "whole_steps" in rules


def test_prompt_level_numbers_of_a_16_device_run() -> None:
    # 16 / (2 x 2) = 4 replicas; 32 prompts x 8 = 256 responses; micro-batch 4: 256 / (4 x 4) = 16 accumulation steps.
    run = prompt_level(megatron_training={"train_iters": 10})
    plan = run.plan
    assert (plan.world_size, plan.dp_size, plan.num_prompts, plan.num_samples) == (16, 4, 32, 256)
    assert (plan.mini_batch_size, plan.micro_batch_size) == (256, 4)
    assert (plan.num_minibatches, plan.epochs, plan.num_optimizer_steps, plan.on_policy) == (1, 1, 1, True)
    table = batch_table(run.sizes, 10)
    assert (table["num_train_prompts"], table["gradient_accumulation_steps"], table["num_rollout_replicas"]) == (32, 16, 16)
    assert (table["total_optimizer_steps"], table["total_samples"], table["total_prompts"]) == (10, 2560, 320)
    assert plan.dispatch_sizes == {
        "actor_rollout_dispatch_size": 16,  # 256 / 16 engines
        "actor_logprob_dispatch_size": 64,  # 256 / 4 replicas
        "ref_dispatch_size": 64,
        "reward_dispatch_size": 256,
        "adv_dispatch_size": 256,
        "actor_update_dispatch_size": 64,
        "dynamic_sampling_dispatch_size": 256,
        "kl_dispatch_size": 256,
    }
    assert run.rl.mini_batch_size == 32  # the run file's value stays in prompts


def test_replicas_without_a_sample_are_counted_and_named() -> None:
    # 16 engines and 16 / (2 x 2) = 4 replicas of the actor: 2 prompts x 4 responses in steps of 1 x 4, and 1 x 2 in one
    changes = {"megatron_training": {"global_batch_size": 2, "micro_batch_size": 1}}
    run = prompt_level(**changes, rl_config={"n_samples_per_prompt": 4, "mini_batch_size": 1})
    assert validate(run) == []
    assert (run.sizes.idle_rollout_replicas, run.sizes.idle_actor_replicas) == (8, 0)
    assert run.plan.dispatch_sizes["actor_rollout_dispatch_size"] == 1
    assert run.plan.dispatch_sizes["actor_logprob_dispatch_size"] == 2
    assert [text for text in find_warnings(run) if "idle" in text] == [
        "8 of the 16 rollout replicas are idle: a rollout has 8 samples, one for each of the others"
    ]
    changes["megatron_training"]["global_batch_size"] = 1
    few = prompt_level(**changes, rl_config={"n_samples_per_prompt": 2, "mini_batch_size": 1})
    assert validate(few) == []
    assert (few.sizes.idle_rollout_replicas, few.sizes.idle_actor_replicas) == (14, 2)
    assert few.plan.dispatch_sizes["actor_logprob_dispatch_size"] == few.plan.dispatch_sizes["actor_update_dispatch_size"] == 1
    table = batch_table(few.sizes, None)
    assert (table["idle_rollout_replicas"], table["idle_actor_replicas"]) == (14, 2)
    assert table["gradient_accumulation_steps"] == 1
    assert any("2 of the 4 data-parallel replicas of the actor are idle" in text for text in find_warnings(few))


def test_more_samples_than_replicas_are_shared_equally_or_refused() -> None:
    # 10 prompts x 2 = 20 samples on 16 engines
    run = prompt_level(
        megatron_training={"global_batch_size": 10, "micro_batch_size": 1},
        rl_config={"n_samples_per_prompt": 2, "mini_batch_size": 10},
    )
    (violation,) = validate(run)
    assert violation.rule == "samples_per_replica" and "infer_tensor_parallel_size 1), or less than that" in violation.message


def test_servers_take_any_number_of_samples() -> None:
    servers = {"use_integrated_worker": False, "rollout_resource": {"num_npus": 7}, "trainer_mode": "async"}
    run = prompt_level(rl_config=servers)
    # 256 samples on 7 servers: at most 37 are the share of one
    assert validate(run) == [] and run.sizes.rollout_rows == 37


def test_rules_score_on_every_node() -> None:
    plan = prompt_level(num_nodes=2).plan
    assert plan.dispatch_sizes["reward_dispatch_size"] == 128
    assert plan.dispatch_sizes["dynamic_sampling_dispatch_size"] == 128


def test_several_steps_and_passes_over_one_rollout() -> None:
    run = prompt_level(rl_config={"mini_batch_size": 8, "epochs": 3})
    plan = run.plan
    assert (plan.num_minibatches, plan.num_optimizer_steps, plan.mini_batch_size) == (4, 12, 64)
    assert batch_table(run.sizes, None)["gradient_accumulation_steps"] == 4
    assert not plan.on_policy


def test_filtered_groups_are_what_is_trained_on() -> None:
    # 32 prompts a rollout, 16 kept: 128 of 256 responses train; log-probs and update see 128 / 4 rows a replica.
    filtered = {"filter_groups_enable": True, "filter_groups_metric": "base_acc", "filter_groups_train_batch_size": 16}
    plan = prompt_level(rl_config={**filtered, "mini_batch_size": 8}).plan
    assert (plan.num_samples, plan.num_train_samples, plan.num_train_prompts, plan.num_minibatches) == (256, 128, 16, 2)
    assert plan.dispatch_sizes["actor_update_dispatch_size"] == 32
    assert plan.dispatch_sizes["actor_logprob_dispatch_size"] == 32
    assert plan.dispatch_sizes["adv_dispatch_size"] == 128
    assert plan.dispatch_sizes["actor_rollout_dispatch_size"] == 16


def test_a_critic_has_dispatch_sizes_of_its_own_layout() -> None:
    run = prompt_level(
        megatron_training={"stage": "ray_ppo"},
        rl_config={"adv_estimator": "gae", "critic_resource": {"num_npus": 8}},
        critic_config={"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1},
    )
    assert run.plan.dispatch_sizes["critic_update_dispatch_size"] == 128  # 256 / (8 / 4)


def test_dispatch_sizes_of_the_run_file_win() -> None:
    plan = prompt_level(rl_config={"reward_dispatch_size": 64, "actor_update_dispatch_size": 64}).plan
    assert plan.dispatch_sizes["reward_dispatch_size"] == 64


def test_a_supervised_run_counts_samples() -> None:
    keys = {"stage": "sft", "global_batch_size": 64, "micro_batch_size": 4, "num_npus": 8, "tensor_model_parallel_size": 2}
    run = draft(build_run_config({"megatron_training": {**keys, "train_iters": 5}}))
    plan, table = run.plan, batch_table(run.sizes, 5)
    assert (table["counting"], plan.world_size, plan.dp_size, table["gradient_accumulation_steps"]) == ("samples", 8, 4, 4)
    assert (plan.num_samples, plan.num_optimizer_steps, table["total_samples"]) == (64, 1, 320)
    assert plan.dispatch_sizes == {}


def test_a_supervised_run_without_devices_is_one_replica() -> None:
    keys = {"stage": "sft", "global_batch_size": 64, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert draft(build_run_config({"megatron_training": keys})).plan.world_size == 4


def test_a_plan_of_a_broken_run_is_refused_with_every_rule() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(guide_run(16, 2, 1, 16, 1, 4).config, platform="cpu")
    assert len(caught.value.errors) == 3


def test_both_ways_of_counting_give_the_same_plan() -> None:
    # 32 prompts x 8 = 256 completions in 4 steps of 64.
    prompts = prompt_level(rl_config={"mini_batch_size": 8})
    completions = prompt_level(
        megatron_training={"global_batch_size": 64, "micro_batch_size": 2},
        rl_config={"n_samples_per_prompt": None, "mini_batch_size": None, "num_generations": 8, "steps_per_generation": 4},
    )
    first, second = prompts.plan, completions.plan
    for name in (
        "num_prompts",
        "num_samples",
        "mini_batch_size",
        "num_optimizer_steps",
        "dispatch_sizes",
    ):
        assert getattr(first, name) == getattr(second, name), name
    tables = [batch_table(run.sizes, None) for run in (prompts, completions)]
    assert tables[0]["num_train_prompts"] == tables[1]["num_train_prompts"] == 8
