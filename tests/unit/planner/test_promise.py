"""What a run will need, take and cost, said before it; checked while it goes, with causes that its own figures show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rl.cli import promise as command
from mindspeed_rl.cli.bands import find_bands
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values, compose, locate
from mindspeed_rl.observability.earlier_runs import find_band
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.host_load import HostLoad
from mindspeed_rl.observability.report import write_report
from mindspeed_rl.observability.timers import Interval, compute_imbalance
from mindspeed_rl.planner.devices import DEVICES, GIB
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.prediction import predict
from mindspeed_rl.planner.promise import make_promise
from mindspeed_rl.planner.promise_check import (
    Assumed,
    BrokenPromiseError,
    Promised,
    PromiseWatch,
    compare_with,
    format_kept,
)
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import plan_time
from mindspeed_rl.planner.trial import MachineSpeed, correct_by_speed, measure_machine
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft, load_run
from mindspeed_rl.run.paths import with_absolute_paths


def _draft(name: str, **changes: object) -> tuple[Run, Mapping[str, object]]:
    tree = apply_values(compose(*locate(name, None), []), {key.replace("__", "."): value for key, value in changes.items()})
    return draft(build_run_config(tree, config_name=name)), tree


def test_hours_price_tokens_and_checkpoints_follow_from_seconds_and_length() -> None:
    keys = {"megatron_training__train_iters": 200, "megatron_training__save_interval": 50, "actor_config__save": "ckpt"}
    run, _ = _draft("grpo_qwen3_8b_A3", **keys)
    promise = make_promise(run, samples=SampleMeans(1000.0, 100.0), price=2.0)
    low, high = promise.time.bounds(promise.time.total)
    assert promise.encode()["hours"] == pytest.approx([200 * low / 3600, 200 * high / 3600])
    assert promise.encode()["device_hours"] == pytest.approx([16 * 200 * low / 3600, 16 * 200 * high / 3600])
    assert promise.encode()["price"] == pytest.approx([2 * 16 * 200 * low / 3600, 2 * 16 * 200 * high / 3600])
    assert promise.encode()["tokens"] == pytest.approx(200 * run.sizes.rollout_samples * 1100)
    assert promise.first_checkpoint == 50 and promise.memory.host is not None
    assert promise.disk == 4 * promise.memory.host.checkpoint  # all are kept
    kept, _ = _draft("grpo_qwen3_8b_A3", **keys, actor_config__keep_last=1)
    assert make_promise(kept).disk == 2 * promise.memory.host.checkpoint  # one, and the one that is written


def test_a_margin_is_what_the_fullest_device_of_a_phase_leaves() -> None:
    run, _ = _draft("dapo_qwen3_32b_A3")
    promise, plan = make_promise(run), plan_memory(run, DEVICES["A3"])
    for margin in promise.margins:
        phases = [phase for group in plan.groups for phase in group.phases if phase.name == margin.name]
        assert margin.total == max(phase.total for phase in phases)
        left = (plan.capacity - margin.total) / GIB
        assert any(margin.name in line and f"margin {left:.1f} " in line for line in promise.list_lines())


def test_cheaper_and_faster_layouts_are_sound_and_better() -> None:
    run, tree = _draft("grpo_qwen25_7b_A3")
    promise = make_promise(run, tree=tree)
    assert promise.faster is not None and promise.faster.time.total < promise.time.total
    now = promise.time.total * promise.time.devices / 3600
    assert promise.cheaper is not None and promise.cheaper.device_hours < now
    for neighbour in (promise.cheaper, promise.faster):
        other, _ = _draft("grpo_qwen25_7b_A3", **{key.replace(".", "__"): value for key, value in neighbour.values.items()})
        assert plan_memory(other, DEVICES["A3"]).verdict == neighbour.verdict in ("fits", "tight")
    assert make_promise(run).cheaper is None  # not searched


@pytest.mark.parametrize("arguments", [["grpo_qwen3_8b_A3"], ["grpo_tiny_cpu"], ["sft_tiny_cpu"], ["ppo_qwen25_32b_A3"]])
def test_the_command_promises_every_kind_of_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{arguments[0]} promises\nfits") and "iterations: " in text and "margin" in text


def test_the_command_refuses_and_is_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["grpo_qwen3_8b_A3", "--price", "-1"]) == 2
    assert "--price: -1 must be a price of a device-hour from 0" in capsys.readouterr().err
    assert command.main(["grpo_qwen3_8b_A3", "megatron_training.device_hour_price=-1"]) == 2
    assert "device_hour_price" in capsys.readouterr().err
    assert command.main(["grpo_qwen3_8b_A3", "--memory-gib", "30", "--strict"]) == 1
    assert command.main(["grpo_qwen3_8b_A3", "--memory-gib", "30"]) == 0  # said, not refused
    assert "does not fit" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "timing/all": 2.0}\n')
    assert command.main([str(tmp_path)]) == 2 and "has no promise" in capsys.readouterr().err


def _write_measured(folder: Path, run: Run, factor: float, outcome: str = "finished") -> None:
    """Write the folder of a run whose iterations took so many times as long as planned."""
    folder.mkdir(parents=True)
    phases = plan_time(run, DEVICES["cpu"], samples=SampleMeans(4.0, 6.0)).phases
    record = {f"timing/{name}": factor * seconds for name, seconds in phases.items()}
    record |= {"timing/all": 1.0, "response_length/mean": 4.0, "prompt_length/mean": 6.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"iteration": index, **record}) + "\n" for index in (1, 2)))
    cfg = run.config
    write_report(folder, dataclasses.asdict(cfg), title="earlier", config_set=cfg.as_written(), outcome=outcome)


def test_on_the_cpu_earlier_runs_beside_it_say_how_fast_the_machine_is(tmp_path: Path) -> None:
    run, _ = _draft("grpo_tiny_cpu")
    sft, _ = _draft("sft_tiny_cpu")
    plain = plan_time(run, DEVICES["cpu"])
    mine = replace(run, folder=tmp_path / "mine")
    _write_measured(tmp_path / "ended", run, 100.0, outcome="failed: x")
    _write_measured(tmp_path / "mine", run, 100.0)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text('{"outcome": "finished"}')
    first = make_promise(mine).time  # none of them is an earlier run
    assert not any("earlier runs: " in note for note in first.notes)
    for name, factor in (("a", 3.0), ("b", 5.0), ("c", 4.0)):
        _write_measured(tmp_path / name, run, factor)
    promise = make_promise(mine)
    assert promise.time.phases == pytest.approx({name: 4.0 * seconds for name, seconds in plain.phases.items()})
    assert any("earlier runs: " in note for note in promise.time.notes)
    # of another kind, or on devices whose constants are fitted
    assert not any("earlier runs: " in note for note in make_promise(replace(sft, folder=tmp_path / "new")).time.notes)
    npu, _ = _draft("grpo_qwen3_8b_A3")
    assert not make_promise(replace(npu, folder=tmp_path / "new")).time.factors


def test_the_first_promise_on_a_cpu_is_corrected_by_what_the_machine_does_in_a_trial() -> None:
    run, _ = _draft("grpo_tiny_cpu")
    device = DEVICES["cpu"]
    plain = plan_time(run, device)
    # host work and products twice as slow as the constants, memory as fast
    half = MachineSpeed(device.flops / 2, device.bandwidth, 6.6e-7)
    made = correct_by_speed(plain, run, device, None, half)
    assert 1.8 * plain.phases["update"] < made.phases["update"] < 2 * plain.phases["update"]  # gradients move as fast
    assert plain.phases["rollout"] < made.phases["rollout"] < 2.1 * plain.phases["rollout"]
    # the report corrects the plan of real lengths by it
    assert made.factors["update"] == made.phases["update"] / plain.phases["update"]
    assert any("as measured now: 40 Gflop/s of a worker in products of 128 x 384" in note for note in made.notes)


def test_a_trial_is_made_where_the_run_is_on_this_machine_and_worth_it() -> None:
    run, _ = _draft("grpo_tiny_cpu")
    assert any("as measured now: " in note for note in make_promise(run).time.notes)
    short, _ = _draft("grpo_tiny_cpu", megatron_training__train_iters=3)
    npu, _ = _draft("grpo_qwen3_8b_A3")
    assert not any("as measured now: " in note for other in (short, npu) for note in make_promise(other).time.notes)
    speed = measure_machine(128, 384, 1, 2)
    assert speed is not None and min(speed.flops, speed.bandwidth) > 1e6 and 0 < speed.call_s < 1


# ---------------------------------------------------------------------- checked while it goes

ASSUMED = Assumed(1000.0, 200.0, 4096.0, is_eager=False, offloads=True, has_servers=False)
PROMISED = [
    Promised("all", "s", "timing/all", 80.0, 120.0),
    Promised("rollout", "s", "timing/rollout", 40.0, 60.0),
    Promised("update", "s", "timing/update", 18.0, 24.0),
    Promised("memory: update", "GiB", "memory/peak_gib", 40.0, 50.0),
]
ORDINARY = {
    "timing/all": 100.0,
    "timing/rollout": 50.0,
    "timing/update": 20.0,
    "memory/peak_gib": 45.0,
    "response_length/mean": 1000.0,
    "prompt_length/mean": 200.0,
    "rollout/truncated_fraction": 0.02,
}


def _history(**figures: float) -> History:
    values = ORDINARY | {name.replace("__", "/"): value for name, value in figures.items()}
    return History([{"iteration": iteration, **values} for iteration in range(1, 11)])


#: cause -> figures that show it, the broken promise, words of the sentence
CAUSES: dict[str, tuple[dict[str, float], str, str]] = {
    "lengths": (
        {"timing__update": 31.0, "response_length__mean": 2320.0},
        "update",
        "responses are longer, 2320 tokens in the mean instead of 1000, so that micro-batches hold 2.1 times as many tokens",
    ),
    "prompts": ({"timing__update": 31.0, "prompt_length__mean": 500.0}, "update", "prompts are longer, 500 tokens"),
    "truncation": ({"timing__rollout": 90.0, "rollout__truncated_fraction": 0.4}, "rollout", "40% of the responses run into"),
    "eager mode": ({"timing__rollout": 90.0, "rollout__eager": 1.0}, "rollout", "the engine runs in eager mode"),
    "slow rank": (
        {"timing__update": 40.0, "imbalance__old_log_p": 1.9, "imbalance__old_log_p_worker": 3.0},
        "update",
        "worker 3 is slow, 1.9 times the median of the others in old_log_p",
    ),
    "offload": ({"timing__rollout": 90.0, "timing__offload": 28.0}, "rollout", "offloading takes 28 s"),
    "rewards": ({"timing__all": 150.0, "timing__reward_wait": 40.0}, "all", "the trainer waits 40 s for rewards"),
    "tools": ({"timing__rollout": 90.0, "tool_seconds__mean": 35.0}, "rollout", "samples wait 35 s for tools"),
    "swap": ({"timing__update": 60.0, "host__swapped_in_mib": 900.0}, "update", "the machine swaps, 900 MiB"),
    "other programs": (
        {"timing__update": 60.0, "host__others_cores": 30.0, "host__cores": 64.0},
        "update",
        "other programs take 30 of 64 cores",
    ),
    "hypervisor": ({"timing__update": 60.0, "host__stolen_fraction": 0.3}, "update", "gets 70% of its cores' time"),
    "heat": ({"timing__update": 60.0, "host__throttled": 12.0}, "update", "throttled by heat"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_named_where_the_figures_show_it_and_nowhere_else(cause: str) -> None:
    figures, name, words = CAUSES[cause]
    rows = {row.promised.name: row for row in compare_with(PROMISED, ASSUMED, _history(**figures))}
    assert rows[name].is_broken and words in rows[name].cause
    others = [other for key, (_, _, other) in CAUSES.items() if key != cause]
    assert not any(other in rows[name].cause for other in others)
    # the same figures of a run that keeps its promise are not a cause
    kept = figures | {"timing__update": 20.0, "timing__rollout": 50.0, "timing__all": 100.0}
    assert not any(row.cause for row in compare_with(PROMISED, ASSUMED, _history(**kept)))


def test_servers_are_waited_for_where_the_engines_have_their_own_devices() -> None:
    assumed = replace(ASSUMED, has_servers=True)
    rows = {row.promised.name: row for row in compare_with(PROMISED, assumed, _history(timing__rollout=90.0))}
    assert rows["rollout"].cause == "the trainer waits 90 s for rollout servers"
    assert compare_with(PROMISED, ASSUMED, _history(timing__rollout=90.0))[1].cause == "no measured figure explains it"


def _watch(shown: list[str], *, is_strict: bool = False) -> PromiseWatch:
    return PromiseWatch(PROMISED, ASSUMED, shown.append, History(), is_strict=is_strict)


def test_a_figure_is_said_once_after_three_ten_or_fifty_iterations() -> None:
    shown = list[str]()
    watch = _watch(shown)
    for iteration in range(1, 61):
        # the update is slow from the start, the rollout from iteration 5 on
        slow = ORDINARY | {"timing/update": 31.0, "response_length/mean": 2320.0}
        watch.on_figures(iteration, slow | ({"timing/rollout": 99.0} if iteration >= 5 else {}))
        assert len(shown) == (0 if iteration < 3 else 1 if iteration < 10 else 2)
    assert shown[0].startswith("promise, iteration 3: update 31 s, promised 18 to 24: responses are longer, 2320 tokens")
    assert shown[1].startswith("promise, iteration 10: rollout 99 s, promised 40 to 60: ")


def test_figures_that_are_not_as_promised_at_the_same_check_share_a_line() -> None:
    shown = list[str]()
    watch = _watch(shown)
    for iteration in (1, 2, 3):
        watch.on_figures(iteration, {**ORDINARY, "timing/update": 31.0, "timing/rollout": 99.0})
    (line,) = shown
    assert line.startswith("promise, iteration 3: ") and line.endswith(" too") and "the report has " in line


def test_a_figure_whose_cause_is_found_comes_first() -> None:
    shown = list[str]()
    watch = _watch(shown)
    for iteration in (1, 2, 3):
        slow = {"timing/all": 150.0, "timing/update": 40.0, "imbalance/update": 1.1, "timing/rollout": 99.0}
        watch.on_figures(iteration, {**ORDINARY, **slow, "tool_seconds/mean": 25.0})
    # 25 s are more than a fifth of the rollout, but not of the iteration
    (line,) = shown
    assert line.startswith("promise, iteration 3: rollout 99 s, promised 40 to 60: samples wait 25 s for tools")
    assert line.endswith("the report has all, update too")


def test_a_kept_promise_is_silent_and_a_better_one_is_said() -> None:
    shown = list[str]()
    watch = _watch(shown)
    for iteration in range(1, 61):
        watch.on_figures(iteration, ORDINARY)
    assert shown == []
    for iteration in range(1, 4):
        (faster := _watch(shown)).on_figures(iteration, ORDINARY)
    for iteration in range(1, 4):
        faster.on_figures(iteration, ORDINARY | {"timing/update": 5.0})
    assert shown == ["promise, iteration 3: update 5 s, promised 18 to 24"]


def test_only_a_strict_run_ends() -> None:
    shown = list[str]()
    for is_strict in (False, True):
        watch = _watch(shown, is_strict=is_strict)
        for iteration in (1, 2):
            watch.on_figures(iteration, ORDINARY | {"timing/update": 31.0})
        if is_strict:
            with pytest.raises(BrokenPromiseError, match=r"not as promised \(--strict\): update 31 s"):
                watch.on_figures(3, ORDINARY | {"timing/update": 31.0})
        else:
            watch.on_figures(3, ORDINARY | {"timing/update": 31.0})


def test_a_run_compares_itself_with_its_promise_and_the_page_shows_it() -> None:
    run, _ = _draft("grpo_qwen3_8b_A3")
    prediction = predict(run, 200.0)
    low, high = prediction.promise.time.bounds(prediction.promise.time.phases["update"], "update")
    figures = {"timing/update": 3 * high, "timing/rollout": 1.0, "response_length/mean": 6000.0, "prompt_length/mean": 200.0}
    kept = prediction.compare(History([{"iteration": 1, **figures}]))["kept"]
    row = next(row for row in kept if row["name"] == "update")
    assert (row["low"], row["high"], row["measured"], row["broken"]) == (low, high, 3 * high, True)
    assert "responses are longer, 6000 tokens in the mean instead of 4096" in row["cause"]
    assert format_kept(kept).splitlines()[0].split() == ["promised", "measured", "cause"]
    assert any(line.startswith("! update") for line in format_kept(kept).splitlines())


def test_a_slow_worker_is_found_by_its_own_intervals() -> None:
    def intervals(*seconds: float) -> list[Interval]:
        return [Interval("old_log_p", 100.0, 100.0 + taken, f"rank {rank}") for rank, taken in enumerate(seconds)]

    assert compute_imbalance(intervals(2.0, 2.1, 6.0, 2.0)) == {"imbalance/old_log_p": 3.0, "imbalance/old_log_p_worker": 2.0}
    assert compute_imbalance(intervals(2.0, 2.1, 2.0)) == {}
    assert compute_imbalance(intervals(9.0)) == {}
    assert compute_imbalance([Interval("adv", 0.0, 9.0), Interval("adv", 0.0, 1.0)]) == {}  # of the driver
    assert compute_imbalance(intervals(0.01, 0.05)) == {}  # too short to say anything


def _write_proc(root: Path, *, busy: int, steal: int, own: int, swapped: int, child: int = 4242) -> None:
    import os

    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "stat").write_text(f"cpu {busy} 0 0 {8000 - busy} 0 0 0 {steal} 0 0\n")
    (root / "proc" / "vmstat").write_text(f"pswpin {swapped}\n")
    for pid, parent, spent in ((os.getpid(), 1, own), (child, os.getpid(), own), (77, 1, 5000)):
        (root / "proc" / str(pid)).mkdir(exist_ok=True)
        fields = ["R", str(parent), *["0"] * 9, str(spent), "0", *["0"] * 8]
        (root / "proc" / str(pid) / "stat").write_text(f"{pid} (a (name) of it) {' '.join(fields)}\n")


def test_others_on_the_host_are_what_is_busy_and_not_the_runs(tmp_path: Path) -> None:
    import os

    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    clock = iter([0.0, 10.0, 20.0])
    _write_proc(tmp_path, busy=0, steal=0, own=0, swapped=0)
    load = HostLoad(root=tmp_path, now_s=lambda: next(clock))
    # ten seconds later: 60 busy core seconds, of which this process and its child took 10 each
    _write_proc(tmp_path, busy=60 * ticks, steal=0, own=10 * ticks, swapped=0)
    (tmp_path / "proc" / "stat").write_text(f"cpu {60 * ticks} 0 0 {8000 + 20 * ticks} 0 0 0 0 0 0\n")
    figures = load.measure()
    assert figures["host/cores"] == pytest.approx(8.0) and figures["host/others_cores"] == pytest.approx(4.0)
    _write_proc(tmp_path, busy=60 * ticks, steal=0, own=10 * ticks, swapped=(1 << 28) // page)
    (tmp_path / "proc" / "stat").write_text(f"cpu {60 * ticks} 0 0 {8000 + 90 * ticks} 0 0 0 {10 * ticks} 0 0\n")
    figures = load.measure()
    assert figures["host/swapped_in_mib"] == pytest.approx(256.0)
    assert figures["host/stolen_fraction"] == pytest.approx(10 / 80) and "host/others_cores" not in figures


def test_a_machine_without_these_files_has_no_figures(tmp_path: Path) -> None:
    clock = iter([0.0, 10.0])
    assert HostLoad(root=tmp_path, now_s=lambda: next(clock)).measure() == {}


# ---------------------------------------------------------------------- curves of earlier runs


def _write_run(
    folder: Path, reward: Callable[[int], float], outcome: str = "finished", *, length: int = 40, **keys: object
) -> None:
    folder.mkdir(parents=True)
    lines = (json.dumps({"iteration": index, "grpo/score/mean": reward(index)}) + "\n" for index in range(1, length + 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    written = {"megatron_training": {"lr": 1e-4, "seed": 1, **keys}, "rl_config": {"n_samples_per_prompt": 8}}
    (folder / "report.json").write_text(json.dumps({"title": "mine", "outcome": outcome, "config_set": written}))


def test_earlier_runs_of_the_same_run_file_make_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_run(tmp_path / "a", lambda index: index / 100, seed=1)
    _write_run(tmp_path / "b", lambda index: 2 * index / 100, seed=2, run_dir="elsewhere")
    _write_run(tmp_path / "failed", lambda index: 9.0, outcome="failed: x")
    _write_run(tmp_path / "other", lambda index: 9.0, lr=1e-3)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{")
    written = {"megatron_training": {"lr": 1e-4, "seed": 7, "train_iters": 100}, "rl_config": {"n_samples_per_prompt": 8}}
    band = find_band(tmp_path / "new", "mine", written)
    assert band is not None and band.source == "earlier runs: a, b" and band.metric == "grpo/score/mean"
    first, last = band.windows[0], band.windows[-1]
    # means of iterations 1 to 10: 0.055 and 0.11, and 5 % of the larger one
    assert (first.first, first.last, last.last) == (1, 10, 40)
    assert (first.low, first.high) == (pytest.approx(0.055 - 0.0055), pytest.approx(0.11 + 0.0055))
    assert find_band(tmp_path / "new", "yours", written) is None
    # a run has absolute paths, its run file those that the user wrote
    # which are compared: a file of the same name elsewhere is another reward
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    paths = [folder / "reward.py" for folder in (tmp_path, elsewhere)]
    for path in paths:
        path.touch()
    _write_run(tmp_path / "plugins" / "a", lambda index: 0.5, length=4, external_plugins=[str(paths[0])], load="/a/model")
    own, others = (
        {**written, "megatron_training": {"lr": 1e-4, "external_plugins": [name], "load": "model"}}
        for name in ("reward.py", "elsewhere/reward.py")
    )
    short = find_band(tmp_path / "plugins" / "new", "mine", own)
    assert short is not None and [(window.first, window.last) for window in short.windows] == [(1, 4)]
    assert find_band(tmp_path / "plugins" / "new", "mine", others) is None
    assert find_band(tmp_path / "new", "mine", {"megatron_training": {"lr": 2.0}}) is None


def test_the_report_of_a_run_has_the_reward_of_its_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "elsewhere"):
        folder.mkdir(exist_ok=True)
        for name in ("prompt.txt", "rubric.json", "reward.py", "tools.yaml"):
            (folder / name).touch()
    words = ["rl_config.judge_prompt=prompt.txt", "rl_config.judge_rubric=rubric.json"]
    words += ["rl_config.external_plugins=[reward.py]"]
    words += ["rl_config.tool_config_path=tools.yaml", "actor_config.load=nowhere/model", "rl_config.judge_model=Org/Judge"]

    def load(*changes: str, seed: int = 1) -> Run:
        return load_run("grpo_tiny_cpu", None, [*words, f"run_dir=runs/{seed}", f"megatron_training.seed={seed}", *changes])

    written = with_absolute_paths(load()).config.as_written()
    _write_run(tmp_path / "runs" / "1", lambda index: 0.5)
    report = json.dumps({"title": "grpo_tiny_cpu", "outcome": "finished", "config_set": written}, default=str)
    (tmp_path / "runs" / "1" / "report.json").write_text(report)
    assert [band.source for band in find_bands(load(seed=2))] == ["earlier runs: 1"]
    for name in ("judge_prompt=@/prompt.txt", "judge_rubric=@/rubric.json", "external_plugins=[@/reward.py]"):
        other = name.replace("@", "elsewhere")
        assert not find_bands(load(f"rl_config.{other}", seed=2)), other


def test_the_run_file_of_a_recipe_has_the_recipes_curve(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[3] / "recipes" / "gmpo"
    assert command.main([str(folder / "A2.yaml"), "--json"]) == 0
    (curve,) = json.loads(capsys.readouterr().out)["curves"]
    assert curve["metric"] == "grpo/score/mean" and "gmpo" in curve["source"]
