"""Machines without a shared disk: each keeps what its ranks wrote, and a resumed run is the uninterrupted one to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_jobs as jobs
import pytest
from comparison import losses
from megatron_release import COMMON_FILE
from ranks import Ranks
from training_jobs import Setting

import mindspeed_rl.engine.disks as disks_module
from mindspeed_rl.engine.checkpoint import _find_newest_iteration

ZERO = {"use_distributed_optimizer": True, "bf16": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP2": ("tied", {}),
    "DP2 distributed optimizer": ("untied", ZERO),
    "PP2 async": ("tied", {"pipeline_model_parallel_size": 2, "async_save": True}),
    "TP2": ("tied", {"tensor_model_parallel_size": 2}),
    "EP2": ("moe", {"expert_model_parallel_size": 2}),
}
QUICK = ("DP2 distributed optimizer",)


@pytest.fixture()
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / "here", tmp_path / "there"]


def own_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for pattern in ("*.distcp", "random/*") for path in folder.glob(pattern)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS])
def test_a_run_over_two_disks_resumes_to_the_bit(
    ranks: Callable[[int], Ranks], models: dict[str, Path], folders: list[Path], name: str
) -> None:
    model, keys = LAYOUTS[name]
    setting = Setting(str(models[model]), keys)
    places = [str(folder) for folder in folders]
    expected = ranks(2).run(jobs.on_separate_disks, job="save_then_train", setting=setting, folders=places)
    here, there = (folder / "iter_0000002" for folder in folders)
    assert [_find_newest_iteration(folder) for folder in folders] == [2, 2]
    assert not own_files(here) & own_files(there) and "random/rank_00001.safetensors" in own_files(there)
    small = {path.name: path.read_bytes() for path in there.iterdir() if path.suffix != ".distcp" and path.is_file()}
    assert {"run_state.json", "checksums.json", ".metadata", "metadata.json"} <= small.keys()
    assert ("common.pt" in small) == COMMON_FILE
    assert all((here / name).read_bytes() == content for name, content in small.items())
    assert set(json.loads(small["checksums.json"])) == own_files(here) | own_files(there) | small.keys() - {"checksums.json"}
    assert [set(part["files"]) for part in json.loads(small["disks.json"])] == [own_files(here), own_files(there)]
    assert not [
        path for folder in folders for path in folder.rglob("*") if path.name.startswith(".disk-") or path.suffix == ".tmp"
    ]

    resumed = ranks(2).run(jobs.on_separate_disks, job="load_then_train", setting=setting, folders=places)
    assert losses(resumed) == losses(expected)
    for ours, theirs in zip(resumed, expected, strict=True):
        assert (ours["grad_norm"], ours["lr"], ours["random"]) == (theirs["grad_norm"], theirs["lr"], theirs["random"])
        assert ours["loaded"]["random_restored"] and ours["loaded"]["iteration"] == 2
    # a stage needs nothing of the other one's but the embedding that it is tied to
    together = ranks(2).run(jobs.load_then_train, setting=setting, folder=str(gathered(folders)))
    assert losses(together) == losses(expected)


def gathered(folders: list[Path]) -> Path:
    """What a user does who copies all parts into one folder."""
    target = folders[0].with_name("together")
    for folder in folders:
        shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


@pytest.mark.slow
def test_what_only_one_disk_needs_is_not_fetched_by_the_other(
    ranks: Callable[[int], Ranks], models: dict[str, Path], folders: list[Path]
) -> None:
    setting = Setting(str(models["untied"]), {"pipeline_model_parallel_size": 2})
    places = [str(folder) for folder in folders]
    ranks(2).run(jobs.on_separate_disks, job="save_many", setting=setting, folders=places, iterations=[1])
    before = [own_files(folder / "iter_0000001") for folder in folders]
    ranks(2).run(jobs.on_separate_disks, job="load_then_train", setting=setting, folders=places, steps=0)
    assert [own_files(folder / "iter_0000001") for folder in folders] == before


@pytest.mark.slow
def test_a_machine_that_takes_anothers_place_gets_what_it_needs(
    ranks: Callable[[int], Ranks], models: dict[str, Path], folders: list[Path]
) -> None:
    setting = Setting(str(models["tied"]), {})
    places = [str(folder) for folder in folders]
    expected = ranks(2).run(jobs.on_separate_disks, job="save_then_train", setting=setting, folders=places)
    shutil.rmtree(folders[1])
    resumed = ranks(2).run(jobs.on_separate_disks, job="load_then_train", setting=setting, folders=places)
    # its random generator is lost with it, and this model draws nothing in training
    assert losses(resumed) == losses(expected) and not resumed[0]["loaded"]["random_restored"]
    assert _find_newest_iteration(folders[1]) == 2


@pytest.mark.slow
def test_a_lost_part_is_named_with_the_machine_that_wrote_it(
    ranks: Callable[[int], Ranks], models: dict[str, Path], folders: list[Path]
) -> None:
    setting = Setting(str(models["tied"]), {"tensor_model_parallel_size": 2})
    places = [str(folder) for folder in folders]
    ranks(2).run(jobs.on_separate_disks, job="save_many", setting=setting, folders=places, iterations=[1])
    part = next((folders[1] / "iter_0000001").glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[4096:4160] = bytes(255 - byte for byte in content[4096:4160])
    part.write_bytes(content)
    said = ranks(2).run(jobs.on_separate_disks, job="refusal", setting=setting, folders=places)
    assert all(f"{part} is damaged" in text for text in said)
    part.unlink()
    said = ranks(2).run(jobs.on_separate_disks, job="refusal", setting=setting, folders=places)
    assert all(part.name in text and "is missing on every one of 2 disks" in text and "has written it" in text for text in said)


def test_disks_that_are_slow_to_show_a_file_are_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 1 did not see rank 0's mark in time, but rank 0 sees its."""
    answers = iter([["tag", "tag"], [None, None], [True, False], [None, None], [True, True]])
    monkeypatch.setattr(disks_module, "gather_objects", lambda value: next(answers))
    monkeypatch.setattr(disks_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(disks_module.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(disks_module, "_PATIENCE_S", 0.0)
    assert disks_module.find_disks(tmp_path).leader_of == (0, 0)
