"""Models whose code comes with their folder: refused in a sentence, and with trust trained as transformers computes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsdp_jobs
import numpy as np
import pytest
import remote_code_model
import rollout_jobs
import stage_jobs
import tiny_hf
import torch
from ranks import RankFailureError, Ranks
from supervised_samples import answers, instruction_row, write_columns
from training_jobs import TEMPERATURE, Setting, all_rows
from transformers import AutoModelForCausalLM

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.plan import plan_model

_TRUSTED = {"engine": "fsdp", "trust_remote_code": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return remote_code_model.save(tmp_path_factory.mktemp("remote") / "own")


@pytest.mark.parametrize(
    ("keys", "changes", "code", "words"),
    [
        ({"engine": "fsdp"}, {}, None, "engine: fsdp runs that only with trust_remote_code: true"),
        ({"engine": "megatron"}, {}, None, "config.json is of ['OwnForCausalLM']"),
        (_TRUSTED, {"auto_map": {"AutoConfig": "own_code.OwnConfig"}}, None, "names no class for AutoModelForCausalLM"),
        (_TRUSTED, {"auto_map": {}}, None, "has no model of type own_decoder, which engine: fsdp computes with"),
        (
            _TRUSTED,
            {"auto_map": {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "owner/repo--own_code.OwnForCausalLM"}},
            None,
            "auto_map.AutoModelForCausalLM names code of another repository (owner/repo--own_code.OwnForCausalLM)",
        ),
        (_TRUSTED | {"recompute_granularity": "full"}, {}, None, "full is not available with OwnForCausalLM"),
        (_TRUSTED, {}, "import nothing_of_this_name", "the code in the folder fails"),
        (_TRUSTED, {}, "raise RuntimeError('no licence')", "fails: RuntimeError: no licence"),
    ],
)
def test_what_cannot_be_run_is_named(
    tmp_path: Path, keys: dict[str, object], changes: dict[str, object], code: str | None, words: str
) -> None:
    made = remote_code_model.write_code(tmp_path / "model", **({} if code is None else {"code": code}), **changes)
    mark = tmp_path / "ran"
    if "trust_remote_code" not in keys:
        (made / "own_code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    with pytest.raises(ValueError, match=".") as caught:
        plan_model(MegatronConfig(bf16=False, **keys), made)  # pyrefly: ignore[bad-argument-type]
    assert words in str(caught.value) and not mark.exists(), caught.value


@pytest.mark.slow
# the second leaks a part of 1e-2 of a nat, below what rounding in bfloat16 may change in a head
@pytest.mark.parametrize(("bf16", "bias", "leak"), [(False, "0.0", r"\d"), (True, "-4.0", r"0\.0\d")])
def test_a_class_that_sees_later_tokens_is_refused(
    ranks: Callable[[int], Ranks], tmp_path: Path, bf16: bool, bias: str, leak: str
) -> None:
    folder = remote_code_model.save(tmp_path / "own")
    code = folder / "own_code.py"
    code.write_text(code.read_text().replace('distance < 0, float("-inf")', f"distance < 0, {bias}"))
    with pytest.raises(RankFailureError, match=f"OwnForCausalLM sees later tokens.* differ by {leak}"):
        ranks(1).run(fsdp_jobs.train, setting=Setting(str(folder), {"trust_remote_code": True, "bf16": bf16}), steps=1)


def test_layers_are_the_outer_list_however_many_experts_each_has(tmp_path: Path) -> None:
    folder = remote_code_model.write_code(tmp_path / "own")
    code = folder / "own_code.py"
    lists = "self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8))"
    code.write_text(code.read_text().replace("        self.heads =", f"        {lists}\n        self.heads ="))
    plan = plan_model(MegatronConfig(bf16=False, **_TRUSTED), folder)  # pyrefly: ignore[bad-argument-type]
    assert plan.model_config.num_layers == 2
    ops = plan.architecture.weight_ops(plan.model_config)
    assert sum(op.layer == 1 and ".experts." in op.mcore for op in ops) == 8


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_log_probs_and_gradients_are_those_of_the_code(ranks: Callable[[int], Ranks], folder: Path, size: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    rows, expected = all_rows(), []
    total, count = torch.zeros(()), 0
    for ids, prompt, weights in zip(rows.input_ids, rows.prompt_lengths, rows.columns["weights"]):
        predicted = (model(ids[None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
        chosen = predicted.gather(1, ids[prompt:, None])[:, 0]
        expected.append(chosen.detach().numpy())
        total = total - (chosen * weights).sum() + 0.1 * (predicted.exp() * predicted).sum()
        count += len(chosen)
    (total / count).backward()
    setting = Setting(str(folder), _TRUSTED)
    found = {row: value for part in ranks(size).run(fsdp_jobs.forward, setting=setting) for row, value in part.items()}
    for row, values in enumerate(expected):
        np.testing.assert_allclose(found[row][0], values, atol=2e-5)
    report, *_ = ranks(size).run(fsdp_jobs.train, setting=setting, steps=1)
    for name, parameter in model.named_parameters():
        gap = np.abs(report["gradients"][name] - parameter.grad.numpy()).max()
        assert gap < 1e-4 * max(float(parameter.grad.abs().max()), 1e-3), name


@pytest.mark.slow
def test_supervised_training_saves_a_folder_that_loads_with_its_code(
    ranks: Callable[[int], Ranks], folder: Path, tmp_path: Path
) -> None:
    samples = answers(8, seed=2)
    tiny_hf.word_tokenizer().save_pretrained(tmp_path / "words")
    training = {
        **{"stage": "sft", "bf16": False, "load": str(folder), "tokenizer_name_or_path": str(tmp_path / "words")},
        **{"data_path": str(write_columns(tmp_path / "rows", [instruction_row(*sample) for sample in samples]))},
        **{"global_batch_size": 8, "micro_batch_size": 4, "seq_length": 64, "no_pad_to_seq_lengths": True, "no_shuffle": True},
        **{"train_iters": 4, "lr": 1e-3, "lr_decay_style": "constant", "finetune": True},
        **{"save": str(tmp_path / "save"), "save_hf": True},
    }
    (metrics,) = ranks(1).run(stage_jobs.train_stage, training=training | _TRUSTED, rl_config=None, steps=4)
    losses = [step.results()["train/loss"] for step in metrics]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for prompt, answer in samples:
        with torch.no_grad():
            predicted = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total, count = total - float(predicted.gather(1, torch.tensor(answer)[:, None]).sum()), count + len(answer)
    assert losses[0] == pytest.approx(total / count, rel=2e-5) and losses[-1] < losses[0]
    latest = tmp_path / "save/hf/latest"
    trained = AutoModelForCausalLM.from_pretrained(latest, trust_remote_code=True, dtype=torch.float32)
    start = dict(model.named_parameters())
    assert all(not torch.equal(start[name], value) for name, value in trained.named_parameters())
    assert json.loads((latest / "config.json").read_text())["auto_map"]["AutoConfig"] == "own_code.OwnConfig"


@pytest.mark.slow
def test_the_code_generates_with_the_trained_weights_and_the_trainer_s_log_probs(folder: Path) -> None:
    group = Ranks(1, "rollout")
    try:
        (report,) = group.run(
            rollout_jobs.learn, setting=Setting(str(folder), _TRUSTED), infer_tp=1, kind="transformers", timeout_s=300
        )
    finally:
        group.close()
    assert len(report["proven"]) == 3 and min(report["proven"]) > 10
    assert max(report["differences"]) < 1e-4
    assert report["grad_norm"][0] > 0 and report["tokens"][0] != report["tokens"][2]
