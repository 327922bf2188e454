"""Odd run files and overrides are read as written, or refused quickly and by name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mindspeed_rl.cli.explain import main as explain
from mindspeed_rl.config import ConfigError, RunConfig, load_run_config
from mindspeed_rl.config.keys import PATH_KEYS, collect_keys
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.run.draft import load_run
from mindspeed_rl.run.rules.validation import validate

NAMES = [
    "数据/运行",
    "a b",
    "a#b",
    "~x",
    "a(b)",
    "a'b",
    'a"b',
    "a,b",
    "a=b",
    "a[b]",
    "a{b}",
    "[x]/y",
    "a%20b",
    "é",
    "a\\b",
    "🙂",
    "100",
    "1e5",
]
NAMES += ["true", "a!b", "a\\'b", "a:b", "a@b", "a&b;c"]
_SHORT = "megatron_training: {stage: sft, global_batch_size: 1}\n"


def _path_options() -> list[str]:
    """Dotted names of all keys that name a file or folder; lists of them with brackets."""
    options = [path for path in collect_keys() if path.rpartition(".")[2] in PATH_KEYS and ".deadlines." not in path]
    return ["run_dir", *options]


def _read(cfg: RunConfig, option: str) -> object:
    value: object = cfg
    for part in option.split("."):
        value = getattr(value, part)
    return value


def test_every_key_that_names_a_path_is_known_as_one() -> None:
    names = {path.rpartition(".")[2] for path in collect_keys()}
    assert PATH_KEYS - {"run_dir"} <= names
    assert {name for name in names if name.endswith(("_path", "_dir", "_file"))} <= PATH_KEYS | {"profile_save_path"}


@pytest.mark.parametrize("name", NAMES)
def test_a_path_in_an_override_is_read_as_it_is_written(name: str) -> None:
    options = [option for option in _path_options() if option != "rl_config.external_plugins"]
    overrides = [f"{option}=/tmp/{name}/x" for option in options]
    cfg = load_run_config("grpo_tiny_cpu", None, overrides)
    assert {option: _read(cfg, option) for option in options} == dict.fromkeys(options, f"/tmp/{name}/x")
    assert load_run_config("grpo_tiny_cpu", None, [f"run_dir={name}"]).run_dir == name


def test_lists_of_paths_and_other_text_may_have_any_characters() -> None:
    overrides = ["megatron_training.data_path=[0.5,/数据/a b,0.5,/x(y)]", "rl_config.wandb_project=数学 (1)"]
    overrides.append("rl_config.external_plugins=[/数据/p.py]")
    cfg = load_run_config("grpo_tiny_cpu", None, overrides)
    assert cfg.megatron_training.data_path == [0.5, "/数据/a b", 0.5, "/x(y)"]
    assert cfg.rl_config is not None and cfg.rl_config.wandb_project == "数学 (1)"
    assert cfg.rl_config.external_plugins == ["/数据/p.py"]


def test_null_and_quotes_keep_their_meaning() -> None:
    cfg = load_run_config("grpo_tiny_cpu", None, ["run_dir=null", "actor_config.save='/a b'", 'actor_config.load="/c"'])
    assert (cfg.run_dir, cfg.actor_config.save, cfg.actor_config.load) == (None, "/a b", "/c")


@pytest.mark.parametrize("name", ["数据", "a b", "a#b", "a(b)", "a'b", "a,b", "~x"])
def test_run_files_and_their_folders_may_have_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    text = (find_project_configs() / "grpo_tiny_cpu.yaml").read_text(encoding="utf-8")
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    assert load_run_config(str(folder / f"{name}.yaml")).stage == load_run_config(name, folder).stage == "ray_grpo"


@pytest.mark.parametrize(
    "override",
    ["rl_config.epochs=[1,", "rl_config.epochs={a", "rl_config.epochs='1", "rl_config..epochs=1", "=3", "run_dir", "~run_dir"],
)
def test_an_override_that_cannot_be_read_is_named_itself(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config("grpo_tiny_cpu", None, [override, "actor_config.lr=1e-3"])
    (text,) = caught.value.errors
    assert text.startswith("override ") and override in text.replace("\\'", "'") and "grpo_tiny_cpu.yaml" not in text


_ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + last] * 9)}]\n" for last, name in zip("abcdefgh", "bcdefghi")
)


def _doubling(reference: str) -> str:
    return "b0: xxxxxxxxxxxxxxxx\n" + "".join(f"b{j + 1}: {reference.replace('N', f'b{j}')}\n" for j in range(32))


@pytest.mark.parametrize(
    "text",
    [
        f"{_SHORT}{_ALIASES}",
        f"defaults: [{{model: [bomb]}}]\n{_SHORT}",
        f"defaults: [{{model: [outer]}}]\n{_SHORT}",
        _SHORT + _doubling("'${N}${N}'"),
        _SHORT + _doubling("['${N}', '${N}']"),
        _SHORT + _doubling("'${oc.select:N}${oc.select:N}'"),
        f"{_SHORT}x: {'y' * 100_000}\n",
        f"defaults: [odd]\n{_SHORT}",
    ],
    ids=["aliases", "aliases of a block", "aliases of a block's block", "text", "lists", "resolvers", "long text", "itself"],
)
def test_a_small_file_that_stands_for_much_is_refused_in_seconds(text: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bomb.yaml").write_text(f"bomb: {{num_layers: 4}}\n{_ALIASES}")
    (tmp_path / "model" / "outer.yaml").write_text("defaults: [bomb]\n")
    (tmp_path / "odd.yaml").write_text(text)
    start_s = time.monotonic()
    with pytest.raises(ConfigError):
        load_run_config("odd", tmp_path)
    assert time.monotonic() - start_s < 20


def test_an_override_may_name_a_block_that_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bomb.yaml").write_text(f"bomb: {{num_layers: 4}}\n{_ALIASES}")
    (tmp_path / "short.yaml").write_text(_SHORT)
    with pytest.raises(ConfigError, match="bomb.yaml stands for more than"):
        load_run_config("short", tmp_path, ["+model=[bomb]"])


def test_a_hundred_million_devices_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("actor_resource", "rollout_resource", "reference_resource"):
        start_s = time.monotonic()
        assert explain(["--config-name", "grpo_tiny_cpu", f"rl_config.{key}.num_npus=100000000"]) == 2
        assert time.monotonic() - start_s < 10
        assert f"rl_config.{key}.num_npus (1e+08) must be at least 1 and at most 100000" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0", "false", "''", "[]", "cpus"])
def test_a_platform_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="platform is .* but must be one of"):
        load_run_config("grpo_tiny_cpu", None, [f"platform={value}"])


@pytest.mark.parametrize("value", ["'  '", "''"])
def test_a_blank_path_is_refused_by_its_key(value: str) -> None:
    blank = "rl_config.integrated_mode_config.ref_model_load_path"
    for option in [
        path for path in _path_options() if path.rpartition(".")[2] not in ("external_plugins", "profile_save_path")
    ]:
        if value == "''" and option.rpartition(".")[2] in ("ref_model", "wandb_save_dir", "swanlab_save_dir"):
            continue  # empty by default
        run = load_run("grpo_tiny_cpu", None, [f"{option}={value}"])
        assert any(f"{option} is " in str(item) for item in validate(run)), option
    assert blank in _path_options()
