"""A copied model is never a mixture of two, or a part of one that looks complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_rl.checkpoint import model_folder
from mindspeed_rl.checkpoint.model_folder import copy_model


def make(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def read(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return make(tmp_path / "new", config__json="new", model__safetensors="new", tokenizer__json="new")


#: a larger model with another template, whose second file no index of the new one names
EARLIER = {name: "old" for name in ("config__json", "model-2__safetensors", "chat_template__jinja", "tokenizer__json")}


@pytest.mark.parametrize("before", ["nothing", "empty", "a model", "a model and a run"])
def test_the_folder_has_the_new_model_alone_and_what_is_no_model(before: str, new: Path, tmp_path: Path) -> None:
    target, kept = tmp_path / "deep" / "target", {}
    if before != "nothing":
        make(target, **(EARLIER if before.startswith("a model") else {}))
    if before == "a model and a run":
        kept = {"report.json": "mine", "checkpoints/iter_0000001/config.json": "mine", "notes.txt": "mine"}
        for name, text in kept.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(text)
    copy_model(new, target)
    assert read(target) == read(new) | kept
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("before", ["nothing", "a model", "a model and a run"])
@pytest.mark.parametrize("step", range(8))
def test_a_killed_copy_leaves_one_model_or_none_that_looks_complete(
    step: int, before: str, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends before the nth change of the disk; what is left there, and what the next copy makes of it."""
    target = tmp_path / "target"
    if before != "nothing":
        make(target, **EARLIER)
    if before == "a model and a run":
        (target / "run.log").write_text("mine")
    earlier, count = read(target), iter(range(100))

    class KilledError(BaseException):
        pass

    def killing(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if next(count) >= step:
                raise KilledError
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for owner, name in ((os, "replace"), (Path, "unlink"), (shutil, "copytree"), (shutil, "rmtree")):
            patched.setattr(owner, name, killing(getattr(owner, name)))
        try:
            copy_model(new, target)
        except KilledError:
            pass
    left = {name: text for name, text in read(target).items() if name != "run.log"}
    if "config.json" in left:
        assert left == read(new) or left == {name: text for name, text in earlier.items() if name != "run.log"}
    copy_model(new, target)
    assert {name: text for name, text in read(target).items() if name != "run.log"} == read(new)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")] == []


def test_a_folder_is_not_copied_into_itself(new: Path) -> None:
    with pytest.raises(ValueError, match="is in the folder that is copied"):
        copy_model(new, new / "copy")
    with pytest.raises(ValueError, match="is in the folder that is copied"):
        model_folder.copy_model(new, new)
