"""The writer turns the record of a run into keys, whatever project it is from, and notes the options that make them up."""

from __future__ import annotations

from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.options import SourceCommand, SourceProject, part, to
from mindspeed_rl.importers.recipe import BATCH, CLIP, KL, Batch, Objective, Placement, Rate, Recipe, Rewards
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.translators import read_options
from mindspeed_rl.importers.writer import build_keys
from mindspeed_rl.rewards import REWARDS

RL = "rl_config"
TABLE = {
    "model": to("megatron_training.load", "megatron_training.tokenizer_name_or_path"),
    "data": part("data_path"),
    "prompts": part(BATCH),
    "group": part(BATCH),
    "clip_high": part(CLIP),
    "kl": part(KL, off="there is no KL"),
    "rounds": part("train_iters"),
    "rate": part("lr"),
}


def describe(run: Import, command: SourceCommand) -> Recipe:
    prompts, group = command.count("prompts", 16), command.count("group", 4)
    rounds, high = command.count("rounds", 10), command.number("clip_high", 0.2)
    rate = Rate(peak=command.number("rate", 1e-6), style="constant")
    return Recipe(
        stage="ray_grpo",
        rollout_completions=prompts * group,
        step_samples=prompts * group,
        total_steps=rounds,
        loss="grpo",
        level="token",
        clip_low=0.2,
        clip_high=high,
        aggregation="token",
        advantage="group_norm",
        advantage_scale="group",
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        prompt_length=64,
        response_length=64,
        dp=command.devices,
        infer_tp=1,
        weight_decay=0.01,
        clip_grad=1.0,
        data=(command.text("data"),),
        model=command.text("model"),
        placement=Placement(actor=command.devices),
        batch=Batch(1, group),
        rates=(rate,),
        objective=Objective(loss_type="dapo", clip=(0.2, high)),
        rewarding=Rewards(functions=["accuracy"]),
        train_iters=rounds,
        keys={
            "megatron_training.data_path": command.text("data"),
            f"{RL}.max_prompt_length": 64,
            "generate_config.sampling_config.max_tokens": 64,
            "generate_config.sampling_config.temperature": 1.0,
            "generate_config.sampling_config.top_p": 1.0,
            "generate_config.sampling_config.top_k": -1,
            "generate_config.infer_tensor_parallel_size": 1,
        },
        notes={"global_batch_size": "one step a rollout"},
        defaults=((f"{RL}.adv_epsilon", 1e-5, "added to the spread"),),
    ).follow(Schedule(rate.peak, rate.style, rounds))


def read(commands: list, devices: int | None) -> SourceCommand:
    return SourceCommand("train", read_options(commands[0].words[1:]), devices=devices or 2)


PROJECT = SourceProject("small", "Small", "1.0", {"train": TABLE}, read, describe)


def imported(options: str) -> Import:
    return import_command(PROJECT, f"small --model m --data d.jsonl {options}", ImportSettings(rewards=REWARDS))


def test_a_reader_and_its_records_are_all_that_a_new_project_needs() -> None:
    run = imported("--prompts 32 --rounds 7")
    paths = ("rl_config.n_samples_per_prompt", "rl_config.mini_batch_size", "megatron_training.global_batch_size")
    assert [run.get(path) for path in paths] == [4, 32, 32]
    assert run.get("rl_config.actor_resource.num_npus") == 2
    assert run.plans is not None and (run.plans[0].rollout_prompts, run.plans[1].rollout_prompts) == (32, 32)
    assert run.plans[0].rewards == ("accuracy",)


def test_keys_are_listed_under_the_first_option_that_the_command_has_and_others_are_defaults() -> None:
    run = imported("--group 2 --clip_high 0.3 --kl 0.1 --rounds 3")
    assert run.translated["--group"].startswith("rl_config.n_samples_per_prompt: 2")
    assert run.translated["--group"].endswith("(one step a rollout)")
    assert "rl_config.clip_ratio_high: 0.3" in run.translated["--clip_high"]
    assert "init_kl_coef" in run.translated["--kl"]
    assert run.added["actor_config.lr"] == "1e-06, the default of Small"
    assert run.added["rl_config.adv_epsilon"] == "1e-05, added to the spread"


def test_a_step_without_whole_groups_is_written_in_completions() -> None:
    batch = {"stage": "ray_grpo", "total_steps": 1, "loss": "grpo", "batch": Batch(group=8)}
    keys = build_keys(Recipe(step_samples=12, rollout_completions=24, **batch))
    assert (keys["rl_config.num_generations"], keys["rl_config.generation_batch_size"]) == (8, 24)
    assert keys["megatron_training.global_batch_size"] == 12
    keys = build_keys(Recipe(step_samples=16, rollout_completions=64, **batch))
    assert (keys["rl_config.n_samples_per_prompt"], keys["rl_config.mini_batch_size"]) == (8, 2)
    # less than a prompt is one prompt
    assert build_keys(Recipe(step_samples=4, rollout_completions=64, **batch))["rl_config.mini_batch_size"] == 1


def test_a_run_without_a_kl_has_neither_its_estimator_nor_its_place() -> None:
    recipe = Recipe(
        stage="ray_grpo", step_samples=8, total_steps=1, loss="grpo", kl_estimator="k3", kl_place="loss", objective=Objective()
    )
    assert build_keys(recipe.complete()) == {"megatron_training.stage": "ray_grpo", "rl_config.init_kl_coef": 0.0}
    assert recipe.complete().kl_place is None
