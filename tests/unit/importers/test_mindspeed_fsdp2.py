"""train_fsdp2.py of MindSpeed-LLM: numbers worked out by hand from its trainer, its scheduler and its process groups."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings

FILE = {
    "model": {"model_id": "qwen3", "trust_remote_code": True, "train_from_scratch": False, "tokenizer_name_or_path": None},
    "data": {"template": "qwen3", "cutoff_len": 4096, "overwrite_cache": True},
    "parallel": {"recompute": True, "fsdp_modules": ["model.layers.{*}"], "reduce_dtype": "bf16"},
    "training": {"lr": "1e-05", "min_lr": 1e-6, "warmup_ratio": 0.1, "max_steps": 200, "save_steps": 50, "optimizer": "adamw"},
}
OPTIONS = (
    "--model.model_name_or_path Qwen/Qwen3-8B --data.dataset rows --parallel.fsdp_size 8 "
    "--training.per_device_train_batch_size 2 --training.gradient_accumulation_steps 4 --training.output_dir ./output"
)
TORCHRUN = "torchrun --nproc_per_node 8 train_fsdp2.py run.yaml "
DOCUMENTS = """--training.stage pt --data.data_manager_type mg --data.dataset '{"file_name": "./texts.parquet"}'"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs" / "fsdp2" / "data").mkdir(parents=True)
    info = {"rows": {"file_name": "rows.json"}, "chats": {"file_name": "chats.json", "formatting": "sharegpt"}}
    (tmp_path / "configs" / "fsdp2" / "data" / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(FILE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def take(command: str, *accepted: str, devices: int | None = None, rows: int = 4096, **variables: str) -> Import:
    settings = ImportSettings(devices=devices, rows=rows, accepted=frozenset(accepted), variables=variables)
    return import_command(PROJECTS["mindspeed-llm"], command, settings)


def test_a_file_and_a_command_make_one_run_on_the_second_engine(folder: Path) -> None:
    run = take(TORCHRUN + OPTIONS + " --training.lr 2e-5")
    plan = run.plans[0]  # type: ignore[index]
    # 2 rows x 4 passes x 8 devices; a tenth of 200 steps is the warm-up, which starts at 0
    assert (plan.step_samples, plan.total_steps, plan.lr_warmup_steps, plan.lr_first) == (64, 200, 20, 0.0)
    # the schedule counts from 0: half of the warm-up at step 10; of the cosine, 179 of 180 steps at the last one
    assert plan.lr_10 == pytest.approx(1e-5)
    assert plan.lr_last == pytest.approx(1e-6 + 1.9e-5 * (math.cos(math.pi * 179 / 180) + 1) / 2)
    actor = run.tree["megatron_training"]
    assert (actor["engine"], actor["stage"], actor["seq_length"]) == ("fsdp", "sft", 4096)
    assert actor["recompute_granularity"] == "full"
    # defaults of the program, which are not ours
    assert (actor["weight_decay"], actor["adam_beta2"], actor["keep_last"], actor["moe_aux_loss_coeff"]) == (0.01, 0.95, 3, 0.0)
    assert "--dataset-dir ./configs/fsdp2/data --prompt-type qwen3 --enable-thinking true" in run.translated["dataset"]
    assert "fewer than about 4267 rows" in run.translated["max_steps"]  # 200 x 64 rows over 3 epochs


def test_a_file_alone_has_the_devices_of_fsdp_size(folder: Path) -> None:
    groups = {
        **FILE,
        "model": {"model_name_or_path": "Qwen/Qwen3-8B"},
        "data": {"dataset": "rows", "template": "qwen3"},
        "parallel": {"fsdp_size": 4},
        "training": {**FILE["training"], "output_dir": "out"},
    }
    (folder / "whole.yaml").write_text(yaml.safe_dump(groups))
    run = take("whole.yaml")
    assert run.plans[0].step_samples == 32 and run.get("megatron_training.num_npus") == 4  # type: ignore[index]


def test_tokens_of_a_row_on_several_devices_divide_the_rows_of_a_step(folder: Path) -> None:
    run = take(f"{TORCHRUN}{OPTIONS} --parallel.cp_size 4")
    actor = run.tree["megatron_training"]
    assert (actor["global_batch_size"], actor["context_parallel_size"], actor["engine"]) == (16, 4, "fsdp")
    ring = take(f"{TORCHRUN}{OPTIONS} --parallel.cp_size 4 --parallel.cp_type ring")
    assert ring.get("megatron_training.engine") is None
    assert ring.get("megatron_training.context_parallel_algo") == "megatron_cp_algo"
    assert "because of attention by cp_type ring" in ring.without_effect["fsdp_size"]


def test_experts_that_transformers_has_transposed_keep_the_engine(folder: Path) -> None:
    run = take(f"{TORCHRUN}{OPTIONS} --model.model_name_or_path openai/gpt-oss-20b --model.model_id gpt_oss")
    assert run.get("megatron_training.engine") == "fsdp"


def test_epochs_are_whole_ones_over_the_rows(folder: Path) -> None:
    run = take(f"{TORCHRUN}{OPTIONS} --training.max_steps -1 --training.num_train_epochs 2 --training.warmup_ratio 0")
    assert run.plans[0].total_steps == 128  # 4096 rows / 64, twice  # type: ignore[index]
    with pytest.raises(ConfigError, match="num_train_epochs 2.5: train_fsdp2.py trains whole epochs only"):
        take(f"{TORCHRUN}{OPTIONS} --training.max_steps -1 --training.num_train_epochs 2.5")


def test_documents_are_joined_and_their_balancing_loss_is_the_commands(folder: Path) -> None:
    command = f"{TORCHRUN}{OPTIONS} {DOCUMENTS} --training.router_aux_loss_coef 0.02"
    run = take(command)
    actor = run.tree["megatron_training"]
    assert (actor["stage"], actor["moe_aux_loss_coeff"]) == ("pretrain", 0.02)
    assert actor["data_path"] == "./dataset/texts/data_text_document"
    assert "no_pad_to_seq_lengths" not in actor and "--append-eod" not in run.translated["dataset"]
    isolated = take(f"{command} --data.append_eod True --data.reset_attention_mask True")
    assert isolated.get("megatron_training.reset_attention_mask") is True
    assert isolated.translated["dataset"].endswith("GeneralPretrainHandler --json-keys text --append-eod)")
    (folder / "tokens_text_document.idx").touch()
    tokens = take(f"{TORCHRUN}{OPTIONS} {DOCUMENTS.replace('./texts.parquet', 'tokens_text_document')}")
    assert tokens.get("megatron_training.data_path") == "tokens_text_document"
    elsewhere = f"{TORCHRUN}{OPTIONS} {DOCUMENTS.replace('./texts.parquet', '/data/tokens')}"
    with pytest.raises(ConfigError, match="/data/tokens is a prefix of tokens or a folder .* --set DATASET=PREFIX"):
        take(elsewhere)
    assert take(elsewhere, DATASET="/data/tokens").get("megatron_training.data_path") == "/data/tokens"


def test_a_data_set_of_the_command_goes_into_the_registry(folder: Path) -> None:
    entry = '{"file_name": "own.json", "formatting": "sharegpt"}'
    text = take(TORCHRUN + OPTIONS.replace("dataset rows", f"dataset '{entry}'")).translated["dataset"]
    assert "--input own " in text
    assert f'after {{"own": {entry}}} is in configs/fsdp2/data/dataset_info.json' in text


def test_numbers_in_fp8_are_accepted_by_name(folder: Path) -> None:
    command = f"{TORCHRUN}{OPTIONS} --model.quant_recipe_name mxfp8"
    with pytest.raises(ConfigError, match="weights would be .* products in mxfp8"):
        take(command)
    assert take(command, "weights").plans[0].weights == "products in mxfp8"  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--training.optimizer muon", "optimizer: not available here: muon; AdamW"),
        ("--model.model_id step35", "model_id: not available here: Step-3.5"),
        ("--model.train_from_scratch True", "train_from_scratch: not available here: weights that start at random"),
        ("--data.mask_history True", "mask_history: not available here: rows of which only the last answer trains"),
        ("--data.lr 1", "data.lr: not available here: no option of MindSpeed-LLM"),
        ("--parallel.tp_size 2", "tp_size: not available here: 2; the program stops with tensor parallelism"),
        ("--parallel.param_dtype fp16", "param_dtype: not available here: fp16; available are bf16, fp32"),
        ("--parallel.cp_size 3", "cp_size 3 does not divide 8 devices"),
        ("--parallel.fsdp_size 4", "fsdp_size is 4 of 8 processes: train_fsdp2.py stops"),
        ("--training.stage pt", "stops unless stage pt has data_manager_type mg"),
        (f"{DOCUMENTS} --training.max_steps -1", "max_steps is missing"),
        (f"{DOCUMENTS} --data.reset_attention_mask 1", "train_fsdp2.py stops without append_eod"),
        ("--training.resume_from_checkpoint c", "resume_from_checkpoint: not available here: a checkpoint of MindSpeed-LLM"),
        ("--data.dataset other", "dataset other is not in"),
        ("--optimization.pre_tokens 4096", "pre_tokens: not available here: 4096; attention reads all tokens before"),
    ],
)
def test_what_is_not_available_is_refused_by_name(options: str, sentence: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        take(f"{TORCHRUN}{OPTIONS} {options}")


def test_a_file_that_is_not_here_is_asked_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the file absent.yaml is not here, and what it holds is part of the run"):
        take(f"torchrun --nproc_per_node 8 train_fsdp2.py absent.yaml {OPTIONS}")
