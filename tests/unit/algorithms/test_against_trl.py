"""Losses of TRL 1.16, where it is installed (envs/cpu/extras.sh): values and gradients of its trainers' own code in float64."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sample_objectives import objective

from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.masks import entropy_threshold
from mindspeed_rl.algorithms.policy_losses import policy_loss

trl = pytest.importorskip("trl", reason="TRL is in the environment of envs/cpu/extras.sh")

NAMES = json.loads((Path(__file__).parents[2] / "data" / "registries" / "names.json").read_text(encoding="utf-8"))["TRL 1.16.0"]
ROWS, LENGTH, GROUP, LONGEST = 6, 5, 3, 9
LOW, HIGH = 0.15, 0.25


def test_the_names_are_those_of_its_trainers() -> None:
    folder = Path(trl.__file__).parent
    result = {path.name.removesuffix("_trainer.py") for path in folder.glob("*er/*_trainer.py")} - {"base"}
    result |= {path.parent.name for path in folder.glob("experimental/*/*_trainer.py")}
    moved = {path.parent.name for path in folder.glob("experimental/*/__init__.py") if "_trainer" in path.read_text()}
    assert sorted(NAMES["stage"]) == sorted(result | moved)
    choices = {
        "kto_loss_type": trl.KTOConfig.__dataclass_fields__["loss_type"].metadata["choices"],
        "sft_loss_type": trl.SFTConfig.__dataclass_fields__["loss_type"].metadata["choices"],
    }
    assert {key: sorted(names) for key, names in choices.items()} == {key: sorted(NAMES[key]) for key in choices}
    texts = {
        "loss_type": (folder / "trainer" / "grpo_trainer.py").read_text(),
        "dpo_loss_type": (folder / "trainer" / "dpo_trainer.py").read_text(),
    }
    for key, text in texts.items():  # the names that its branches compare with
        assert [name for name in NAMES[key] if f'"{name}"' not in text] == []


def random_batch(seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    log_probs = -rng.random((ROWS, LENGTH)) * 3
    arrays = {
        "log_probs": log_probs,
        "old": np.minimum(log_probs + 0.3 * rng.normal(size=log_probs.shape), -1e-3),
        "ref": log_probs + 0.5 * rng.normal(size=log_probs.shape),
        "sampler": log_probs + 0.2 * rng.normal(size=log_probs.shape),
        "entropy": rng.random(log_probs.shape),
        "advantages": rng.normal(size=ROWS),
    }
    return {name: torch.tensor(values) for name, values in arrays.items()} | {
        "mask": torch.tensor(np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1)))
    }


def compute_theirs(batch: dict[str, torch.Tensor], trainer: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of a trainer's loss on log-probs in place of a model's."""
    log_probs, mask = batch["log_probs"].clone().requires_grad_(), batch["mask"]
    state = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, batch["entropy"], None),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda values: values,
            reduce=lambda values, **_: values,
            pad_across_processes=lambda values, **_: values,
        ),
        args=SimpleNamespace(
            **{"delta": None, "steps_per_generation": 1, "use_bias_correction_kl": False},
            **{"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
            **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
        ),
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        **{"aux_loss_enabled": False, "_entropy_bonus_enabled": False, "use_adaptive_entropy": False},
        **{"current_gradient_accumulation_steps": 1, "max_completion_length": LONGEST, "beta": 0.0},
        **{"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token"},
        **{"use_vllm": False, "vllm_importance_sampling_correction": False, "epsilon_low": LOW, "epsilon_high": HIGH},
    )
    state.get_high_entropy_mask = partial(trl.GRPOTrainer.get_high_entropy_mask, state)
    for name, value in settings.items():
        setattr(state.args if hasattr(state.args, name) else state, name, value)
    nothing = torch.zeros(ROWS, 1, dtype=torch.int64)
    inputs = {
        **{"prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)},
        "completion_mask": mask.double(),
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["ref"],
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(state, None, inputs)
    return loss, torch.autograd.grad(loss, log_probs)[0]


#: loss type there, settings there -> loss here, keys here
LOSSES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "grpo": ({}, "grpo", {}),
    "bnpo": ({}, "bnpo", {}),
    "dr_grpo": ({}, "dr_grpo", {}),
    "dapo": ({}, "dapo", {}),
    "cispo": ({"epsilon_high": 1.1}, "cispo_cap", {"clip_ratio_high": 1.1}),
    "sapo": ({}, "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "luspo": ({"importance_sampling_level": "sequence"}, "luspo", {}),
    "vespo": ({}, "vespo", {}),
    "grpo of sequences": ({"importance_sampling_level": "sequence"}, "gspo", {}),
    "dapo with delta": ({"delta": 1.3}, "dapo", {"delta": 1.3}),
    "grpo with a KL": ({"beta": 0.3}, "grpo", {"kl_coef": 0.3}),
    "dapo with a corrected KL": ({"beta": 0.3, "use_bias_correction_kl": True}, "dapo", {"kl_coef": 0.3, "corrected": True}),
    "dapo of high entropy": ({"top_entropy_quantile": 0.4}, "dapo", {"top_entropy_quantile": 0.4}),
    "grpo without off-policy sequences": (
        {"off_policy_mask_threshold": 0.02},
        "grpo",
        {"off_policy_sequence_mask_delta": 0.02},
    ),
}


def test_every_policy_loss_of_trl_is_compared() -> None:
    assert set(NAMES["loss_type"]) <= set(LOSSES)


def assert_equal(
    batch: dict[str, torch.Tensor], ours: str, keys: dict[str, Any], theirs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    keys = {"use_bias_correction_kl" if name == "corrected" else name: value for name, value in keys.items()}
    here = objective(ours, max_response_length=LONGEST, **{"clip_ratio_low": LOW, "clip_ratio_high": HIGH, **keys})
    log_probs, mask = batch["log_probs"].clone().requires_grad_(), batch["mask"]
    output = policy_loss(
        PolicyBatch(
            log_probs,
            batch["advantages"][:, None].expand(ROWS, LENGTH),
            mask,
            old_log_probs=batch["old"],
            ref_log_probs=batch["ref"],
            entropy=batch["entropy"],
            entropy_threshold=entropy_threshold([(batch["entropy"].float(), mask)], here.top_entropy_quantile),
        ),
        here,
    )
    (output.loss_sum / output.count).backward()
    # there the temperatures of SAPO are float32
    assert (output.loss_sum / output.count).item() == pytest.approx(theirs[0].item(), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(log_probs.grad, theirs[1], rtol=1e-6, atol=1e-9)
    assert theirs[1].abs().max() > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", LOSSES)
def test_a_policy_loss_has_the_value_and_gradient_of_trl(case: str, seed: int) -> None:
    settings, ours, keys = LOSSES[case]
    batch = random_batch(seed)
    assert_equal(batch, ours, keys, compute_theirs(batch, trl.GRPOTrainer, loss_type=case.split()[0], **settings))


def test_gmpo_has_the_value_and_gradient_of_trl() -> None:
    from trl.experimental.gmpo import GMPOTrainer

    batch = random_batch(4)
    # there the smaller of both sides bounds the logarithm, which is the same bound
    assert_equal(batch, "gmpo", {"kl_coef": 0.2}, compute_theirs(batch, GMPOTrainer, beta=0.2))
