import json

import naive_algorithms as naive
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli.parity import main

ROWS, LENGTH, GROUP = 6, 5, 3
SETTINGS = dict(loss_type="grpo", init_kl_coef=0.3, kl_clamp=False, adv_epsilon=1e-4)


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    log_probs = -rng.random((ROWS, LENGTH))
    columns = {
        "input_ids": torch.ones(ROWS, 9, dtype=torch.int64),
        "response_mask": torch.tensor(mask),
        "truncated": torch.tensor([False, True, False, False, False, False]),
        "rewards": torch.tensor(rng.normal(size=ROWS)),
        "log_probs": torch.tensor(log_probs),
        "old_log_probs": torch.tensor(log_probs + 0.3 * rng.normal(size=log_probs.shape)),
        "ref_log_probs": torch.tensor(log_probs + rng.normal(size=log_probs.shape)),
        "entropy": torch.tensor(rng.random((ROWS, LENGTH))),
    }
    path = tmp_path / "batch.safetensors"
    RolloutBatch(columns, GROUP, 8, "ray_grpo", SETTINGS).save(path)
    return path


def run(path, *arguments):
    assert main([str(path), *arguments]) == 0
    output = path.with_name("batch_parity.safetensors")
    return json.loads(output.with_suffix(".json").read_text()), load_file(output)


def arrays_of(path):
    columns = {name: column.numpy() for name, column in RolloutBatch.load(path).columns.items()}
    scores = []
    for start in range(0, ROWS, GROUP):
        group = list(columns["rewards"][start : start + GROUP])
        mean = sum(group) / GROUP
        std = (sum((x - mean) ** 2 for x in group) / (GROUP - 1)) ** 0.5
        scores += [(x - mean) / (std + 1e-4) for x in group]
    mask = columns["response_mask"]
    return columns["log_probs"], {
        "advantages": np.array(scores)[:, None] * mask,
        "response_mask": mask,
        "loss_mask": mask,
        "old": columns["old_log_probs"],
        "ref": columns["ref_log_probs"],
        "rollout": None,
        "entropy": columns["entropy"],
        "entropy_threshold": None,
    }


def test_the_replay_writes_loss_advantages_and_gradients_of_the_formula(saved):
    summary, tensors = run(saved)
    log_probs, arrays = arrays_of(saved)
    settings = {"loss_type": "grpo", "kl_coef": 0.3}
    assert summary["loss"] == pytest.approx(naive.policy_loss(log_probs, log_probs, arrays, settings), rel=1e-10)
    np.testing.assert_allclose(tensors["advantages"].numpy(), arrays["advantages"], rtol=1e-9)
    expected = naive.gradient(lambda moved: naive.policy_loss(moved, log_probs, arrays, settings), log_probs)
    np.testing.assert_allclose(tensors["gradients"].numpy(), expected, rtol=1e-6, atol=1e-9)
    assert (summary["count"], summary["dtype"]) == (ROWS, "float64")
    assert summary["metrics"]["actor/kl_loss"] > 0


def test_the_replay_does_not_depend_on_the_micro_batch_and_little_on_the_precision(saved):
    whole, tensors = run(saved, "top_entropy_quantile=0.5")
    cut, cut_tensors = run(saved, "top_entropy_quantile=0.5", "--micro-batch-size", "1")
    single, single_tensors = run(saved, "top_entropy_quantile=0.5", "--dtype", "float32")
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    assert single["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    torch.testing.assert_close(cut_tensors["gradients"], tensors["gradients"])
    assert single_tensors["gradients"].dtype == torch.float32
    torch.testing.assert_close(single_tensors["gradients"].double(), tensors["gradients"], rtol=1e-4, atol=1e-6)


def test_overrides_replace_the_keys_of_the_batch(saved):
    summary, tensors = run(saved, "rl_config.loss_type=dr_grpo", "overlong_filter=true", "init_kl_coef=0")
    assert summary["settings"]["loss_type"] == "dr_grpo"
    assert summary["settings"]["kl_coef"] == 0.0
    assert summary["count"] == ROWS * 8
    assert tensors["gradients"][1].abs().sum() == 0.0


def test_a_saved_batch_is_loaded_as_it_was(saved):
    batch = RolloutBatch.load(saved)
    assert (batch.group_size, batch.max_response_length, batch.stage, batch.rl_config) == (GROUP, 8, "ray_grpo", SETTINGS)
    assert batch.columns["response_mask"].dtype == torch.bool


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["los_type=grpo"], "rl_config.los_type"),
        (["loss_type"], "not of the form key=value"),
        (["adv_estimator=gae"], "critic's values"),
        (["use_kl_in_reward=true", "adv_estimator=gdpo"], "reward_components"),
        (["rollout_importance_sampling_mode=token_mask"], "rollout_log_probs"),
    ],
)
def test_an_error_is_one_sentence_and_exit_status_two(saved, capsys, arguments, message):
    assert main([str(saved), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_sidecar_and_a_foreign_format_are_named(saved, capsys, tmp_path):
    assert main([str(tmp_path / "none.safetensors")]) == 2
    assert "none.safetensors does not exist" in capsys.readouterr().err
    saved.with_suffix(".json").write_text('{"format": "other", "version": 1}')
    assert main([str(saved)]) == 2
    assert "format 'other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "lacks the columns response_mask, rewards, log_probs"),
        ({"old_log_prob": torch.ones(2, 3)}, "unknown columns old_log_prob"),
        ({"old_log_probs": torch.ones(2, 4)}, r"old_log_probs is \[2, 4\]"),
        ({"loss_mask": torch.ones(2, 3)}, "loss_mask must be bool"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, message):
    base = {"response_mask": torch.ones(2, 3, dtype=torch.bool), "rewards": torch.ones(2), "log_probs": torch.ones(2, 3)}
    with pytest.raises(ValueError, match=message):
        RolloutBatch(base | columns if columns else {}, 2, 3)


def test_components_count_with_the_weights_of_the_run_file_and_rows_without_a_score_not_at_all(saved):
    batch = RolloutBatch.load(saved)
    components = torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.0, 5.0], [1.0, 0.0], [0.0, 0.0], [0.5, 9.0]], dtype=torch.float64)
    scored = torch.tensor([True, True, False, True, True, False])
    keys = {"adv_estimator": "gdpo", "verifier_function": ["a"], "verifier_weight": [2.0], "reward_model_weight": 0.25}
    RolloutBatch({**batch.columns, "scored": scored, "reward_components": components}, GROUP, 8, "ray_grpo", keys).save(saved)
    _, tensors = run(saved)
    # two scores a group: (x - mean) / std = +-sqrt(1/2) for both parts of the first pair, for the first part of the second
    half = 0.5**0.5
    totals = np.array([2.0 * half - 0.25 * half, -2.0 * half + 0.25 * half, 2.0 * half, -2.0 * half])
    expected = np.zeros(ROWS)
    expected[[0, 1, 3, 4]] = totals / totals.std(ddof=1)
    np.testing.assert_allclose(tensors["advantages"][:, 0].numpy(), expected, rtol=1e-4)
