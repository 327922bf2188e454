"""A phase's memory is measured by owner, and running out of it says the phase, the largest owners and what would leave more."""

from __future__ import annotations

import ctypes
import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mindspeed_rl import platform
from mindspeed_rl.config import build_run_config
from mindspeed_rl.config.run_files import compose, locate
from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.planner.prediction import predict
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.runtime.device_memory import DeviceMemoryError, PhaseMemory, convert_memory_errors
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.trainers.run_folder import _advise_on_memory, _find_memory_error

MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    platform.select("cpu")
    # pages that earlier tests of this process gave back, but not to the system, would be handed out without a rise
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    yield


def test_lasting_and_temporary_memory_of_an_owner_are_distinguished() -> None:
    kept: list[torch.Tensor] = []
    memory = PhaseMemory(lambda: {"weights": 3 * MIB, "KV cache": sum(tensor.nbytes for tensor in kept)})
    metrics = Metrics()
    with memory("log-probs", "activations", metrics):
        kept.append(torch.ones(8 * MIB))  # 32 MiB that stay
        passing = torch.ones(32 * MIB)  # 128 MiB that do not
        del passing
    results = {name: value * 1024 for name, value in metrics.results().items()}
    assert results["memory/log-probs/weights_gib"] == 3 and results["memory/log-probs/kv_cache_gib"] == 32
    assert results["memory/log-probs/activations_gib"] == pytest.approx(128, abs=16)
    assert memory.peak_gib * 1024 > 160


def test_a_new_phase_does_not_see_the_peak_of_the_one_before() -> None:
    memory, first, second = PhaseMemory(dict), Metrics(), Metrics()
    with memory("update", "activations", first):
        torch.ones(32 * MIB).sum()
    with memory("generate", "engine step", second):
        pass
    assert first.results()["memory/update/activations_gib"] * 1024 > 110
    assert second.results()["memory/generate/engine_step_gib"] * 1024 < 16


def test_the_fullest_moment_of_a_phase_counts_when_owners_take_turns() -> None:
    held = {"weights": torch.ones(16 * MIB)}  # 64 MiB, which leave
    memory, metrics = PhaseMemory(lambda: {owner: tensor.nbytes for owner, tensor in held.items()}), Metrics()
    with memory("update weights", "push buckets", metrics):
        torch.ones(32 * MIB).sum()  # 128 MiB beside the weights
        with memory.exchange():
            held.clear()
        held["KV cache"] = torch.ones(24 * MIB)  # 96 MiB in their place
    results = {name: value * 1024 for name, value in metrics.results().items()}
    assert results["memory/update_weights/weights_gib"] == 64 and "memory/update_weights/kv_cache_gib" not in results
    assert results["memory/update_weights/push_buckets_gib"] == pytest.approx(128, abs=16)


def test_what_leaves_in_a_phase_is_no_memory_of_the_moment_after() -> None:
    held = {"weights": torch.ones(32 * MIB)}
    memory, metrics = PhaseMemory(lambda: {owner: tensor.nbytes for owner, tensor in held.items()}), Metrics()
    with memory("reference pass", "activations", metrics), memory.exchange():
        held.clear()
    results = {name: value * 1024 for name, value in metrics.results().items()}
    assert results["memory/reference_pass/weights_gib"] == 128 and results["memory/reference_pass/activations_gib"] < 16


def test_memory_of_a_sleeping_engine_is_not_counted() -> None:
    asleep = torch.ones(16 * MIB)
    awake: list[torch.Tensor] = []
    memory = PhaseMemory(lambda: {"rollout weights": sum(t.nbytes for t in awake)}, lambda: 0 if awake else asleep.nbytes)
    counted, metrics = memory.allocated_gib, Metrics()
    with memory("update", "activations", metrics):
        torch.ones(8 * MIB).sum()
        with memory.exchange():
            awake.append(asleep)
    results = {name: value * 1024 for name, value in metrics.results().items()}
    # awake it is an owner, and the fuller moment; the allocator counted it all the time
    assert results["memory/update/rollout_weights_gib"] == 64 and results["memory/update/activations_gib"] < 16
    assert (memory.allocated_gib - counted) * 1024 == pytest.approx(64, abs=16)


def test_the_start_is_measured_over_all_models() -> None:
    memory = PhaseMemory(dict)
    with memory.starting():
        torch.ones(32 * MIB).sum()
        with memory.exchange():  # each model leaves before the next is built
            pass
    assert memory.start_gib * 1024 > 128


@pytest.mark.parametrize("error", [MemoryError("no"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_out_of_memory_names_the_phase_and_the_three_largest_owners(error: Exception) -> None:
    owners = {"weights": 3 << 30, "gradients": 6 << 30, "optimizer": 12 << 30, "KV cache": 1 << 20}
    with pytest.raises(DeviceMemoryError) as raised, PhaseMemory(lambda: owners)("update", "activations", Metrics()):
        raise error
    wanted = "out of memory in phase update: optimizer 12.00 GiB, gradients 6.00 GiB, weights 3.00 GiB."
    assert str(raised.value) == wanted and raised.value.__cause__ is error
    travelled = pickle.loads(pickle.dumps(raised.value))
    assert str(travelled) == wanted and travelled.phase == "update"


def test_models_that_do_not_fit_while_they_are_built_say_so() -> None:
    said = r"^out of memory in phase start: models and engine so far .* GiB\.$"
    with pytest.raises(DeviceMemoryError, match=said) as raised, convert_memory_errors():
        raise MemoryError("no")
    assert 0 < raised.value.owners["models and engine so far"] < 1 << 40
    with pytest.raises(KeyError), convert_memory_errors():
        raise KeyError("x")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="^shapes differ$"), PhaseMemory(dict)("update", "activations", Metrics()):
        raise RuntimeError("shapes differ")


_SMALL = """
import resource, torch
from mindspeed_rl import platform
from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.runtime.device_memory import DeviceMemoryError, PhaseMemory
platform.select("cpu")
held = torch.ones(1 << 20)
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with PhaseMemory(lambda: {"weights": held.nbytes})("log-probs", "activations", Metrics()):
        torch.empty(1 << 30)
except DeviceMemoryError as error:
    print(error)
"""


def test_a_process_whose_memory_ends_says_so_in_these_words() -> None:
    done = subprocess.run([sys.executable, "-c", _SMALL], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("out of memory in phase log-probs: "), done.stderr[-2000:]
    assert "weights 0.00 GiB" in done.stdout


def test_a_run_that_ran_out_of_memory_says_which_settings_leave_more() -> None:
    cfg = build_run_config(compose(*locate("grpo_tiny_cpu", None), []), config_name="grpo_tiny_cpu")
    run = resolve(cfg, platform="cpu")
    failure = DeviceMemoryError("update", {"activations": 3 << 30})
    with pytest.raises(WorkerError) as raised, _advise_on_memory(predict(run)):
        raise WorkerError(f"worker 0 failed in update_actor: {failure}") from failure
    said = str(raised.value)
    assert said.startswith("worker 0 failed in update_actor: out of memory in phase update: activations 3.00 GiB. Nearest")
    assert 'actor_config.recompute_granularity: "full"' in said and "(a third more operations in the update)" in said


def test_what_leaves_a_critic_more_on_its_own_devices_are_its_own_settings() -> None:
    changes = ["rl_config.critic_resource.num_npus=8", "rl_config.use_integrated_worker=false"]
    cfg = build_run_config(compose(*locate("ppo_qwen25_32b_A3", None), changes), config_name="ppo_qwen25_32b_A3")
    failure = DeviceMemoryError("update critic", {"activations": 30 << 30, "optimizer": 9 << 30, "weights": 4 << 30})
    with pytest.raises(WorkerError) as raised, _advise_on_memory(predict(resolve(cfg, platform="cpu"))):
        raise WorkerError(f"worker 0 failed in update_critic: {failure}") from failure
    said = str(raised.value)
    assert "out of memory in phase update critic: activations 30.00 GiB, optimizer 9.00 GiB, weights 4.00 GiB." in said
    assert "critic_config." in said.partition("Nearest settings with more room: ")[2]


def test_other_failures_of_workers_pass_as_they_are() -> None:
    cfg = build_run_config(compose(*locate("grpo_tiny_cpu", None), []), config_name="grpo_tiny_cpu")
    error = WorkerError("worker 0 failed in generate: KeyError: 'x'")
    with pytest.raises(WorkerError) as raised, _advise_on_memory(predict(resolve(cfg, platform="cpu"))):
        raise error
    assert raised.value is error and _find_memory_error(error) is None


def test_memory_that_does_not_come_back_is_an_alert_with_its_owner() -> None:
    kept: list[torch.Tensor] = []
    memory, history, steady = PhaseMemory(dict), History(), History()
    for iteration in range(1, 13):
        metrics = Metrics()
        with memory("generate", "engine step", Metrics()):
            kept.append(torch.ones(10 * MIB))  # 40 MiB a wake-up that nobody frees
        memory.measure_residue("sleep", metrics)
        history.add({"iteration": iteration, **metrics.results()})
    for iteration in range(1, 13):
        metrics = Metrics()
        with memory("generate", "engine step", Metrics()):
            torch.ones(10 * MIB).sum()
        memory.measure_residue("sleep", metrics)
        steady.add({"iteration": iteration, **metrics.results()})
    (alert,) = [alert for alert in find_alerts(history) if alert.kind == "memory_leak"]
    assert "(tensors, after sleep)" in alert.text and "a hook or loss of yours" in alert.advice
    assert 36 <= float(alert.text.split(" MiB an iteration")[0].rpartition(" ")[2]) <= 44
    assert not [alert for alert in find_alerts(steady) if alert.kind == "memory_leak"]


def test_the_engine_is_the_owner_of_what_it_keeps() -> None:
    sizes = iter(range(0, 12 << 30, 1 << 30))
    memory, metrics = PhaseMemory(lambda: {"weights": 5 << 30, "KV cache": 2 << 30, "rollout weights": next(sizes)}), Metrics()
    memory.measure_residue("weight_sync", metrics)
    memory.measure_residue("weight_sync", metrics)
    assert metrics.results()["residue/weight_sync/engine_gib"] == 3.0
