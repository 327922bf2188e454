"""Runs whose responses are generated while others train, or over several rollouts."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_command import ONE_PROCESS, Command, finished, overrides, running
from measured_figures import select_computed
from patience import patient
from ports import find_free_port
from safetensors import safe_open
from test_prediction_run import standalone_server

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli.parity import replay

SHARED = [*ONE_PROCESS, "rl_config.log_completions=true", "rl_config.log_completions_keep=1000"]
SERVER = [
    *SHARED,
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
    f"generate_config.vllm_server_timeout={patient(100):.0f}",
]
#: one response at a time: a server's batches do not depend on when requests arrive, nor does what its kernels round
IN_TURN = "generate_config.max_num_seqs=1"


def iterations(count: int) -> str:
    return f"megatron_training.train_iters={count}"


def responses(command: Command) -> list[str]:
    """Of the run, in the order in which they trained."""
    lines = (command.folder / "run" / "completions.jsonl").read_text().splitlines()
    return [json.loads(line)["response"] for line in lines]


def consumed(command: Command) -> list[dict[str, Any]]:
    """The run's record of what trained."""
    return [json.loads(line) for line in (command.folder / "run" / "consumed.jsonl").read_text().splitlines()]


def test_an_asynchronous_run_keeps_its_bound_and_says_what_trained(task: Path, tmp_path: Path) -> None:
    keys = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1", "rl_config.save_rollouts_interval=1"]
    run = finished(task, tmp_path, *SERVER, *keys, iterations(5))
    records = consumed(run)
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5]
    taken = [prompt["prompt"] for record in records for prompt in record["prompts"]]
    assert len(set(taken)) == len(taken) == 5 * 8
    for record, metrics in zip(records, run.metrics, strict=True):
        versions = [span[0] for prompt in record["prompts"] for sample in prompt["samples"] for span in sample["versions"]]
        assert max(record["version"] - version for version in versions) <= 1
        assert metrics["rollout/staleness_max"] == max(record["version"] - version for version in versions)
    assert any(metrics["rollout/staleness_max"] == 1 for metrics in run.metrics)  # the rollout was ahead
    for record, metrics in zip(records, run.metrics, strict=True):
        batch = RolloutBatch.load(run.folder / "run" / "rollouts" / f"iteration_{record['iteration']:07d}.safetensors")
        samples = [sample for prompt in record["prompts"] for sample in prompt["samples"]]
        expected = [version for sample in samples for version, count in sample["versions"] for _ in range(count)]
        assert batch.columns["weight_versions"][batch.columns["response_mask"]].tolist() == expected
        # the batch in the run's order is all it takes to make the update again
        again = replay(batch, {}, torch.float64)
        loss = metrics["actor/pg_loss"] + metrics["actor/kl_coef"] * metrics["actor/kl_loss"]
        assert again.loss == pytest.approx(loss, abs=1e-6)


def same_figures(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """To the bit."""
    how_far_the_servers_were = {"rollout/ready_prompts", "rollout/in_flight_prompts", "rollout/queue_level"}
    ours, theirs = (
        {name: value for name, value in select_computed(record).items() if name not in how_far_the_servers_were}
        for record in (result, expected)
    )
    assert ours == theirs


@pytest.mark.slow
def test_without_a_threshold_an_asynchronous_run_is_the_synchronous_one(task: Path, tmp_path: Path) -> None:
    sync = finished(task, tmp_path / "sync", *SERVER, IN_TURN, iterations(3))
    bounded = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=0"]
    run = finished(task, tmp_path / "async", *SERVER, IN_TURN, *bounded, iterations(3))
    assert responses(run) == responses(sync)
    for metric, expected in zip(run.metrics, sync.metrics, strict=True):
        same_figures(metric, expected)


@pytest.mark.slow
def test_one_step_off_goes_on_as_if_it_had_not_stopped(task: Path, tmp_path: Path) -> None:
    keys = [*SERVER, IN_TURN, "rl_config.trainer_mode=one_step_off", "actor_config.lr_decay_style=constant"]
    whole = finished(task, tmp_path / "whole", *keys, iterations(4))
    first = finished(task, tmp_path / "parts", *keys, iterations(2))
    begun = responses(first)
    second = finished(task, tmp_path / "parts", *keys, iterations(4))
    assert consumed(second) == consumed(whole)
    assert begun == responses(whole)[: len(begun)]
    assert responses(second)[-2 * 32 :] == responses(whole)[-2 * 32 :]
    same_figures(second.metrics[-1], whole.metrics[-1])


@pytest.mark.slow
def test_long_responses_go_on_in_later_rollouts(task: Path, tmp_path: Path) -> None:
    keys = [
        "rl_config.partial_rollout_max_split=2",
        "rl_config.guarantee_order=false",
        "generate_config.sampling_config.ignore_eos=true",
        "rl_config.off_policy_token_limit=0",
    ]
    run = finished(task, tmp_path, *SHARED, *keys, iterations(4))
    taken = [prompt["prompt"] for record in consumed(run) for prompt in record["prompts"]]
    assert taken == list(range(4 * 8))
    assert all(metrics["rollout/staleness_max"] <= 2 for metrics in run.metrics)
    assert any(metrics["rollout/old_tokens_masked"] > 0 for metrics in run.metrics)
    assert all(metrics["response_length/mean"] == 4 for metrics in run.metrics)


@pytest.mark.slow
def test_drafts_change_no_response_and_save_steps_in_process_and_in_servers(task: Path, tmp_path: Path) -> None:
    keys = ["generate_config.sampling_config.ignore_eos=true", "generate_config.sampling_config.max_tokens=24", iterations(2)]
    drafts = [f"generate_config.speculative_config.{key}" for key in ("method=suffix", "num_speculative_tokens=8")]
    plain = finished(task, tmp_path / "plain", *SHARED, *keys)
    local = finished(task, tmp_path / "local", *SHARED, *keys, *drafts)
    served = finished(task, tmp_path / "served", *SERVER, *keys, *drafts)
    # of the first iteration: rounding of the log-probs enters the second one's weights
    expected = responses(plain)[:32]
    assert responses(local)[:32] == expected and responses(served)[:32] == expected
    assert "rollout/tokens_per_step" not in plain.metrics[0]
    # a server's count comes with the next weight sync
    for metrics in (local.metrics[0], served.metrics[1]):
        assert 1.0 < metrics["rollout/tokens_per_step"] < 9.0
        assert 0.0 < metrics["rollout/draft_acceptance"] < 1.0


@pytest.mark.slow
def test_a_server_joins_a_run_by_its_folder_generates_and_leaves_without_a_lost_or_doubled_sample(
    task: Path, tmp_path: Path
) -> None:
    keys = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1"]
    # as many iterations as it takes for a server to start, however busy the machine is
    with running(task, tmp_path, *SERVER, *keys, iterations(100_000)) as command:
        folder, log = command.folder / "run", (tmp_path / "server.log").open("w+")
        command.wait_until(lambda: len(command.metrics) >= 1)
        words = [sys.executable, "-m", "mindspeed_rl.cli.main", "rollout", "--join", str(folder)]
        words += ["--port", str(find_free_port())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            command.wait_until(lambda: "has joined" in (folder / "run.log").read_text())
            joined = len(command.metrics)
            command.wait_until(lambda: len(command.metrics) >= joined + 3)
            server.send_signal(signal.SIGINT)
            assert server.wait(patient(120)) == 0
            assert not [path for path in (folder / "servers").iterdir() if path.name != "run.json"]
            command.wait_until(lambda: "was taken out" in (folder / "run.log").read_text())
            left = len(command.metrics)
            command.wait_until(lambda: len(command.metrics) >= left + 2)
            command.interrupt()
            assert command.wait(120) == 128 + signal.SIGINT, command.output[-4000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            log.close()
        numbers = [metrics["rollout/servers"] for metrics in command.metrics]
        assert [number for number, _ in itertools.groupby(numbers)] == [1, 2, 1]
        # each prompt trained once, or is in the checkpoint: none is lost, none is there twice
        taken = [prompt["prompt"] for record in consumed(command) for prompt in record["prompts"]]
        (saved,) = (tmp_path / "save" / f"iter_{len(command.metrics):07d}" / "in_flight").glob("*.safetensors")
        with safe_open(saved, "pt") as file:
            taken += [group["number"] for group in json.loads(file.metadata()["groups"])]
        assert sorted(taken) == list(range(len(taken)))
        assert not (folder / "servers" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.extra
def test_a_server_that_is_started_between_two_weight_syncs_has_newer_weights_than_it_counts(task: Path, tmp_path: Path) -> None:
    # one response after the other: the engine dies while it generates for the third iteration, not when it waits for weights
    keys = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=0", "rl_config.parameter_sync_step=2", IN_TURN]
    keys += ["megatron_training.save_interval=2", "rl_config.deadlines.server=20", *SERVER, iterations(6)]
    with running(task, tmp_path, *keys) as run:
        run.wait_until(lambda: len(run.metrics) == 2)
        for process in run.processes():
            if "EngineCore" in " ".join(process.cmdline()):
                process.kill()
        assert run.wait(600) == 0, run.output[-4000:]
        assert [record["iteration"] for record in run.metrics] == [1, 2, 3, 4, 5, 6]
        text = (run.folder / "run" / "run.log").read_text()
        assert "a new one has weights that are up to 1 iterations newer than version" in text
        for record in consumed(run):
            versions = [span[0] for prompt in record["prompts"] for sample in prompt["samples"] for span in sample["versions"]]
            assert {record["version"] - version for version in versions} <= {0, 1}


@pytest.mark.slow
def test_an_asynchronous_run_whose_node_of_ray_dies_recovers_at_once_and_ends_at_a_signal(task: Path, tmp_path: Path) -> None:
    keys = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1", "megatron_training.save_interval=2"]
    keys += ["rl_config.fault_tolerance.enabled=true", "rl_config.fault_tolerance.heartbeat_interval_s=1"]
    with running(task, tmp_path, *SERVER, *keys, IN_TURN, iterations(100_000)) as command:
        command.wait_until(lambda: len(command.metrics) >= 2)
        # Ray's node service ends with its agent, and its processes end with it
        (agent,) = [process for process in command.processes() if "runtime_env_agent" in " ".join(process.cmdline()).lower()]
        agent.kill()
        command.wait_until(lambda: "rl_config.fault_tolerance: all workers were ended" in command.output, patient(60))
        known = len(command.metrics)
        command.wait_until(lambda: len(command.metrics) >= known + 2)
        assert [metrics["iteration"] for metrics in command.metrics] == list(range(1, len(command.metrics) + 1))
        command.process.terminate()
        assert command.wait(60) == 128 + signal.SIGTERM, command.output[-4000:]
        assert not command.leftovers()


@pytest.mark.slow
def test_an_int8_rollout_is_near_the_trainer_and_corrected_in_process_and_in_servers(task: Path, tmp_path: Path) -> None:
    keys = ["generate_config.quantization=int8", "rl_config.log_probs_diff_limit=0.1", iterations(3)]
    plain = finished(task, tmp_path / "plain", *SHARED, iterations(3))
    for name, where in (("process", SHARED), ("server", [*SERVER, "generate_config.update_weight_mode=delta"])):
        run = finished(task, tmp_path / name, *where, *keys)
        for metrics, exact in zip(run.metrics, plain.metrics, strict=True):
            # another policy, by little: the weights of the correction are near 1
            assert exact["rollout/log_probs_diff_mean"] < 1e-5 < metrics["rollout/log_probs_diff_mean"] < 0.02
            assert 0.99 < metrics["rollout/ess"] < 1


def test_log_probs_of_an_exact_run_differ_by_nothing(task: Path, tmp_path: Path) -> None:
    run = finished(task, tmp_path, *ONE_PROCESS, "rl_config.exact_log_probs=true", iterations(2))
    assert [record["rollout/log_probs_diff_max"] for record in run.metrics] == [0.0, 0.0]


@pytest.mark.slow
def test_log_probs_of_servers_differ_by_nothing_in_an_exact_run(task: Path, tmp_path: Path) -> None:
    exact = "rl_config.exact_log_probs=true"
    run_file = ["--config-name", "grpo_tiny_cpu", *overrides(task, tmp_path), *ONE_PROCESS]
    runs = [finished(task, tmp_path / "own", *SERVER, exact, iterations(2))]
    with standalone_server(task, tmp_path, *run_file, exact) as at:
        runs.append(finished(task, tmp_path / "standalone", *SHARED, *at, exact, iterations(2)))
    for run in runs:
        assert [record["rollout/log_probs_diff_max"] for record in run.metrics] == [0.0, 0.0]
    with standalone_server(task, tmp_path, *run_file) as at, running(task, tmp_path / "other", *SHARED, *at, exact) as command:
        assert command.wait(300) != 0
        assert "does not fit the run: its log-probs" in command.output
        assert "mindspeed-rl rollout --config-name" in command.output


RECORDED = "rl_config.old_log_probs=rollout"


@pytest.mark.slow
def test_recorded_log_probs_train_as_computed_ones_where_these_are_exact(task: Path, tmp_path: Path) -> None:
    # two steps a rollout: the second has another ratio
    keys = [*ONE_PROCESS, "rl_config.exact_log_probs=true", "rl_config.mini_batch_size=4", iterations(2)]
    computed = finished(task, tmp_path / "computed", *keys)
    recorded = finished(task, tmp_path / "recorded", *keys, RECORDED)
    for ours, theirs in zip(recorded.metrics, computed.metrics, strict=True):
        assert ours["rollout/old_log_probs_diff_max"] == 0.0
        for name in ("grpo/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
            assert ours[name] == theirs[name]
        assert "timing/old_log_p" in ours  # of the rows that are checked
    weights = [
        {name: file.get_tensor(name) for file in [safe_open(path, "pt")] for name in file.keys()}
        for run in (recorded, computed)
        for path in sorted((run.folder / "save" / "hf").rglob("*.safetensors"))
    ]
    assert len(weights) >= 2 and len(weights) % 2 == 0
    for ours, theirs in zip(weights[: len(weights) // 2], weights[len(weights) // 2 :], strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_an_asynchronous_run_on_recorded_log_probs_resumes_and_falls_back(task: Path, tmp_path: Path) -> None:
    keys = [*SERVER, RECORDED, "rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1"]
    finished(task, tmp_path, *keys, iterations(3))
    # a bound that rounding breaks: the trainer's log-probs are taken, and the run says so
    bound = ["rl_config.log_probs_diff_limit=1e-12", "rl_config.old_log_probs_fallback=trainer"]
    second = finished(task, tmp_path, *keys, *bound, iterations(5))
    assert [record["iteration"] for record in consumed(second)] == [1, 2, 3, 4, 5]
    compared = [record for record in second.metrics[3:] if "rollout/old_log_probs_diff_mean" in record]
    assert compared and all(record["rollout/old_log_probs_computed"] == 1.0 for record in compared)
    assert "the trainer's are taken (rl_config.old_log_probs_fallback)" in second.output
    assert all("rollout/old_log_probs_computed" not in record for record in second.metrics[:3])
