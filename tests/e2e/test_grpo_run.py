"""`mindspeed-rl train` on a tiny model: figures, layouts, and resuming after a worker was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, Command, finished, running
from measured_figures import select_computed
from safetensors.torch import load_file

ITERATIONS = "megatron_training.train_iters=3"
NAMES = """
    timing/all timing/rollout timing/update timing/reference_model timing/rule_reward timing/adv timing/resharding_to_infer
    timing/non_overlap_reference_model timing/non_overlap_rule_reward timing/non_overlap_adv
    actor/lr actor/pg_loss actor/pg_clipfrac actor/ppo_kl actor/kl_loss actor/entropy actor/grad_norm
    grpo/score/mean grpo/score/max grpo/score/min response_length/mean response_length/max response_length/min
    prompt_length/mean prompt_length/max prompt_length/min exact_match_rewards/mean e2e_tps update_tps vllm_tps
    rollout/log_probs_diff_max rollout/log_probs_diff_mean
""".split()


@pytest.fixture(scope="module")
def uninterrupted(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Two workers, trained with TP2, rolled out with two engines."""
    return finished(task, tmp_path_factory.mktemp("uninterrupted"), ITERATIONS)


@pytest.fixture(scope="module")
def killed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """The same run, one of whose workers is killed once the first checkpoint is complete and its iteration is logged."""
    with running(task, tmp_path_factory.mktemp("killed"), ITERATIONS) as command:
        command.wait_until(lambda: (command.folder / "save" / "latest_checkpointed_iteration.txt").exists())
        command.wait_until(lambda: command.metrics)
        os.kill(command.worker(1).pid, signal.SIGKILL)
        command.code = command.wait(60)
        yield command


def test_every_iteration_has_the_figures_that_users_of_mindspeed_rl_know(uninterrupted: Command) -> None:
    assert [record["iteration"] for record in uninterrupted.metrics] == [1, 2, 3]
    for record in uninterrupted.metrics:
        assert set(NAMES) - set(record) == set()
        tokens = (record["response_length/max"] + record["prompt_length/max"]) * 32
        for name, time in (("e2e_tps", "all"), ("update_tps", "update"), ("vllm_tps", "rollout")):
            assert record[name] == pytest.approx(tokens / 2 / record[f"timing/{time}"], rel=1e-6)
        assert record["actor/pg_clipfrac"] == record["actor/ppo_kl"] == 0.0  # one step on its own samples
        assert 0.0 <= record["grpo/score/mean"] == record["exact_match_rewards/mean"] <= 1.0
        assert record["rollout/weight_version"] == record["iteration"]
    assert uninterrupted.metrics[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert uninterrupted.metrics[2]["actor/kl_loss"] > 0.0


def test_trainer_and_rollout_agree_about_log_probs_in_every_iteration(uninterrupted: Command) -> None:
    assert max(record["rollout/log_probs_diff_max"] for record in uninterrupted.metrics) < 1e-4


def test_the_run_folder_and_the_console_hold_what_the_user_looks_for(uninterrupted: Command) -> None:
    run = uninterrupted.folder / "run"
    assert f"run folder: {run}" in uninterrupted.output and f"finished: {run}" in uninterrupted.output
    assert list((run / "tensorboard").rglob("events.out.tfevents.*"))
    assert "rank 1" in (run / "run.log").read_text() and (run / "logs" / "rank_0.log").exists()
    # plan, promise, card of the data, start, iterations, summary; no wall of library logs
    assert len(uninterrupted.output.splitlines()) < 70
    assert "UserWarning" not in uninterrupted.output
    assert (uninterrupted.folder / "save" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_a_killed_worker_ends_the_command_with_its_name_and_leaves_nothing(killed: Command) -> None:
    assert killed.code == 1
    assert "error: worker 1 failed in" in killed.output and "its process died" in killed.output
    assert killed.leftovers() == []


def test_the_resumed_run_equals_the_uninterrupted_one_to_the_bit(task: Path, uninterrupted: Command, killed: Command) -> None:
    first = int((killed.folder / "save" / "latest_checkpointed_iteration.txt").read_text())
    assert 1 <= first < 3
    resumed = finished(task, killed.folder, ITERATIONS)
    assert f"resumes after iteration {first} of" in resumed.output
    records = {record["iteration"]: select_computed(record) for record in resumed.metrics}  # the last of each number counts
    assert records == {record["iteration"]: select_computed(record) for record in uninterrupted.metrics}
    ours, theirs = (
        load_file(command.folder / "save" / "hf" / "iter_0000003" / "model.safetensors") for command in (resumed, uninterrupted)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


PPO = [
    "megatron_training.stage=ray_ppo",
    "megatron_training.train_iters=1",
    "rl_config.adv_estimator=gae",
    "critic_config.model=tiny_qwen25",
    "critic_config.tensor_model_parallel_size=2",
    "critic_config.micro_batch_size=16",
    "critic_config.lr=1e-3",
    "critic_config.finetune=true",
]


@pytest.mark.slow
def test_a_critic_starts_from_the_checkpoint_of_a_language_model(task: Path, uninterrupted: Command, tmp_path: Path) -> None:
    start = uninterrupted.folder / "save"
    command = finished(task, tmp_path, *PPO, f"critic_config.load={start}", timeout_s=500)
    assert f"critic: {start} has no score head; it starts with a fresh one, whose values are 0" in command.output
    assert command.metrics[0]["critic/values/max"] == command.metrics[0]["critic/values/min"] == 0.0
    assert command.metrics[0]["critic/grad_norm"] > 0.0


def test_a_run_with_nothing_left_to_do_says_so_before_ray_starts(task: Path, uninterrupted: Command) -> None:
    with running(task, uninterrupted.folder, ITERATIONS, f"run_dir={uninterrupted.folder / 'again'}") as command:
        assert command.wait(120) == 2
        assert "the run would resume after iteration 3" in command.output and "nothing is left to do" in command.output
        assert "starting" not in command.output


def assert_same_first_update(ours: Command, theirs: Command) -> None:
    first, reference = ours.metrics[0], theirs.metrics[0]
    for name in ("actor/grad_norm", "actor/entropy", "grpo/score/mean", "response_length/mean"):
        assert first[name] == pytest.approx(reference[name], rel=1e-5), name
    assert first["actor/pg_loss"] == pytest.approx(reference["actor/pg_loss"], rel=1e-5, abs=1e-7)
    assert max(record["rollout/log_probs_diff_max"] for record in ours.metrics) < 1e-4


TP, PP = ("actor_config.tensor_model_parallel_size={}".format, "actor_config.pipeline_model_parallel_size={}".format)
INFER, SIZE = ("generate_config.infer_tensor_parallel_size={}".format, "rl_config.actor_resource.num_npus={}".format)
OTHER_LAYOUTS = {
    "one process": ONE_PROCESS,
    "DP2 to TP1x2": [TP(1)],
    "PP2 to TP1x2": [TP(1), PP(2)],
    "TP2 to TP2": [INFER(2)],
    "TP2 PP2 to TP2x2": [SIZE(4), PP(2), INFER(2)],
    "TP2 PP2 to TP1x4": [SIZE(4), PP(2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_the_first_update_is_the_same_under_every_layout(
    task: Path, uninterrupted: Command, tmp_path: Path, changes: list[str]
) -> None:
    command = finished(task, tmp_path, *changes, "megatron_training.train_iters=2", timeout_s=900)
    assert_same_first_update(command, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["true", "false"])
def test_a_group_may_be_spread_over_replicas(task: Path, tmp_path: Path, order: str) -> None:
    """Three prompts of four responses, on two replicas with six responses each."""
    sizes = ["megatron_training.global_batch_size=3", "rl_config.mini_batch_size=3", "actor_config.micro_batch_size=3"]
    sizes += ["megatron_training.train_iters=2", f"rl_config.guarantee_order={order}"]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = finished(task, tmp_path / "one", *ONE_PROCESS, *sizes)
    spread = finished(task, tmp_path / "two", TP(1), *sizes)
    assert alone.metrics[0]["grpo/score/mean"] == spread.metrics[0]["grpo/score/mean"]
    assert_same_first_update(spread, alone)
