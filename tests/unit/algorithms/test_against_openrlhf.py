"""Losses, estimators, KLs and reward shaping of OpenRLHF 0.11.2, where it is installed (envs/cpu/extras.sh)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sample_objectives import objective

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.interfaces import AdvantageInputs, LossOutput, PolicyBatch
from mindspeed_rl.algorithms.kl import build_kl_controller, kl_penalty
from mindspeed_rl.algorithms.policy_losses import policy_loss, value_loss
from mindspeed_rl.algorithms.preference_losses import DPOSettings, PreferenceBatch, dpo_loss, pairwise_reward_loss
from mindspeed_rl.catalogue import KL_ESTIMATORS
from mindspeed_rl.importers.openrlhf import _ESTIMATORS as IMPORTED
from mindspeed_rl.rewards.dispatcher import _compute_overlong_penalty
from mindspeed_rl.rewards.samples import RewardSettings

pytest.importorskip("openrlhf", reason="OpenRLHF is in the environment of envs/cpu/extras.sh")

_REGISTRIES = Path(__file__).parents[2] / "data" / "registries" / "names.json"
NAMES = json.loads(_REGISTRIES.read_text(encoding="utf-8"))["OpenRLHF 0.11.2"]
ROWS, LENGTH, GROUP = 8, 6, 4
LOW, HIGH = 0.15, 0.25

#: packages whose own __init__ imports flash-attn, which only builds for GPUs
_BARE = ("openrlhf.models", "openrlhf.utils", "openrlhf.trainer.ray")
#: what the files below import and do not call: deepspeed, the start of Ray workers, the padding of a batch
_UNUSED = {
    "deepspeed": {},
    "openrlhf.trainer.ray.launcher": {"RayActorGroup": object},
    "openrlhf.utils.utils": {"zero_pad_sequences": None},
}


@pytest.fixture(scope="module")
def theirs() -> Iterator[SimpleNamespace]:
    """Modules of the published package, read without what they import for GPUs."""
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations
    (folder,) = {Path(place) for place in spec.submodule_search_locations}
    before = set(sys.modules)
    for name in _BARE:
        module = ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    for name, attributes in _UNUSED.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # transformers asks whether there is a deepspeed
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        names = {
            "loss": "models.loss",
            "utils": "models.utils",
            "maker": "trainer.ppo_utils.experience_maker",
            "lengths": "trainer.ppo_utils.length_penalty",
            "controller": "trainer.ppo_utils.kl_controller",
        }
        yield SimpleNamespace(**{key: importlib.import_module(f"openrlhf.{name}") for key, name in names.items()})
    finally:
        for name in set(sys.modules) - before:
            if name in _UNUSED or name.startswith("openrlhf."):
                del sys.modules[name]


def test_the_names_are_those_of_its_options() -> None:
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations
    text = Path(list(spec.submodule_search_locations)[0], "cli", "train_ppo_ray.py").read_text(encoding="utf-8")
    options = {"loss_type": "policy_loss_type", "adv_estimator": "advantage.estimator", "kl_penalty": "kl.estimator"}
    for key, option in options.items():
        choices = text.split(f'{option}"', 1)[1].split("choices=[", 1)[1].split("]", 1)[0]
        assert NAMES[key] == [name.strip(' "') for name in choices.split(",")]
    assert set(NAMES["adv_estimator"]) == set(KEYS) == set(IMPORTED)
    assert set(NAMES["kl_penalty"]) <= set(KL_ESTIMATORS)


def random_batch(seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    log_probs = -rng.random((ROWS, LENGTH)) * 3
    arrays = {
        "log_probs": log_probs,
        "old": np.minimum(log_probs + 0.3 * rng.normal(size=log_probs.shape), -1e-3),
        "ref": log_probs + 0.5 * rng.normal(size=log_probs.shape),
        "sampler": log_probs + 0.4 * rng.normal(size=log_probs.shape),
        "advantages": rng.normal(size=log_probs.shape),
        "values": rng.normal(size=log_probs.shape),
        "rewards": (rng.random(ROWS) < 0.5) * 1.0 + 0.25 * rng.integers(0, 3, ROWS),
    }
    return {name: torch.tensor(values) for name, values in arrays.items()} | {
        "mask": torch.tensor(np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (ROWS, 1)))
    }


def mean(output: LossOutput) -> torch.Tensor:
    return output.loss_sum / output.count


# ---------------------------------------------------------------------- policy losses

#: arguments of PolicyLoss -> loss here, its keys
LOSSES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "ppo": ({}, "dapo", {}),
    "ppo of sequences": ({"token_level_loss": False}, "grpo", {}),
    "ppo with a dual clip": ({"dual_clip": 1.5}, "dapo", {"clip_ratio_c": 1.5}),
    "gspo": ({"policy_loss_type": "gspo"}, "gspo", {}),
    "tis": (
        {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": (0.0, 1.2)},
        "dapo",
        {"rollout_correction": "token_truncate", "rollout_threshold": 1.2},
    ),
    "icepop": (
        {"is_correction_level": "token", "is_correction_mode": "mask", "is_correction_threshold": (0.7, 1.3)},
        "dapo",
        {"rollout_correction": "token_mask", "rollout_threshold": 1.3, "rollout_threshold_min": 0.7},
    ),
    "seq-mask-tis": (
        {"is_correction_level": "seq", "is_correction_mode": "mask", "is_correction_threshold": (0.9, 1.1)},
        "grpo",
        {"rollout_correction": "token_geometric_mask", "rollout_threshold": 1.1, "rollout_threshold_min": 0.9},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", LOSSES)
def test_a_policy_loss_has_the_value_and_gradient_of_openrlhf(theirs: SimpleNamespace, case: str, seed: int) -> None:
    arguments, ours, keys = LOSSES[case]
    if ours == "grpo" and "token_level_loss" not in arguments:
        arguments = {**arguments, "token_level_loss": False}
    batch = random_batch(seed)
    if case == "gspo":  # an advantage per response, as the paper has it
        batch["advantages"] = batch["advantages"][:, :1].expand(ROWS, LENGTH)
    mask, log_probs = batch["mask"], batch["log_probs"].clone().requires_grad_()
    module = theirs.loss.PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, **arguments)
    loss = module(log_probs, batch["old"], batch["advantages"], mask, rollout_log_probs=batch["sampler"])[0]
    (slope,) = torch.autograd.grad(loss, log_probs)

    here = objective(ours, clip_ratio_low=LOW, clip_ratio_high=HIGH, **keys)
    mine = batch["log_probs"].clone().requires_grad_()
    sampler = batch["sampler"] if "rollout_correction" in keys else None
    output = policy_loss(
        PolicyBatch(mine, batch["advantages"], mask, old_log_probs=batch["old"], rollout_log_probs=sampler), here
    )
    mean(output).backward()
    assert mean(output).item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(mine.grad, slope, rtol=1e-6, atol=1e-9)
    assert slope.abs().max() > 0


def test_gspo_with_a_correction_takes_the_ratio_to_the_sampler(theirs: SimpleNamespace) -> None:
    batch = random_batch(5)
    advantages = batch["advantages"][:, :1].expand(ROWS, LENGTH)
    module = theirs.loss.PolicyLoss(LOW, HIGH, policy_loss_type="gspo", is_correction_level="token")
    loss = module(batch["log_probs"], batch["old"], advantages, batch["mask"], rollout_log_probs=batch["sampler"])[0]
    # rl_config.old_log_probs rollout: the sampler's log-probs are the old policy's, without a correction
    output = policy_loss(
        PolicyBatch(batch["log_probs"], advantages, batch["mask"], old_log_probs=batch["sampler"]),
        objective("gspo", clip_ratio_low=LOW, clip_ratio_high=HIGH),
    )
    assert mean(output).item() == pytest.approx(loss.item(), rel=1e-9)


# ---------------------------------------------------------------------- KL


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_kl_has_the_gradient_of_openrlhf(theirs: SimpleNamespace, name: str, unbiased: bool) -> None:
    batch = random_batch(0)
    log_probs = [batch["log_probs"].clone().requires_grad_() for _ in range(2)]
    expected = theirs.utils.compute_approx_kl(
        log_probs[0], batch["ref"], log_probs_old=batch["old"], kl_estimator=name, unbiased_gradient=unbiased
    )
    log_ratio = log_probs[1] - batch["old"] if unbiased else None
    ours = kl_penalty(log_probs[1], batch["ref"], KL_ESTIMATORS[name], clamp=True, log_ratio=log_ratio)
    expected.sum().backward()
    ours.sum().backward()
    ratio = (batch["log_probs"] - batch["old"]).exp()
    # under a ratio our value has it too, theirs has not; k1's gradient there is r x, here r (1 + x), with r zero on average
    torch.testing.assert_close(ours.detach(), expected.detach().double() * (ratio if unbiased else 1.0), rtol=1e-5, atol=1e-6)
    zero_on_average = ratio if unbiased and name == "k1" else 0.0
    assert log_probs[0].grad is not None and log_probs[1].grad is not None
    torch.testing.assert_close(log_probs[1].grad - zero_on_average, log_probs[0].grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("observed", [0.001, 0.09, 0.1, 0.5])
def test_the_adaptive_coefficient_moves_as_in_openrlhf(theirs: SimpleNamespace, observed: float) -> None:
    other = theirs.controller.AdaptiveKLController(0.02, 0.1, 1000)
    ours = build_kl_controller(objective(kl_coef=0.02, kl_ctrl_type="adaptive", kl_target=0.1, kl_horizon=1000))
    for _ in range(3):
        other.update(observed, 64)
        ours.update(observed, 64)
    assert ours.coef == pytest.approx(other.value, rel=1e-12)


# ---------------------------------------------------------------------- rewards and advantages

#: estimator there -> keys here
KEYS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "reinforce": {"gamma": 0.9},
    "reinforce_baseline": {},
    "rloo": {},
    "group_norm": {"eps": 1e-9},
    "dr_grpo": {"scale": "none"},
    "flash_reinforce": {},
}
#: those that take the KL from each token's reward before any baseline; the others, after it
TOKEN_KL = ("gae", "reinforce")


def compute_theirs(
    theirs: SimpleNamespace, name: str, batch: dict[str, torch.Tensor], kl_coef: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of its maker of experiences, [B, R] each."""
    numbers = {"gamma": KEYS[name].get("gamma", 1.0), "lambd": KEYS[name].get("lam", 1.0)}
    kl = theirs.utils.compute_approx_kl(batch["old"], batch["ref"])
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=GROUP, max_new_tokens=LENGTH),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=name, no_std_norm=False, **numbers)),
    )
    maker = theirs.maker.RemoteExperienceMaker(*[None] * 4, SimpleNamespace(value=kl_coef), SimpleNamespace(args=args), None)
    mask = batch["mask"]
    experiences = [
        SimpleNamespace(
            index=list(range(start, start + 2)),
            rewards=batch["rewards"][start : start + 2].clone(),
            response_length=mask[start : start + 2].sum(1),
            truncated=None,
            values=batch["values"][start : start + 2],
            kl=kl[start : start + 2].double(),
            action_mask=mask[start : start + 2],
            info={},
        )
        for start in range(0, ROWS, 2)
    ]
    done = maker.compute_advantages_and_returns(experiences)
    return torch.cat([each.advantages for each in done]) * mask, torch.cat([each.returns for each in done]) * mask


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", KEYS)
def test_an_estimator_has_the_advantages_of_openrlhf(theirs: SimpleNamespace, name: str, seed: int) -> None:
    batch = random_batch(seed)
    mask, kl_coef = batch["mask"], 0.1 if name in TOKEN_KL else 0.0
    expected, returns = compute_theirs(theirs, name, batch, kl_coef)
    estimator, whitens = IMPORTED[name]
    inputs = AdvantageInputs(
        batch["rewards"],
        mask,
        GROUP,
        values=batch["values"],
        kl=batch["old"] - batch["ref"] if kl_coef else None,
        kl_coef=kl_coef,
    )
    keys = KEYS[name] if whitens is None else {**KEYS[name], "whiten": whitens}
    ours, our_returns, _ = compute_advantages(inputs, objective(adv_estimator=estimator, group_size=GROUP, **keys))
    count = int(mask.sum())
    # there the variance is divided by n, here by n - 1
    factor = ((count - 1) / count) ** 0.5 if whitens else 1.0
    torch.testing.assert_close(ours.double(), expected.double() * factor, rtol=1e-5, atol=1e-6)
    if name in TOKEN_KL:
        torch.testing.assert_close(our_returns.double(), returns.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", range(1, 13))
def test_the_overlong_penalty_is_that_of_openrlhf(theirs: SimpleNamespace, tokens: int) -> None:
    row = SimpleNamespace(rewards=torch.zeros(1), response_length=torch.tensor([tokens]))
    theirs.lengths.apply_overlong_penalty([row], 12, 5, 0.7)
    settings = RewardSettings(
        overlong_buffer_enable=True, rollout_max_tokens=12, overlong_buffer=5, overlong_buffer_penalty_factor=0.7
    )
    assert _compute_overlong_penalty(tokens, settings) == pytest.approx(row.rewards.item(), abs=1e-6)


# ---------------------------------------------------------------------- critic and pairs


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_loss_of_the_critic_is_that_of_openrlhf(theirs: SimpleNamespace, clip: float | None) -> None:
    batch = random_batch(1)
    values = [batch["values"].clone().requires_grad_() for _ in range(2)]
    old = batch["values"] + 0.4 * batch["old"]
    expected = theirs.loss.ValueLoss(clip_eps=clip)(values[0], old, batch["advantages"], batch["mask"])
    ours = mean(value_loss(values[1], batch["advantages"], batch["mask"], old_values=old, clip_range=clip))
    assert ours.item() == pytest.approx(expected.item())
    expected.backward()
    ours.backward()
    torch.testing.assert_close(values[1].grad, values[0].grad)


@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_a_loss_of_pairs_is_that_of_openrlhf(theirs: SimpleNamespace, loss_type: Any, smoothing: float) -> None:
    log_probs = -10 * torch.rand(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    both = [log_probs.clone().requires_grad_() for _ in range(2)]
    expected = theirs.loss.DPOLoss(0.3, smoothing, ipo=loss_type == "ipo")(*both[0])[0]
    one = torch.ones(5, dtype=torch.int64)  # there IPO takes log-probs as they are given to it
    batch = PreferenceBatch(both[1][0], both[1][1], one, one, both[1][2], both[1][3])
    ours = mean(dpo_loss(batch, DPOSettings(loss_type, 0.3, smoothing)))
    assert ours.item() == pytest.approx(expected.item())
    expected.backward()
    ours.backward()
    torch.testing.assert_close(both[1].grad, both[0].grad)


def test_the_loss_of_a_reward_model_is_that_of_openrlhf(theirs: SimpleNamespace) -> None:
    chosen, rejected = torch.randn(2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = mean(pairwise_reward_loss(chosen, rejected)).item()
    assert ours == pytest.approx(theirs.loss.PairWiseLoss()(chosen, rejected).item())
    assert ours == pytest.approx(theirs.loss.LogExpLoss()(chosen, rejected).item())
