"""Layouts of a model that is given as a folder, in place of a model block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from published import MODELS

from mindspeed_rl.cli.plan import main
from mindspeed_rl.planner.fit import FitRequest, build_grpo_tree
from mindspeed_rl.planner.run_files import read_block

SIZES = ["--npus", "2", "--prompt", "512", "--response", "512", "--prompts", "8", "--samples", "4", "--top", "2"]


def _fit(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["fit", *SIZES, *words]) == 0
    return capsys.readouterr().out


def test_a_folder_has_the_layouts_of_the_block_of_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "qwen25_0p5b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen2.5-0.5B"]))
    written = tmp_path / "run.yaml"
    by_folder = _fit(capsys, "--model", str(folder), "-o", str(written))
    assert by_folder == _fit(capsys, "--model", "qwen25_0p5b")
    text = written.read_text()
    assert f'load: "{folder}"' in text and "defaults" not in text
    assert main(["memory", "--config-name", str(written), "--chip", "A3"]) == 0


def test_layouts_of_delta_nets_have_no_cached_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vllm-ascend's engine caches none of them."""
    content = MODELS["Qwen3.5-4B"]
    small = {"num_hidden_layers": 4, "layer_types": content["text_config"]["layer_types"][:4]}
    (tmp_path / "config.json").write_text(json.dumps(content | {"text_config": content["text_config"] | small}))
    _fit(capsys, "--model", str(tmp_path), "-o", str(tmp_path / "run.yaml"))
    assert "enable_prefix_caching: false" in (tmp_path / "run.yaml").read_text()
    trees = {name: build_grpo_tree(FitRequest(name, read_block(name, None), 2, 512, 512)) for name in ("qwen35_4b", "qwen3_8b")}
    kept = {name: tree["generate_config"]["enable_prefix_caching"] for name, tree in trees.items()}
    assert kept == {"qwen35_4b": False, "qwen3_8b": True}


def test_layouts_of_the_second_engine_are_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SIZES, "--model", "qwen25_0p5b", "--engine", "fsdp", "--json"]) == 0
    layouts = [layout["values"] for layout in json.loads(capsys.readouterr().out)["layouts"]]
    assert layouts and all(layout["actor_config.tensor_model_parallel_size"] == 1 for layout in layouts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GptOss", "Gemma3Text", "Glm4Moe", "GlmMoeDsa", "DeepseekV32", "Phi3", "Qwen3_5MoeText"])
def test_every_family_has_layouts(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = getattr(transformers, f"{kind}Config")(
        **{"num_hidden_layers": 4, "hidden_size": 1024, "vocab_size": 32000, "rms_norm_eps": 1e-6, "use_cache": True}
    )
    config.save_pretrained(tmp_path)
    names = {"Gemma3Text": "Gemma3", "Qwen3_5MoeText": "Qwen3_5Moe"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [f"{names.get(kind, kind)}ForCausalLM"]}))
    assert "on 2 x A3" in _fit(capsys, "--model", str(tmp_path))


def test_what_is_no_model_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"], "model_type": "bloom"}')
    assert main(["fit", *SIZES, "--model", str(tmp_path)]) == 2
    assert "BloomForCausalLM" in capsys.readouterr().err
    assert main(["fit", *SIZES, "--model", "hf://nobody/has-this"]) == 2
    assert "nobody/has-this" in capsys.readouterr().err


def test_a_rule_that_every_layout_breaks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5-0.5B"] | {"max_position_embeddings": 512}))
    assert main(["fit", *SIZES, "--model", str(tmp_path)]) == 2
    assert "no layout keeps the rules; generate_config.max_model_len (1024) must be at most 512" in capsys.readouterr().err
