"""Resumed training is the uninterrupted one, under the same layout to the bit; a killed save never looks finished."""

from __future__ import annotations

import json
import math
import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import checkpoint_jobs as jobs
import numpy as np
import pytest
import torch
from comparison import assert_same_training, losses
from megatron_release import COMMON_FILE
from ranks import RankFailureError, Ranks
from slow_layouts import EP, PP, VPP
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from training_jobs import Setting

from mindspeed_rl.engine.checkpoint import _find_newest_iteration

TP, SP = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ZERO = {"use_distributed_optimizer": True}
MUON = {"optimizer": "muon", "muon_extra_scale_factor": 0.2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
#: a bucket for each parameter, and padding behind the few numbers of a gated delta net
BUCKETS = ZERO | OVERLAP | {"ddp_bucket_size": 100}


def cases(named: Mapping[str, tuple], *quick: str) -> list[Any]:
    """Parameters of a test; all but the named ones are slow."""
    return [pytest.param(*case, id=name, marks=() if name in quick else pytest.mark.slow) for name, case in named.items()]


SAME: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one process": (1, "tied", {}),
    "one process async": (1, "untied", {"async_save": True}),
    "TP2 SP": (2, "tied", SP),
    "VPP2 async": (2, "tied", VPP | {"async_save": True}),
    "DP2 distributed optimizer": (2, "untied", ZERO),
    "DP2 distributed optimizer overlap async": (2, "tied", ZERO | OVERLAP | {"async_save": True}),
    "DP2 in buckets": (2, "hybrid", BUCKETS),
    "one process bf16 in buckets": (1, "hybrid", BUCKETS | {"bf16": True}),
    "DP2 bf16 in buckets": (2, "hybrid", BUCKETS | {"bf16": True}),
    "EP2 bf16 in buckets": (2, "moe", EP | BUCKETS | {"bf16": True}),
    "DP2 bf16": (2, "tied", {"bf16": True}),
    "DP2 bf16 distributed optimizer": (2, "tied", ZERO | {"bf16": True}),
    "EP2 grouped": (2, "moe", EP | {"moe_grouped_gemm": True}),
    "EP2 distributed optimizer": (2, "moe", EP | ZERO),
    "TP2 muon": (2, "tied", TP | MUON),
    "DP2 bf16 muon": (2, "tied", MUON | {"bf16": True}),
    "EP2 muon": (2, "moe", EP | MUON),
}


@pytest.mark.parametrize(("size", "name", "keys"), cases(SAME, "one process async", "TP2 SP", "DP2 bf16 in buckets"))
def test_the_same_layout_resumes_to_the_bit(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path, size: int, name: str, keys: dict[str, Any]
) -> None:
    setting = Setting(str(models[name]), keys)
    expected = ranks(size).run(jobs.save_then_train, setting=setting, folder=str(tmp_path))
    assert _find_newest_iteration(tmp_path) == 2
    resumed = ranks(size).run(jobs.load_then_train, setting=setting, folder=str(tmp_path))
    assert losses(resumed) == losses(expected)
    for ours, theirs in zip(resumed, expected):
        assert (ours["grad_norm"], ours["lr"], ours["random"]) == (theirs["grad_norm"], theirs["lr"], theirs["random"])
        assert ours["loaded"]["random_restored"] and ours["loaded"]["iteration"] == 2
    assert resumed[0]["loaded"]["run_state"]["consumed"] == 16
    for key, weight in expected[0]["weights"].items():
        assert np.array_equal(resumed[0]["weights"][key], weight), key


def test_the_states_of_a_distributed_optimizer_are_gathered_on_one_rank(
    ranks: Callable[[int], Ranks], models: dict[str, Path]
) -> None:
    (first, parameters), (second, _) = ranks(2).run(jobs.count_saved_states, setting=Setting(str(models["untied"]), ZERO))
    assert first == 2 * parameters and second == 0


OTHER: dict[str, tuple[str, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "TP2 SP to one": ("tied", (2, SP), (1, {})),
    "one to PP2": ("untied", (1, {}), (2, PP)),
    "PP2 to TP2": ("tied", (2, PP), (2, TP)),
    "TP2 to VPP2": ("untied", (2, TP), (2, VPP)),
    "VPP2 to uneven PP2": ("tied", (2, VPP), (2, PP | {"num_layer_list": "1,3"})),
    "noop PP2 to noop TP2": ("tied", (2, PP | {"noop_layers": "0,5"}), (2, TP | {"noop_layers": "0,5"})),
    "distributed optimizer DP2 to one": ("tied", (2, ZERO), (1, ZERO)),
    "distributed optimizer DP2 to TP2": ("untied", (2, ZERO), (2, TP | ZERO)),
    "distributed optimizer PP2 to DP2": ("tied", (2, PP | ZERO), (2, ZERO)),
    "DP2 in buckets to one": ("hybrid", (2, BUCKETS), (1, {})),
    "PP2 to DP2 in buckets": ("hybrid", (2, PP), (2, BUCKETS)),
    "DP2 in buckets to PP2 in others": ("hybrid", (2, BUCKETS), (2, PP | BUCKETS | {"ddp_bucket_size": 300})),
    "EP2 to one": ("moe", (2, EP), (1, {})),
    "one to EP2": ("moe", (1, {}), (2, EP)),
    "EP2 distributed optimizer to one": ("moe", (2, EP | ZERO), (1, ZERO)),
    "EP2 to TP2": ("moe", (2, EP), (2, SP | {"expert_tensor_parallel_size": 1})),
    "TP2 PP2 to DP2 PP2": ("tied", (4, TP | PP), (4, PP)),
    "distributed optimizer off, PP2 to DP2": ("tied", (2, PP | ZERO), (2, {})),
    "distributed optimizer on, one to TP2": ("untied", (1, {}), (2, SP | ZERO)),
    "distributed optimizer on, EP2": ("moe", (2, EP), (2, EP | ZERO)),
}


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    cases(
        OTHER,
        "TP2 to VPP2",
        "DP2 in buckets to one",
        "EP2 distributed optimizer to one",
        "distributed optimizer off, PP2 to DP2",
    ),
)
def test_another_layout_goes_on_with_the_same_training(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path, name: str, saved: tuple, loaded: tuple
) -> None:
    expected = ranks(saved[0]).run(jobs.save_then_train, setting=Setting(str(models[name]), saved[1]), folder=str(tmp_path))
    resumed = ranks(loaded[0]).run(jobs.load_then_train, setting=Setting(str(models[name]), loaded[1]), folder=str(tmp_path))
    same_ranks = saved[0] == loaded[0] and saved[1].keys() - ZERO == loaded[1].keys() - ZERO
    assert resumed[0]["loaded"]["random_restored"] == same_ranks
    assert_same_training(resumed, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "keys"), [(1, {}), (1, ZERO), (2, TP), (2, {})], ids=["one", "one on", "TP2", "DP2"])
def test_half_precision_loads_under_another_layout_with_its_full_precision_weights(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path, size: int, keys: dict[str, Any]
) -> None:
    half, folder = {"bf16": True}, str(tmp_path)
    expected = ranks(2).run(jobs.save_then_train, setting=Setting(str(models["tied"]), half | ZERO), folder=folder, after=1)
    setting = Setting(str(models["tied"]), half | keys)
    resumed = ranks(size).run(jobs.load_then_train, setting=setting, folder=folder, steps=1)
    assert_same_training(resumed, expected, tolerance=0.02)
    # from rounded weights a step would end at another bf16 number in about every fourth place
    same = [resumed[0]["weights"][key] == weight for key, weight in expected[0]["weights"].items()]
    assert np.concatenate([part.ravel() for part in same]).mean() > 0.95


def test_fine_tuning_takes_the_weights_and_nothing_else(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    setting = Setting(str(models["tied"]))
    ranks(1).run(jobs.save_then_train, setting=setting, folder=str(tmp_path), before=4, after=0)
    fresh = Setting(str(models["tied"]), {"finetune": True})
    report = ranks(1).run(jobs.load_then_train, setting=fresh, folder=str(tmp_path))[0]
    assert not report["loaded"]["random_restored"]
    assert report["lr"][0] == pytest.approx(5.5e-4)  # its own second step, not the fifth of the saved schedule


def test_a_killed_save_never_looks_finished_and_the_next_one_succeeds(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    setting = Setting(str(models["tied"]), SP)
    ranks(2).run(jobs.save_many, setting=setting, folder=str(tmp_path), iterations=[3])
    with pytest.raises(RankFailureError, match="rank 1: the process ended with exit code -9"):
        ranks(2).run(jobs.killed_while_saving, setting=setting, folder=str(tmp_path), iteration=5)
    assert [path.name for path in tmp_path.glob("iter_*[0-9]")] == ["iter_0000003"]
    assert _find_newest_iteration(tmp_path) == 3
    report = ranks(2).run(jobs.load_then_train, setting=setting, folder=str(tmp_path), steps=1)
    assert report[0]["loaded"]["iteration"] == 3
    warnings = ranks(2).run(jobs.save_many, setting=setting, folder=str(tmp_path), iterations=[5])
    assert warnings == [[], []]  # the killed one's files are nothing that the next one overwrites
    assert _find_newest_iteration(tmp_path) == 5 and not list(tmp_path.glob("*.partial"))


def test_the_last_checkpoints_are_kept_and_none_that_is_newer(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    abandoned = tmp_path / "iter_0000099"  # of a run that had gone further and was set back
    abandoned.mkdir()
    setting = Setting(str(models["tied"]), {"keep_last": 2})
    ranks(1).run(jobs.save_many, setting=setting, folder=str(tmp_path), iterations=[9, 10, 11, 12])
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000011", "iter_0000012", "iter_0000099"]
    assert _find_newest_iteration(tmp_path) == 12


def test_what_a_checkpoint_cannot_give_is_named(ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path) -> None:
    def said(name: str = "tied", **keys: Any) -> str:
        return ranks(1).run(jobs.refusal, setting=Setting(str(models[name]), keys), folder=str(tmp_path))[0]

    assert "has no finished checkpoint" in said()
    bare = Setting(str(models["tied"]), {"no_save_optim": True})
    ranks(1).run(jobs.save_many, setting=bare, folder=str(tmp_path), iterations=[1])
    assert "was saved without its optimizer; set no_load_optim or finetune" in said()
    ranks(1).run(jobs.save_many, setting=Setting(str(models["tied"])), folder=str(tmp_path), iterations=[2])
    assert "was saved with bf16: false; keep that" in said(bf16=True)
    assert "was saved with noop_layers [], this run has [4]" in said(noop_layers=4)
    other_model = said("untied")
    assert "iter_0000002 does not fit this run: rank 0: KeyError" in other_model and "output_layer" in other_model


def test_the_schedule_is_the_run_files_and_only_its_position_is_resumed(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    setting = Setting(str(models["tied"]))
    ranks(1).run(jobs.save_then_train, setting=setting, folder=str(tmp_path), before=4, after=0)
    longer = Setting(str(models["tied"]), {"train_iters": 40, "min_lr": 1e-4})
    rate = ranks(1).run(jobs.load_then_train, setting=longer, folder=str(tmp_path), steps=1)[0]["lr"][0]
    # a warm-up of 2 steps, then a cosine from 1e-3 to 1e-4 over the other 38, of which 2 are over
    assert rate == pytest.approx(1e-4 + 9e-4 * (1 + math.cos(math.pi * 2 / 38)) / 2)


@pytest.mark.parametrize("keys", [{}, pytest.param(ZERO, marks=pytest.mark.slow), {"bf16": True}], ids=str)
def test_a_checkpoint_from_before_the_first_step_resumes(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path, keys: dict[str, Any]
) -> None:
    setting = Setting(str(models["tied"]), keys)
    expected = ranks(1).run(jobs.save_then_train, setting=setting, folder=str(tmp_path), before=0)
    resumed = ranks(1).run(jobs.load_then_train, setting=setting, folder=str(tmp_path))
    assert losses(resumed) == losses(expected)
    assert (resumed[0]["grad_norm"], resumed[0]["lr"]) == (expected[0]["grad_norm"], expected[0]["lr"])


@pytest.mark.parametrize(("text", "message"), [("7", "names iteration 7, but"), ("seven", "holds 'seven', not an iteration")])
def test_a_damaged_pointer_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        _find_newest_iteration(tmp_path)


def test_a_damaged_file_is_refused_by_name_on_every_rank(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    setting = Setting(str(models["tied"]), SP)
    ranks(2).run(jobs.save_many, setting=setting, folder=str(tmp_path), iterations=[1, 2])
    folder = tmp_path / "iter_0000002"
    listed = json.loads((folder / "checksums.json").read_text())
    assert listed.keys() == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"checksums.json"}
    largest = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[4096:4160] = bytes(255 - byte for byte in content[4096:4160])
    largest.write_bytes(content)
    for said in ranks(2).run(jobs.refusal, setting=setting, folder=str(tmp_path)):
        assert f"load: {largest} is damaged: its checksum is" in said and "load_previous: true" in said
    report = ranks(2).run(jobs.load_then_train, setting=setting, folder=str(tmp_path), steps=1, iteration=1)
    assert report[0]["loaded"]["iteration"] == 1


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def add_sums(folder: Path) -> None:
    """The checksums match the files as they are now."""
    names = json.loads((folder / "checksums.json").read_text())
    contents = {name: (folder / name).read_bytes() for name in names}
    (folder / "checksums.json").write_text(json.dumps({name: [len(has), zlib.crc32(has)] for name, has in contents.items()}))


@pytest.mark.parametrize("place", [".metadata", *(["common.pt"] if COMMON_FILE else []), "object", "tensor"])
def test_code_in_a_checkpoint_is_refused_by_its_file_and_never_runs(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path, place: str
) -> None:
    setting = Setting(str(models["moe" if place == "object" else "tied"]), ZERO if place == "object" else {})
    ranks(1).run(jobs.save_many, setting=setting, folder=str(tmp_path), iterations=[1])
    folder, index, bomb = tmp_path / "iter_0000001", tmp_path / "iter_0000001/.metadata", Bomb(tmp_path / "exploded")
    if place == ".metadata":
        index.write_bytes(pickle.dumps(bomb))
    elif place == "common.pt":
        torch.save({"optimizer": bomb}, folder / place)
    else:
        metadata = FileSystemReader(folder).read_metadata()
        kind = BytesStorageMetadata if place == "object" else TensorStorageMetadata
        entries = [key for key in metadata.storage_data if isinstance(metadata.state_dict_metadata[key.fqn], kind)]
        assert entries
        place = metadata.storage_data[entries[0]].relative_path
        with (folder / place).open("ab") as file:
            start = file.tell()
            torch.save(bomb, file)
            for key in entries:
                metadata.storage_data[key] = _StorageInfo(place, start, file.tell() - start)
        index.write_bytes(pickle.dumps(metadata))
    add_sums(folder)
    said = ranks(1).run(jobs.refusal, setting=setting, folder=str(tmp_path))[0]
    assert f"{folder / place}" in said and "refusing to load" in said, said
    assert not bomb.path.exists()


@pytest.mark.parametrize("background", [False, True])
def test_a_limit_on_files_fails_the_save_in_a_sentence_and_leaves_nothing(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path, background: bool
) -> None:
    setting = Setting(str(models["tied"]), {"async_save": background})
    said = ranks(1).run(jobs.save_under_a_limit, setting=setting, folder=str(tmp_path), limit_bytes=20_000)[0]
    why = "a file may have 20000 bytes here (ulimit -f), which is too little."
    assert said == f"save: {tmp_path / 'iter_0000001'} could not be written: {why}"
    assert not list(tmp_path.iterdir())


def test_no_rank_waits_for_one_that_could_not_end_the_save(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    said = ranks(2).run(jobs.save_what_cannot_be_named, setting=Setting(str(models["tied"])), folder=str(tmp_path))
    assert said[0] == said[1] and "rank 0" in said[0] and str(tmp_path / "iter_0000001") in said[0]
