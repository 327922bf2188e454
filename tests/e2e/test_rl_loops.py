"""What the keys of the loop change, seen in whole runs."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from call_path import listed, watching
from ray.actor import ActorMethod

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli.parity import replay
from mindspeed_rl.trainers.old_policy import DisagreementError
from mindspeed_rl.trainers.rl_setup import DATA_PLANE_USERS

if TYPE_CHECKING:
    from rl_world import Run, World

GRPO = "grpo_tiny_cpu"
TWO_STEPS = "rl_config.mini_batch_size=8"
NO_KL = "rl_config.init_kl_coef=0"
# the engine samples hotter than the trainer computes, so that the two disagree
DISAGREEING = ["generate_config.sampling_config.temperature=1.3", "rl_config.log_probs_diff_limit=null"]


@pytest.fixture(scope="module")
def plain(world: World) -> Run:
    """Three iterations of one step each."""
    return world.run(GRPO, iterations=3)


def assert_same(run: Run, other: Run) -> None:
    """Both ended with the same weights, to the bit."""
    assert run.num_steps == other.num_steps
    assert np.array_equal(run.weights["actor"], other.weights["actor"])


def differ(run: Run, other: Run, role: str = "actor") -> bool:
    return not np.array_equal(run.weights[role], other.weights[role])


def zero_groups(run: Run) -> list[float]:
    """Share of the groups whose rewards are all equal."""
    return run.column("reward/zero_std_groups")


# --- several steps and passes a rollout ----------------------------------------------------------------------------------


def test_a_run_repeats_to_the_bit(world: World, plain: Run) -> None:
    assert_same(plain, world.run(GRPO, iterations=3))
    assert plain.num_steps == 3 and plain.column("actor/ppo_kl") == [0.0, 0.0, 0.0]


def test_epochs_and_num_iterations_are_passes_over_one_rollout(world: World) -> None:
    epochs = world.run(GRPO, "rl_config.epochs=3")
    assert epochs.num_steps == 3 and epochs.metrics[0]["actor/ppo_kl"] != 0.0
    assert epochs.metrics[0]["timing/old_log_p"] > 0.0
    assert_same(epochs, world.run(GRPO, "rl_config.num_iterations=3"))


def test_mini_batches_are_steps_away_from_the_sampling_policy_however_they_are_counted(world: World) -> None:
    prompts = world.run(GRPO, TWO_STEPS, iterations=2)
    assert prompts.num_steps == 4 and 0.0 not in prompts.column("actor/ppo_kl")
    completions = ["rl_config.num_generations=8", "megatron_training.global_batch_size=64", "actor_config.micro_batch_size=4"]
    for rollout in ("rl_config.steps_per_generation=2", "rl_config.generation_batch_size=128"):
        counted = world.run(GRPO, *completions, TWO_STEPS, rollout, iterations=2)
        assert counted.num_steps == 4 and counted.plan.num_prompts == 16
        np.testing.assert_allclose(counted.weights["actor"], prompts.weights["actor"], atol=2e-5)


def test_shuffling_deals_other_groups_to_the_steps(world: World) -> None:
    ordered = world.run(GRPO, TWO_STEPS)
    shuffled = world.run(GRPO, TWO_STEPS, "rl_config.shuffle_mini_batch=true")
    assert differ(ordered, shuffled)
    assert ordered.metrics[0]["grpo/score/mean"] == shuffled.metrics[0]["grpo/score/mean"]
    assert_same(shuffled, world.run(GRPO, TWO_STEPS, "rl_config.shuffle_mini_batch=true"))


# --- reference and KL ----------------------------------------------------------------------------------------------------


def test_the_reference_follows_the_actor_when_and_as_far_as_it_is_told_to(world: World, plain: Run) -> None:
    assert plain.column("actor/kl_loss")[0] == pytest.approx(0.0, abs=1e-6) and min(plain.column("actor/kl_loss")[1:]) > 1e-5
    sync = ["rl_config.sync_ref_model=true", "rl_config.ref_model_sync_steps=2", "rl_config.ref_model_mixup_alpha=1.0"]
    kl = world.run(GRPO, *sync, iterations=4).column("actor/kl_loss")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[2] == pytest.approx(0.0, abs=1e-6)
    assert min(kl[1], kl[3]) > 1e-5
    quarter = world.run(GRPO, sync[0], "rl_config.ref_model_sync_steps=1", "rl_config.ref_model_mixup_alpha=0.25")
    expected = 0.25 * quarter.weights["actor"] + 0.75 * plain.weights["ref"]
    np.testing.assert_allclose(quarter.weights["ref"], expected, atol=1e-6)


@pytest.mark.parametrize(("name", "figure"), [("rloo_tiny_cpu", "reward/kl"), ("dr_grpo_tiny_cpu", "actor/ref_kl")])
def test_the_adaptive_coefficient_moves_towards_its_target(world: World, name: str, figure: str) -> None:
    keys = ["rl_config.kl_ctrl_type=adaptive", "rl_config.kl_horizon=640", "rl_config.init_kl_coef=0.1"]
    for target in (1e-6, 100.0):
        run = world.run(name, *keys, f"rl_config.kl_target={target}", iterations=3)
        coef = 0.1
        for kl, logged in zip(run.column(figure), run.column("actor/kl_coef")):
            coef *= 1 + np.clip(kl / target - 1, -0.2, 0.2) * 128 / 640
            assert logged == pytest.approx(coef)
    assert differ(run, world.run(name, *keys[2:], iterations=3))


def test_the_kl_in_the_reward_lowers_the_returns(world: World) -> None:
    run = world.run(
        "reinforce_plus_plus_tiny_cpu", "rl_config.init_kl_coef=0.5", "rl_config.advantage_whiten=false", iterations=2
    )
    rewards, old, ref, returns = run.rows("rewards", "old_log_probs", "ref_log_probs", "returns")
    for reward, o, r, total in zip(rewards, old, ref, returns):
        left = (-0.5 * (o - r)).numpy().copy()
        left[-1] += float(reward)
        np.testing.assert_allclose(total.numpy(), left[::-1].cumsum()[::-1], atol=1e-5)


# --- rollout engine against trainer --------------------------------------------------------------------------------------


def weights_by_hand(mode: str, old: Any, rollout: Any, low: float, high: float) -> list[np.ndarray]:
    """Weights of the tokens of each response."""
    results = []
    for o, mu in zip(old, rollout):
        drift = (o - mu).double().numpy()
        level = {"token": drift, "sequence": drift.sum(), "geometric": drift.mean()}
        weight = np.exp(level[mode.split("_")[0]] + 0 * drift)
        judged = np.exp(drift.mean() + 0 * drift) if mode == "token_geometric_mask" else weight
        results.append(np.minimum(weight, high) if mode.endswith("truncate") else weight * ((low <= judged) & (judged <= high)))
    return results


#: one of each level; the others are the same functions with another bound
MODES = ("token_truncate", "sequence_mask", "geometric_mask")
OTHERS = ("token_mask", "sequence_truncate", "geometric_truncate", "token_geometric_mask")


@pytest.mark.parametrize("mode", [*MODES, *(pytest.param(mode, marks=pytest.mark.slow) for mode in OTHERS)])
def test_a_rollout_correction_weighs_tokens_as_its_name_says(world: World, mode: str) -> None:
    keys = [f"rl_config.rollout_importance_sampling_mode={mode}", "rl_config.rollout_importance_sampling_threshold=1.05"]
    low = 0.0
    if mode.endswith("mask"):
        low = 0.95
        keys.append("rl_config.rollout_importance_sampling_threshold_min=0.95")
    run = world.run(GRPO, *DISAGREEING, TWO_STEPS, *keys)
    expected = np.concatenate(weights_by_hand(mode, *run.rows("old_log_probs", "rollout_log_probs"), low, 1.05)).mean()
    assert run.metrics[0]["rollout/weight_mean"] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - 1.0) > 1e-3
    assert run.metrics[0]["rollout/ess"] < 1.0 and run.metrics[0]["rollout/kl"] > 0.0


def test_a_correction_that_masks_everything_leaves_the_weights_alone(world: World, plain: Run) -> None:
    keys = ["rl_config.rollout_importance_sampling_mode=sequence_mask", "rl_config.rollout_importance_sampling_threshold=1e-9"]
    run = world.run(GRPO, NO_KL, *keys)
    assert run.metrics[0]["actor/grad_norm"] == 0.0
    assert np.array_equal(run.weights["actor"], plain.weights["ref"])


def test_without_disagreement_the_weights_are_one(world: World) -> None:
    run = world.run(GRPO, "rl_config.rollout_importance_sampling_mode=token_mask")
    assert run.metrics[0]["rollout/weight_mean"] == pytest.approx(1.0, abs=1e-4)


def test_a_run_whose_engine_disagrees_stops(world: World) -> None:
    with pytest.raises(DisagreementError, match="log_probs_diff_limit 0.001"):
        world.run(GRPO, DISAGREEING[0])


# --- masks and filters ---------------------------------------------------------------------------------------------------


def test_truncated_responses_do_not_train_with_the_overlong_filter(world: World, plain: Run) -> None:
    short = [NO_KL, "generate_config.sampling_config.max_tokens=2"]  # an answer and its end take three
    assert world.run(GRPO, *short).metrics[0]["actor/grad_norm"] > 0.0
    for others in ([], ["rl_config.top_entropy_quantile=0.2"]):
        run = world.run(GRPO, *short, "rl_config.overlong_filter=true", *others)
        assert run.metrics[0]["rollout/truncated_fraction"] == 1.0 and run.metrics[0]["actor/skipped_steps"] == 1.0
        assert np.array_equal(run.weights["actor"], plain.weights["ref"])


PAIRS = ["rl_config.n_samples_per_prompt=2", "rl_config.mini_batch_size=16", "rl_config.log_completions=true"]


def test_only_groups_whose_metric_varies_are_trained_on(world: World) -> None:
    assert max(zero_groups(world.run(GRPO, *PAIRS, iterations=2))) > 0.2
    keys = ["rl_config.filter_groups_train_batch_size=16", "rl_config.filter_groups_max_batches=8"]
    run = world.run("dapo_tiny_cpu", *PAIRS, *keys, iterations=2)
    assert zero_groups(run) == [0.0, 0.0]
    for record in run.metrics:
        assert 2 <= record["train/num_gen_batches"] <= 8
        assert record["train/kept_groups_fraction"] * record["train/num_gen_batches"] >= 1.0
    # a prompt keeps its own responses, rewards and advantages
    for line in (run.folder / "completions.jsonl").read_text().splitlines():
        record = json.loads(line)
        right = record["response"] == record["prompt"].replace("=", "<eos>")
        assert record["reward"] == float(right) and (record["advantage"] > 0) == right


def test_too_few_groups_with_a_varying_metric_end_the_run(world: World) -> None:
    keys = ["rl_config.filter_groups_train_batch_size=16", "rl_config.filter_groups_max_batches=1"]
    with pytest.raises(RuntimeError, match="1 rollouts gave .* of 16 groups whose exact_match varies"):
        world.run("dapo_tiny_cpu", *PAIRS, *keys)


def test_groups_without_spread_are_replaced_as_often_as_allowed(world: World) -> None:
    dynamic = [*PAIRS, "rl_config.dynamic_sample=true"]
    enough = world.run(GRPO, *dynamic, "rl_config.max_resample_times=8")
    assert zero_groups(enough) == [0.0] and enough.metrics[0]["train/num_gen_batches"] >= 2
    never = world.run(GRPO, *dynamic, "rl_config.max_resample_times=0")
    assert never.metrics[0]["train/num_gen_batches"] == 1
    assert zero_groups(never)[0] == pytest.approx(1.0 - never.metrics[0]["train/kept_groups_fraction"])
    assert zero_groups(never)[0] > 0.2


def test_the_top_entropy_quantile_is_that_of_the_whole_batch(world: World) -> None:
    run = world.run(GRPO, TWO_STEPS, "rl_config.top_entropy_quantile=0.25")
    (entropies,) = run.rows("entropies")
    tokens = np.concatenate([row.numpy() for row in entropies])
    kept = (tokens >= np.quantile(tokens.astype(np.float64), 0.75)).mean()
    assert run.metrics[0]["actor/entropy_kept"] == pytest.approx(kept, abs=1.5 / len(tokens))
    assert 0.2 < kept < 0.4 and differ(run, world.run(GRPO, TWO_STEPS))


@pytest.mark.slow
def test_tokens_that_a_loss_marks_are_chosen_over_the_whole_batch(world: World) -> None:
    keys = ["rl_config.loss_type=kl_cov", "rl_config.kl_cov_ratio=0.1", NO_KL]
    run = world.run(GRPO, TWO_STEPS, *keys)
    marked, advantages, log_probs, mask = run.rows("marked_tokens", "advantages", "old_log_probs", "loss_mask")
    arrays = [np.concatenate([row.numpy() for row in rows]).astype(np.float64) for rows in (advantages, log_probs)]
    trained = np.concatenate([row.numpy() for row in mask]).astype(bool)
    covariances = np.prod([values - values[trained].mean() for values in arrays], axis=0)
    chosen = np.concatenate([row.numpy() for row in marked]).astype(bool)
    assert chosen.sum() == int(0.1 * trained.sum()) and not (chosen & ~trained).any()
    assert covariances[chosen].min() >= covariances[trained & ~chosen].max()
    assert run.metrics[0]["actor/pg_clipfrac"] == pytest.approx(chosen.sum() / trained.sum())
    assert differ(run, world.run(GRPO, TWO_STEPS, *keys, "rl_config.ppo_kl_coef=0"))  # from the second step on


@pytest.mark.slow
def test_responses_of_a_prompt_are_compared_whatever_the_micro_batch(world: World) -> None:
    keys = [TWO_STEPS, "rl_config.loss_type=real", "rl_config.scale_rewards=none", NO_KL]
    runs = [world.run(GRPO, *keys, f"actor_config.micro_batch_size={size}") for size in (8, 32)]
    assert runs[0].metrics[0]["actor/pg_loss"] == pytest.approx(runs[1].metrics[0]["actor/pg_loss"], rel=1e-4)
    np.testing.assert_allclose(runs[0].weights["actor"], runs[1].weights["actor"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_token_baseline_reads_the_probabilities_of_the_whole_vocabulary(world: World) -> None:
    run = world.run(GRPO, "rl_config.adv_estimator=optimal_token_baseline", NO_KL)
    squares, log_probs, advantages = run.rows("squared_probs", "old_log_probs", "advantages")
    for row, chosen in zip(squares, log_probs):
        # the sampled token is one of them
        assert ((row <= 1.0 + 1e-5) & (row >= chosen.double().exp().square() - 1e-5)).all()
    assert any(len(row) > 1 and float(row.std()) > 0 for row in advantages) and run.num_steps == 1


def test_off_policy_sequences_with_negative_advantages_are_dropped(world: World) -> None:
    run = world.run(GRPO, "rl_config.off_policy_sequence_mask_delta=-100")
    (advantages,) = run.rows("advantages")
    negative = np.mean([float(row.mean()) < 0 for row in advantages])
    assert negative > 0.0 and run.metrics[0]["actor/off_policy_sequences_dropped"] == pytest.approx(negative)


def test_the_entropy_bonus_keeps_the_policy_undecided(world: World, plain: Run) -> None:
    run = world.run(GRPO, "rl_config.entropy_coeff=0.5", iterations=3)
    assert run.column("actor/entropy")[-1] > plain.column("actor/entropy")[-1]


# --- critic, baselines, rewards ------------------------------------------------------------------------------------------


def test_only_the_critic_learns_while_it_warms_up(world: World, plain: Run) -> None:
    keys = ["rl_config.critic_warmup=5"]
    warm = world.run("ppo_tiny_cpu", *keys, iterations=5)
    assert warm.num_steps == 0 and np.array_equal(warm.weights["actor"], plain.weights["ref"])
    assert "actor/grad_norm" not in warm.metrics[0]
    losses = warm.column("critic/vf_loss")
    assert losses[4] < 0.8 * losses[0]
    trained = world.run("ppo_tiny_cpu", *keys, iterations=6)
    assert trained.num_steps == 1 and differ(trained, warm) and differ(trained, warm, "critic")
    assert trained.column("critic/lr") == [1e-3] * 6 and trained.metrics[5]["actor/lr"] == 3e-4


def test_the_baseline_of_remax_is_the_reward_of_the_greedy_answer(world: World) -> None:
    run = world.run("remax_tiny_cpu", NO_KL)
    rewards, advantages = run.rows("rewards", "advantages")
    baselines = np.array([float(reward) - float(row[0]) for reward, row in zip(rewards, advantages)]).reshape(-1, 8)
    assert (baselines == baselines[:, :1]).all()  # one for each prompt
    assert set(baselines.flatten()) == {0.0, 1.0}  # the half-trained model gets some right


def test_a_reward_model_is_one_more_part_of_the_reward(world: World) -> None:
    keys = [f"rl_config.reward_model={world.reward_model}", "rl_config.reward_model_weight=0.5"]
    run = world.run("gdpo_tiny_cpu", *keys)
    results, rewards, advantages = run.rows("reward_results", "rewards", "advantages")
    parts = np.array([[result.parts[name] for name in ("exact_match", "length", "reward_model")] for result in results])
    np.testing.assert_allclose([float(reward) for reward in rewards], parts @ [1.0, 0.1, 0.5], rtol=1e-5)
    groups = parts.reshape(-1, 8, 3)
    normal = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    total = (normal @ [1.0, 0.1, 0.5]).flatten()
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
    np.testing.assert_allclose([float(row[0]) for row in advantages], expected, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["grpo", "ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dr_grpo", "gdpo", "rloo", "remax"))]
)
def test_a_saved_rollout_is_replayed_to_the_loss_of_the_run(world: World, name: str) -> None:
    one_step = ["rl_config.save_rollouts_interval=2", "rl_config.critic_warmup=0"]
    run = world.run(f"{name}_tiny_cpu", *one_step[: 2 if name == "ppo" else 1], iterations=3)
    assert [path.name for path in sorted((run.folder / "rollouts").glob("*.safetensors"))] == [
        "iteration_0000001.safetensors",
        "iteration_0000003.safetensors",
    ]
    batch = RolloutBatch.load(run.folder / "rollouts" / "iteration_0000003.safetensors")
    result = replay(batch, {}, torch.float64)
    for ours, theirs in zip(*run.rows("advantages"), result.advantages):
        np.testing.assert_allclose(theirs[: len(ours)].numpy(), ours.numpy(), atol=1e-5)
    logged = run.metrics[-1]
    in_loss = 0.0 if name in ("rloo", "remax", "ppo") else logged["actor/kl_coef"] * logged["actor/kl_loss"]
    assert result.loss == pytest.approx(logged["actor/pg_loss"] + in_loss, abs=1e-6)
    assert result.metrics["actor/entropy"] == pytest.approx(logged["actor/entropy"], rel=1e-5)


# --- how rows travel -----------------------------------------------------------------------------------------------------


def test_every_declared_column_is_put_in_one_iteration_with_all_roles(world: World) -> None:
    trained = ["rl_config.critic_warmup=0", "rl_config.log_completions=true"]  # an update whose ratios are written
    run = world.run("ppo_tiny_cpu", f"rl_config.reward_model={world.reward_model}", *trained)
    elsewhere = {"teacher_log_probs", "teacher_ids"}  # tests/e2e/test_distillation_run.py has teachers
    elsewhere |= {"marked_tokens", "squared_probs"}  # of clip_cov, kl_cov and the token baseline, below
    declared = [column for columns in DATA_PLANE_USERS.values() for column in columns if column not in elsewhere]
    assert {len(rows) for rows in run.rows(*declared)} == {run.plan.num_train_samples}


@pytest.mark.parametrize("key", ["rl_config.data_strategy=tq", "rl_config.blocking=false"])
def test_how_rows_travel_does_not_change_the_run(world: World, plain: Run, key: str) -> None:
    assert_same(world.run(GRPO, key, "rl_config.actor_rollout_dispatch_size=16", iterations=3), plain)


def test_without_a_guaranteed_order_the_same_responses_come(world: World, plain: Run) -> None:
    run = world.run(GRPO, "rl_config.guarantee_order=false", "rl_config.actor_rollout_dispatch_size=8", iterations=3)
    assert run.column("grpo/score/mean")[0] == plain.column("grpo/score/mean")[0]
    np.testing.assert_allclose(run.weights["actor"], plain.weights["actor"], atol=1e-3)


# --- how far it is to the loss -------------------------------------------------------------------------------------------


def test_the_way_from_the_loop_to_the_policy_loss_is_the_documented_one(world: World) -> None:
    asks_for_an_update = inspect.unwrap(ActorMethod._remote).__code__
    world.workers.watch()
    with watching(asks_for_an_update, lambda frame: "update_actor" in frame.f_locals["args"][:1]) as driver:
        world.run(GRPO)
    worker = world.workers.stacks()
    documented = [(file, name.split(".")[-1]) for file, name in listed()]
    assert documented[0] == ("mindspeed_rl/cli/train.py", "main")  # the command, which this test is in place of
    assert driver and worker
    for ours, theirs in zip(driver, worker):
        assert ours + theirs == documented[1:]


# --- samples of several turns ---------------------------------------------------------------------------------------------

SEVERAL_TURNS = [
    "rl_config.multi_turn_enable=true",
    "rl_config.max_total_response_length=24",
    "generate_config.sampling_config.max_tokens=6",
    "rl_config.use_remove_padding=true",
]


def test_an_environment_gives_turns_and_rewards(world: World) -> None:
    run = world.run(
        "grpo_tiny_cpu",
        *SEVERAL_TURNS,
        "rl_config.environment=agent_plugins:TwoQuestions",
        "rl_config.rule_reward=false",
        "rl_config.verifier_function=[]",
        "rl_config.verifier_weight=[]",
        iterations=2,
    )
    columns = ("prompt_ids", "input_ids", "responses", "response_mask", "rollout_log_probs", "weight_versions", "loss_mask")
    prompts, inputs, responses, masks, log_probs, versions, losses = run.rows(*columns)
    facts, rewards, lengths = run.rows("trajectories", "rewards", "sequence_lengths")
    two_turns = 0
    for row in range(len(prompts)):
        assert inputs[row].tolist() == prompts[row].tolist() + responses[row].tolist()
        assert lengths[row].tolist() == [len(prompts[row]), len(responses[row])]
        mask = masks[row]
        assert not log_probs[row][~mask].any() and bool((log_probs[row][mask] < 0).all())
        assert versions[row].tolist() == [1 if is_sampled else -1 for is_sampled in mask.tolist()]
        assert not losses[row][~mask].any()
        told = "".join(map(chr, responses[row][~mask].tolist()))
        if told:
            two_turns += 1
            digits = "".join(map(chr, prompts[row].tolist()))[:2]
            assert told == f"{digits[::-1]}="
            # an end token stands before what is told
            assert int(responses[row][int((~mask).nonzero()[0]) - 1]) == 1
        assert float(rewards[row]) == sum(value or 0.0 for value in facts[row]["turn_rewards"])
    assert two_turns
    assert run.column("turns/max")[-1] == 2.0
    assert run.column("actor/grad_norm")[-1] > 0
    assert torch.isfinite(torch.tensor(run.column("actor/pg_loss"))).all()
