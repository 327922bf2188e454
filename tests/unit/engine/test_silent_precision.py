"""Three faults of precision that change a model silently, in bfloat16: the gate of experts, their bias, the length of rope."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from megatron.core.transformer.moe.router import TopKRouter
from test_engine_router_bias import DEEPSEEK3

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.build import build_model
from mindspeed_rl.models.hf_module import build_module, cast_parameters, read_hf_config
from mindspeed_rl.models.module_family import ModuleArchitecture
from mindspeed_rl.models.plan import plan_model, read_model
from mindspeed_rl.run.rules.training_engine_rules import check_model_form

sys.path.append(str(Path(__file__).parents[2] / "dist"))
import tiny_modules

ROPE = {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN = {**DEEPSEEK3, "max_position_embeddings": 1024, "rope_scaling": {**ROPE, "original_max_position_embeddings": 64}}


def build(folder: Path, content: dict[str, Any], **keys: Any) -> torch.nn.Module:
    """A bfloat16 model of Megatron's layers."""
    (folder / "config.json").write_text(json.dumps(content))
    config = MegatronConfig(bf16=True, **keys)
    parallel._seed_all(1)
    (model,) = build_model(config, plan_model(config, folder), trainable=False).models
    return model


def test_the_gate_of_a_bfloat16_model_is_computed_in_float32(training_world: None, tmp_path: Path) -> None:
    (router,) = [part for part in build(tmp_path, DEEPSEEK3).modules() if isinstance(part, TopKRouter)]
    hidden = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact = hidden.double() @ router.weight.detach().double().t()
    with torch.no_grad():
        logits = router.gating(hidden)
    assert logits.dtype == torch.float32 and router.weight.dtype == torch.bfloat16
    assert float((logits - exact).abs().max()) < 1e-5 * float(exact.abs().max())
    rounded = hidden @ router.weight.detach().t()  # what a product in bfloat16 would choose experts by
    assert float((rounded - exact).abs().max()) > 1e-3 * float(exact.abs().max())


def build_v4(folder: Path) -> transformers.PreTrainedModel:
    """A bfloat16 module of transformers of a tiny DeepSeek-V4, as a rollout has it."""
    config = tiny_modules.CONFIGS["deepseek_v4"]()
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["DeepseekV4ForCausalLM"]}))
    torch.manual_seed(3)
    module = build_module(read_hf_config(folder, "generate_config.engine: transformers"))
    cast_parameters(module, torch.bfloat16)
    return module


def test_deepseek_v4_chooses_experts_in_float32_in_training_and_in_the_rollout(tmp_path: Path) -> None:
    """Its class computes gates in the format of the weights, so that it is refused in bfloat16, which it cannot compute.

    Once transformers computes it in bfloat16 the last line fails: gates then need float32 of their own.
    """
    module = build_v4(tmp_path)
    gates = [layer.mlp.gate for layer in module.model.layers]
    assert {gate.e_score_correction_bias.dtype for gate in gates[1:]} == {torch.float32}
    assert gates[0].tid2eid.dtype == torch.int64 and gates[0].weight.dtype == torch.bfloat16
    architecture, model_config, _ = read_model(tmp_path, "fsdp")
    assert isinstance(architecture, ModuleArchitecture)
    with pytest.raises(ValueError, match="bf16: true with engine: fsdp .* deepseek_v4 keeps some in float32, such as"):
        check_model_form(MegatronConfig(engine="fsdp", bf16=True), architecture, model_config)
    with pytest.raises(ValueError, match="^generate_config.dtype: bfloat16 computes .* keeps some in float32, such as .*; set"):
        architecture.check_rollout("bfloat16", "generate_config.dtype:")
    architecture.check_rollout("float32", "generate_config.dtype:")
    with pytest.raises(RuntimeError, match="same dtype"), torch.no_grad():
        module(torch.arange(8)[None])


def test_mamba_generates_in_bfloat16_and_trains_in_float32(tmp_path: Path) -> None:
    """It keeps its residual in float32, and no weight: a product casts the residual first."""
    content = {**tiny_modules.CONFIGS["mamba"]().to_dict(), "architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    architecture, model_config, _ = read_model(tmp_path, "fsdp")
    assert isinstance(architecture, ModuleArchitecture)
    architecture.check_rollout("bfloat16", "generate_config.dtype:")
    with pytest.raises(ValueError, match="mamba keeps some in float32, such as the residual; set bf16: false"):
        check_model_form(MegatronConfig(engine="fsdp", bf16=True), architecture, model_config)
    torch.manual_seed(3)
    module, ids = build_module(read_hf_config(tmp_path, "generate_config.engine: transformers")).eval(), torch.arange(12)[None]
    with torch.no_grad():
        exact = module(ids).logits.log_softmax(-1)
        cast_parameters(module, torch.bfloat16)
        rounded = module(ids).logits.float().log_softmax(-1)
    assert {value.dtype for value in module.parameters()} == {torch.bfloat16}
    assert 0 < float((rounded - exact).abs().max()) < 0.05  # a few times 2**-8, the step of bfloat16


def test_the_angles_of_a_bfloat16_module_of_deepseek_v4_are_those_of_the_formula(tmp_path: Path) -> None:
    rotary = build_v4(tmp_path).model.rotary_emb
    for name, settings in rotary.config.rope_parameters.items():
        if isinstance(settings, dict):
            size = int(16 * settings["partial_rotary_factor"])
            expected = settings["rope_theta"] ** -(torch.arange(0, size, 2).double() / size)
            frequencies = getattr(rotary, f"{name}_inv_freq")
            assert frequencies.dtype == torch.float32
            torch.testing.assert_close(frequencies.double(), expected, rtol=1e-6, atol=0)
            positions = torch.arange(200)[None]
            for length in (20, 200):  # a row's length changes none of its angles
                cos, _ = rotary(torch.zeros(1), positions[:, :length], layer_type=name)
                exact = (positions[0, :length, None] * frequencies.double()).cos()
                torch.testing.assert_close(cos[0].double(), exact, rtol=0, atol=2e-5)


def test_the_bias_of_a_bfloat16_module_stays_in_float32(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK3))
    with torch.device("meta"):
        module = build_module(read_hf_config(tmp_path, "engine: fsdp"))
    cast_parameters(module, torch.bfloat16)
    (bias,) = [value for name, value in module.named_buffers() if name.endswith("e_score_correction_bias")]
    assert bias.dtype == torch.float32 and module.lm_head.weight.dtype == torch.bfloat16


def test_angles_do_not_depend_on_the_length_of_a_run_and_are_not_rounded(training_world: None, tmp_path: Path) -> None:
    published = transformers.DeepseekV3Config(**{key: value for key, value in YARN.items() if key != "architectures"})
    theirs = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3RotaryEmbedding(published)
    positions = torch.arange(1000)
    angles = positions[:, None].double() * theirs.inv_freq.double()
    for length in (32, 64, 512):  # below, at and above the length of pretraining
        model = build(tmp_path, YARN, seq_length=length)
        rotary = model.decoder.layers[0].self_attention.rotary_pos_emb
        ours, _ = rotary(1000)
        half = ours.reshape(1000, -1)[:, : angles.shape[1]]
        assert ours.dtype == torch.float32
        np.testing.assert_allclose(half.double().cos().numpy(), angles.cos().numpy(), atol=2e-4)
