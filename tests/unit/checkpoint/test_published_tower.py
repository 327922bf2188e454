"""A checkpoint of a run with `language_model_only`: the conversion takes the tower from the published folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_vision
import torch
from safetensors.torch import load_file

from mindspeed_rl.checkpoint import megatron_source
from mindspeed_rl.checkpoint.published_tower import find_tower
from mindspeed_rl.cli.convert import main
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.plan import ModelSource, plan_model

TO_MEGATRON = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir"]
TO_HF = ["--load-model-type", "mg", "--save-model-type", "hf", "--load-dir"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A published folder, and a Megatron checkpoint of it from which the tower is gone."""
    model, saved = tmp_path_factory.mktemp("published"), tmp_path_factory.mktemp("saved") / "mg"
    tiny_vision.save("qwen3", model)
    assert main([*TO_MEGATRON, str(model), "--save-dir", str(saved)]) == 0
    path = next(saved.rglob("model_optim_rng.pt"))
    content = torch.load(path, weights_only=False)
    content["model"] = {name: value for name, value in content["model"].items() if not name.startswith("vision_model.")}
    torch.save(content, path)
    (path.parents[1] / "checksums.json").unlink()
    return model, saved


def test_the_conversion_adds_the_published_tower(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, saved = folders
    assert main([*TO_HF, str(saved), "--save-dir", str(tmp_path / "out"), "--hf-cfg-dir", str(model)]) == 0
    published, converted = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    assert published.keys() == converted.keys() and all(torch.equal(published[name], converted[name]) for name in published)


def test_without_the_published_folder_it_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TO_HF, str(folders[1]), "--save-dir", str(tmp_path / "out")]) != 0
    assert "pass --hf-cfg-dir with the published folder" in capsys.readouterr().err


def test_only_a_run_without_a_tower_starts_from_it(folders: tuple[Path, Path]) -> None:
    model, saved = folders
    text = plan_model(MegatronConfig(language_model_only=True), model)
    opened = megatron_source.open_megatron(saved, text.architecture, text.model_config)
    norm = "model.language_model.norm.weight"
    assert torch.equal(opened.read(norm), load_file(model / "model.safetensors")[norm])
    whole = plan_model(MegatronConfig(), model)
    with pytest.raises(ValueError, match="was saved with language_model_only: true"):
        megatron_source.open_megatron(saved, whole.architecture, whole.model_config)


def test_exports_need_the_published_tensors(folders: tuple[Path, Path]) -> None:
    model, saved = folders
    names = ["model.visual.pos_embed.weight"]
    source = ModelSource(saved / "huggingface", saved, "training")
    assert find_tower(MegatronConfig(tokenizer_name_or_path=str(model)), source, names) == model
    with pytest.raises(ValueError, match="name the published folder in tokenizer_name_or_path"):
        find_tower(MegatronConfig(), source, names)


def test_a_model_without_a_tower_has_nothing_to_look_for(folders: tuple[Path, Path]) -> None:
    source = ModelSource(folders[1] / "huggingface", folders[1], "training")
    assert find_tower(MegatronConfig(language_model_only=True), source, []) is None
