"""Losses, estimators and KLs of verl 0.9.1, where it is installed (envs/cpu/extras.sh): values and gradients in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_objectives import objective

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.interfaces import AdvantageInputs, PolicyBatch
from mindspeed_rl.algorithms.kl import kl_penalty
from mindspeed_rl.algorithms.policy_losses import policy_loss, value_loss
from mindspeed_rl.catalogue import KL_ESTIMATORS
from mindspeed_rl.importers.verl_losses import LOSS_MODES

core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is in the environment of envs/cpu/extras.sh")
configs = pytest.importorskip("verl.workers.config")
algorithm = pytest.importorskip("verl.trainer.config")

NAMES = json.loads((Path(__file__).parents[2] / "data" / "registries" / "names.json").read_text(encoding="utf-8"))["verl 0.9.1"]
ROWS, LENGTH, GROUP = 8, 6, 4


def test_the_names_are_those_of_its_registries() -> None:
    assert sorted(NAMES["loss_type"]) == sorted(core.POLICY_LOSS_REGISTRY)
    assert sorted(NAMES["adv_estimator"]) == sorted(core.ADV_ESTIMATOR_REGISTRY)
    assert set(core.ADV_ESTIMATOR_REGISTRY) == {estimator.value for estimator in core.AdvantageEstimator}


def random_batch(seed: int, *, on_policy: bool = False) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    log_probs = -rng.random((ROWS, LENGTH)) * 3
    drift = 0.0 if on_policy else 0.3 * rng.normal(size=log_probs.shape)
    arrays = {
        "log_probs": log_probs,
        "old": np.minimum(log_probs + drift, -1e-3),
        "advantages": rng.normal(size=log_probs.shape),
        "rewards": (rng.random(ROWS) < 0.5) * 1.0 + 0.25 * rng.integers(0, 3, ROWS),
        "values": rng.normal(size=log_probs.shape),
        "squares": rng.random(log_probs.shape),
    }
    return {name: torch.tensor(values) for name, values in arrays.items()} | {
        "mask": torch.tensor(np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1)))
    }


# ---------------------------------------------------------------------- policy losses

#: loss there -> aggregation there, loss here, its keys; LOW and HIGH are the bounds of both
LOW, HIGH = 0.15, 0.25
LOSSES = {
    "vanilla": ("token-mean", "dapo", {"clip_ratio_c": 3.0}),
    "vanilla of sequences": ("seq-mean-token-mean", "grpo", {"clip_ratio_c": 3.0}),
    "vanilla of a fixed length": ("seq-mean-token-sum-norm", "dr_grpo", {"clip_ratio_c": 3.0, "max_response_length": 11}),
    "vanilla of sums": ("seq-mean-token-sum", "luspo", {"clip_ratio_c": 3.0, "importance_sampling_level": "token"}),
    "gspo": ("seq-mean-token-mean", "gspo", {"importance_sampling_level": "sequence_token"}),
    "sapo": ("seq-mean-token-mean", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gpg": ("token-mean", "gpg", {}),
    "cispo": ("token-mean", "cispo", {}),
    "dppo_tv": ("token-mean", "dppo_tv", {"clip_ratio_c": 3.0}),
    "dppo_kl": ("token-mean", "dppo_kl", {"clip_ratio_c": 3.0}),
    "geo_mean": ("seq-mean-token-mean", "gmpo", {}),
    "dro": ("token-mean", "dro", {"dro_beta": 0.7}),
    "clip_cov": ("token-mean", "clip_cov", {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 2.0}),
    "kl_cov": ("token-mean", "kl_cov", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.3}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", LOSSES)
def test_a_policy_loss_has_the_value_and_gradient_of_verl(case: str, seed: int) -> None:
    aggregation, ours, keys = LOSSES[case]
    name = case.split()[0]
    # clipped tokens are not candidates there, and cannot be: nothing is clipped before the first step
    batch = random_batch(seed, on_policy=name == "clip_cov")
    if name == "geo_mean":  # an advantage a response, as the paper has it
        batch["advantages"] = batch["advantages"][:, :1].expand(ROWS, LENGTH)
    mask, log_probs = batch["mask"], batch["log_probs"].clone().requires_grad_()
    numbers = {key: value for key, value in keys.items() if key.startswith(("clip_cov", "kl_cov", "ppo_kl", "dro"))}
    config = configs.ActorConfig(
        strategy="fsdp",
        rollout_n=GROUP,
        use_dynamic_bsz=True,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        policy_loss=configs.PolicyLossConfig(loss_mode=name, **numbers),
        global_batch_info={"loss_scale_factor": keys.get("max_response_length")},
    )
    # their means over a mask equal the means over float masks
    arguments = batch["old"], log_probs, batch["advantages"].clone(), mask.double(), aggregation
    torch.manual_seed(0)
    loss, _ = core.get_policy_loss_fn(name)(*arguments, config=config)
    (slope,) = torch.autograd.grad(loss, log_probs)

    here = objective(ours, clip_ratio_low=LOW, clip_ratio_high=HIGH, **keys)
    mine, marks = batch["log_probs"].clone().requires_grad_(), here.loss.load_marks()
    # there of the present policy
    marked = marks and marks(batch["advantages"], batch["log_probs"], mask, here, torch.Generator())
    output = policy_loss(PolicyBatch(mine, batch["advantages"], mask, old_log_probs=batch["old"], marked=marked), here)
    (output.loss_sum / output.count).backward()
    assert (output.loss_sum / output.count).item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(mine.grad, slope, rtol=1e-6, atol=1e-9)
    assert slope.abs().max() > 0


@pytest.mark.parametrize("name", LOSS_MODES)
def test_the_importer_knows_which_aggregation_clip_and_dual_clip_a_loss_reads(name: str) -> None:
    batch = random_batch(1)
    defaults = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": 3.0}

    def compute(aggregation: str = "token-mean", sign: int = 1, ratio: float = 0.5, **changes: float) -> float:
        config = configs.ActorConfig(
            strategy="fsdp", rollout_n=GROUP, use_dynamic_bsz=True, **(defaults | changes),
            policy_loss=configs.PolicyLossConfig(loss_mode=name, dro_beta=0.7, kl_cov_ratio=0.2, ppo_kl_coef=0.3),
        )  # fmt: skip
        torch.manual_seed(0)
        inputs = batch["log_probs"] - ratio, batch["log_probs"].clone(), sign * batch["advantages"].abs()
        return core.get_policy_loss_fn(name)(*inputs, batch["mask"].double(), aggregation, config=config)[0].item()

    mode = LOSS_MODES[name]
    # of gspo only this release takes the mode: its main branch, before and after, always takes the mean of sequences
    is_fixed = mode.aggregation is not None and name != "gspo"
    assert (compute() == compute("seq-mean-token-mean")) == is_fixed
    assert mode.aggregation in (None, "sequence")
    assert (compute() != compute(clip_ratio_low=1e-3, clip_ratio_high=1e-3)) == mode.clips
    # ratios above every bound of advantages below 0, which a dual clip reaches
    assert (compute(sign=-1, ratio=2.5) != compute(sign=-1, ratio=2.5, clip_ratio_c=2.0)) == mode.has_dual


def test_the_importer_knows_every_loss_of_the_registry() -> None:
    assert {*LOSS_MODES, "bypass_mode"} == set(core.POLICY_LOSS_REGISTRY)


# ---------------------------------------------------------------------- advantages

#: estimator there -> here, keys here
ESTIMATORS = {
    "gae": ("gae", {"gamma": 0.9, "lam": 0.8}),
    "grpo": ("group_norm", {}),
    "grpo_vectorized": ("group_norm", {}),
    "grpo_passk": ("pass_at_k", {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {"gamma": 0.9}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "rloo": ("rloo", {}),
    "rloo_vectorized": ("rloo", {}),
    "opo": ("opo", {}),
    "remax": ("remax", {"gamma": 1.0}),
    "gpg": ("gpg", {}),
    "optimal_token_baseline": ("optimal_token_baseline", {}),
    "tir_optimal_token_baseline": ("optimal_token_baseline", {}),
    "gdpo": ("gdpo", {}),
}


def test_every_estimator_of_verl_is_compared() -> None:
    assert set(ESTIMATORS) == set(core.ADV_ESTIMATOR_REGISTRY)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_has_the_advantages_of_verl(name: str, seed: int) -> None:
    ours, keys = ESTIMATORS[name]
    batch = random_batch(seed)
    mask, rewards = batch["mask"], batch["rewards"]
    if name in ("reinforce_plus_plus", "gae", "tir_optimal_token_baseline"):
        mask[0] = torch.tensor([True, False, True, True, False, True])  # a tool's reply in the middle
    last = torch.where(mask, torch.arange(LENGTH), -1).amax(dim=1, keepdim=True)
    token_rewards = torch.where(torch.arange(LENGTH) == last, rewards[:, None], 0.0)
    greedy = torch.tensor([0.5, 1.0]).double().repeat_interleave(GROUP)
    others = {
        "gae": {"values": batch["values"], **keys},
        "reinforce_plus_plus": {"config": algorithm.AlgoConfig(gamma=keys.get("gamma", 1.0))},
        "remax": {"reward_baselines": greedy, "config": algorithm.AlgoConfig()},
        "grpo_passk": {"config": algorithm.AlgoConfig()},
    }.get(name, {})
    if name.endswith("token_baseline"):
        others = {"old_log_probs": batch["old"], "sum_pi_squared": batch["squares"]}
    if name not in ("gae", "reinforce_plus_plus", "remax"):
        others["index"] = np.repeat(np.arange(ROWS // GROUP), GROUP).astype(str)
    got, _ = core.get_adv_estimator_fn(name)(token_level_rewards=token_rewards, response_mask=mask.double(), **others)

    inputs = AdvantageInputs(
        rewards,
        mask,
        GROUP,
        values=batch["values"],
        greedy_rewards=greedy,
        old_log_probs=batch["old"],
        squared_probs=batch["squares"],
        reward_components=rewards[:, None],
    )
    advantages, _, _ = compute_advantages(inputs, objective(adv_estimator=ours, group_size=GROUP, eps=1e-6, **keys))
    expected = got.double() * mask
    if name == "gdpo":
        # whitened there over tokens, here over responses, as in TRL: the same up to scale and shift
        mine, theirs = advantages[:, 0], expected[:, 0]
        slope = (mine - mine.mean()).dot(theirs - theirs.mean()) / (theirs - theirs.mean()).square().sum()
        torch.testing.assert_close(mine - mine.mean(), slope * (theirs - theirs.mean()), rtol=1e-5, atol=1e-6)
        assert slope > 0
        return
    # some of them compute in float32
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- KL and critic


@pytest.mark.parametrize("name", sorted(set(NAMES["kl_penalty"]) - {"full"}))
def test_a_kl_has_the_value_and_gradient_of_verl(name: str) -> None:
    batch = random_batch(0)
    log_probs = [batch["log_probs"].clone().requires_grad_() for _ in range(2)]
    theirs = core.kl_penalty(log_probs[0], batch["old"], name)
    ours = kl_penalty(log_probs[1], batch["old"], KL_ESTIMATORS[name], clamp=True)
    torch.testing.assert_close(ours, theirs)
    theirs.sum().backward()
    ours.sum().backward()
    torch.testing.assert_close(log_probs[1].grad, log_probs[0].grad)


def test_the_loss_of_the_critic_is_that_of_verl() -> None:
    batch = random_batch(1)
    values = [batch["values"].clone().requires_grad_() for _ in range(2)]
    returns, old, mask = batch["advantages"], batch["values"] + 0.4 * batch["old"], batch["mask"]
    theirs, _ = core.compute_value_loss(values[0], returns, old, mask.double(), 0.2)
    ours = value_loss(values[1], returns, mask, old_values=old, clip_range=0.2)
    assert (ours.loss_sum / ours.count).item() == pytest.approx(theirs.item())
    theirs.backward()
    (ours.loss_sum / ours.count).backward()
    torch.testing.assert_close(values[1].grad, values[0].grad)
