"""What machines see differently is said in one error, before a model is built."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.run import Run
from mindspeed_rl.runtime import shared_filesystem
from mindspeed_rl.runtime.shared_filesystem import ObservedFiles, check_shared_files, read_observed_files


class _Config:
    """The part of a run file that says where files are."""

    def __init__(self, folder: Path) -> None:
        model = str(folder / "model")
        self.actor_config = MegatronConfig(load=model, save=str(folder / "save"), tokenizer_name_or_path=model)
        self.megatron_training = self.actor_config
        self.ref_config = self.reward_config = self.critic_config = self.teacher_config = self.rl_config = None


class _Run:
    def __init__(self, folder: Path) -> None:
        self.config, self.folder = _Config(folder), folder / "run"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_filesystem, "_PATIENCE_S", 0.0)


@pytest.fixture()
def run(tmp_path: Path) -> Run:
    (tmp_path / "here" / "model").mkdir(parents=True)
    (tmp_path / "here" / "model" / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "here" / "model" / "model.safetensors").write_bytes(bytes(3 << 20))
    return cast(Run, _Run(tmp_path / "here"))


def machines(tmp_path: Path, *folders: str) -> Callable[[Sequence[str]], list[ObservedFiles]]:
    """Processes, one for each folder, that see it in the place of the driver's."""

    def ask(paths: Sequence[str]) -> list[ObservedFiles]:
        files: list[Any] = []
        for number, folder in enumerate(folders):
            moved = [path.replace(str(tmp_path / "here"), str(tmp_path / folder)) for path in paths]
            files.append(ObservedFiles(f"host-{number}", read_observed_files(moved).files))
        return files

    return ask


def copied(run: Run, tmp_path: Path) -> Path:
    """The driver's model, copied to another machine."""
    there = tmp_path / "there" / "model"
    there.mkdir(parents=True)
    for path in (tmp_path / "here" / "model").iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    return there


def test_a_shared_disk_is_right_and_nothing_is_left_on_it(run: Run, tmp_path: Path) -> None:
    notices = check_shared_files(run, ["worker 0", "worker 1"], machines(tmp_path, "here", "here"), saves=["actor_config"])
    assert notices == []
    assert list((tmp_path / "here" / "run").iterdir()) == [] == list((tmp_path / "here" / "save").iterdir())


def test_all_that_is_missing_on_a_machine_is_named_at_once_and_once(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        check_shared_files(run, ["worker 0", "worker 1"], machines(tmp_path, "here", "there"), saves=["actor_config"])
    said = str(raised.value)
    model = tmp_path / "here" / "model"
    assert f"megatron_training.load: {model} does not exist on host-1 (worker 1)" in said
    assert said.count(str(model)) == 1 and "host-0" not in said and "\n" not in said


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_copy_that_is_another_model_is_named_by_file(run: Run, tmp_path: Path, name: str) -> None:
    there = copied(run, tmp_path) / name
    there.write_bytes(there.read_bytes()[:-1] + (b"]" if name == "config.json" else b""))
    with pytest.raises(ValueError, match=re.escape(f"model has another {name} on host-1 (worker 1)")):
        check_shared_files(run, ["worker 0", "worker 1"], machines(tmp_path, "here", "there"), saves=["actor_config"])


def test_a_machine_may_write_to_a_disk_of_its_own_and_the_user_hears_of_it(run: Run, tmp_path: Path) -> None:
    copied(run, tmp_path)
    names = ["worker 0", "worker 1", "worker 2"]
    notices = check_shared_files(
        run, names, machines(tmp_path, "here", "there", "there"), saves=["actor_config", "critic_config"]
    )
    assert [notice.partition(" is on a disk of its own on host-1, host-2: ")[0] for notice in notices] == [
        f"run_dir: {tmp_path / 'here' / 'run'}",
        f"actor_config.save: {tmp_path / 'here' / 'save'}",
    ]


def test_a_run_that_goes_on_may_find_its_checkpoints_in_parts(run: Run, tmp_path: Path) -> None:
    copied(run, tmp_path)
    config = cast(_Config, run.config)
    assert config.actor_config.save is not None
    config.actor_config = dataclasses.replace(config.actor_config, load=config.actor_config.save)
    Path(config.actor_config.save).mkdir()
    Path(config.actor_config.save, "latest_checkpointed_iteration.txt").write_text("1")
    names = ["worker 0", "worker 1"]
    assert len(check_shared_files(run, names, machines(tmp_path, "here", "there"), saves=["actor_config"])) == 2


def test_the_first_rank_saves_where_the_command_looks_for_checkpoints(run: Run, tmp_path: Path) -> None:
    copied(run, tmp_path)
    with pytest.raises(ValueError, match=r"actor_config.save: .* is another folder .* on host-0 \(worker 0\)"):
        check_shared_files(run, ["worker 0"], machines(tmp_path, "there"), saves=["actor_config"])
    assert len(check_shared_files(run, ["worker 0"], machines(tmp_path, "there"), saves=[])) == 1  # of the logs
