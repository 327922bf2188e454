"""Weights in host memory whose layers come to the device one after the other give the numbers of weights that stay there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import ROWS
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.streamed_weights import StreamedWeights
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import load_weights
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.planner.shapes import count_streamed_elements

LAYERS, HIDDEN, VOCAB = 4, 32, 67
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, tie_word_embeddings=True)),
    "untied": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, tie_word_embeddings=False)),
    "experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=2
        )
    ),
}


def build_engine(folder: Path, **keys: Any) -> TrainEngine:
    """An engine that does not train."""
    config = MegatronConfig(**{"bf16": False, **keys})
    model = build_model(config, plan_model(config, folder), trainable=False)
    load_weights(model, HfFolder(folder))
    return TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0))


def sizes(modules: nn.Module | list[nn.Module]) -> int:
    """Bytes of the parameters that are on the device."""
    modules = modules if isinstance(modules, list) else [modules]
    found = {p.data_ptr(): p.untyped_storage().size() for module in modules for p in module.parameters()}
    return sum(found.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_streamed_layers_give_the_numbers_of_resident_ones_and_two_are_there_at_a_time(
    training_world: None, tmp_path: Path, kind: str, bf16: bool
) -> None:
    torch.manual_seed(0)
    MODELS[kind]().save_pretrained(tmp_path)
    parallel._seed_all(1)
    engine = build_engine(tmp_path, bf16=bf16)
    wanted = [engine.forward(ROWS, MicroBatching(size)) for size in (1, 2)]
    total = engine.offloader.resident_bytes()["weights"]
    engine.offloader = StreamedWeights(engine.model)
    assert engine.offloader.resident_bytes() == {"weights": 0, "gradients": 0, "optimizer": 0}

    (module,), seen = engine.model.models, []
    layers = list(module.decoder.layers)
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *_: seen.append((sizes(layers), engine.offloader.resident_bytes()["weights"])))
    for size, outputs in zip((1, 2), wanted):
        for _ in range(2):  # the copies in host memory stay
            engine.offloader.onload(params=True)
            for ours, theirs in zip(engine.forward(ROWS, MicroBatching(size)), outputs, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            engine.offloader.offload(params=True)
            assert engine.offloader.resident_bytes()["weights"] == 0
    # the planner's count, from the table of weights; expert_bias and the like are not parameters
    (counted,) = count_streamed_elements(engine.plan, engine.config)
    assert max(there for _, there in seen) == counted.parameters * (2 if bf16 else 4) < total
    assert len(seen) == LAYERS * 2 * (2 + 1)


def test_a_failed_pass_leaves_nothing_behind(training_world: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS["untied"]().save_pretrained(tmp_path)
    engine = build_engine(tmp_path)
    (wanted, _) = engine.forward(ROWS, MicroBatching(2))
    engine.offloader = StreamedWeights(engine.model)
    layers = engine.model.models[0].decoder.layers

    def fail(*_: object) -> None:
        raise RuntimeError("a broken kernel")

    broken = layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a broken kernel"):
        engine.forward(ROWS, MicroBatching(2))
    # only the layer that was on its way
    assert engine.offloader.resident_bytes()["weights"] == sizes(layers[2])
    broken.remove()
    (again, _) = engine.forward(ROWS, MicroBatching(2))
    assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))
    assert engine.offloader.resident_bytes()["weights"] == 0
