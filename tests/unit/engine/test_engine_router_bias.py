"""The router's bias on the choice of experts stays in fp32 all the way to the rollout engine, whatever the model's type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import list_model_ops, load_weights
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.models.weights import MemorySource
from mindspeed_rl.resharding.bit_sums import bit_sum
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.proof import compute_chunk_sums
from mindspeed_rl.resharding.transfer import WeightStream

DEEPSEEK3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "attention_bias": False,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_a_bfloat16_model_pushes_its_router_bias_in_float32(training_world: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK3))
    config = MegatronConfig(bf16=True)
    parallel._seed_all(1)
    model = build_model(config, plan_model(config, tmp_path), trainable=True)
    tensors = {name: torch.randn(shape) for op in list_model_ops(model) for name, shape in zip(op.hf, op.shapes)}
    tensors[BIAS] = torch.tensor([3.0001, 3.0002, 3.0003, 3.0004])  # all the same in bfloat16
    load_weights(model, MemorySource(tensors))
    stream = WeightStream(model)
    pushed = dict(stream.named_tensors(torch.bfloat16))
    assert pushed[BIAS].dtype == torch.float32 and torch.equal(pushed[BIAS], tensors[BIAS])
    assert pushed["model.norm.weight"].dtype == torch.bfloat16
    plan, dtypes = stream.plan_full_tensors(torch.bfloat16)
    chunk_sums = compute_chunk_sums(plan, stream.sources, dtypes, Exchange.from_world(), torch.device("cpu")).wait()
    sums = {plan.tensors[chunk.tensor].name: value for chunk, value in zip(plan.chunks, chunk_sums)}  # one process, one chunk
    assert sums == {name: bit_sum(tensor) for name, tensor in pushed.items()}


def start(folder: Path, **keys: float) -> TrainEngine:
    """An engine that trains experts with random weights."""
    (folder / "config.json").write_text(json.dumps(DEEPSEEK3))
    config = MegatronConfig(bf16=False, lr=1e-3, train_iters=10, lr_decay_style="constant", **keys)
    parallel._seed_all(1)
    model = build_model(config, plan_model(config, folder), trainable=True)
    load_weights(
        model, MemorySource({n: torch.randn(shape) for op in list_model_ops(model) for n, shape in zip(op.hf, op.shapes)})
    )
    engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0))
    engine.start_training(1)
    return engine


def test_a_step_without_labels_leaves_the_bias_as_it_was(training_world: None, tmp_path: Path) -> None:
    engine = start(tmp_path)
    model = engine.model
    bias = next(tensor for name, tensor in model.models[0].named_buffers() if name.endswith("expert_bias"))

    def step(labelled: bool) -> bool:
        ids = torch.arange(2, 12)
        rows = Rows([ids], [2], {"loss_mask": [torch.full((8,), labelled)]}, [ids[2:]])
        return engine.train_step(rows, MicroBatching(1), negative_log_prob).is_skipped

    def negative_log_prob(inputs: LossInputs) -> LossOutput:
        mask = inputs.columns["loss_mask"] & inputs.mask
        return LossOutput(-torch.where(mask, inputs.outputs[0], 0.0).sum(), mask.sum())

    before = bias.clone()
    assert not step(True) and not torch.equal(bias, before)
    before = bias.clone()
    assert step(False) and torch.equal(bias, before)


@pytest.mark.parametrize("rate", [None, 0.0, 0.25])
def test_a_step_moves_the_bias_by_the_rate_towards_experts_with_few_tokens(
    training_world: None, tmp_path: Path, rate: float | None
) -> None:
    engine = start(tmp_path, **({} if rate is None else {"moe_router_bias_update_rate": rate}))
    model = engine.model
    (router,) = (module for module in model.models[0].modules() if isinstance(module, TopKRouter))
    chosen: list[Tensor] = []
    router.register_forward_hook(lambda module, inputs, output: chosen.append(output[1]))
    before, ids = router.expert_bias.clone(), torch.arange(2, 14)

    def negative_log_prob(inputs: LossInputs) -> LossOutput:
        return LossOutput(-torch.where(inputs.mask, inputs.outputs[0], 0.0).sum(), inputs.mask.sum())

    engine.train_step(Rows([ids], [2]), MicroBatching(1), negative_log_prob)
    counts = sum(one[: len(ids)].sum(0).float() for one in chosen)
    assert isinstance(counts, Tensor) and counts.max() > counts.min()
    expected = before + (1e-3 if rate is None else rate) * (counts.mean() - counts).sign()
    torch.testing.assert_close(router.expert_bias, expected, rtol=0, atol=1e-6)


def test_a_resumed_run_has_the_bias_of_its_checkpoint_and_moves_it_by_the_rate(training_world: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK3))
    keys = {"lr": 1e-3, "train_iters": 10, "lr_decay_style": "constant", "moe_router_bias_update_rate": 0.25}
    config = MegatronConfig(bf16=False, **keys)

    def start(seed: int) -> tuple[TrainEngine, TopKRouter]:
        parallel._seed_all(1)
        torch.manual_seed(seed)
        model = build_model(config, plan_model(config, tmp_path), trainable=True)
        load_weights(
            model, MemorySource({n: torch.randn(shape) for op in list_model_ops(model) for n, shape in zip(op.hf, op.shapes)})
        )
        engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0))
        engine.start_training(1)
        (router,) = (module for module in model.models[0].modules() if isinstance(module, TopKRouter))
        return engine, router

    def step(engine: TrainEngine, first: int) -> None:
        def negative_log_prob(inputs: LossInputs) -> LossOutput:
            return LossOutput(-torch.where(inputs.mask, inputs.outputs[0], 0.0).sum(), inputs.mask.sum())

        engine.train_step(Rows([torch.arange(first, first + 12)], [2]), MicroBatching(1), negative_log_prob)

    engine, router = start(1)
    before = router.expert_bias.clone()
    step(engine, 2)
    saved = router.expert_bias.clone()
    assert set((saved - before).abs().mul(4).round(decimals=3).tolist()) <= {0.0, 1.0} and not torch.equal(saved, before)
    CheckpointSaver(engine, tmp_path / "save").save(1, {})
    step(engine, 20)

    resumed, its_router = start(2)
    assert not torch.equal(its_router.expert_bias, saved)
    load_checkpoint(resumed, tmp_path / "save")
    assert torch.equal(its_router.expert_bias, saved)
    step(resumed, 20)
    assert torch.equal(its_router.expert_bias, router.expert_bias) and not torch.equal(router.expert_bias, saved)
