"""What ms-swift's scripts have besides one command, and options that differ by name: order, packs, capacity, documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.swift import PROJECT
from mindspeed_rl.rewards import REWARDS

SFT = "NPROC_PER_NODE=8 swift sft --model models/base --tuner_type full --dataset rows.jsonl --max_steps 3"
DPO = "NPROC_PER_NODE=4 swift rlhf --rlhf_type dpo --model models/base --tuner_type full --dataset pairs.jsonl --max_steps 50"
MEGATRON = "NPROC_PER_NODE=8 megatron sft --model models/base --dataset rows.jsonl --train_iters 3 --global_batch_size 16"


def take(command: str, *accepted: str, folder: Path | None = None, **variables: str) -> Import:
    settings = ImportSettings(rewards=REWARDS, accepted=frozenset(accepted), variables=variables, folder=folder)
    return import_command(PROJECT, command, settings)


def fail(command: str, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        take(command, **variables)
    return "\n".join(caught.value.errors)


@pytest.mark.parametrize(
    ("command", "name", "there"),
    [
        (f"{DPO} --group_by_length true", "row_order", "rows of similar lengths together"),
        (f"{DPO} --train_sampling_strategy group_by_length", "row_order", "rows of similar lengths together"),
        (f"{MEGATRON} --moe_expert_capacity_factor 2", "expert_capacity", "2 x the mean, further ones are dropped"),
        (f"{DPO} --rpo_alpha 0.1 --per_device_train_batch_size 2", "answer_term", "mean of the tokens of a pass"),
        (SFT.replace("sft", "pt") + " --max_length 2048", "documents", "one a row, those above 2048 tokens left out"),
        (
            SFT.replace("sft", "pt") + " --packing true --max_length 512 --truncation_strategy split",
            "documents",
            "in packs of 512 tokens, those above 512 tokens split",
        ),
    ],
)
def test_what_differs_by_its_nature_is_accepted_by_name(command: str, name: str, there: str) -> None:
    assert f"{name} would be" in fail(command) and f"is {there} in ms-swift; --accept {name}" in fail(command)
    plans = take(command, name).plans
    assert plans is not None and getattr(plans[0], name) == there


@pytest.mark.parametrize(
    "options",
    ["--moe_expert_capacity_factor -1", "--group_by_length false --train_sampling_strategy random", "--streaming false"],
)
def test_options_that_are_off_are_no_difference(options: str) -> None:
    assert take(f"{MEGATRON} {options}").plans is not None


def test_rows_of_other_orders_are_refused() -> None:
    assert "sequential rows; random and group_by_length" in fail(f"{SFT} --train_sampling_strategy sequential")
    assert "--streaming needs a length in steps" in fail(f"{SFT.replace('--max_steps 3', '')} --streaming true")
    assert "there by a buffer" in take(f"{SFT} --streaming true").without_effect["--streaming"]


def test_packs_of_pairs_have_as_many_as_the_user_says() -> None:
    packed = f"{DPO} --packing true --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --max_length 8192"
    assert "--set ROWS_PER_PACK=NUMBER says how many fit into one" in fail(packed)
    assert "packed_rows would be a fixed number here" in fail(packed, ROWS_PER_PACK="6")
    run = take(packed, "packed_rows", ROWS_PER_PACK="6")
    # 4 devices x 1 pack x 2 passes of 6 pairs
    assert run.plans is not None and [plan.step_samples for plan in run.plans] == [48, 48]
    assert run.get("megatron_training.micro_batch_size") == 6
    assert "ROWS_PER_PACK is 'many', but must be a whole number" in fail(packed, ROWS_PER_PACK="many")


def test_rows_above_the_limit_are_left_out_by_preprocessing() -> None:
    assert "--seq-length 513" in take(f"{SFT} --max_length 512").translated["--dataset"]
    assert "--neat-pack --seq-length 512" in take(f"{SFT} --max_length 512 --packing true").translated["--dataset"]
    assert "--seq-length" not in take(SFT).translated["--dataset"]
    assert "--seq-length 513" in take(f"{DPO} --max_length 512").translated["--dataset"]


def test_an_export_next_to_a_training_is_named_and_its_tokens_are_its_data() -> None:
    export = "swift export --model models/base --dataset a/b#100 --system Brief. --split_dataset_ratio 0.1 --to_cached_dataset"
    training = SFT.replace("--dataset rows.jsonl", "--cached_dataset ./out/train --cached_val_dataset out/val")
    run = take(f"{export} --output_dir ./out\n{training}")
    note = run.translated["--dataset"]
    assert "--input a/b#100" in note and "--system-prompt Brief." in note
    assert run.get("megatron_training.split") == "90,10,0"
    assert "mindspeed-rl convert" in run.without_effect["swift export"]
    assert "--cached_dataset: not available" in fail(f"{export} --output_dir elsewhere\n{training}")
    merge = f"{SFT}\nswift export --adapters out --merge_lora true"
    assert "mindspeed-rl convert" in take(merge).without_effect["swift export"]
    assert "swift export: mindspeed-rl convert" in fail("swift export --adapters out\nswift infer --model out")


def test_turns_of_the_server_of_a_script_are_those_of_its_run() -> None:
    script = (
        "swift rollout --model models/base --multi_turn_scheduler gym_scheduler --gym_env lake --use_gym_env true "
        "--max_turns 3 --external_plugins p.py\n"
        "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model models/base --tuner_type full --dataset p.jsonl --use_vllm true "
        "--vllm_mode server --vllm_server_host 127.0.0.1 --num_generations 4"
    )
    run = take(script)
    names = ("environment", "multi_turn_enable", "max_turns", "external_plugins", "rule_reward")
    assert [run.get(f"rl_config.{name}") for name in names] == ["lake", True, 3, ["p.py"], False]


def test_sizes_that_do_not_divide_as_completions_are_written_in_prompts() -> None:
    base = (
        "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model models/base --dataset p.jsonl --reward_funcs accuracy "
        "--vllm_mode colocate --train_iters 8 --global_batch_size 128 --micro_batch_size 4 --steps_per_generation 4"
    )
    run = take(base)
    assert run.get("rl_config.mini_batch_size") == 16 and run.get("rl_config.num_generations") is None
    assert run.plans is not None
    assert [(plan.step_samples, plan.rollout_prompts, plan.steps_per_rollout) for plan in run.plans] == [(128, 64, 4)] * 2
    run = take(base.replace("--micro_batch_size 4", "--micro_batch_size 2"))
    assert run.get("rl_config.num_generations") == 8


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{nproc_per_node: 4, default: {device: GPU, ranks: 'list(range(0, 4))', workers: [default]}}", 4),
        ("{default: {ranks: [0, 1], workers: [default]}}", 2),
        ("{default: {ranks: 8, workers: [default]}}", 8),
    ],
)
def test_one_group_of_devices_is_their_number(tmp_path: Path, groups: str, devices: int) -> None:
    text = f"model: models/base\ntuner_type: full\ndataset: rows.jsonl\nmax_steps: 3\ndevice_groups: {groups}\n"
    (tmp_path / "sft.yaml").write_text(text)
    assert take("swift sft --config sft.yaml", folder=tmp_path).get("megatron_training.num_npus") == devices


def test_several_groups_of_devices_are_refused(tmp_path: Path) -> None:
    text = "model: m\ndataset: d\ndevice_groups: {default: {ranks: 1, workers: [default]}, b: {ranks: 1, workers: [b]}}\n"
    (tmp_path / "sft.yaml").write_text(text)
    with pytest.raises(ConfigError, match="devices by their ranks"):
        take("swift sft --config sft.yaml", folder=tmp_path)


def test_small_options_have_their_keys() -> None:
    assert take(f"{SFT} --enable_dft_loss true").get("megatron_training.sft_loss_type") == "dft"
    assert take(SFT).get("megatron_training.sft_loss_type") is None
    muon = take(f"{MEGATRON} --optimizer dist_muon")
    assert [muon.get(f"megatron_training.{name}") for name in ("optimizer", "muon_momentum")] == ["muon", 0.9]
    assert (
        "num_layer_list"
        in take(f"{MEGATRON} --decoder_last_pipeline_num_layers 11").without_effect["--decoder_last_pipeline_num_layers"]
    )
    assert "mindspeed-rl evaluate" in take(f"{SFT} --predict_with_generate true").without_effect["--predict_with_generate"]


@pytest.mark.parametrize(
    ("model", "is_own"),
    [
        ("Qwen/Qwen2.5-3B", True),
        ("Qwen/Qwen2.5-7B-Instruct", True),
        ("Qwen/Qwen3-30B-A3B", True),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", False),
        ("Qwen/Qwen3.5-4B", False),
        ("ZhipuAI/GLM-4-9B-0414", False),
    ],
)
def test_tools_in_the_form_of_the_tokenizer_are_no_change(model: str, is_own: bool) -> None:
    command = f"{SFT.replace('models/base', model)} --agent_template hermes"
    if is_own:
        assert take(command).same["--agent_template"] == "the tokenizer's chat template writes tools so"
    else:
        assert "hermes: another form of tools" in fail(command)


GRPO = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model models/base --dataset p.jsonl --reward_funcs accuracy"
ASKED = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": ASKED, "solution": "2"}, {"prompt": "messages", "response": "solution"}),
        ({"query": "1+1?", "solution": "2"}, {"prompt": "query", "query": "", "response": "solution"}),
        ({"problem": "1+1?", "solution": "2"}, {"prompt": "problem", "query": "", "response": "solution"}),
        ({"instruction": "1+1?", "output": "2"}, None),
        ({"instruction": "1+1?", "input": "", "output": "two", "solution": "2"}, {"response": "solution"}),
        (None, None),
    ],
)
def test_columns_of_prompts_are_those_that_ms_swift_reads(tmp_path: Path, row: dict | None, expected: dict | None) -> None:
    if row is not None:
        (tmp_path / "p.jsonl").write_text("\n" + json.dumps(row) + "\n")
    run = take(f"{GRPO} --vllm_mode colocate", folder=tmp_path)
    assert run.get("megatron_training.map_keys") == expected
    own = take(f"""{GRPO} --vllm_mode colocate --columns '{{"a": "query"}}'""", folder=tmp_path)
    assert own.get("megatron_training.map_keys") == {"prompt": "a"}


def test_the_last_answer_of_messages_is_not_in_the_prompt(tmp_path: Path) -> None:
    row = {"messages": [*ASKED, {"role": "assistant", "content": "2"}]}
    for added, response in (({"solution": "2"}, "solution"), ({}, "messages")):
        (tmp_path / "p.jsonl").write_text(json.dumps(row | added))
        run = take(GRPO, folder=tmp_path)
        assert run.get("megatron_training.handler_name") == "R1SharegptStyleInstructionHandler"
        assert run.get("megatron_training.map_keys") == {"messages": "messages", "response": response}
