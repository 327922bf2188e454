"""`mindspeed-rl merge`: every weight of the result against the method's formula, computed element by element in float64."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from mindspeed_rl.cli.merge import main

Weights = dict[str, torch.Tensor]
BIG = "model.layers.1.mlp.down_proj.weight"


def run(*words: object) -> int:
    return main([str(word) for word in words])


def read(folder: Path) -> Weights:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base and two models near it, the second in several files; each with a tokenizer and a template of its own."""
    root = tmp_path_factory.mktemp("merge")
    model = tiny_models.make_hf_model("qwen2", 0)
    for seed, name in enumerate(("base", "a", "b")):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        tiny_models.write_hf_model(model, root / name, max_shard_size="300KB" if name == "b" else "5GB")
        tokenizer = {"model": {"type": "WordLevel", "vocab": {"x": 0, "y": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
        (root / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        (root / name / "chat_template.jinja").write_text(f"template of {name}")
    return {name: root / name for name in ("base", "a", "b")}


def linear(base: np.ndarray, models: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    return sum(w * x for w, x in zip(weights, models)) / sum(weights)


def slerp(x: np.ndarray, y: np.ndarray, t: float) -> np.ndarray:
    cosine = np.dot(x.ravel(), y.ravel()) / (np.linalg.norm(x) * np.linalg.norm(y))
    if abs(cosine) > 0.9995:
        return (1 - t) * x + t * y
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle) * x + math.sin(t * angle) / math.sin(angle) * y


def task_arithmetic(base: np.ndarray, models: Sequence[np.ndarray], weights: Sequence[float], scale: float) -> np.ndarray:
    return base + scale * sum(w * (x - base) for w, x in zip(weights, models))


def ties(base: np.ndarray, models: Sequence[np.ndarray], weights: Sequence[float], density: float, scale: float) -> np.ndarray:
    """Section 3.1 of the paper, an element at a time."""
    kept = []
    for model in models:
        delta = (model.astype(np.float32) - base.astype(np.float32)).ravel()
        order = sorted(range(delta.size), key=lambda i: -abs(delta[i]))[: max(1, round(density * delta.size))]
        trimmed = np.zeros(delta.size)
        trimmed[order] = delta[order]
        kept.append(trimmed)
    result = base.ravel().copy()
    for i in range(result.size):
        total = sum(w * delta[i] for w, delta in zip(weights, kept))
        agreeing = [(w, delta[i]) for w, delta in zip(weights, kept) if delta[i] * total > 0]
        if agreeing:
            result[i] += scale * sum(w * d for w, d in agreeing) / sum(w for w, _ in agreeing)
    return result.reshape(base.shape)


CASES: dict[str, tuple[list[object], Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]]] = {
    "linear": (["--weights", 3, 1], lambda base, a, b: linear(base, [a, b], [3, 1])),
    "slerp": (["--t", 0.3], lambda base, a, b: slerp(a, b, 0.3)),
    "task_arithmetic": (
        ["--weights", 0.75, -0.5, "--scale", 2],
        lambda base, a, b: task_arithmetic(base, [a, b], [0.75, -0.5], 2.0),
    ),
    "ties": (["--weights", 2, 1, "--density", 0.3, "--scale", 1.5], lambda base, a, b: ties(base, [a, b], [2, 1], 0.3, 1.5)),
}


@pytest.mark.parametrize("method", CASES)
def test_every_weight_is_that_of_the_formula(method: str, folders: dict[str, Path], tmp_path: Path) -> None:
    options, formula = CASES[method]
    base = ["--base", folders["base"]] if method in ("ties", "task_arithmetic") else []
    result = tmp_path / "result"
    assert run("--method", method, *base, "--models", folders["a"], folders["b"], "-o", result, "--verify", *options) == 0
    inputs = [{name: tensor.double().numpy() for name, tensor in read(folder).items()} for folder in folders.values()]
    merged = read(result)
    assert merged.keys() == inputs[0].keys()
    names = ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.self_attn.k_proj.weight", "model.norm.weight"]
    for name in names if method == "ties" else merged:
        expected = formula(*(weights[name] for weights in inputs))
        np.testing.assert_allclose(merged[name].double().numpy(), expected, rtol=2e-6, atol=1e-6, err_msg=name)
    assert (result / "chat_template.jinja").read_text() == "template of a"
    assert json.loads((result / "config.json").read_text())["model_type"] == "qwen2"
    assert not list(tmp_path.glob("*.partial"))


def write_adapter(folder: Path, base: Path, rank: int, alpha: float, value: float) -> torch.Tensor:
    """Write an adapter of one weight whose delta has this value everywhere, and return the delta."""
    outer, inner = read(base)[BIG].shape
    a, b = torch.full((rank, inner), 1.0), torch.full((outer, rank), value / alpha)
    folder.mkdir()
    module = f"base_model.model.{BIG.removesuffix('.weight')}"
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return torch.full((outer, inner), value)


def test_an_adapter_is_merged_without_being_rounded_to_its_base(folders: dict[str, Path], tmp_path: Path) -> None:
    """A bf16 weight of 1.0 has steps of 2^-7 above it; 16 adapters' deltas of 2^-10 each are 2^-6 together."""
    base = tmp_path / "bf16"
    shutil.copytree(folders["base"], base)
    save_file({name: torch.ones_like(t, dtype=torch.bfloat16) for name, t in read(base).items()}, base / "model.safetensors")
    adapters = [tmp_path / f"adapter{index}" for index in range(16)]
    for adapter in adapters:
        write_adapter(adapter, base, 2, 4.0, 2.0**-10)
    (adapters[0] / "chat_template.jinja").write_text("template of the adapter")
    result = tmp_path / "result"
    assert run("--method", "task_arithmetic", "--base", base, "--models", *adapters, "-o", result) == 0
    merged = read(result)
    assert torch.equal(merged[BIG], torch.full_like(merged[BIG], 1 + 2.0**-6)) and merged[BIG].dtype == torch.bfloat16
    assert all(torch.equal(t, torch.ones_like(t)) for name, t in merged.items() if name != BIG)
    assert (result / "chat_template.jinja").read_text() == "template of the adapter"
    both = tmp_path / "both"  # an adapter beside a whole model
    assert run("--method", "linear", "--models", base, adapters[0], "--params-dtype", "fp32", "-o", both) == 0
    assert torch.equal(read(both)[BIG], torch.full_like(read(both)[BIG], 1 + 2.0**-11))


def test_a_tied_head_is_stored_once_and_must_be_the_embedding(tmp_path: Path) -> None:
    model = tiny_models.make_hf_model("gemma", 0)
    tiny_models.write_hf_model(model, tmp_path / "a")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3)
    tiny_models.write_hf_model(model, tmp_path / "b")
    weights = read(tmp_path / "b")
    assert "lm_head.weight" not in weights
    assert run("--method", "linear", "--models", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c") == 0
    merged, before = read(tmp_path / "c"), read(tmp_path / "a")
    torch.testing.assert_close(merged["model.embed_tokens.weight"], 2 * before["model.embed_tokens.weight"])
    assert merged.keys() == before.keys()
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, tmp_path / "b/model.safetensors")
    assert run("--method", "linear", "--models", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "d") == 2
    assert not (tmp_path / "d").exists() and not (tmp_path / "d.partial").exists()


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--method linear --models A B --t 0.5", "--t belongs to slerp"),
        ("--method slerp --models A B A", "merges two models; --models names 3"),
        ("--method ties --models A B", "needs --base"),
        ("--method linear --models A B --weights 1", "1 numbers for 2 models"),
        ("--method linear --models A B --weights 1 -1", "sum to 0"),
        ("--method linear --models A B --weights 1 nan", "finite"),
        ("--method ties --base A --models A B --density 0", "above 0 and at most 1"),
        ("--method slerp --models A B --t 1.5", "from 0 to 1"),
        ("--method linear --models A B -o A", "in the place of"),
        ("--method linear --models A TOKENS", "has id 7 for the token 'y'"),
        ("--method linear --models A SMALL", "merge models of one shape"),
        ("--method linear --models A OTHER", "merge models of one architecture"),
        ("--method linear --models A TIED", "tie_word_embeddings"),
    ],
)
def test_what_cannot_be_merged_is_refused_in_a_line(
    words: str, error: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"A": folders["a"], "B": folders["b"]}
    for name in ("TOKENS", "TIED"):
        if name in words.split():
            names[name] = tmp_path / name
            shutil.copytree(folders["b"], names[name])
    if "TOKENS" in names:
        change_json(names["TOKENS"] / "tokenizer.json", model={"type": "WordLevel", "vocab": {"x": 0, "y": 7}})
    if "TIED" in names:
        change_json(names["TIED"] / "config.json", tie_word_embeddings=True)
    if "OTHER" in words:
        tiny_models.save_hf_model("qwen3", tmp_path / "OTHER")
        names["OTHER"] = tmp_path / "OTHER"
    if "SMALL" in words:
        model = tiny_models.make_hf_model("qwen2", 0)
        model.resize_token_embeddings(64)
        tiny_models.write_hf_model(model, tmp_path / "SMALL")
        names["SMALL"] = tmp_path / "SMALL"
    output = [] if "-o" in words else ["-o", tmp_path / "result"]
    assert run(*(names.get(word, word) for word in words.split()), *output) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and error in lines[0], lines
    assert not (tmp_path / "result").exists() and not (tmp_path / "result.partial").exists()
