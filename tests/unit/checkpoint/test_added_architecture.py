"""An architecture is added by one file and one line of the registry: nothing else in the package names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_rl.cli.convert import main
from mindspeed_rl.models import ARCHITECTURES

HIDDEN, FFN, VOCAB, LAYERS, HEADS, GROUPS, HEAD_DIM = 64, 96, 100, 4, 8, 4, 8


def toy_tensors() -> dict[str, torch.Tensor]:
    """The weights of a toy checkpoint under the names that its files would have."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "ffn_norm")}
        for part, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (heads * HEAD_DIM,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes |= {f"{prefix}.feed_forward.{name}.weight": (FFN, HIDDEN) for name in ("wi_0", "wi_1")}
        shapes[f"{prefix}.feed_forward.wo.weight"] = (HIDDEN, FFN)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "layout",
    ["", "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2", "--ckpt-format torch_dist"],
    ids=["tp1", "tp2-pp2", "torch_dist"],
)
def test_an_architecture_of_one_file_and_one_line_round_trips_bit_equal(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "toy", "toy_architecture:TOY")
    config = {"architectures": ["ToyForCausalLM"], "model_type": "toy", "hidden_size": HIDDEN, "intermediate_size": FFN}
    config |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCAB}
    config |= {"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config), encoding="utf-8")
    expected = toy_tensors()
    save_file(expected, tmp_path / "hf/model.safetensors")
    assert main(["--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "mg"), *layout.split()]) == 0
    back = ["--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", str(tmp_path / "mg")]
    assert main([*back, "--save-dir", str(tmp_path / "back"), "--verify"]) == 0
    result = load_file(tmp_path / "back/model.safetensors")
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())
