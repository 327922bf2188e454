"""Families that Megatron refuses train by transformers' own modules as a plain computation does, and generate by them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fsdp_jobs
import numpy as np
import pytest
import rollout_jobs
import stage_jobs
import tiny_hf
import tiny_modules
import torch
from ranks import RankFailureError, Ranks
from safetensors.torch import load_file, save_file
from supervised_samples import answers, instruction_row, write_columns
from training_jobs import TEMPERATURE, Setting, all_rows
from transformers import AutoModelForCausalLM, BartConfig, BertConfig, GraniteConfig, PretrainedConfig

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.run.rules.training_engine_rules import check_model_form

pytestmark = pytest.mark.slow
FAMILIES = list(tiny_modules.CONFIGS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a family -> the folder of its tiny model."""
    return cache(lambda name: str(tiny_modules.save(name, tmp_path_factory.mktemp(name))))


def _compute(folder: str) -> tuple[list[Any], float, dict[str, torch.Tensor]]:
    """Log-probs of each row, the norm of all gradients and each of them, of the loss of `training_jobs`, by autograd."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # without dropout
    model.get_input_embeddings().padding_idx = None
    rows, log_probs = all_rows(), []
    total, count = torch.zeros(()), 0
    for ids, prompt, weights in zip(rows.input_ids, rows.prompt_lengths, rows.columns["weights"]):
        predicted = (model(ids[None], use_cache=False).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
        entropy = -(predicted.exp() * predicted).sum(-1)
        chosen = predicted.gather(1, ids[prompt:, None])[:, 0]
        log_probs.append(chosen.detach().numpy())
        total, count = total - (chosen * weights + 0.1 * entropy).sum(), count + len(chosen)
    (total / count).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    return log_probs, norm, gradients


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [1, 2])
def test_log_probs_and_gradients_are_those_of_the_module(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], name: str, size: int
) -> None:
    setting = Setting(folders(name))
    log_probs, norm, gradients = _compute(folders(name))
    rows = {row: values for part in ranks(size).run(fsdp_jobs.forward, setting=setting) for row, values in part.items()}
    for row, expected in enumerate(log_probs):
        np.testing.assert_allclose(rows[row][0], expected, atol=2e-5)
    first, *_ = ranks(size).run(fsdp_jobs.train, setting=setting, steps=3)
    assert first["grad_norm"][0] == pytest.approx(norm, rel=1e-4)
    # by their names in the module, but for experts that checkpoints have one by one
    named = {tiny_modules.find_module_name(name, key): value for key, value in first["gradients"].items()}
    compared = {key: value for key, value in named.items() if key in gradients}
    assert len(compared) > len(gradients) / 2
    for key, value in compared.items():
        scale = max(float(gradients[key].abs().max()), 1e-3 * norm)
        assert float(np.abs(value - gradients[key].numpy()).max()) < 2e-4 * scale, key
    # what is exported has the names that the folder has, and all of it
    stored = load_file(Path(folders(name), "model.safetensors"))
    assert {key: tuple(value.shape) for key, value in first["weights"].items()} == {
        key: tuple(value.shape) for key, value in stored.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_supervised_training_starts_from_the_loss_of_the_module_and_saves_what_it_loads(
    ranks: Callable[[int], Ranks], tmp_path: Path, name: str
) -> None:
    folder, samples = tiny_modules.save(name, tmp_path / "model"), answers(8, seed=2)
    tiny_hf.word_tokenizer().save_pretrained(folder)
    training = {
        **{"stage": "sft", "engine": "fsdp", "bf16": False, "load": str(folder), "tokenizer_name_or_path": str(folder)},
        **{"data_path": str(write_columns(tmp_path / "rows", [instruction_row(*sample) for sample in samples]))},
        **{"global_batch_size": 8, "micro_batch_size": 4, "seq_length": 64, "no_pad_to_seq_lengths": True, "no_shuffle": True},
        **{"train_iters": 4, "lr": 1e-3, "lr_decay_style": "constant", "finetune": True},
        **{"save": str(tmp_path / "save"), "save_hf": True},
    }
    (metrics,) = ranks(1).run(stage_jobs.train_stage, training=training, rl_config=None, steps=4)
    losses = [step.results()["train/loss"] for step in metrics]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for prompt, answer in samples:
        with torch.no_grad():
            predicted = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total, count = total - float(predicted.gather(1, torch.tensor(answer)[:, None]).sum()), count + len(answer)
    assert losses[0] == pytest.approx(total / count, rel=2e-5) and losses[-1] < losses[0]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "save/hf/latest", dtype=torch.float32)
    start = dict(model.named_parameters())
    assert sum(not torch.equal(start[key], value) for key, value in trained.named_parameters()) > len(start) // 2


@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v4"])
def test_a_run_resumes_exactly(ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Path, name: str) -> None:
    setting, folder = Setting(folders(name)), str(tmp_path / "saved")
    expected, *_ = ranks(2).run(fsdp_jobs.save, setting=setting, folder=folder, steps=2, more=2)
    same, *_ = ranks(2).run(fsdp_jobs.resume, setting=setting, folder=folder, more=2)
    assert same["grad_norm"] == expected["grad_norm"]
    for key, weight in expected["weights"].items():
        np.testing.assert_array_equal(same["weights"][key], weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_module_generates_with_the_trained_weights_and_the_trainer_s_log_probs(tmp_path: Path, name: str) -> None:
    setting = Setting(str(tiny_modules.save(name, tmp_path)), {"engine": "fsdp"})
    group = Ranks(2, "rollout")
    try:
        reports = group.run(rollout_jobs.learn, setting=setting, infer_tp=1, kind="transformers", timeout_s=300)
    finally:
        group.close()
    for report in reports:
        assert len(report["proven"]) == 3 and min(report["proven"]) > 10
        assert max(report["differences"]) < 1e-4
        assert report["grad_norm"][0] > 0 and report["tokens"][0] != report["tokens"][2]


@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_refuses_them(folders: Callable[[str], str], name: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        plan_model(MegatronConfig(), folders(name))
    plan = plan_model(MegatronConfig(engine="fsdp", bf16=False), folders(name))
    assert plan.architecture.name == name and plan.architecture.packs == (name in ("gpt_neox", "phi3"))


def test_tensors_are_found_under_the_names_of_published_folders(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Path
) -> None:
    shutil.copytree(folders("bloom"), tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    named = {name.removeprefix("transformer."): value for name, value in stored.items()}  # as BLOOM is published
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    (expected,) = ranks(1).run(fsdp_jobs.train, setting=Setting(folders("bloom")), steps=1)
    (actual,) = ranks(1).run(fsdp_jobs.train, setting=Setting(str(tmp_path)), steps=1)
    assert actual["grad_norm"] == expected["grad_norm"] and set(actual["weights"]) == set(named)


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("deepseek_v4", {"bf16": True}, r"bf16: true .* deepseek_v4 keeps some in float32, such as "),
        ("mamba", {"bf16": True}, r"bf16: true .* mamba keeps some in float32, such as the residual; set bf16: false"),
        ("phi3", {"bf16": False, "seq_length": 65}, r"seq_length: 65 is above the 64 tokens"),
    ],
)
def test_what_would_change_precision_silently_is_refused(
    folders: Callable[[str], str], name: str, keys: dict[str, Any], words: str
) -> None:
    config = MegatronConfig(engine="fsdp", **keys)
    with pytest.raises(ValueError, match=words):
        plan = plan_model(config, folders(name))
        check_model_form(config, plan.architecture, plan.model_config)


_BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BertConfig(**_BERT), "does not train bert: BertLMHeadModel has a bias in its head"),
        (BartConfig(d_model=64, decoder_layers=2, decoder_attention_heads=2), "does not train bart: BartForCausalLM "),
    ],
    ids=["bias", "decoder of a pair"],
)
def test_a_class_of_another_form_is_refused_before_anything_starts(
    tmp_path: Path, config: PretrainedConfig, words: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        plan_model(MegatronConfig(engine="fsdp", bf16=False), str(tmp_path))
    assert str(caught.value).count("config.json") <= 2 and "Traceback" not in str(caught.value)


def test_a_class_that_scales_its_logits_is_refused(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = GraniteConfig(**sizes, logits_scaling=8.0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(RankFailureError, match="the head of GraniteForCausalLM is not"):
        ranks(1).run(fsdp_jobs.train, setting=Setting(str(tmp_path)), steps=1)
