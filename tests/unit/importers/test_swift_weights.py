"""Formats and starts of weights, positions, early ends and plug-ins in commands of ms-swift: accepted by name, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.swift import PROJECT
from mindspeed_rl.rewards import REWARDS

SFT = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset rows.jsonl --max_length 2048 --save_steps 100"
MEGATRON = (
    "NPROC_PER_NODE=8 megatron sft --model models/base --dataset rows.jsonl --max_length 2048 --num_train_epochs 1 "
    "--global_batch_size 64"
)
GRPO = (
    "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model models/base --tuner_type full --dataset prompts.jsonl --reward_funcs "
    "accuracy --use_vllm true --vllm_mode colocate --max_steps 8 --per_device_train_batch_size 8"
)


def take(command: str, *accepted: str, folder: Path | None = None, **variables: str) -> Import:
    settings = ImportSettings(rewards=REWARDS, accepted=frozenset(accepted), folder=folder, variables=variables)
    return import_command(PROJECT, command, settings)


def fail(command: str, *accepted: str, folder: Path | None = None, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        take(command, *accepted, folder=folder, **variables)
    return "\n".join(caught.value.errors)


@pytest.mark.parametrize(
    ("command", "name", "there"),
    [
        (f"{SFT} --quant_method bnb --quant_bits 4", "weights", "frozen ones in 4 bits (bnb)"),
        (f"{SFT} --quant_bits 8", "weights", "frozen ones in 8 bits (bnb)"),
        (
            f"{MEGATRON} --fp8_format e4m3 --fp8_param_gather true --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16",
            "weights",
            "products in fp8 (e4m3, weights too); exp_avg_dtype bf16; exp_avg_sq_dtype bf16",
        ),
        (f"{MEGATRON} --fp8_format hybrid --linear_decoupled_in_proj true", "weights", "products in fp8 (hybrid)"),
        (f"{SFT} --init_weights pissa", "adapter_start", "pissa, by which the model computes the same"),
        (f"{SFT} --init_weights pissa_niter_16", "adapter_start", "pissa_niter_16, by which the model computes the same"),
        (f"{SFT} --init_weights olora", "adapter_start", "olora, by which the model computes the same"),
        (f"{SFT} --use_dora true", "adapter_form", "DoRA"),
        (
            f"{MEGATRON} --tuner_type lora --linear_decoupled_in_proj true",
            "adapter_form",
            "LoRA of each half of the input projection of linear attention",
        ),
        (f"{SFT} --tuner_type lora_llm", "tower", "all its weights"),
        (
            f"{SFT} --tuner_type full --use_galore true --galore_rank 64",
            "optimizer_state",
            "of gradients that GaLore projects to rank 64",
        ),
        (f"{SFT} --neftune_noise_alpha 15", "embedding_noise", "uniform, 15 / sqrt(tokens x width)"),
        (f"{SFT} --early_stop_interval 3", "early_stop", "3 saves without a better loss"),
        (f"{SFT} --rope_scaling yarn --max_model_len 512000", "layers", "rope_scaling yarn up to 512000 tokens"),
        (f"{GRPO} --loss_type real --beta 0.01", "kl_average", "mean of the tokens of a pass"),
        (
            f"{GRPO} --advantage_estimator reinforce_plus_plus --beta 0.01",
            "advantage_scale",
            "batch, of centred rewards",
        ),
    ],
)
def test_what_differs_is_accepted_by_the_name_of_its_number(command: str, name: str, there: str) -> None:
    assert f"but is {there} in ms-swift; --accept {name} takes the difference" in fail(command)
    run = take(command, name)
    assert run.plans is not None
    assert getattr(run.plans[0], name) == there


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (f"{SFT} --tuner_type full --quant_bits 4", "quantized weights that train"),
        (f"{SFT} --init_weights loftq", "--init_weights: not available here: loftq: a start of the adapters that changes"),
        (f"{SFT} --init_weights false", "a start of the adapters that changes what the model computes"),
        (f"{SFT} --template default", "--template: not available here: default: the text of another family's chat template"),
        (f"{SFT} --model google/diffusiongemma-26B-A4B-it", "a model that denoises"),
        (f"{SFT} --template qwen3", "qwen3: the text of another family's chat template"),
    ],
)
def test_what_would_be_another_model_is_refused(command: str, sentence: str) -> None:
    assert sentence in fail(command)


@pytest.mark.parametrize(
    "options",
    [
        "--init_weights true",
        "--template qwen2_5",
        "--tuner_type full --init_weights pissa",
        "--early_stop_interval 0",
        "--exp_avg_dtype fp32 --exp_avg_sq_dtype fp32",
        "--bnb_4bit_compute_dtype bfloat16",
        "--linear_decoupled_in_proj false",
        "--tuner_type full --linear_decoupled_in_proj true",
        "--use_dora false --use_galore false --neftune_noise_alpha 0",
    ],
)
def test_what_changes_nothing_needs_no_word(options: str) -> None:
    run = take(f"{SFT} {options}")
    assert run.plans is not None
    assert run.plans[0].weights is run.plans[0].adapter_start is run.plans[0].early_stop is None


def test_a_kl_in_the_reward_is_divided_by_the_spread_of_the_groups_here_too() -> None:
    # ms-swift: rewards - beta * sum(old - ref), then mean and std of the group; the rewards of group_norm are those
    run = take(f"{GRPO} --kl_in_reward true --beta 0.01")
    assert run.plans is not None
    assert {(plan.kl_place, plan.kl_estimator, plan.advantage_scale) for plan in run.plans} == {("reward", "k1", "group")}
    assert run.get("rl_config.use_kl_in_reward") is True
    # ms-swift turns the switch off next to gdpo, and keeps the KL in the loss
    run = take(f"{GRPO} --kl_in_reward true --beta 0.01 --scale_rewards gdpo --reward_funcs accuracy format")
    assert run.plans is not None
    assert {(plan.kl_place, plan.kl_estimator) for plan in run.plans} == {("loss", "k3")}


def test_a_tower_that_trains_as_a_whole_has_adapters_here() -> None:
    run = take(f"{SFT} --tuner_type lora_llm", "tower")
    names = ("freeze_vit", "freeze_aligner", "lora_r")
    assert [run.get(f"megatron_training.{name}") for name in names] == [False, False, 8]


def test_scores_of_a_reward_model_are_centred() -> None:
    run = take(SFT.replace("sft", "rlhf --rlhf_type rm") + " --center_rewards_coefficient 0.01")
    assert run.get("megatron_training.center_rewards_coefficient") == 0.01


def test_rows_that_are_joined_are_no_rows_of_a_step() -> None:
    # 10,000 rows fill fewer packs, whose number nobody says: the length stays one in epochs
    run = take(f"{SFT} --packing true --dataset rows.jsonl#10000 --num_train_epochs 2")
    assert run.get("megatron_training.train_epochs") == 2
    assert run.get("megatron_training.train_iters") is None
    documents = SFT.replace("sft", "pt").replace("rows.jsonl", "text.jsonl#10000") + " --tuner_type full --packing true"
    assert "packs of 2048 tokens, whose number only the data knows; --set NUM_SAMPLES=NUMBER" in fail(documents)
    # 8 devices x 1 row x 2 passes: 16 of 4,096 packs a step, 3 epochs
    run = take(documents, "documents", NUM_SAMPLES="4096")
    assert run.plans is not None
    assert [plan.total_steps for plan in run.plans] == [768, 768]


# --- plug-ins


REGISTERS = """
from swift.dataset import DatasetMeta, register_dataset
register_dataset(DatasetMeta(ms_dataset_id='org/rows', hf_dataset_id='other/rows', preprocess_func=f))
"""


def test_rows_that_code_makes_are_given_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(REGISTERS)
    command = f"{SFT} --external_plugins rows.py"
    for name in ("org/rows", "other/rows#500", "org/rows:train"):
        sentence = fail(command.replace("--dataset rows.jsonl", f"--dataset {name}"), folder=tmp_path)
        assert "that its code makes (register_dataset): write them to a file, --set dataset=FILE" in sentence
    # another data set is not of the file
    assert take(command, folder=tmp_path).translated["--external_plugins"].startswith("its code makes no rows")
    run = take(command.replace("--dataset rows.jsonl", "--dataset org/rows"), folder=tmp_path, dataset="mine.jsonl")
    assert "mine" in str(run.get("megatron_training.data_path"))


def test_models_and_templates_of_a_plug_in_are_refused_and_a_file_that_is_elsewhere_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import swift.model\nswift.model.register_model(ModelMeta())\n")
    assert "a model that its code registers" in fail(f"{SFT} --external_plugins model.py", folder=tmp_path)
    assert "other.py is not here, and may make the rows" in fail(f"{SFT} --external_plugins other.py", folder=tmp_path)


PLUGIN = """
class Mine{bases}:
    \"\"\"The score of the head.\"\"\"
{body}
rm_plugins['mine'] = Mine
"""
DEFAULT = """
    def __init__(self, model, template):
        self.model = model
        self.template: Template = template

    def __call__(self, inputs, **kwargs):
        batched_inputs = [self.template.encode(deepcopy(infer_request)) for infer_request in inputs]
        reward_inputs = to_device(self.template.data_collator(batched_inputs), self.model.device)

        with torch.inference_mode():
            return self.model(**reward_inputs).logits[:, 0]
"""


@pytest.mark.parametrize(
    ("bases", "body", "is_default"),
    [
        ("", DEFAULT, True),
        ("(DefaultRMPlugin)", "", True),
        ("", "", False),
        ("(Other)", "", False),
        ("", DEFAULT.replace("[:, 0]", "[:, 1]"), False),
        ("(DefaultRMPlugin)", "    def __call__(self, inputs, **kwargs):\n        return 1\n", False),
        ("(DefaultRMPlugin)", "    scale = 2\n", False),
    ],
)
def test_a_plug_in_that_scores_as_the_default_one_is_a_reward_model(
    bases: str, body: str, is_default: bool, tmp_path: Path
) -> None:
    (tmp_path / "p.py").write_text(PLUGIN.format(bases=bases, body=body))
    command = f"{GRPO} --external_plugins p.py --reward_model models/rm --reward_model_plugin mine"
    if is_default:
        assert take(command, folder=tmp_path).get("rl_config.reward_model") == "models/rm"
    else:
        assert "code of a plug-in around a reward model" in fail(command, folder=tmp_path)
