from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindspeed_rl.adaptors.cpu_attention import KernelChoice
from mindspeed_rl.cli import explain
from mindspeed_rl.cli import plan as command
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values, compose, locate
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.report import write_report
from mindspeed_rl.planner import published
from mindspeed_rl.planner.devices import DEVICES
from mindspeed_rl.planner.efficiency import CONSTANTS, EFFICIENCIES, NPU, PhaseError
from mindspeed_rl.planner.engine import plan_engine
from mindspeed_rl.planner.fit import FitRequest, _build_space, _Search, build_grpo_tree
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.prediction import predict
from mindspeed_rl.planner.run_files import read_block
from mindspeed_rl.planner.run_shape import read_shape
from mindspeed_rl.planner.samples import Lengths, SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, _compare_kernels, _read_bytes, _StepSeconds, calibrate, plan_time
from mindspeed_rl.planner.step_costs import count_kernels
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.resolve import resolve

TABLE = Path(__file__).parents[3] / "benchmarks" / "results" / "published_runs.json"


def planned(name: str, mean_response: float | None = None, **overrides: object) -> TimePlan:
    tree = compose(*locate(name, None), [])
    cfg = build_run_config(apply_values(tree, {key.replace("__", "."): value for key, value in overrides.items()}))
    return plan_time(draft(cfg), DEVICES["A3"], samples=SampleMeans(mean_response, 200.0))


def test_lengths_are_those_of_a_cut_lognormal() -> None:
    lengths = Lengths(1000.0, 4000.0)
    generator = random.Random(1)
    median = lengths.mean  # found by the draw itself: the mean of what is cut must come out as asked
    for _ in range(60):
        sampled = [min(4000.0, generator.lognormvariate(math.log(median), Lengths.SIGMA)) for _ in range(20000)]
        median *= 1000.0 / (sum(sampled) / len(sampled))
    sampled = [min(4000.0, generator.lognormvariate(math.log(median), Lengths.SIGMA)) for _ in range(50000)]
    assert lengths.above(2000.0) == pytest.approx(sum(length > 2000 for length in sampled) / len(sampled), abs=0.01)
    assert lengths.mean_square == pytest.approx(sum(length * length for length in sampled) / len(sampled), rel=0.03)
    assert lengths.above(4000.0) == 0.0 and lengths.above(0.0) == 1.0
    assert lengths.max_of(10_000) == 4000.0 and lengths.max_of(4) < 4000.0


def test_an_update_is_its_operations_over_the_chips_share() -> None:
    plan = planned("dapo_qwen3_32b_A3", mean_response=1000.0, rl_config__use_prefix_grouper=False)
    # 32.8e9 parameters less the embedding, 6 operations a parameter and token, 256 responses of 1200 tokens, 16 devices
    weights = 32_762_123_264 - 151936 * 5120
    least = 6 * weights * 256 * 1200 / (16 * 354e12 * NPU["megatron"].train)
    assert least < plan.parts["update"]["computing"] < 1.1 * least  # attention is on top
    shared = planned("dapo_qwen3_32b_A3", mean_response=1000.0)
    assert 0.8 * least < shared.parts["update"]["computing"] < plan.parts["update"]["computing"]  # prompts of 200 tokens once


def test_recomputation_adds_a_third_of_the_update() -> None:
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain = planned("dapo_qwen3_32b_A3").parts["update"]["computing"]
    full = planned("dapo_qwen3_32b_A3", **{f"actor_config__{key}": value for key, value in again.items()})
    assert full.parts["update"]["computing"] == pytest.approx(plain * 4 / 3)


def test_more_devices_and_shorter_responses_are_never_slower() -> None:
    seconds = [planned("grpo_qwen3_8b_A3", rl_config__actor_resource__num_npus=count).total for count in (16, 32, 64)]
    assert seconds == sorted(seconds, reverse=True)
    lengths = [planned("grpo_qwen3_8b_A3", mean_response=mean).total for mean in (500.0, 1000.0, 4000.0, 8000.0)]
    assert lengths == sorted(lengths)


def test_stages_make_bubbles_and_one_stage_makes_none() -> None:
    parts = planned("dapo_qwen3_32b_A3").parts["update"]
    # one replica, 256 micro-batches, two stages
    assert parts["bubble"] == pytest.approx((parts["computing"] + parts["host"] + parts["collectives"]) / 256)
    alone = planned("dapo_qwen3_32b_A3", actor_config__pipeline_model_parallel_size=1)
    assert alone.parts["update"]["bubble"] == 0.0


def test_a_calibrated_plan_takes_as_long_as_was_measured() -> None:
    plan = planned("grpo_qwen3_8b_A3")
    longer = calibrate(plan, {"rollout": 2.0, "all": 3.0})
    assert longer.phases["rollout"] == pytest.approx(2 * plan.phases["rollout"])
    assert longer.phases["update"] == pytest.approx(3 * plan.phases["update"])
    assert sum(longer.parts["rollout"].values()) == pytest.approx(longer.phases["rollout"])


@pytest.fixture(scope="module")
def runs() -> list[published.PublishedRun]:
    return published.read_published_runs(TABLE, only_fitted=True)


def test_the_planner_keeps_to_the_published_runs_that_its_constants_were_fitted_to(runs: list[published.PublishedRun]) -> None:
    errors, ratios = [], []
    for run in runs:
        predicted = run.predict(NPU[run.engine])
        errors += [predicted[name] / seconds for name, seconds in run.seconds.items()]
        ratios += [run.plan_gib() / run.record["gib"]] if "gib" in run.record else []
    within = sum(1 / 1.6 < ratio < 1.6 for ratio in errors)
    assert within >= 0.9 * len(errors) and statistics.median(abs(ratio - 1) for ratio in errors) < 0.25
    assert len(ratios) == 9 and all(0.85 < ratio < 1.15 for ratio in ratios)


def test_a_range_is_the_error_of_runs_that_were_left_out() -> None:
    # of 13 errors the one of rank ceil(14 * 2 / 3) = 10 bounds the next in two of three cases
    errors = [math.log(1 + 0.05 * rank) for rank in range(1, 14)]
    made = published._summarize(errors)
    assert made.spread == pytest.approx(1.5) and made.figures == 13 and made.median == pytest.approx(0.35)
    assert published._summarize([0.001, -0.002, 0.003]).spread == 1.1  # no range is narrower
    assert NPU["megatron"].find_error("update") == NPU["megatron"].find_error("all")  # too few figures of its own


def test_a_range_of_a_phase_is_its_own(runs: list[published.PublishedRun]) -> None:
    plan = replace(planned("grpo_qwen3_8b_A3"), efficiency=replace(NPU["megatron"], errors={
        "all": PhaseError(2.0, 0.3, 9), "rollout": PhaseError(1.25, 0.1, 4)
    }))  # fmt: skip
    assert plan.bounds(100.0, "rollout") == (80.0, 125.0) and plan.bounds(100.0, "update") == (50.0, 200.0)


@pytest.mark.slow
def test_the_shipped_constants_are_the_fit_to_the_table(runs: list[published.PublishedRun]) -> None:
    left_out = list(published.leave_one_out(runs))
    made = published.encode_constants(published.fit_constants(runs), left_out, published.summarize_memory(runs))
    assert made == json.loads(CONSTANTS.read_text())
    errors = [error for one in left_out for _, error in one.list_errors()]
    assert statistics.median(abs(math.expm1(error)) for error in errors) < 0.25
    assert sum(abs(error) < math.log(1.6) for error in errors) >= 0.9 * len(errors)


@pytest.mark.slow
def test_the_fit_recovers_constants_that_made_the_figures(runs: list[published.PublishedRun]) -> None:
    truth = replace(published.PRIOR, layer_s=2.4e-3)
    eager = [run for run in runs if run.record["name"] in ("CISPO Qwen2.5-0.5B, eager", "Distillation of Qwen3-0.6B, eager")]
    made = [replace(run, seconds=run.predict(truth)) for run in eager]
    found = published.fit_constants(made)
    assert found["megatron"].layer_s == found["fsdp"].layer_s == pytest.approx(2.4e-3, rel=0.08)


@pytest.mark.parametrize(("change", "message"), [
    ({"device": "A9"}, "'A9'"), ({"model": "qwen9"}, "qwen9"), ({"keys": {"actor_config.no_key": 1}}, "no_key"),
])  # fmt: skip
def test_a_run_of_the_table_that_cannot_be_planned_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    record = next(run for run in json.loads(TABLE.read_text())["runs"] if run["name"].startswith("GMPO"))
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"runs": [record | change]}))
    with pytest.raises(ValueError, match=f"table.json: GMPO Qwen2.5-7B: .*{message}"):
        published.read_published_runs(path)


def test_the_second_engine_divides_weights_and_gradients_over_all_devices() -> None:
    request = FitRequest("qwen3_8b", read_block("qwen3_8b", None), 8, 1024, 1024)
    tree = build_grpo_tree(request)
    tree["megatron_training"]["engine"] = "fsdp"
    plan = plan_memory(draft(build_run_config(tree)), DEVICES["A2"])
    owners = next(phase for phase in plan.fullest.phases if phase.name == "update").owners
    # 8.19e9 float32 weights, and two moments, over eight devices; gradients of micro-batches are added in full first
    parameters = 8_190_735_360
    assert owners["weights"] == pytest.approx(4 * parameters / 8, rel=1e-3)
    assert owners["optimizer"] == pytest.approx(8 * parameters / 8, rel=1e-3)
    assert owners["gradients"] + owners["gradients of all ranks"] == pytest.approx(4 * parameters, rel=1e-3)
    # embedding and head of 151936 x 4096, and two of 36 layers, in bf16
    layers = 2 * (parameters - 2 * 151936 * 4096) / 36
    assert owners["gathered weights"] == pytest.approx(2 * (2 * 151936 * 4096 + layers), rel=1e-2)
    time = plan_time(draft(build_run_config(tree)), DEVICES["A2"])
    assert time.efficiency is NPU["fsdp"] and time.phases["update"] > 0


def test_time_prints_ranges_and_modes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["time", "--config-name", "grpo_qwen3_8b_A3", "--mean-response", "2000"]) == 0
    text = capsys.readouterr().out
    assert " to " in text.splitlines()[0] and "one_step_off" in text
    assert command.main(["time", "--config-name", "grpo_qwen3_8b_A3", "--mean-response", "90000"]) == 2
    assert "--mean-response: 90000 must be above 0 and at most the longest response, 8192" in capsys.readouterr().err


def test_a_run_folder_corrects_the_plan_and_its_report_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = build_run_config(compose(*locate("grpo_tiny_cpu", None), []), config_name="grpo_tiny_cpu")
    (tmp_path := tmp_path / "runs" / "own").mkdir(parents=True)  # without other runs beside it
    run = replace(resolve(cfg, platform="cpu"), folder=tmp_path)
    prediction = predict(run)
    plain = plan_time(draft(cfg), DEVICES["cpu"], samples=SampleMeans(4.0, 6.0))
    records = [
        {
            "iteration": number,
            "timing/rollout": seconds * plain.phases["rollout"],
            "timing/update": 0.5 * plain.phases["update"],
            "timing/all": 1.0,
            "response_length/mean": 4.0,
            "prompt_length/mean": 6.0,
            "memory/update/weights_gib": 0.001,
            "memory/generate/kv_cache_gib": 0.002,
        }
        for number, seconds in ((1, 90.0), (2, 90.0), (3, 3.0), (4, 3.0))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = prediction.compare(History(records))
    path = write_report(
        tmp_path, dataclasses.asdict(cfg), title="grpo_tiny_cpu", config_set=cfg.as_written(), plan=lambda _: rows
    )
    by_name = {row["name"]: row for row in rows["rows"]}
    rollout = by_name["rollout"]
    factors = prediction.promise.time.factors if prediction.promise is not None else {}  # of the machine
    assert rollout["measured"] == pytest.approx(3 * rollout["with_lengths"] / factors.get("rollout", 1.0))
    # nobody knew the lengths before the run: 8 tokens at most, half of them
    before = plan_time(draft(cfg), DEVICES["cpu"]).phases["rollout"]
    assert rollout["predicted"] == prediction.seconds["rollout"].predicted
    assert rollout["predicted"] == pytest.approx(before * factors.get("rollout", 1.0))
    assert by_name["update: weights"]["measured"] == 0.001
    cache = by_name["generate: KV cache"]
    assert cache["measured"] == 0.002 and cache["low"] == cache["high"] == cache["predicted"] > 0
    assert "| Planned for cpu |" in path.read_text()
    assert '"name":"rollout","predicted"' in (tmp_path / "report.html").read_text()
    assert command.main(["time", "--config-name", "grpo_tiny_cpu", "--calibrate", str(tmp_path), "--json"]) == 0
    factors = json.loads(capsys.readouterr().out)["factors"]
    assert factors["rollout"] == pytest.approx(3.0) and factors["update"] == pytest.approx(0.5)
    assert command.main(["time", "--config-name", "grpo_tiny_cpu", "--calibrate", str(tmp_path / "none")]) == 2
    assert "is not a folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "npus"),
    [("qwen25_7b", 8), *(pytest.param(name, 16, marks=pytest.mark.slow) for name in ("qwen3_32b", "qwen3_30b_a3b"))],
)
def test_fit_finds_layouts_that_fit_and_explain_accepts(
    model: str, npus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.yaml"
    asked = ["fit", "--npus", str(npus), "--model", model, "--prompt", "2k", "--response", "8k", "--json", "-o", str(path)]
    assert command.main(asked) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert layouts and layouts[0]["verdict"] == "fits"
    seconds = [layout["seconds"]["middle"] for layout in layouts]
    assert all(later > earlier * 0.94 for earlier, later in zip(seconds, seconds[1:]))
    assert explain.main(["--config-name", str(path)]) == 0
    assert command.main(["memory", "--config-name", str(path), "--chip", "A3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.partition("valid\n")[2])
    assert report["peak"]["bytes"] == layouts[0]["bytes"]


def test_fit_says_what_does_not_fit_and_which_model_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fit", "--npus", "2", "--model", "qwen3_32b"]) == 2
    assert "qwen3_32b" in capsys.readouterr().err
    assert command.main(["fit", "--npus", "16", "--model", "qwen3_33b"]) == 2
    assert "the nearest name is qwen3_32b" in capsys.readouterr().err
    assert command.main(["fit", "--npus", "0", "--model", "qwen3_32b"]) == 2
    assert "--npus: 0 must be at least 1" in capsys.readouterr().err


def test_fit_takes_what_saves_memory_only_where_it_must_and_names_the_phase_that_is_too_large(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lengths = ["--prompt", "1k", "--response", "1k", "--prompts", "16", "--samples", "4"]
    asked = ["fit", "--npus", "1", "--model", "qwen3_8b", "--chip", "A2", *lengths]
    found = {}
    for memory in (48, 64, 400):
        assert command.main([*asked, "--memory-gib", str(memory), "--json"]) == 0
        found[memory] = json.loads(capsys.readouterr().out)["layouts"][0]
        assert found[memory]["verdict"] == "fits" and found[memory]["bytes"] < memory * 2**30
    # 8.19e9 weights in bf16, gradients in bf16, no states: 30.5 GiB; fp32 gradients would add 15.3 to what else is there
    assert found[48]["values"]["actor_config.optimizer_offload_fraction"] == 1.0
    assert found[48]["values"]["actor_config.grad_reduce_in_fp32"] is False
    # with fp32 gradients and no states 45.8 GiB: nothing is rounded
    assert "actor_config.grad_reduce_in_fp32" not in found[64]["values"]
    # 8.19e9 x 18 bytes and four tenths for the engine fit into 400 GiB: nothing leaves, and so an iteration is faster
    values = found[400]["values"]
    assert not {"actor_config.optimizer_offload_fraction", "actor_config.grad_reduce_in_fp32"} & values.keys()
    assert values["generate_config.offload_train_optimizer"] is False
    seconds = [found[memory]["seconds"]["middle"] for memory in (48, 64, 400)]
    assert seconds == sorted(seconds, reverse=True)
    assert command.main([*asked, "--memory-gib", "32"]) == 2
    assert "the nearest layout takes 39 GiB in phase update" in capsys.readouterr().err
    assert command.main([*asked, "--memory-gib", "14"]) == 2
    assert "no engine does in phase generate; generate_config.gpu_memory_utilization 0.9 leaves" in capsys.readouterr().err


def test_fit_streams_a_reference_that_would_stay_on_the_trainers() -> None:
    request = FitRequest("qwen3_8b", read_block("qwen3_8b", None), 2, 1024, 1024, prompts=16, samples=4)
    tight = replace(DEVICES["A2"], memory=52 * 2**30)
    found = _Search(request, _build_space(request), tight, None, None).find_layouts(1)
    assert found and all(result.values["actor_config.stream_ref_weights"] is True for result in found)
    assert all("reference" not in phase.owners or phase.name == "reference pass" for phase in found[0].memory.groups[0].phases)


def test_the_smallest_machine_of_each_stage_and_what_fewer_devices_cost(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt", "1k", "--response", "1k", "--prompts", "16", "--samples", "4"]
    assert command.main(["smallest", "--model", "qwen25_7b", "--chip", "A2", *lengths, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    for stage in stages.values():
        seconds = [machine["seconds"]["middle"] for machine in stage["machines"]]
        counts = [machine["devices"] for machine in stage["machines"]]
        assert counts == [counts[0] * 2**index for index in range(len(counts))] and seconds == sorted(seconds, reverse=True)
        costs = [(more, more + fewer) for fewer, more in zip(seconds[1:], [cost["seconds"] for cost in stage["costs"]])]
        assert [total for _, total in costs] == pytest.approx(seconds[:-1]) and all(more > 0 for more, _ in costs)
    # adapters have a small optimizer: none of it leaves for the host
    assert stages["SFT with LoRA"]["machines"][0]["host_bytes"] == 0
    # bf16 weights of 15.2 GB, twice 4 bytes of moments and 4 of main weights for each of 7.6e9 parameters, of which all train
    assert stages["GRPO"]["machines"][0]["devices"] == 1
    assert stages["GRPO"]["machines"][0]["host_bytes"] == pytest.approx(7.616e9 * (12 + 2 * 2), rel=0.01)


@pytest.mark.slow
def test_the_smallest_machine_is_explained_by_what_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt", "1k", "--response", "1k", "--prompts", "16", "--samples", "4"]
    assert command.main(["smallest", "--model", "qwen25_7b", "--chip", "A2", "--memory-gib", "40", *lengths]) == 0
    text = capsys.readouterr().out
    assert "Fewer devices are too few:" in text and "qwen25_7b with sequences of 2048 tokens does not fit on 1 devices" in text
    assert command.main(["smallest", "--model", "qwen25_7b", "--prompts", "0"]) == 2
    assert "--prompts: 0 must be at least 1" in capsys.readouterr().err


def test_a_push_of_adapters_takes_as_long_as_they_are_large() -> None:
    lora = {"actor_config__lora_target_modules": ["linear_qkv"], "actor_config__lora_r": 8, "actor_config__lora_alpha": 16}
    plan = planned("grpo_tiny_cpu", **lora, generate_config__lora_push="adapter")
    # A of 8 x 128, and B of the 256 rows of query, key and value together; four layers, fp32
    adapters = 4 * 4 * 8 * (128 + 256)
    exchanged = adapters / (DEVICES["A3"].link * NPU["megatron"].push)
    assert plan.parts["resharding_to_infer"]["exchange"] == pytest.approx(exchanged)


def test_models_with_dedicated_devices_run_there(tmp_path: Path) -> None:
    dedicated = {
        "rl_config__use_integrated_worker": False,
        "rl_config__actor_resource": {"num_npus": 16},
        "rl_config__reference_resource": {"num_npus": 32},
    }
    shared, own = planned("grpo_qwen3_8b_A3"), planned("grpo_qwen3_8b_A3", **dedicated)
    assert own.devices == 48
    assert own.parts["reference_model"]["computing"] == pytest.approx(shared.parts["reference_model"]["computing"] / 2)
    assert own.parts["update"] == shared.parts["update"]
    # a reward model with 10 of the 36 layers, and a score in place of a vocabulary
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 10}
    config |= {"intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config |= {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "hidden_act": "silu"}))
    rewarded = planned("grpo_qwen3_8b_A3", rl_config__reward_model=str(tmp_path))
    pass_of_the_actor = rewarded.parts["reference_model"]["computing"]
    assert 0.23 < rewarded.parts["reward_model"]["computing"] / pass_of_the_actor < 10 / 36


def test_a_supervised_stage_takes_the_time_of_the_sequences_that_its_data_has(tmp_path: Path) -> None:
    lengths = np.array([4, 12, 6, 8, 30, 2, 10, 10, 16, 4], np.int32)
    prefix = tmp_path / "data_packed_input_ids_document"
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]) * 4
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + offsets.astype(np.int64).tobytes() + documents.tobytes())
    Path(f"{prefix}.bin").write_bytes(bytes(4 * int(lengths.sum())))

    def plan(*values: tuple[str, object], mean: float | None = None) -> TimePlan:
        keys = {"data_path": str(tmp_path / "data"), "micro_batch_size": 5, "global_batch_size": 10, **dict(values)}
        changes = {f"megatron_training.{name}": value for name, value in keys.items()}
        cfg = build_run_config(apply_values(compose(*locate("sft_tiny_cpu", None), []), changes))
        return plan_time(draft(cfg), DEVICES["cpu"], samples=SampleMeans(mean))

    # each costs as much as the longest of its micro-batch: 30 in the first five, 16 in the others
    assert (plan().lengths.mean, plan().tokens) == (23, 230)
    # 64 is seq_length
    for other in (("no_pad_to_seq_lengths", False), ("data_path", str(tmp_path / "elsewhere"))):
        assert plan(other).lengths.mean == 64
    assert plan(mean=23).phases == plan().phases
    assert plan().phases["update"] < plan(mean=64).phases["update"]
    with pytest.raises(ValueError, match="--mean-response: 65 must be above 0 and at most the longest sequence, 64"):
        plan(mean=65)


def test_turns_and_tools_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["time", "--config-name", "grpo_tiny_agent_cpu", "--json"]
    assert command.main(asked) == 0
    plain = json.loads(capsys.readouterr().out)
    assert any("--tool-seconds" in note for note in plain["notes"])
    assert command.main([*asked, "--mean-turns", "3", "--tool-seconds", "2.5"]) == 0
    waiting = json.loads(capsys.readouterr().out)
    rollout = [result["phases"]["rollout"]["parts"] for result in (plain, waiting)]
    assert rollout[0]["tools"] == 0.0 and rollout[1]["tools"] == 2.5
    assert rollout[1]["decoding"] == rollout[0]["decoding"] and rollout[1]["prefill"] >= rollout[0]["prefill"]
    assert not any("--tool-seconds" in note for note in waiting["notes"])
    assert command.main(["time", "--config-name", "grpo_tiny_cpu", "--tool-seconds", "2.5"]) == 2
    assert "--tool-seconds: the run file has no tools" in capsys.readouterr().err


def test_further_turns_are_prefilled_anew_without_a_cache_of_prefixes() -> None:
    parts = []
    for caching in (True, False):
        tree = compose(*locate("grpo_tiny_agent_cpu", None), [f"generate_config.enable_prefix_caching={caching}"])
        plan = plan_time(draft(build_run_config(tree)), DEVICES["cpu"], samples=SampleMeans(20.0, 10.0, turns=3.0))
        parts.append(plan.parts["rollout"]["prefill"])
    # a sample has 10 tokens of prompt, and for each further turn 10 and half of 20; with the cache 8 samples share their prompt
    assert parts[1] / parts[0] == pytest.approx((10 + 2 * 20) / (10 / 8))


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"rl_config__fault_tolerance": {"enabled": True}}, "fault_tolerance"),
        ({"rl_config__blocking": False}, "blocking"),
        ({"generate_config__update_weight_mode": "delta"}, "delta"),
    ],
)
def test_what_the_seconds_leave_out_is_said(overrides: dict, word: str) -> None:
    assert any(word in note for note in planned("grpo_qwen3_8b_A3", **overrides).notes)
    assert not any(word in note for note in planned("grpo_qwen3_8b_A3").notes)


def test_a_run_that_cannot_be_planned_runs_and_its_report_says_why() -> None:
    # no keys say the shape, and no config.json where the quickstart leaves its own
    unknown = [
        "model.tiny_qwen25.num_layers=null",
        "actor_config.load=null",
        "megatron_training.tokenizer_name_or_path=nowhere",
    ]
    cfg = build_run_config(compose(*locate("grpo_tiny_cpu", None), unknown))
    run = resolve(cfg, platform="cpu")
    assert "num_layers" in predict(run).compare(History())["missing"]


def test_a_served_judge_reads_prompt_and_response_and_writes_its_reply(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 2, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes(bytes(4 * 250_000))
    tree = compose(*locate("grpo_tiny_cpu", None), [])

    def plan(**rl: object) -> dict[str, float]:
        changes = {f"rl_config.{name}": value for name, value in {"judge_model": str(tmp_path), **rl}.items()}
        cfg = build_run_config(apply_values(tree, changes | {"generate_config.dtype": "float32"}))
        return plan_time(draft(cfg), DEVICES["cpu"], samples=SampleMeans(4.0, 6.0)).parts["judge"]

    # 64 prompts of 8 samples on two engines, a product and a sum for each of 250,000 weights and 10 tokens
    cpu, efficiency = DEVICES["cpu"], EFFICIENCIES["cpu"]["megatron"]
    assert plan()["prefill"] == pytest.approx(256 * 10 * 2 * 250_000 / (cpu.flops * efficiency.prefill))
    # with one engine of two devices all replies are on it, and each device computes half of them
    assert plan(judge_tensor_parallel_size=2)["prefill"] == pytest.approx(plan()["prefill"])
    result, two = (sum(plan(judge_resource={"num_npus": count}).values()) for count in (1, 2))
    assert result > two
    short, long = plan(judge_max_tokens=64), plan(judge_max_tokens=512)
    assert short["prefill"] == long["prefill"] and long["decoding"] > 4 * short["decoding"]


def test_each_collective_of_a_layer_has_a_latency() -> None:
    request = FitRequest("qwen3_8b", read_block("qwen3_8b", None), 8, 1024, 1024, prompts=16, samples=4)
    layout = {"actor_config.tensor_model_parallel_size": 2, "actor_config.sequence_parallel": True}
    tree = apply_values(
        build_grpo_tree(request), layout | {"rl_config.max_packing_token_size": 2048, "rl_config.use_prefix_grouper": False}
    )
    means = SampleMeans(512.0, 512.0)

    def plan(seconds: float, **changes: object) -> float:
        # operations take no time, so that all that the host does is seen
        efficiency = replace(NPU["megatron"], collective_s=seconds, train=1e9)
        run = draft(build_run_config(apply_values(tree, {f"actor_config.{name}": value for name, value in changes.items()})))
        return plan_time(run, DEVICES["A2"], samples=means, efficiency=efficiency).phases["reference_model"]

    # 64 samples on four replicas, two in a micro-batch: 8 passes through 36 layers, which gather and scatter twice
    assert plan(1.0) - plan(0.0) == pytest.approx(8 * 36 * 4, rel=1e-6)
    assert plan(1.0, sequence_parallel=False) - plan(0.0, sequence_parallel=False) == pytest.approx(8 * 36 * 2, rel=1e-6)
    alone = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    assert plan(1.0, **alone) == plan(0.0, **alone)


def test_a_step_of_more_responses_than_the_largest_captured_graph_runs_without_graphs() -> None:
    efficiency = replace(NPU["megatron"], layer_s=1.0, graph_layer_s=0.25, response_s=0.0)
    steps = _StepSeconds(DEVICES["A2"], efficiency, is_eager=False, captured=16)
    assert [steps.compute(0.0, 0.0, 10, active) for active in (1.0, 16.0, 17.0)] == [2.5, 2.5, 10.0]
    run, keys = "grpo_qwen3_8b_A3", {"generate_config__enforce_eager": False, "generate_config__max_num_seqs": 64}
    few = planned(run, 1000.0, **keys, generate_config__cudagraph_capture_sizes=[1, 2, 4]).phases["rollout"]
    assert few > planned(run, 1000.0, **keys, generate_config__cudagraph_capture_sizes=[64]).phases["rollout"]


def test_adapters_of_the_engine_are_further_kernels_of_its_layers() -> None:
    request = FitRequest("qwen3_8b", read_block("qwen3_8b", None), 8, 1024, 1024, prompts=16, samples=4)
    adapters = {"actor_config.lora_target_modules": ["linear_qkv", "linear_proj"], "actor_config.lora_r": 8}
    tree = apply_values(build_grpo_tree(request), adapters | {"actor_config.lora_alpha": 16, "rl_config.share_backbone": True})
    merged, apart = (apply_values(tree, {"generate_config.lora_push": name}) for name in ("merged", "adapter"))
    shapes = [read_shape(draft(build_run_config(tree)), DEVICES["A2"]) for tree in (merged, apart)]
    # adapters of query, key, value and output; norms of layer, queries and keys; four matrices; rotary embeddings, attention,
    # two sums, a norm; gate and product
    kernels = count_kernels(shapes[0].actor.plan.model_config, False)[0]
    assert [_compare_kernels(shape) for shape in shapes] == [1.0, pytest.approx(1 + 2 * (3 + 1) / kernels)]


def test_adapters_of_the_trainer_are_further_kernels_and_operations() -> None:
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    adapters = {"actor_config.lora_target_modules": targets, "actor_config.lora_r": 8, "actor_config.lora_alpha": 16}
    keys = {"actor_config.tensor_model_parallel_size": 1, "rl_config.actor_resource.num_npus": 1, "rl_config.init_kl_coef": 0.0}
    tree = apply_values(compose(*locate("grpo_tiny_cpu", None), []), {**keys, "rl_config.use_prefix_grouper": False})
    dense, lora = (
        plan_time(draft(build_run_config(apply_values(tree, more))), DEVICES["cpu"], samples=SampleMeans(5.0, 20.0))
        for more in ({}, adapters)
    )
    # a layer has a norm, two products, three of the MLP, six others; each of four adapters two products, a scale and a sum;
    # frozen weights have no gradient, so that an update is two forward passes and not three
    assert lora.parts["update"]["host"] == pytest.approx(dense.parts["update"]["host"] * 2 / 3 * (12 + 16) / 12)
    # 512 samples of 25 tokens; a layer's matrices are 128 x 256, 128 x 128, 128 x 768 and 384 x 128
    elements = 4 * 8 * ((128 + 256) + (128 + 128) + (128 + 768) + (384 + 128))
    more = lora.parts["update"]["computing"] - dense.parts["update"]["computing"] * 2 / 3
    cpu = EFFICIENCIES["cpu"]["megatron"]
    assert more == pytest.approx(512 * 25 * 2 * elements * 2 / (DEVICES["cpu"].flops * cpu.train))
    assert lora.parts["resharding_to_infer"]["merging"] == pytest.approx(4 * cpu.pass_s * 16 / 12)
    assert dense.parts["resharding_to_infer"]["merging"] == 0.0


def test_torchs_attention_on_the_cpu_takes_short_blocks_of_each_head() -> None:
    keys = {"actor_config.tensor_model_parallel_size": 1, "rl_config.actor_resource.num_npus": 1}
    tree = apply_values(compose(*locate("grpo_tiny_cpu", None), []), {**keys, "rl_config.use_prefix_grouper": False})
    run, means = draft(build_run_config(tree)), SampleMeans(5.0, 60.0)
    plain, blocks, slower = (
        plan_time(replace(run, attention=chosen), DEVICES["cpu"], samples=means)
        for chosen in (None, KernelChoice("blocks", "as tried"), KernelChoice("torch", "as tried"))
    )
    assert plain.phases == blocks.phases
    # 512 samples of 65 tokens, three blocks of up to 32; four layers of four heads; forward, and backward twice as long
    more = slower.parts["update"]["host"] - plain.parts["update"]["host"]
    assert more == pytest.approx(512 * 3 * 4 * 4 * 3 * EFFICIENCIES["cpu"]["megatron"].attention_s)
    more = slower.parts["reference_model"]["host"] - plain.parts["reference_model"]["host"]
    assert more == pytest.approx(512 * 3 * 4 * 4 * EFFICIENCIES["cpu"]["megatron"].attention_s)


def test_short_rows_exchange_over_the_ranks_that_dynamic_context_parallelism_gives_them() -> None:
    keys = {"rl_config__use_dynamic_bsz": True, "rl_config__max_packing_token_size": 16384}
    keys |= {"rl_config__use_prefix_grouper": False}

    def plan(size: int, **more: object) -> float:
        made = planned("grpo_qwen3_8b_A3", 1000.0, **keys, actor_config__context_parallel_size=size, **more)
        return made.parts["reference_model"]["collectives"]

    def exchange(size: int) -> float:  # of a rank that has as many tokens whatever the size is
        return (size - 1) / size

    none, fixed = (plan(4, actor_config__dynamic_context_parallel=dynamic) for dynamic in (True, False))
    half = plan(4, actor_config__dynamic_context_parallel=True, actor_config__min_dynamic_context_parallel_size=2)
    # 1200 tokens fit into the 4096 of a device: nothing is exchanged between the ranks of a row
    assert none < half < fixed
    assert (half - none) / (fixed - none) == pytest.approx(exchange(2) / exchange(4))


def test_a_step_of_int8_experts_reads_the_bytes_that_tokens_choose() -> None:
    keys = {"generate_config.enable_expert_parallel": False, "generate_config.enforce_eager": False}
    tree = apply_values(compose(*locate("grpo_qwen3_30b_a3b_A3_8dies", None), []), keys)
    shapes = [
        read_shape(draft(build_run_config(apply_values(tree, {"generate_config.quantization": name}))), DEVICES["A3"])
        for name in (None, "int8")
    ]
    engines = [plan_engine(shape) for shape in shapes]
    assert all(engines)
    full, int8 = (_read_bytes(shape, engine.weights) for shape, engine in zip(shapes, engines) if engine is not None)
    # 48 layers of 128 experts with three matrices of 2048 x 768, of which a token chooses 8
    experts = 48 * 128 * 3 * 2048 * 768
    assert full(1000) - full(1) == pytest.approx(2 * experts * 120 / 128, rel=1e-6)
    # a byte for each element, and a scale of bfloat16 for each row
    rows = 48 * 128 * (768 + 768 + 2048)
    assert int8(1000) - int8(1) == pytest.approx((experts + 2 * rows) * 120 / 128, rel=1e-6)
    assert 0 < int8(1) < full(1)
