"""Workers run in another folder than the command: every path they read is absolute before they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.run.draft import load_run
from mindspeed_rl.run.paths import with_absolute_paths

GIVEN = {
    "actor_config.load": "weights",
    "actor_config.save": "saved",
    "actor_config.prompt_type_path": "templates.json",
    "generate_config.expert_map_path": "map.json",
    "generate_config.eplb_token_save_path": "counts",
    "rl_config.tool_config_path": "tools.yaml",
    "rl_config.external_plugins": "[plugin.py]",
    "rl_config.reward_model": "judge",
    "rl_config.judge_prompt": "prompt.txt",
    "rl_config.judge_rubric": "rubric.json",
    "audit.judge_prompt": "second.txt",
    "rl_config.integrated_mode_config.ref_model_load_path": "reference",
    "profiler_config.integrated.profile_save_path": "traces",
    "msprobe_config.dump_path": "dumps",
}


def test_paths_that_workers_read_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "templates.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    run = with_absolute_paths(load_run("grpo_tiny_cpu", None, [f"{name}={value}" for name, value in GIVEN.items()]))
    for name, value in GIVEN.items():
        result = run.config
        for part in name.split("."):
            result = getattr(result, part)
        if isinstance(result, list):
            (result,) = result
        assert result == str(tmp_path / value.strip("[]")), name


def test_names_that_are_no_path_here_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = with_absolute_paths(load_run("grpo_tiny_cpu", None, ["actor_config.load=Qwen/Qwen2.5-7B"])).config
    assert cfg.actor_config.load == "Qwen/Qwen2.5-7B"
    assert not Path(cfg.actor_config.prompt_type_path).is_absolute()  # the default, which is not there
    assert cfg.profiler_config.integrated.profile_save_path == ""


def test_the_folder_of_a_draft_model_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drafts = {"method": "draft_model", "spec_model": "draft", "spec_tokens": 3}
    keys = [f"generate_config.speculative_config.{name}={value}" for name, value in drafts.items()]
    generate = with_absolute_paths(load_run("grpo_tiny_cpu", None, keys)).generate
    assert generate.drafts is not None
    assert generate.drafts["model"] == str(tmp_path / "draft") and generate.drafts["num_speculative_tokens"] == 3
