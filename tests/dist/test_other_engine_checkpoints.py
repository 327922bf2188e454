"""A checkpoint of one engine starts the other: the same numbers in the same places, and the same training after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import checkpoint_jobs
import fsdp_jobs
import numpy as np
import pytest
import tiny_families
import tiny_hf
import tiny_vision
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from test_fsdp import FAMILIES
from training_jobs import Setting

_UNBALANCED = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a family, a model of `tiny_hf`, or "images" and a model of `tiny_vision` -> the folder of its tiny model."""

    @cache
    def save(name: str) -> str:
        if name.startswith("images "):
            return str(tiny_vision.save(name.removeprefix("images "), tmp_path_factory.mktemp("images")))
        family = tiny_hf if name in tiny_hf.CONFIGS else tiny_families
        return str(family.save(name, tmp_path_factory.mktemp(name)))

    return save


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the only checkpoint in a folder, by torch's own reader."""
    (path,) = folder.glob("iter_*")
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items() if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _drop_padding(state: dict[str, torch.Tensor], folder: str) -> dict[str, torch.Tensor]:
    """The same without the rows that pad the vocabulary for tensor parallelism, which no token has."""
    vocab = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    ends = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name: value[:vocab] if name.endswith(ends) else value for name, value in state.items()}


_TP, _PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
_EP = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}
#: model, keys of both, ranks and layout of Megatron, ranks and layout of the other engine
_CASES: list[tuple[str, dict[str, Any], tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = [
    ("qwen3_moe", {}, (1, {}), (2, {})),
    ("tied", {"bf16": True}, (2, _TP), (1, {})),
    ("deepseek_v3", {"bf16": True}, (2, _EP), (3, {})),
    ("phi3", {"optimizer": "muon"}, (2, _PP), (2, {"fsdp_size": 1})),
    ("qwen3_next", {}, (2, _TP | {"sequence_parallel": True}), (2, {})),
    ("gemma3", {"use_distributed_optimizer": True}, (2, {}), (2, {"context_parallel_size": 2})),
    ("qwen3_moe", {"bf16": True, "optimizer_offload_fraction": 0.5}, (1, {}), (2, {})),
    ("gpt_oss", {"bf16": True}, (1, {}), (2, {})),
]
_NAMED = {name for name, *_ in _CASES}
_CASES += [(name, {}, (1, {}), (2, {})) for name in FAMILIES if name not in _NAMED]
_MARKED = [pytest.param(*case, marks=() if index == 0 else pytest.mark.slow) for index, case in enumerate(_CASES)]


@pytest.mark.parametrize(("name", "keys", "megatron", "fsdp"), _MARKED)
def test_a_checkpoint_that_both_engines_pass_on_has_the_same_bits(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    tmp_path: Path,
    name: str,
    keys: dict[str, Any],
    megatron: tuple[int, dict[str, Any]],
    fsdp: tuple[int, dict[str, Any]],
) -> None:
    (size, layout), (other_size, other_layout) = megatron, fsdp
    keys = _UNBALANCED | keys
    mine, theirs = Setting(folders(name), keys | layout), Setting(folders(name), keys | other_layout)
    first, second, third = (tmp_path / part for part in ("first", "second", "third"))
    ranks(size).run(checkpoint_jobs.save_then_train, setting=mine, folder=str(first), before=2, after=0)
    loaded, *_ = ranks(other_size).run(fsdp_jobs.pass_on, setting=theirs, folder=str(first), out=str(second))
    assert loaded["iteration"] == 2 and loaded["run_state"] == {"consumed": 16} and not loaded["random_restored"]
    ranks(size).run(fsdp_jobs.pass_on_megatron, setting=mine, folder=str(second), out=str(third))
    expected, actual = (_drop_padding(_read(part), folders(name)) for part in (first, third))
    assert actual.keys() == expected.keys()
    for tensor, value in expected.items():
        assert torch.equal(actual[tensor], value), tensor
    assert any(name.startswith("optimizer.state.") and value.any() for name, value in expected.items())


_THAWED = {"freeze_vit": False, "freeze_aligner": False}
#: model, module with its rows, keys of both, ranks and layout of Megatron, ranks of the other engine
_AVERAGED: list[tuple[str, str, dict[str, Any], tuple[int, dict[str, Any]], int]] = [
    ("qwen3_moe", "training_jobs", {"bf16": True}, (2, _EP), 3),
    ("gpt_oss", "training_jobs", {}, (1, {}), 2),
    ("images qwen2.5", "vision_jobs", {}, (2, _TP), 2),
    ("images qwen3", "vision_jobs", _THAWED, (2, _PP), 2),
    ("images qwen3_moe", "vision_jobs", _THAWED, (1, {}), 2),
    ("images qwen3.5", "vision_jobs", _THAWED | {"bf16": True}, (1, {}), 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source", "keys", "megatron", "size"), _AVERAGED)
def test_averages_and_models_of_images_pass_through_both_engines(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    tmp_path: Path,
    name: str,
    source: str,
    keys: dict[str, Any],
    megatron: tuple[int, dict[str, Any]],
    size: int,
) -> None:
    own, layout = megatron
    folder, keys = folders(name), _UNBALANCED | keys
    mine, theirs = Setting(folder, keys | layout), Setting(folder, keys)
    first, second, third = (str(tmp_path / part) for part in ("first", "second", "third"))
    expected, *_ = ranks(own).run(fsdp_jobs.save_averaged, setting=mine, folder=first, steps=2, source=source)
    report, *_ = ranks(size).run(fsdp_jobs.read_average, setting=theirs, folder=first)
    assert report["differs"] and report["average"].keys() == expected.keys()
    for tensor, value in expected.items():
        assert torch.equal(report["average"][tensor].to(value.dtype), value), tensor
    ranks(size).run(fsdp_jobs.pass_on, setting=theirs, folder=first, out=second, averages=True)
    ranks(own).run(fsdp_jobs.pass_on_megatron, setting=mine, folder=second, out=third, averages=True)
    before, after = _read(Path(first)), _read(Path(third))
    assert after.keys() == before.keys() and any(part.startswith("average.") for part in before)
    for tensor, value in before.items():
        assert torch.equal(after[tensor], value), tensor


@pytest.mark.slow
def test_a_state_that_one_rank_cannot_read_is_an_error_of_all(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Path
) -> None:
    setting = Setting(folders("qwen3"), {"use_distributed_optimizer": True})
    ranks(2).run(fsdp_jobs.save, setting=Setting(folders("qwen3")), folder=str(tmp_path), steps=1, more=0)
    said = ranks(2).run(fsdp_jobs.adopt_what_one_rank_lacks, setting=setting, folder=str(tmp_path), iteration=1)
    assert len(said) == 2 and all(text.startswith("rank 0: the checkpoint has no ") for text in said), said


_LONGER: list[tuple[str, dict[str, Any], int, int]] = [("qwen3_moe", {}, 1, 2), ("tied", {}, 2, 1), ("deepseek_v3", {}, 1, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys", "size", "other_size"), _LONGER)
def test_training_continues_on_the_other_engine_as_on_its_own(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    tmp_path: Path,
    name: str,
    keys: dict[str, Any],
    size: int,
    other_size: int,
) -> None:
    setting, saved, back = Setting(folders(name), _UNBALANCED | keys), str(tmp_path / "megatron"), str(tmp_path / "fsdp")
    expected, *_ = ranks(size).run(checkpoint_jobs.save_then_train, setting=setting, folder=saved, before=2, after=3)
    first, *_ = ranks(other_size).run(fsdp_jobs.resume, setting=setting, folder=saved, more=3)
    ranks(other_size).run(fsdp_jobs.save, setting=setting, folder=back, steps=2, more=0)
    second, *_ = ranks(size).run(checkpoint_jobs.load_then_train, setting=setting, folder=back, steps=3)
    for report in (first, second):
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5) and report["lr"] == expected["lr"]
        for tensor, weight in expected["weights"].items():
            gap = np.abs(report["weights"][tensor] - weight).max()
            assert gap < 2e-5 * max(np.abs(weight).max(), 1e-30), tensor


@pytest.mark.slow
def test_what_the_other_engine_cannot_take_is_named(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Path
) -> None:
    plain, adapted = Setting(folders("qwen3")), Setting(folders("qwen3"), fsdp_jobs.ADAPTED)
    half = Setting(folders("qwen3"), {"bf16": True})
    kinds = {"adapted": adapted, "plain": plain, "bare": Setting(folders("qwen3"), {"no_save_optim": True})}
    for name, setting in kinds.items():
        ranks(1).run(checkpoint_jobs.save_then_train, setting=setting, folder=str(tmp_path / name), before=1, after=0)
        ranks(1).run(fsdp_jobs.save, setting=setting, folder=str(tmp_path / f"{name} fsdp"), steps=1, more=0)
    for refuse, end in ((fsdp_jobs.refuse, ""), (fsdp_jobs.refuse_megatron, " fsdp")):
        for name, setting, message in (
            ("adapted", adapted, "adapters are not read from another engine's checkpoint"),
            ("adapted", plain, "adapters are not read from another engine's checkpoint"),
            ("plain", half, "was saved with bf16: false"),
            ("plain", adapted, "was saved without LoRA adapters"),
            ("bare", plain, "was saved without its optimizer"),
            ("plain", Setting(folders("qwen2")), "does not fit this run"),
        ):
            (text,) = ranks(1).run(refuse, setting=setting, folder=str(tmp_path / f"{name}{end}"))
            assert message in text, (refuse, name, text)
