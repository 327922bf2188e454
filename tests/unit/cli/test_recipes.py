"""Recipes: their run files are sound, their figures are the planner's, their twins are valid, their curves have a source."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.cli.explain import main as explain_main
from mindspeed_rl.cli.main import main
from mindspeed_rl.cli.recipe import compute_planned, make_twin
from mindspeed_rl.cli.recipe.record import CPU, Recipe, list_recipes, load_recipe
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.observability.expected_curve import EXPECTED
from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.plan_page import explain

RECIPES = list_recipes()
#: recipe, machine, run file
NPU_FILES = [
    (each, path) for each in RECIPES for name in each.machines if name != CPU for path in each.list_run_files(name)
]


def test_the_recipes_that_are_promised_are_there_with_files_for_both_lines_of_devices() -> None:
    assert {recipe.name for recipe in RECIPES} == set(
        "maths dapo gspo_experts gmpo cispo distillation lora agent_tools vision ppo sft_dpo long_context".split()
    )
    for recipe in RECIPES:
        assert {"A2", "A3", CPU} <= set(recipe.machines), recipe.name
        assert all(path.is_file() for machine in recipe.machines for path in recipe.list_run_files(machine))
    assert sum("950DT" in recipe.machines for recipe in RECIPES) >= 3


@pytest.mark.parametrize(("recipe", "path"), NPU_FILES, ids=lambda value: getattr(value, "name", None))
def test_a_run_file_of_devices_is_sound_and_its_figures_are_the_planners(recipe: Recipe, path: Path) -> None:
    report = explain(draft(load_run_config(str(path))))
    assert report["errors"] == [] and report["missing"] == [] and report["unavailable"] == []
    figures = compute_planned(path)
    assert recipe.read_planned()[path.stem] == figures, "mindspeed-rl recipe plan writes them anew"
    assert figures["chip"] in path.stem and figures["verdict"] == "fits"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_run_writes_where_no_other_one_does(recipe: Recipe) -> None:
    for machine in recipe.machines:
        for path in recipe.list_run_files(machine):
            cfg = load_run_config(str(path))
            keys = cfg.megatron_training if cfg.is_supervised else cfg.actor_config
            if machine == CPU:
                assert cfg.platform == CPU and cfg.run_dir is not None and not Path(cfg.run_dir).is_absolute()
            else:
                name = f"{recipe.name}_{path.stem}"
                assert cfg.run_dir == f"runs/{name}" and keys.save is not None and keys.save.split("/")[2] == name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_curve_is_of_the_length_of_its_run_and_what_is_published_names_its_place(recipe: Recipe) -> None:
    for machine in recipe.machines:
        curve = recipe.find_curve(machine)
        keys = load_run_config(str(recipe.list_run_files(machine)[-1])).actor_config
        if curve is not None:
            assert keys.train_iters is not None and curve.windows[-1].last <= keys.train_iters
            if curve.metric.startswith("eval/"):
                assert all(window.last % (keys.eval_interval or 1) == 0 for window in curve.windows) and keys.eval_data_path
    assert recipe.curve is not None or "published" in recipe.published or "no band" in recipe.published
    assert recipe.curve is None or any(word in recipe.published for word in ("verl-ascend-recipe", "MindSpeed-RL"))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twins")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=recipe.name, marks=() if recipe.name in ("maths", "agent_tools") else pytest.mark.slow)
        for recipe in RECIPES
    ],
)
def test_the_plan_of_a_twin_passes_the_checks_of_train(
    recipe: Recipe, twins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(twins)
    monkeypatch.setitem(REWARDS, recipe.name, None)
    monkeypatch.delitem(REWARDS, recipe.name)
    monkeypatch.chdir(make_twin(recipe))
    for path in recipe.list_run_files(CPU):
        # the second stage starts from the first one's result
        load = "megatron_training.load" if path.stem == "cpu_dpo" else "actor_config.load"
        changes = [f"{load}=model"] if recipe.stages and path.stem.endswith(recipe.stages[-1]) else []
        capsys.readouterr()
        assert explain_main(["--config-name", str(path), "--validate", *changes]) == 0, capsys.readouterr().out
        assert capsys.readouterr().out.startswith("valid\n")


def write_recipe(folder: Path, text: str = "", **fields: object) -> Path:
    """A recipe of its own, with the twin of another one."""
    folder.mkdir(parents=True)
    values = {"title": "t", "about": "a", "published": "nothing is published", "twin": "mindspeed-rl new {folder}"} | fields
    (folder / "recipe.yaml").write_text(text or json.dumps(values))
    for machine in ("A2", CPU):
        (folder / f"{machine}.yaml").write_text("defaults: [grpo_tiny_cpu, _self_]\nrun_dir: run\n")
    return folder


def test_data_are_made_of_data_sets_by_texts_and_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "1 + 1?", "answer": "It costs $$2.\n#### 1,002"}, {"question": "$question", "answer": "#### 3"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    part: dict[str, Any] = {
        "rows": "rows.jsonl",
        "columns": {"prompt": "$question Think.", "labels": "$answer", "data_source": "x"},
        "edits": {"answer": [["(?s).*#### ", ""], [",", ""]]},
    }
    write_recipe(tmp_path / "mine", data={"out/train.jsonl": [part, {**part, "rows": "rows.jsonl#1"}]})
    assert main(["recipe", "data", "./mine", "--on", "A2"]) == 0
    written = [json.loads(line) for line in Path("out/train.jsonl").read_text().splitlines()]
    first = {"prompt": "1 + 1? Think.", "labels": "1002", "data_source": "x"}
    assert written == [first, {"prompt": "$question Think.", "labels": "3", "data_source": "x"}, first]
    assert "wrote out/train.jsonl" in capsys.readouterr().out
    Path("out/train.jsonl").write_text("kept\n")
    assert main(["recipe", "data", "./mine", "--on", "A2"]) == 0
    assert Path("out/train.jsonl").read_text() == "kept\n"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"titel": "x"}, "titel is not a field; did you mean title?"),
        ({"published": ""}, "published is '', but must be a text"),
        ({"twin": None}, "twin is None, but must be a text"),
        ({"data": {"x": [{"row": 1}]}}, "unexpected keyword argument 'row'"),
        ({"curve": {"metric": "x"}}, "a curve has the fields metric, source, windows"),
    ],
)
def test_a_recipe_with_a_mistake_is_one_line(
    fields: dict[str, Any], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path / "mine", **fields)
    assert main(["recipe", "show", str(tmp_path / "mine")]) == 2
    output = capsys.readouterr().err
    assert error in output and "mine/recipe.yaml" in output


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["show", "dpao"], "there is no recipe 'dpao'; did you mean 'dapo'?"),
        (["show", "xyz"], "there is no recipe 'xyz'; there are agent_tools, cispo"),
        (["run", "cispo", "--on", "950DT"], "recipe cispo has no run file for 950DT; it has A2, A3, cpu"),
        (["run", "cispo", "--on", "H100"], "invalid choice: 'H100'"),
        (["sohw", "dapo"], "invalid choice: 'sohw'"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", *words]) == 2
    assert error in capsys.readouterr().err


def test_list_and_show_say_what_a_recipe_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(recipe.name in listed and recipe.title in listed for recipe in RECIPES)
    assert main(["recipe", "show", "gmpo"]) == 0
    shown = capsys.readouterr().out
    for text in ("gmpo/A2.yaml", "4 devices; fits", "iterations 1 to 10: 0.397 to 0.497", "recipe run gmpo", "0.8193"):
        assert text in shown, shown


def test_the_curve_of_the_last_stage_is_in_the_run_folder_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    curve = {"metric": "x", "source": "s", "windows": [{"first": 1, "last": 2, "low": 0.0, "high": 1.0}]}
    write_recipe(tmp_path / "mine", curve=curve)
    # it has no data and no model: train refuses it, and the folder has the curve
    assert main(["recipe", "run", "./mine", "--on", "A2", "megatron_training.data_path=nothing.jsonl"]) == 2
    assert json.loads((tmp_path / "run" / EXPECTED).read_text()) == curve


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([0.1, 0.2, 0.3, 0.4], "x is inside its band up to iteration 4, 2 of 2 windows"),
        ([0.1, 0.2, 0.1, 0.1], "x left its band at iteration 4: the mean of iterations 3 to 4 is 0.1, expected 0.3 to 0.4"),
        ([0.1], "too early: iterations 1 to 2 of x are not over yet"),
        (None, "no band is known for it"),
    ],
)
def test_show_says_whether_the_last_run_is_inside_of_its_band(
    values: list[float] | None,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    windows = [{"first": 1, "last": 2, "low": 0.0, "high": 0.2}, {"first": 3, "last": 4, "low": 0.3, "high": 0.4}]
    curve = {"metric": "x", "source": "s", "windows": windows}
    write_recipe(tmp_path / "mine", curve=curve)
    for folder in (Path("run"), Path("runs/recipes/mine/run")):
        folder.mkdir(parents=True)
        rows = [{"iteration": number, "x": value} for number, value in enumerate(values or [0.1], 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if values is not None:
            (folder / EXPECTED).write_text(json.dumps(curve))
    assert main(["recipe", "show", "./mine"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Last run, run: {sentence}" in shown and f"Last run, runs/recipes/mine/run: {sentence}" in shown


def test_show_describes_what_it_can_read_and_says_what_runs_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "mine")
    for folder, text in ((Path("run"), '{"iteration": 1, "x": 0.1}\n'), (Path("runs/recipes/mine/run"), "{\n[]\n")):
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(text)
    program = "import sys, time; from pathlib import Path; from mindspeed_rl.observability import heartbeat as h; "
    program += "h.start(Path('run'), 'driver', interval_s=0.1); print(1, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert main(["recipe", "show", "./mine"]) == 0
        process.communicate()
    shown = " ".join(capsys.readouterr().out.split())
    assert "Last run, run, is running now: no band is known for it" in shown
    assert "Last run, runs/recipes/mine/run: cannot be read: " in shown and "metrics.jsonl, line 1" in shown
    (tmp_path / "mine" / "A2.yaml").write_text("run_dir: [\n")
    assert main(["recipe", "show", "./mine"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mine/A2.yaml: cannot be read: " in shown and "Last run, runs/recipes/mine/run: cannot be read: " in shown


def test_a_folder_of_the_user_is_a_recipe_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "recipes" / "mine")
    assert load_recipe("mine").machines == ("A2", CPU)
