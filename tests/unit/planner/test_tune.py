"""`mindspeed-rl plan tune` without its pilots: what is tried, what a pilot may write, what is refused before any starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from published import SHIPPED

from mindspeed_rl.cli import plan as command
from mindspeed_rl.cli.tune import _read_failure
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values, compose, find_project_configs, locate
from mindspeed_rl.planner.devices import find_device
from mindspeed_rl.planner.fit import fit_run
from mindspeed_rl.planner.tune import (
    Layout,
    Pilot,
    build_pilot_tree,
    choose,
    format_table,
    format_tree,
    list_layouts,
    parse_variations,
)
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import is_valid

TINY = sorted(find_project_configs().glob("*_tiny_cpu.yaml"))
ALL = [path for path in (*SHIPPED, *TINY) if not path.stem.startswith("serve")]
#: two by default, as each takes half a second
SOME = ("ppo_tiny_cpu", "sft_tiny_cpu")
FILES = [pytest.param(path, id=path.stem, marks=() if path.stem in SOME else pytest.mark.slow) for path in ALL]


def _compose(name: str, *overrides: str) -> dict[str, Any]:
    return compose(*locate(name, None), list(overrides))


def _draft(tree: dict[str, Any], name: str = "test") -> Run:
    return draft(build_run_config(tree, config_name=name))


@pytest.mark.parametrize("path", FILES)
def test_a_pilot_keeps_the_rules_and_writes_only_into_its_folder(path: Path) -> None:
    written = ["save=/elsewhere", "save_interval=5", "save_hf=true", "eval_interval=2", "keep_last=2"]
    tree = _compose(path.stem, *(f"actor_config.{item}" for item in written if "eval" not in item))
    trackers = dict.fromkeys(("tensorboard", "wandb", "swanlab", "mlflow", "trackio", "otlp"), True)
    changes: dict[str, object] = {f"rl_config.use_{name}": value for name, value in trackers.items()}
    changes |= {"rl_config.report_to": ["wandb"], "rl_config.wandb_project": "mine", "rl_config.wandb_save_dir": "/elsewhere"}
    changes |= {"msprobe_config.dump_path": "/elsewhere", "profiler_config.integrated.profile_save_path": "/elsewhere"}
    pilot = build_pilot_tree(apply_values(tree, changes), "/pilot/run")
    run = _draft(pilot, path.stem)
    assert is_valid(run) == is_valid(_draft(_compose(path.stem), path.stem))
    cfg = run.config
    assert run.folder == Path("/pilot/run") and "/elsewhere" not in json.dumps(pilot)
    roles = (cfg.actor_config, cfg.critic_config, cfg.megatron_training)
    assert all(role is None or (role.save is None and role.eval_data_path is None) for role in roles)
    assert cfg.rl_config is None or not (cfg.rl_config.tracker_names or cfg.rl_config.fault_tolerance.enabled)


@pytest.mark.parametrize("path", FILES)
def test_a_written_run_file_is_read_as_the_one_that_was_tried(path: Path, tmp_path: Path) -> None:
    tree = _compose(path.stem)
    tree["rl_config"] = dict(tree.get("rl_config") or {}) | {"external_plugins": ["a b.py", "ü:x"]}
    (tmp_path / "mine.yaml").write_text(format_tree(["first line", "", "a table"], tree))
    assert compose(tmp_path, "mine", []) == tree


@pytest.mark.parametrize(
    "value", [1e-6, 2.5e-4, 1.25e-05, 3e16, float("inf"), -0.0, "1e-6", "yes", "null", "a: b # c", None, True]
)
def test_every_value_of_a_run_file_is_written_as_itself(value: object) -> None:
    text = format_tree([], {"actor_config": {"on": value, "lr": [value, {"y": value}]}})
    assert yaml.safe_load(text) == {"actor_config": {"on": value, "lr": [value, {"y": value}]}}


def test_a_text_that_a_run_file_would_replace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a text with \$\{"):
        format_tree([], {"rl_config": {"judge_prompt": "${oc.env:HOME}"}})


def test_layouts_of_a_run_have_its_devices_and_everything_else_of_it() -> None:
    tree = _compose("ppo_tiny_cpu", "actor_config.clip_grad=0.7")
    run = _draft(tree)
    layouts = list_layouts(tree, run, find_device(run), variations={})
    assert layouts[0].values == {} and len(layouts) > 2 and len({str(layout) for layout in layouts}) == len(layouts)
    planned = [layout.planned_s for layout in layouts[1:]]
    assert planned == sorted(planned)
    layout_keys = (
        "parallel",
        "micro_batch",
        "recompute",
        "virtual",
        "offload",
        "swap",
        "gpu_memory",
        "head",
        "chunk",
        "layer_list",
    )
    for layout in layouts:
        other = _draft(dict(layout.tree))
        assert is_valid(other) and other.placement.num_devices == run.placement.num_devices
        assert other.config.actor_config.clip_grad == 0.7
        assert all(any(word in key for word in layout_keys) for key in layout.values), layout.values
        # the critic is on the same devices
        sizes = [role.tensor_model_parallel_size for role in (other.config.actor_config, other.config.critic_config) if role]
        assert sizes == sizes[:1] * 2


@pytest.mark.parametrize("name", ["sft_tiny_cpu", pytest.param("grpo_tiny_cpu", marks=pytest.mark.slow)])
def test_layouts_are_searched_for_both_engines(name: str) -> None:
    tree = _compose(name, "megatron_training.engine=fsdp", "actor_config.tensor_model_parallel_size=1", "platform=npu")
    if "rl_config" in tree:
        tree["rl_config"]["use_prefix_grouper"] = False
    run = _draft(tree)
    results = fit_run(tree, run, find_device(run))
    assert results and all(_draft(result.tree).config.actor_config.engine == "fsdp" for result in results)


def test_all_combinations_of_listed_values_are_layouts_and_one_that_breaks_a_rule_says_which() -> None:
    tree = _compose("grpo_tiny_cpu")
    run = _draft(tree)
    words = ["actor_config.tensor_model_parallel_size=1,2,3", "generate_config.infer_tensor_parallel_size=1,2"]
    layouts = list_layouts(tree, run, find_device(run), variations=parse_variations(words))
    # six combinations, of which one is the run file as it is; on two devices one row of 512 samples is too many without TP2
    assert len(layouts) == 6 and layouts[0].values == {} and not any(layout.problem for layout in layouts[:2])
    problems = {str(layout.values.get("actor_config.tensor_model_parallel_size")): layout.problem for layout in layouts[2:]}
    assert "(64 x 8 / 2 = 256)" in problems["1"] and "devices of the actor (2" in problems["3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tensor=1,2"], "not of the form group.key=VALUE,VALUE"),
        (["actor_config.micro_batch_size="], "not of the form"),
        (["actor_config.micro_batch_size=1,,2"], "not of the form"),
        (["actor_config.micro_batch_size=1", "actor_config.micro_batch_size=2"], "comes twice"),
        ([f"actor_config.micro_batch_size={','.join(map(str, range(257)))}"], "257 combinations are more than 256"),
        (["actor_config.micro_batch_size=[1]"], "is a list"),
        (["actor_config.micro_batch_size={a"], "cannot be read"),
    ],
)
def test_values_to_vary_have_one_form(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="--vary: .*" + message.replace("[", r"\[")):
        parse_variations(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", "0"], "--top: 0 must be at least 1"),
        (["--minutes", "0"], "--minutes: 0 must be above 0"),
        (["--pilot-minutes", "nan"], "--pilot-minutes: nan must be above 0"),
        (["--nodes", "0"], "--nodes: 0 must be at least 1"),
        (["-o", "mine.txt"], "--output: mine.txt is not the name of a run file"),
        (["-o", "missing/mine.yaml"], "in one that does not exist"),
        (["--keep", "full"], "--keep: full is not empty"),
        (["--vary", "actor_config.tensor_model_paralel_size=1"], "tensor_model_paralel_size"),
        (["actor_config.tensor_model_parallel_size=3"], "tensor_model_parallel_size"),
        pytest.param(["actor_config.load=/nowhere"], "/nowhere", marks=pytest.mark.slow),
    ],
)
def test_bad_input_is_one_error_and_starts_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert command.main(["tune", "--config-name", "grpo_tiny_cpu", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "pilot 1 of" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


LAYOUTS = [Layout({}, {}, "fits", 4.0), Layout({}, {"a.b": 2}, "fits", 2.0), Layout({}, {"a.b": 4}), Layout({}, {"a.b": 8})]


def test_the_fastest_by_its_last_iteration_is_chosen_and_failures_are_entries() -> None:
    pilots = [
        Pilot(LAYOUTS[0], "measured", (9.0, 3.0)),
        Pilot(LAYOUTS[1], "measured", (2.0, 3.5)),
        Pilot(LAYOUTS[2], "out of memory", (1.0,), "in phase update"),
        Pilot(LAYOUTS[3], "took too long", (), "no 2 iterations within 1 minutes"),
    ]
    assert choose(pilots) is pilots[0] and choose(pilots[2:]) is None and choose([]) is None
    lines = list(format_table(pilots))
    assert lines[1].split() == ["*", "3", "4", "as", "written"] and lines[2].split() == ["3.5", "2", "a.b=2"]
    assert lines[3].split()[:3] == ["-", "-", "a.b=4"] and lines[3].endswith("(out of memory: in phase update)")
    assert "took too long" in lines[4]


def test_a_failure_is_read_from_the_report_or_from_the_output(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    output.write_text("start\nerror: first\nerror: the last one\n")
    assert _read_failure(tmp_path, output, 1) == ("failed", "the last one")
    output.write_text("killed\n")
    assert _read_failure(tmp_path, output, -9) == ("failed", "its process ended with exit code -9")
    text = "failed: WorkerError: worker 1: DeviceMemoryError: out of memory in phase update: weights 1 GiB."
    (tmp_path / "report.json").write_text(json.dumps({"outcome": text}))
    assert _read_failure(tmp_path, output, 1) == ("out of memory", text.removeprefix("failed: "))
