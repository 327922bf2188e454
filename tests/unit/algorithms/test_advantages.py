import math
from dataclasses import replace

import naive_algorithms as naive
import numpy as np
import pytest
import torch
from sample_objectives import objective

from mindspeed_rl.algorithms import advantages
from mindspeed_rl.algorithms.advantages import _compute_token_rewards, whiten
from mindspeed_rl.algorithms.interfaces import AdvantageInputs
from mindspeed_rl.catalogue import ADVANTAGES
from mindspeed_rl.config import RLConfig
from mindspeed_rl.run.objective import build_objective

SIZE, ROWS, LENGTH = 3, 12, 7


def compute_advantages(name, inputs, **numbers):
    """Advantages by the estimator of that name; numbers as `objective` takes them."""
    return advantages.compute_advantages(inputs, objective(adv_estimator=name, **numbers))


def random_inputs(seed=0, **changes):
    rng = np.random.default_rng(seed)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    mask[0] = [True, True, False, False, True, True, False]  # a tool's reply in the middle
    mask[5] = False  # nothing was sampled
    arrays = dict(
        rewards=rng.normal(size=ROWS),
        mask=mask,
        size=SIZE,
        kl=rng.normal(size=(ROWS, LENGTH)),
        kl_coef=0.3,
        values=rng.normal(size=(ROWS, LENGTH)),
        greedy=np.repeat(rng.normal(size=ROWS // SIZE), SIZE),
        components=rng.normal(size=(ROWS, 2)),
        weights=(1.0, 0.4),
        gamma=0.9,
        lam=0.8,
        scale="group",
        eps=1e-6,
        old=-rng.random((ROWS, LENGTH)) * 3,
        squares=rng.random((ROWS, LENGTH)),
    )
    return arrays | changes


def as_inputs(arrays, dtype=torch.float64):
    def tensor(name):
        return torch.tensor(arrays[name], dtype=dtype)

    return AdvantageInputs(
        tensor("rewards"),
        torch.tensor(arrays["mask"]),
        group_size=arrays["size"],
        kl=tensor("kl"),
        kl_coef=arrays["kl_coef"],
        values=tensor("values"),
        greedy_rewards=tensor("greedy"),
        reward_components=tensor("components"),
        reward_weights=arrays["weights"],
        old_log_probs=tensor("old"),
        squared_probs=tensor("squares"),
    )


def numbers_of(arrays):
    return {name: arrays[name] for name in ("gamma", "lam", "scale", "eps")}


def simple(rewards, group_size=1, length=2, **options):
    rewards = torch.tensor(rewards, dtype=torch.float32)
    return AdvantageInputs(rewards, torch.ones(len(rewards), length, dtype=torch.bool), group_size, **options)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("seed", range(3))
def test_every_estimator_equals_the_naive_loops(name, seed):
    arrays = random_inputs(seed, kl_coef=0.0 if name in ("gdpo", "max_rl") else 0.3)
    if name == "max_rl":  # rates of success; no success at all in the first group
        arrays["rewards"] = np.where(np.arange(ROWS) < SIZE, 0.0, (arrays["rewards"] > 0) * 1.0)
    got, _, _ = compute_advantages(name, as_inputs(arrays), **numbers_of(arrays))
    np.testing.assert_allclose(got.numpy(), naive.advantages(name, **arrays), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_norm_scales_as_named(scale):
    arrays = random_inputs(scale=scale, eps=1e-4)
    got, _, _ = compute_advantages("group_norm", as_inputs(arrays), **numbers_of(arrays))
    np.testing.assert_allclose(got.numpy(), naive.advantages("group_norm", **arrays), rtol=1e-9, atol=1e-9)


def test_group_norm_of_two_right_and_two_wrong_is_half_over_the_unbiased_std():
    got, returns, _ = compute_advantages("group_norm", simple([1.0, 0.0, 0.0, 1.0], 4))
    expected = 0.5 / (math.sqrt(1.0 / 3.0) + 1e-6)
    np.testing.assert_allclose(got[:, 0], [expected, -expected, -expected, expected], rtol=1e-6)
    assert torch.equal(got, returns)


def test_group_norm_without_scaling_is_the_distance_from_the_mean():
    got, _, _ = compute_advantages("group_norm", simple([3.0, 0.0, 0.0], 3), scale="none")
    assert got[:, 0].tolist() == [2.0, -1.0, -1.0]


def test_a_group_of_equal_rewards_gets_exactly_zero():
    got, _, metrics = compute_advantages("group_norm", simple([0.1, 0.1, 0.1, 1.0, 0.0, 0.0], 3))
    assert got[:3].abs().max() == 0.0
    assert metrics["reward/zero_std_groups"].result() == 0.5


def test_rloo_compares_with_the_mean_of_the_others():
    got, _, _ = compute_advantages("rloo", simple([3.0, 0.0, 1.0], 3))
    np.testing.assert_allclose(got[:, 0], [2.5, -2.0, -0.5], rtol=1e-6)


def test_gae_with_lambda_one_is_the_return_less_the_value():
    inputs = simple([1.0], values=torch.tensor([[0.5, 0.25]]))
    advantages, returns, _ = compute_advantages("gae", inputs, lam=1.0, whiten=False)
    assert advantages.tolist() == [[0.5, 0.75]]
    assert returns.tolist() == [[1.0, 1.0]]


def test_gae_by_hand_with_discount_and_lambda():
    inputs = simple([2.0], values=torch.tensor([[1.0, 3.0]]))
    advantages, _, _ = compute_advantages("gae", inputs, gamma=0.5, lam=0.5, whiten=False)
    # delta_2 = 2 - 3 = -1; delta_1 = 0.5 * 3 - 1 = 0.5; A_1 = 0.5 + 0.25 * -1
    assert advantages.tolist() == [[0.25, -1.0]]


def test_gae_steps_over_tokens_the_actor_did_not_sample():
    mask = torch.tensor([[True, False, True]])
    values = torch.tensor([[1.0, 99.0, 3.0]])
    inputs = AdvantageInputs(torch.tensor([2.0]), mask, values=values)
    assert compute_advantages("gae", inputs, gamma=0.5, lam=0.5, whiten=False)[0].tolist() == [[0.25, 0.0, -1.0]]


def test_gae_returns_are_taken_before_whitening():
    inputs = simple([1.0], values=torch.tensor([[0.5, 0.25]]))
    advantages, returns, _ = compute_advantages("gae", inputs, lam=1.0)
    assert returns.tolist() == [[1.0, 1.0]]
    np.testing.assert_allclose(advantages, [[-math.sqrt(0.5), math.sqrt(0.5)]], rtol=1e-5)


def test_the_optimal_token_baseline_by_hand():
    # lengths 2 and 1, returns 1 and 0; W of the first token: 1 - 2 pi + sum pi^2 = 0.5 and 0.25
    mask = torch.tensor([[True, True], [True, False]])
    inputs = AdvantageInputs(
        torch.tensor([1.0, 0.0]),
        mask,
        2,
        old_log_probs=torch.tensor([[0.5, 0.25], [0.5, 0.5]]).log(),
        squared_probs=torch.tensor([[0.5, 0.3], [0.25, 9.0]]),
    )
    got, returns, _ = compute_advantages("optimal_token_baseline", inputs)
    baseline = 0.5 / (0.5 + 0.25)
    # nothing else reaches the second token
    torch.testing.assert_close(got, torch.tensor([[1.0 - baseline, 1.0], [-baseline, 0.0]]))
    assert returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_remax_subtracts_the_greedy_score():
    got, _, _ = compute_advantages("remax", simple([1.0, 0.0], greedy_rewards=torch.tensor([0.25, 0.25])))
    assert got.tolist() == [[0.75, 0.75], [-0.25, -0.25]]


def test_reinforce_plus_plus_whitens_over_tokens_not_over_sequences():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    got, _, _ = compute_advantages("reinforce_plus_plus", AdvantageInputs(torch.tensor([1.0, 0.0]), mask))
    # tokens 1 1 1 0: mean 0.75, unbiased variance 0.25
    np.testing.assert_allclose(got, [[0.5, 0.5, 0.5], [-1.5, 0.0, 0.0]], rtol=1e-6)


def test_gdpo_gives_each_reward_function_the_same_weight():
    components = torch.tensor([[1.0, 1000.0], [0.0, 0.0]])
    got, _, _ = compute_advantages("gdpo", simple([1001.0, 0.0], 2, reward_components=components))
    halves = math.sqrt(0.5)
    np.testing.assert_allclose(got[:, 0], [halves, -halves], rtol=1e-5)


def test_gdpo_leaves_a_function_without_an_opinion_out_of_its_group():
    none = math.nan
    components = torch.tensor([[1.0, none], [0.0, 2.0], [0.0, 5.0], [none, 1.0], [1.0, none], [1.0, none]])
    got, _, _ = compute_advantages("gdpo", simple([0.0] * 6, 3, reward_components=components, reward_weights=(1.0, 0.5)))

    def of(column):
        said = [x for x in column if not math.isnan(x)]
        std = np.std(said, ddof=1) if len(said) > 1 else 0.0
        return [0.0 if math.isnan(x) else (x - np.mean(said)) / (std + 1e-6) for x in column]

    columns = components.double().numpy()
    sums = np.concatenate([np.array(of(columns[i : i + 3, 0])) + 0.5 * np.array(of(columns[i : i + 3, 1])) for i in (0, 3)])
    np.testing.assert_allclose(got[:, 0], (sums - sums.mean()) / (sums.std(ddof=1) + 1e-6), rtol=1e-5)


def test_opinions_that_do_not_differ_give_no_advantage_beside_missing_ones():
    components = torch.tensor([[1.0, 1.0], [0.0, math.nan], [0.0, math.nan], [1.0, 1.0]])
    got, _, _ = compute_advantages(
        "gdpo", simple([1.0, 0.0, 0.0, 1.0], 4, reward_components=components, reward_weights=(0.0, 1.0))
    )
    assert torch.equal(got, torch.zeros(4, 2))


def test_a_row_whose_greedy_response_has_no_score_takes_no_part_in_remax():
    greedy = torch.tensor([-1.0, -1.0, math.nan, math.nan])
    inputs = simple([-1.0, 1.0, -1.0, -1.0], 2, greedy_rewards=greedy)
    got, returns, _ = compute_advantages("remax", inputs)
    np.testing.assert_array_equal(got[:, 0], [0.0, 2.0, 0.0, 0.0])
    np.testing.assert_array_equal(returns[:, 0], [-1.0, 1.0, 0.0, 0.0])
    assert inputs.valid.tolist() == [True, True, False, False]


def test_group_norm_with_scale_gdpo_is_gdpo():
    components = torch.rand(6, 2)
    both = [
        compute_advantages(name, simple([0.0] * 6, 3, reward_components=components), scale=scale)[0]
        for name, scale in (("gdpo", "group"), ("group_norm", "gdpo"))
    ]
    assert torch.equal(*both)


def test_the_score_sits_on_the_last_sampled_token_and_the_kl_on_every_one():
    mask = torch.tensor([[True, False, True, False]])
    inputs = AdvantageInputs(torch.tensor([1.0]), mask, kl=torch.tensor([[0.5, 9.0, 1.0, 9.0]]), kl_coef=0.1)
    np.testing.assert_allclose(_compute_token_rewards(inputs), [[-0.05, 0.0, 0.9, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("name", ["group_norm", "rloo", "reinforce_plus_plus_baseline", "gdpo"])
def test_a_group_of_one_is_refused_where_it_is_undefined(name):
    with pytest.raises(ValueError, match=f"{name}.*n_samples_per_prompt >= 2"):
        compute_advantages(name, simple([1.0, 0.0], 1, reward_components=torch.ones(2, 1)))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_tiny_and_empty_responses_never_give_nan(name):
    mask = torch.tensor([[True], [False], [True], [True]])
    inputs = AdvantageInputs(
        torch.tensor([1.0, 1.0, 1.0, 1.0]),
        mask,
        2,
        values=torch.zeros(4, 1),
        greedy_rewards=torch.zeros(4),
        reward_components=torch.ones(4, 1),
        old_log_probs=torch.zeros(4, 1),
        squared_probs=torch.ones(4, 1),
    )
    for tensor in compute_advantages(name, inputs)[:2]:
        assert torch.isfinite(tensor).all()
        assert tensor[1].item() == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gae", {}, "values"),
        ("optimal_token_baseline", {}, "old_log_probs, .* and squared_probs"),
        ("remax", {}, "greedy_rewards"),
        ("gdpo", {}, "reward_components"),
        ("gdpo", {"reward_components": torch.ones(2, 2), "reward_weights": (1.0,)}, "1 reward weights .* 2 reward functions"),
        ("gdpo", {"reward_components": torch.ones(2, 1), "kl": torch.ones(2, 2), "kl_coef": 0.1}, "use_kl_in_reward"),
        ("group_norm", {"scale": "std"}, "scale_rewards"),
        ("group_morm", {}, "adv_estimator: unknown value 'group_morm'; did you mean 'group_norm'"),
    ],
)
def test_a_missing_input_or_unknown_name_is_an_error(name, options, message):
    with pytest.raises(ValueError, match=message):
        numbers = {"scale": options.pop("scale")} if "scale" in options else {}
        compute_advantages(name, simple([1.0, 0.0], 2, **options), **numbers)


def test_scaling_by_the_batch_needs_two_responses():
    with pytest.raises(ValueError, match="at least 2 responses in the batch"):
        compute_advantages("group_norm", simple([1.0], 1), scale="batch")


_EVERY_SCALE = [("group_norm", {"scale": scale}) for scale in ("group", "batch", "none")]


@pytest.mark.parametrize("num_scored", [0, 1])
@pytest.mark.parametrize(
    ("name", "numbers"), [*_EVERY_SCALE, *((name, {}) for name in sorted(ADVANTAGES) if name != "group_norm")]
)
def test_a_batch_whose_scores_failed_but_one_has_finite_advantages(name, numbers, num_scored):
    others = {"reward_components": torch.ones(2, 1), "values": torch.zeros(2, 2), "greedy_rewards": torch.zeros(2)}
    others |= {"old_log_probs": torch.full((2, 2), -0.5), "squared_probs": torch.full((2, 2), 0.4)}
    inputs = simple([1.0, 0.0], 2, scored=torch.arange(2) < num_scored, **others)
    advantages = compute_advantages(name, inputs, **numbers)[0]
    assert torch.isfinite(advantages).all() and not advantages[num_scored:].any()


def test_a_group_without_spread_has_advantages_of_0_without_an_epsilon():
    for scale in ("group", "batch"):
        advantages = compute_advantages("group_norm", simple([1.0, 1.0], 2), scale=scale, eps=0.0)[0]
        assert not advantages.any()


def test_rows_that_do_not_fill_groups_are_refused():
    with pytest.raises(ValueError, match="3 rows do not divide into groups of 2"):
        simple([1.0, 0.0, 1.0], 2)


def test_a_reward_that_is_not_a_number_names_its_row():
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite"):
        simple([1.0, float("nan")], 2)


def test_group_norm_whitened_centres_over_tokens_not_over_responses():
    # lengths 3 and 1: the mean of (1, 1, 1, -1) / 2 is 1/4, its std 1/2
    mask = torch.tensor([[True, True, True], [True, False, False]])
    inputs = AdvantageInputs(torch.tensor([1.0, 0.0]), mask, 2)
    got = compute_advantages("group_norm_whitened", inputs, scale="none", eps=0.0)[0]
    assert got.tolist() == [[0.5, 0.5, 0.5], [-1.5, 0.0, 0.0]]
    # the spread of the group, sqrt(1/2), cancels but for eps
    scaled = 0.5 / (0.5**0.5 + 0.1)
    got = compute_advantages("group_norm_whitened", inputs, scale="group", eps=0.1)[0]
    assert got[1, 0].item() == pytest.approx(-1.5 * scaled / (scaled + 0.1))


def test_whitening_a_single_token_gives_0():
    assert whiten(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize(
    "name",
    ["group_norm", "group_norm_whitened", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "gdpo"],
)
def test_a_response_without_a_score_is_as_if_it_had_not_been_sampled(name):
    arrays = random_inputs(kl_coef=0.0 if name == "gdpo" else 0.3)
    keep = np.arange(ROWS) % SIZE != 1  # one of each group of three failed
    fewer = {key: value[keep] for key, value in arrays.items() if isinstance(value, np.ndarray)} | {"size": SIZE - 1}
    expected = naive.advantages(name, **(arrays | fewer))
    inputs = as_inputs(arrays)
    inputs.rewards[~torch.tensor(keep)] = float("nan")
    got = compute_advantages(name, replace(inputs, scored=torch.tensor(keep)), **numbers_of(arrays))[0].numpy()
    np.testing.assert_allclose(got[keep], expected, rtol=1e-9, atol=1e-9)
    assert (got[~keep] == 0).all()


def test_the_only_score_of_a_group_gets_advantage_zero():
    scored = torch.tensor([True, False, True, True])
    for name in ("group_norm", "rloo"):
        got = compute_advantages(name, simple([5.0, 0.0, 1.0, 0.0], 2, scored=scored))[0]
        assert got[:2].abs().max() == 0.0 and got[2, 0] > 0.0


def test_values_outside_the_mask_are_never_read():
    arrays = random_inputs()
    clean = as_inputs(arrays)
    poisoned = {name: np.where(arrays["mask"], arrays[name], np.nan) for name in ("kl", "values")}
    for name in sorted(set(ADVANTAGES) - {"gdpo", "max_rl"}):
        assert torch.equal(compute_advantages(name, clean)[0], compute_advantages(name, as_inputs(arrays | poisoned))[0])


def test_a_user_estimator_is_found_by_module_and_function():
    got = compute_advantages("mindspeed_rl.algorithms.advantages:rloo", simple([1.0, 0.0], 2))[0]
    assert got[:, 0].tolist() == [1.0, -1.0]


def test_the_metrics_cover_response_tokens_only():
    mask = torch.tensor([[True, False], [True, True]])
    inputs = AdvantageInputs(torch.tensor([2.0, 0.0]), mask, 2)
    metrics = compute_advantages("group_norm", inputs, scale="none")[2]
    assert metrics["critic/advantages/mean"].result() == pytest.approx(-1.0 / 3.0)
    assert metrics["critic/advantages/max"].result() == 1.0
    assert metrics["critic/advantages/min"].result() == -1.0


def test_the_objective_takes_its_numbers_from_the_run_file():
    config = RLConfig(scale_rewards="none", adv_epsilon=0.1, gamma=0.5, lam=0.25, adv_estimator="gae", advantage_whiten=False)
    made = build_objective(config, "ray_ppo")
    got = (made.scale_rewards, made.adv_epsilon, made.gamma, made.lam, made.advantage_whiten)
    assert got == ("none", 0.1, 0.5, 0.25, False)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_are_left_as_they_are_without_whitening(name):
    mask = torch.ones(2, 2, dtype=torch.bool)
    values = {"values": torch.zeros(2, 2)} if name == "gae" else {}
    inputs = AdvantageInputs(torch.tensor([3.0, 1.0]), mask, group_size=2, **values)
    got, returns, _ = compute_advantages(name, inputs, whiten=False)
    assert torch.equal(got, returns) and got.sum() != 0 or name == "reinforce_plus_plus_baseline" and got[0, 0] == 1.0
