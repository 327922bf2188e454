"""Files and commands of LLaMA-Factory: numbers worked out by hand from the formulas of transformers' Trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS, main
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings

INFO = {
    "own": {"file_name": "own.json"},
    "chats": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}},
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "flat_pairs": {
        "file_name": "flat.json",
        "ranking": True,
        "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"},
    },
    "votes": {
        "file_name": "votes.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}},
    "pictures": {"file_name": "p.json", "formatting": "sharegpt", "columns": {"messages": "messages", "videos": "videos"}},
    "seen": {"file_name": "s.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}},
    "seen_pairs": {
        "file_name": "sp.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "images": "images"},
    },
    "elsewhere": {"ms_hub_url": "AI/elsewhere"},
    "drawn": {"file_name": "own.json", "num_samples": 10},
}
BASE: dict[str, object] = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "own",
    "template": "qwen3_nothink",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1.0e-5,
    "max_steps": 100,
    "bf16": True,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def take(text: str, *, devices: int | None = 8, rows: int = 8192) -> Import:
    return import_command(PROJECTS["llama-factory"], text, ImportSettings(devices=devices, rows=rows))


def write(folder: Path, values: Mapping[str, object]) -> str:
    content = {name: value for name, value in {**BASE, **values}.items() if value is not ...}
    (folder / "train.yaml").write_text(yaml.safe_dump(content))
    return "train.yaml"


def training(run: Import) -> Mapping[str, object]:
    return {**run.tree["megatron_training"], **run.tree["actor_config"]}


def test_a_file_has_the_numbers_of_transformers_trainer(folder: Path) -> None:
    run = take(write(folder, {}))
    keys = training(run)
    # 2 rows x 4 passes x 8 devices
    assert (keys["global_batch_size"], keys["micro_batch_size"], keys["num_npus"]) == (64, 2, 8)
    assert (keys["train_iters"], keys["stage"], keys["lr"], keys["lr_decay_style"]) == (100, "sft", 1e-5, "linear")
    assert (keys["seq_length"], keys["weight_decay"], keys["clip_grad"], keys["seed"]) == (2048, 0.0, 1.0, 42)
    assert (keys["adam_beta1"], keys["adam_beta2"], keys["adam_eps"]) == (0.9, 0.999, 1e-8)
    assert (keys["save"], keys["save_interval"]) == ("trainer_output/checkpoints", 500)
    assert "lora_r" not in keys
    assert "LlamaFactoryInstructionHandler --dataset-dir data --prompt-type qwen3_nothink" in run.translated["dataset"]


def test_defaults_are_those_of_the_source(folder: Path) -> None:
    names = "per_device_train_batch_size gradient_accumulation_steps learning_rate max_steps finetuning_type stage"
    run = take(write(folder, dict.fromkeys(names.split(), ...)), devices=1)
    keys = training(run)
    assert (keys["global_batch_size"], keys["train_epochs"], keys["lr"]) == (8, 3.0, 5e-5)
    # LoRA of rank 8 in all linear layers, with twice the rank for alpha and no dropout
    assert (keys["lora_r"], keys["lora_alpha"], keys["lora_dropout"]) == (8, 16, 0.0)
    assert keys["lora_target_modules"] == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert run.plans is not None and run.plans[0].total_steps == 3 * 8192 // 8


def test_words_after_the_file_replace_its_values(folder: Path) -> None:
    file = write(folder, {"warmup_ratio": 0.1, "lr_scheduler_type": "cosine"})
    run = take(f"FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=4 llamafactory-cli train {file} learning_rate=3e-6 cutoff_len=512",
               devices=None)  # fmt: skip
    keys = training(run)
    assert (keys["lr"], keys["seq_length"], keys["num_npus"], keys["global_batch_size"]) == (3e-6, 512, 8, 64)
    assert run.plans is not None and run.plans[0].lr_warmup_steps == run.plans[1].lr_warmup_steps == 10


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("python src/train.py train.yaml", 1),
        ("USE_RAY=True llamafactory-cli train train.yaml", 1),
        ("ASCEND_RT_VISIBLE_DEVICES=0,1,2 lmf train train.yaml", 3),
        ("torchrun --nproc_per_node 4 --nnodes 2 src/train.py train.yaml", 8),
        ("accelerate launch --num_processes 6 src/train.py train.yaml", 6),
        ("deepspeed --num_gpus 4 src/train.py train.yaml", 4),
        ("python -m llamafactory.cli train train.yaml ray_num_workers=5", 5),
    ],
)
def test_devices_of_the_launchers(folder: Path, command: str, count: int) -> None:
    write(folder, {})
    assert training(take(command, devices=None))["num_npus"] == count


@pytest.mark.parametrize(
    "command",
    ["FORCE_TORCHRUN=1 llamafactory-cli train train.yaml", "llamafactory-cli train train.yaml", "train.yaml",
     "USE_RAY=0 lmf train train.yaml", "accelerate launch src/train.py train.yaml", "deepspeed src/train.py train.yaml",
     "USE_RAY=0 FORCE_TORCHRUN=true llamafactory-cli train train.yaml"],
)  # fmt: skip
def test_all_devices_of_a_machine_are_asked_for(folder: Path, command: str) -> None:
    write(folder, {})
    with pytest.raises(ConfigError, match="write --devices N"):
        take(command, devices=None)


def test_a_switch_that_programs_read_in_different_ways_is_asked_for(folder: Path) -> None:
    write(folder, {})
    with pytest.raises(ConfigError, match="USE_MCA=yes: a switch that some programs read as on and others as off"):
        take("USE_MCA=yes llamafactory-cli train train.yaml")
    for value in ("", "0", "False", "no", "OFF"):
        assert training(take(f"USE_V1={value} USE_MCA={value} llamafactory-cli train train.yaml"))["num_npus"] == 8
    with pytest.raises(ConfigError, match="second engine of LLaMA-Factory"):
        take("USE_V1=Y llamafactory-cli train train.yaml")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"stage": "dpo", "dpo_loss_type": "sigmoid", "dpo_beta": 0.1}),
        ({"pref_loss": "ipo", "pref_beta": 0.3}, {"dpo_loss_type": "ipo", "dpo_beta": 0.3}),
        ({"pref_ftx": 0.5, "dpo_label_smoothing": 0.1}, {"pref_ftx": 0.5, "dpo_label_smoothing": 0.1}),
        ({"ref_model": "other"}, {"ref_model": "other"}),
        ({"pref_loss": "orpo", "pref_beta": 0.2}, {"stage": "orpo", "orpo_lambda": 0.2}),
        # the margin of SimPO is gamma / beta
        ({"pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.0}, {"stage": "simpo", "gamma_beta_ratio": 0.5}),
        ({"pref_loss": "simpo", "pref_beta": 2.0}, {"simpo_beta": 2.0, "gamma_beta_ratio": 0.25}),
    ],
)
def test_preference_losses(folder: Path, values: dict[str, object], expected: dict[str, object]) -> None:
    run = take(write(folder, {"stage": "dpo", "dataset": "pairs", **values}))
    keys = training(run)
    assert {name: keys[name] for name in expected} == expected
    assert "--input data/pairs.json" in run.translated["dataset"]
    assert "--handler-name SharegptStylePairwiseHandler" in run.translated["dataset"]


def test_rewards_and_votes(folder: Path) -> None:
    run = take(write(folder, {"stage": "rm", "dataset": "flat_pairs"}))
    assert training(run)["stage"] == "orm"
    mapped = (
        '{"prompt": "question", "chosen": "good", "rejected": "bad", "query": "", "system": "", "history": "", "tools": ""}'
    )
    assert f"--handler-name AlpacaStylePairwiseHandler --map-keys '{mapped}'" in run.translated["dataset"]
    run = take(write(folder, {"stage": "kto", "dataset": "votes", "kto_chosen_weight": 0.5, "pref_beta": 0.2}))
    keys = training(run)
    assert (keys["stage"], keys["kto_beta"]) == ("kto", 0.2)
    assert (keys["kto_desirable_weight"], keys["kto_undesirable_weight"]) == (0.5, 1.0)
    assert '"label": "label"' in run.translated["dataset"] and '"role_tag": "role"' in run.translated["dataset"]


def test_documents(folder: Path) -> None:
    run = take(write(folder, {"stage": "pt", "dataset": "texts", "template": ...}))
    assert training(run)["stage"] == "pretrain" and training(run)["data_path"] == "./dataset/texts/data_text_document"
    assert "--handler-name GeneralPretrainHandler --json-keys text --append-eod" in run.translated["dataset"]
    with pytest.raises(ConfigError, match="write max_steps, or --rows"):
        import_command(
            PROJECTS["llama-factory"],
            write(folder, {"stage": "pt", "dataset": "texts", "max_steps": ...}),
            ImportSettings(devices=8),
        )


def test_mixtures_and_templates_become_words_of_preprocessing(folder: Path) -> None:
    values = {"dataset": "own, chats", "mix_strategy": "interleave_under", "interleave_probs": "0.3,0.7", "max_samples": 50}
    note = take(write(folder, values)).translated["dataset"]
    assert "--input own,chats" in note and "--mix-strategy interleave_under --interleave-probs 0.3 0.7 --seed 42" in note
    assert "--max-samples 50" in note
    # an empty thought trains unless thinking is off, and thoughts of earlier answers stay where these train
    for thinking, word in ((..., "true"), (False, "false"), (None, "none")):
        note = take(write(folder, {"template": "qwen3", "enable_thinking": thinking})).translated["dataset"]
        assert f"--prompt-type qwen3 --enable-thinking {word} --drop-thinking false" in note
    note = take(write(folder, {"stage": "dpo", "dataset": "pairs", "template": "qwen3"})).translated["dataset"]
    assert "--drop-thinking true" in note
    note = take(write(folder, {"default_system": "Be 'kind'."})).translated["dataset"]
    assert """--system-prompt 'Be '"'"'kind'"'"'.'""" in note
    run = take(write(folder, {"template": "llama3", "dataset": "chats"}))
    assert "--prompt-type hf" in run.translated["template"] and "not checked" in run.translated["template"]
    assert "--prompt-type llama3" in take(write(folder, {"template": "llama3"})).translated["template"]


def test_packing(folder: Path) -> None:
    run = take(write(folder, {"packing": True}))
    assert training(run)["pack"] is True and "neat_pack" not in training(run) and training(run)["seq_length"] == 2048
    assert "--pack --seq-length 2048" in run.translated["dataset"]
    run = take(write(folder, {"neat_packing": True}))
    assert all(training(run)[name] for name in ("pack", "neat_pack", "reset_attention_mask", "reset_position_ids"))


def test_held_out_rows(folder: Path) -> None:
    run = take(write(folder, {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 200}))
    assert (training(run)["split"], training(run)["eval_interval"]) == ("90,10,0", 200)
    run = take(write(folder, {"eval_dataset": "chats"}))
    assert training(run)["eval_data_path"] == "./dataset/chats/eval"


def test_lora_layers_and_adapters(folder: Path) -> None:
    lora = {"finetuning_type": "lora", "lora_rank": 16, "lora_target": "q_proj,v_proj", "lora_dropout": 0.05}
    keys = training(take(write(folder, lora)))
    assert (keys["lora_target_modules"], keys["lora_r"], keys["lora_alpha"]) == (["linear_qkv"], 16, 32)
    run = take(write(folder, {"finetuning_type": "lora", "adapter_name_or_path": "a", "stage": "dpo", "dataset": "pairs"}))
    keys = training(run)
    # the reference has no adapter
    assert (keys["load"], keys["base_model"], keys["ref_model"]) == ("a", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"finetuning_type": "freeze"}, "finetuning_type: .*freeze; lora and full"),
        ({"finetuning_type": "oft"}, "finetuning_type: .*oft"),
        ({"use_rslora": True}, "rank-stabilized"),
        ({"use_muon": True, "finetuning_type": "lora"}, "Muon of adapters"),
        ({"use_kt": True}, "experts on the host whose weights train"),
        ({"use_kt": True, "finetuning_type": "lora", "kt_use_lora_experts": True}, "further experts that are adapters"),
        ({"quantization_bit": 4, "finetuning_type": "full"}, "quantized weights that train"),
        ({"ref_model_quantization_bit": 4}, "another model with quantized weights"),
        ({"model_name_or_path": "x/Llama-3-8B-AWQ"}, "quantized base weights; write --set BASE_MODEL=FOLDER"),
        ({"train_on_prompt": True}, "questions that train"),
        ({"mask_history": True}, "only the last answer"),
        ({"use_eaft_loss": True}, "EAFT"),
        ({"stage": "ppo"}, "stage ppo"),
        ({"stage": "grpo"}, "no such stage"),
        ({"stage": "dpo", "dataset": "pairs", "pref_loss": "kto_pair"}, "kto_pair; sigmoid"),
        ({"stage": "dpo", "dataset": "own"}, "own is not ranking data"),
        ({"dataset": "pairs"}, "pairs is ranking data"),
        ({"stage": "kto", "dataset": "own"}, "no kto_tag"),
        ({"dataset": "pictures"}, "videos of its rows"),
        ({"dataset": "elsewhere"}, "modelscope download --dataset AI/elsewhere"),
        ({"dataset": "onw"}, "did you mean 'own'"),
        ({"dataset": ...}, "names no data"),
        ({"dataset_dir": "nowhere"}, "nowhere/dataset_info.json is not here"),
        ({"dataset_dir": "REMOTE:a/b"}, "hf download --repo-type dataset a/b"),
        ({"do_train": ...}, "trains nothing"),
        ({"deepspeed": "mine.json"}, "mine.json is not here"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type polynomial"),
        ({"mix_strategy": "interleave_once", "dataset": "own,chats"}, "interleave_once"),
        ({"cutof_len": 5}, "did you mean cutoff_len"),
        ({"train_dataset": "x"}, "v1"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
    ],
)  # fmt: skip
def test_what_is_not_available_is_named(folder: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take(write(folder, values))


@pytest.mark.parametrize(
    ("values", "number", "text"),
    [
        ({"quantization_bit": 4, "double_quantization": True}, "weights", r"frozen ones in 4 bits \(bnb\)"),
        ({"quantization_bit": 8, "quantization_method": "hqq"}, "weights", r"frozen ones in 8 bits \(hqq\)"),
        ({"fp8": True, "fp8_backend": "torchao"}, "weights", r"products in fp8 \(torchao\)"),
        ({"pure_bf16": True}, "weights", "bfloat16, moments too"),
        ({"optim": "paged_adamw_8bit", "pure_bf16": True}, "weights", "bfloat16, moments too; moments in 8 bits"),
        ({"pissa_init": True, "pissa_iter": 16}, "adapter_start", "pissa, by which the model computes the same"),
        ({"use_dora": True}, "adapter_form", "DoRA"),
        ({"use_galore": True, "galore_rank": 128}, "optimizer_state", "GaLore projects to rank 128"),
        ({"use_apollo": True}, "optimizer_state", "APOLLO projects to rank 16"),
        ({"use_adam_mini": True}, "optimizer_state", "one second moment for each block"),
        ({"use_badam": True, "badam_mode": "layer"}, "optimizer_state", r"one block of layers at a time, .* \(BAdam\)"),
        ({"use_muon": True, "finetuning_type": "full"}, "optimizer_state", "gate_proj and up_proj each by itself"),
        ({"loraplus_lr_ratio": 16.0}, "adapter_form", r"LoRA, whose B has 16 times the rate \(LoRA\+\)"),
        ({"use_kt": True, "kt_config": {"kt_expert_weight_format": "int8"}}, "weights", "frozen ones of experts in int8"),
        ({"use_kt": True, "kt_weight_path": "x.kt"}, "weights", "frozen ones of experts x.kt"),
        ({"use_kt": True}, "weights", "frozen ones of experts as the file of accelerate says"),
    ],
)
def test_formats_and_states_that_differ_by_their_nature_are_named(
    folder: Path, values: dict[str, object], number: str, text: str
) -> None:
    file = write(folder, {"finetuning_type": "lora", **values})
    with pytest.raises(ConfigError, match=rf"{number} would be .*{text}.* in LLaMA-Factory; --accept {number}"):
        take(file)
    settings = ImportSettings(devices=4, accepted=frozenset((number,)), folder=folder)
    assert import_command(PROJECTS["llama-factory"], file, settings).plans is not None


def test_an_optimizer_has_the_keys_that_it_has_there(folder: Path) -> None:
    file = write(folder, {"use_muon": True, "use_badam": False, "weight_decay": 0.1, "deepspeed": "ds_z3_config.json"})
    settings = ImportSettings(devices=4, accepted=frozenset(("optimizer_state",)), folder=folder)
    keys = import_command(PROJECTS["llama-factory"], file, settings).tree["megatron_training"]
    # nesterov, and 0.2 x sqrt(largest side) times the rate
    assert (keys["optimizer"], keys["muon_use_nesterov"], keys["muon_extra_scale_factor"]) == ("muon", True, 0.2)
    assert keys["muon_scale_mode"] == "spectral" and keys["engine"] == "fsdp"
    # of several optimizers the first one trains
    both = import_command(PROJECTS["llama-factory"], write(folder, {"use_muon": True, "use_galore": True}), settings)
    assert "optimizer" not in both.tree["megatron_training"] and both.without_effect["use_muon"] == "use_galore is read instead"


def test_experts_in_bfloat16_on_the_host_are_the_same_numbers(folder: Path) -> None:
    values = {"finetuning_type": "lora", "use_kt": True, "kt_config": {"kt_expert_weight_format": "bf16", "kt_num_threads": 96}}
    assert "experts are computed on the devices" in take(write(folder, values)).same["use_kt"]


MCA = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}


def test_mcore_adapter_has_the_layout_of_megatron(folder: Path) -> None:
    experts = {"model_name_or_path": "Qwen/Qwen3-30B-A3B", **MCA, "recompute_granularity": "full", "sequence_parallel": True}
    settings = ImportSettings(devices=8, accepted=frozenset(("aggregation",)), folder=folder)
    with pytest.raises(ConfigError, match="aggregation would be null here, but is token of a micro-batch in LLaMA-Factory"):
        take(write(folder, experts))
    run = import_command(PROJECTS["llama-factory"], write(folder, experts), settings)
    keys, plan = training(run), run.plans[0]  # type: ignore[index]
    # 8 devices are 2 replicas of 4; a step has 2 rows x 4 passes of each
    assert (plan.dp, plan.tp, plan.pp, plan.ep, plan.step_samples) == (2, 2, 2, 2, 16)
    assert (keys["sequence_parallel"], keys["recompute_method"]) == (True, "uniform")
    # its converter reads the balancing loss of config.json
    assert "moe_aux_loss_coeff" not in keys and "engine" not in keys
    mean = take(write(folder, {**MCA, "expert_model_parallel_size": 1, "calculate_per_token_loss": True}))
    assert mean.plans[0].aggregation is None and "recompute_granularity" not in training(mean)  # type: ignore[index]


def test_the_variable_of_mcore_adapter_is_enough(folder: Path) -> None:
    command = f"USE_MCA=1 llamafactory-cli train {write(folder, {'lr_scheduler_type': 'constant', 'warmup_steps': 10})}"
    settings = ImportSettings(devices=8, accepted=frozenset(("aggregation",)), folder=folder)
    # Megatron's schedule has the warm-up that transformers' constant rate has not
    assert import_command(PROJECTS["llama-factory"], command, settings).plans[0].lr_warmup_steps == 10  # type: ignore[index]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({**MCA, "finetuning_type": "lora"}, "adapters of USE_MCA"),
        ({**MCA, "stage": "dpo", "dataset": "pairs"}, "stage dpo: not available here with USE_MCA"),
        ({**MCA, "tensor_model_parallel_size": 3}, "8 devices are no multiple of tensor 3 x pipeline 2 x context 1"),
        ({**MCA, "mtp_num_layers": 1}, "prediction layers of USE_MCA"),
        ({**MCA, "model_name_or_path": "deepseek-ai/DeepSeek-V3"}, "mcore_adapter's converter decides their balancing"),
        ({**MCA, "mixed_precision": "bf16_mixed"}, "an option of the Megatron bridge"),
        ({"model_name_or_path": "Qwen/Qwen2-VL-7B-Instruct"}, "models of images but Qwen2.5-VL, Qwen3-VL and Qwen3.5"),
    ],
)
def test_what_mcore_adapter_has_and_is_not_here_is_named(folder: Path, values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        take(write(folder, values))


def test_tokens_are_those_of_preprocess(folder: Path) -> None:
    file = write(folder, {"tokenized_path": "saved"})
    assert "preprocess writes them" in take(file).same["tokenized_path"]
    (folder / "saved").mkdir()
    with pytest.raises(ConfigError, match="the tokens of saved, which LLaMA-Factory wrote"):
        take(file)


def test_a_quantized_model_is_trained_from_the_one_that_it_is_made_of(folder: Path) -> None:
    file = write(folder, {"finetuning_type": "lora", "model_name_or_path": "x/Llama-3-8B-AWQ"})
    variables = {"BASE_MODEL": "x/Llama-3-8B"}
    settings = ImportSettings(devices=4, accepted=frozenset(("weights",)), folder=folder, variables=variables)
    keys = training(import_command(PROJECTS["llama-factory"], file, settings))
    assert (keys["load"], keys["tokenizer_name_or_path"]) == ("x/Llama-3-8B", "x/Llama-3-8B")


@pytest.mark.parametrize("name", ["use_dora", "use_galore", "pissa_init", "shift_attn", "quantization_bit", "use_mca"])
def test_what_is_off_is_no_reason(folder: Path, name: str) -> None:
    take(write(folder, {name: False if name.startswith("use") else None}))


def test_a_file_of_deepspeed_may_not_set_the_optimizer(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    take(write(folder, {"deepspeed": "ds.json"}))
    (folder / "ds.json").write_text(json.dumps({"optimizer": {"type": "Lion"}}))
    with pytest.raises(ConfigError, match=r"optimizer of ds\.json"):
        take(write(folder, {"deepspeed": "ds.json"}))
    take(write(folder, {"deepspeed": "examples/deepspeed/ds_z3_config.json"}))


def test_switches_of_the_environment(folder: Path) -> None:
    file = write(folder, {})
    with pytest.raises(ConfigError, match="USE_MEGATRON_BRIDGE=1"):
        take(f"USE_MEGATRON_BRIDGE=1 llamafactory-cli train {file}")
    for other in ("chat", "export", "webui"):
        with pytest.raises(ConfigError, match=f"llamafactory-cli {other}"):
            take(f"llamafactory-cli {other} {file}")


def test_options_of_a_command_line(folder: Path) -> None:
    words = " ".join(f"--{name} {value}" for name, value in BASE.items() if name not in ("do_train", "bf16"))
    assert training(take(f"llamafactory-cli train {words} --do_train --bf16"))["global_batch_size"] == 64


def test_images_have_a_folder_and_areas(folder: Path) -> None:
    run = take(write(folder, {"dataset": "seen,own", "image_max_pixels": 262144, "freeze_vision_tower": True}))
    # the smallest area is the default of LLaMA-Factory, 32 x 32
    assert "--image-folder data --min-pixels 1024 --max-pixels 262144" in run.translated["dataset"]
    assert "freeze_vit" not in training(run)
    assert training(take(write(folder, {"dataset": "seen", "freeze_vision_tower": False})))["freeze_vit"] is False


def test_pairs_have_images_too(folder: Path) -> None:
    run = take(write(folder, {"stage": "dpo", "dataset": "seen_pairs", "pref_beta": 0.1}))
    assert not run.refused
    assert "SharegptStylePairwiseHandler" in run.translated["dataset"]
    assert "--image-folder data --min-pixels 1024 --max-pixels 589824" in run.translated["dataset"]  # 768 x 768


def test_full_training_without_bf16_is_in_fp32(folder: Path) -> None:
    full: dict[str, object] = {"finetuning_type": "full", "bf16": ...}
    # LLaMA-Factory casts what trains to fp32; accelerate casts products only where bf16 says so. Adapters keep a base in bf16
    assert take(write(folder, full)).get("megatron_training.bf16") is False
    assert take(write(folder, full | {"trust_remote_code": True})).get("generate_config.dtype") == "float32"
    assert take(write(folder, full | {"bf16": True})).get("megatron_training.bf16") is None
    assert take(write(folder, {"finetuning_type": "lora", "bf16": ...})).get("megatron_training.bf16") is None


@pytest.mark.parametrize(
    "script",
    [
        "llamafactory-cli train train.yaml\nllamafactory-cli train train.yaml learning_rate=1e-4",
        "if [ -f more ]; then\n  llamafactory-cli train train.yaml\nfi",
        "USE_MCA=1 llamafactory-cli train train.yaml\nllamafactory-cli train train.yaml",
    ],
)
def test_a_script_trains_once(folder: Path, script: str) -> None:
    write(folder, {})
    with pytest.raises(ConfigError, match="several trainings, or one that may not run"):
        take(script)


def test_the_value_that_decides_whether_it_trains_is_asked_for(folder: Path) -> None:
    write(folder, {})
    with pytest.raises(ConfigError, match="--set STAGE=VALUE"):
        take('if [ "$STAGE" = sft ]; then llamafactory-cli train train.yaml; fi')


def test_the_run_of_a_loop_that_is_taken_is_said(folder: Path) -> None:
    write(folder, {})
    script = "for x in 1 2; do llamafactory-cli train train.yaml learning_rate=${x}e-4; done"
    assert "run 1 of 2 of the loop" in take(script).summarize()


def test_what_each_node_runs_and_what_follows_training_is_one_training(folder: Path) -> None:
    write(folder, {})
    nodes = "\n".join(f"NNODES=2 NODE_RANK={rank} FORCE_TORCHRUN=1 llamafactory-cli train train.yaml" for rank in range(2))
    assert take(nodes).tree == take("llamafactory-cli train train.yaml\nllamafactory-cli export e.yaml").tree


def test_a_registry_of_the_hub_is_read_from_its_copy(folder: Path) -> None:
    (folder / "data").rename(folder / "copy")
    settings = ImportSettings(devices=8, variables={"DATASET_DIR": "copy"})
    run = import_command(PROJECTS["llama-factory"], write(folder, {"dataset_dir": "REMOTE:a/b"}), settings)
    assert "--input own " in run.summarize()
    assert "--dataset-dir copy" in run.summarize()


def test_num_samples_are_said(folder: Path) -> None:
    assert "num_samples" in take(write(folder, {"dataset": "drawn"})).translated["dataset"]


def test_the_command_line_writes_a_run_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--devices", "2", "llama-factory", write(folder, {})]) == 0
    assert yaml.safe_load((folder / "from_llama-factory.yaml").read_text())["megatron_training"]["num_npus"] == 2
    assert "--prompt-type qwen3_nothink: the same text" in capsys.readouterr().out
