"""Memory savers change memory and nothing else; keys of the model are compared with config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from engine_steps import ROWS, negative_log_prob, steps, weights
from megatron.core.parallel_state import RankGenerator
from megatron_release import GROUPED_EXPERTS
from torch import Tensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.models.layers import _RecomputingMLP
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.run.batch_sizes import Layout
from mindspeed_rl.run.explain.plan_page import _list_parallel_groups


def state_bytes(engine: TrainEngine) -> int:
    """Bytes of Adam's moments that are on the device."""
    return sum(
        value.untyped_storage().size()
        for optimizer in engine.optimizer.chained_optimizers
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )


def build_random(config: MegatronConfig, folder: Path) -> TrainEngine:
    """An engine that trains the model of a folder from random weights, the same for every configuration."""
    parallel._seed_all(1)
    model = build_model(config, plan_model(config, folder), trainable=True)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.models[0].parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0))
    engine.start_training(1)
    return engine


# ---------------------------------------------------------------- swap_optimizer


@pytest.mark.parametrize("keys", [{}, {"bf16": True}, {"bf16": True, "use_distributed_optimizer": True}], ids=str)
def test_a_swapped_optimizer_takes_the_same_steps_and_stays_off_the_device(
    make_engine: Callable[..., TrainEngine], keys: dict
) -> None:
    plain, swapped = make_engine(**keys), make_engine(swap_optimizer=True, **keys)
    assert steps(plain, 3) == steps(swapped, 3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(plain), weights(swapped)))
    assert state_bytes(plain) > 0
    assert state_bytes(swapped) == 0


def test_a_swapped_optimizer_is_saved_and_loaded_in_full(make_engine: Callable[..., TrainEngine], tmp_path: Path) -> None:
    keys = {"swap_optimizer": True, "bf16": True}
    engine = make_engine(**keys)
    steps(engine, 1)
    CheckpointSaver(engine, tmp_path).save(1, {})
    resumed = make_engine(**keys)
    steps(resumed, 2)
    load_checkpoint(resumed, tmp_path)
    assert steps(resumed, 2) == steps(engine, 2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(resumed), weights(engine)))


# ---------------------------------------------------------------- recompute_activation_function


def test_recomputed_activations_give_the_same_steps_and_are_dropped(make_engine: Callable[..., TrainEngine]) -> None:
    plain, recomputing = make_engine(), make_engine(recompute_activation_function=True)
    assert steps(plain, 3) == steps(recomputing, 3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(plain), weights(recomputing)))
    mlp = recomputing.model.models[0].decoder.layers[0].mlp
    assert type(mlp) is _RecomputingMLP
    seen: list[Tensor] = []
    mlp.linear_fc2.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    output, _ = mlp(torch.randn(5, 1, 32, requires_grad=True))
    assert seen[0].untyped_storage().size() == 0
    output.sum().backward()
    assert seen[0].untyped_storage().size() > 0


@pytest.mark.usefixtures("training_world")
def test_activations_of_experts_are_recomputed_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[1],
    )
    config.architectures = ["Qwen2MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    finals = []
    for recompute in (False, True):
        keys = MegatronConfig(
            bf16=False, lr=1e-2, train_iters=9, lr_decay_style="constant", recompute_activation_function=recompute
        )
        engine = build_random(keys, tmp_path)
        finals.append((steps(engine, 2), weights(engine)))
        count = sum(isinstance(module, _RecomputingMLP) for module in engine.model.models[0].modules())
        assert count == recompute * (4 + 1 + 1)
    assert finals[0][0] == finals[1][0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(finals[0][1], finals[1][1]))


@pytest.mark.usefixtures("training_world")
@pytest.mark.skipif(not GROUPED_EXPERTS, reason="this release has no grouped experts")
def test_grouped_experts_recompute_their_activation_unless_it_has_adapters(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = transformers.Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    experts.architectures = ["Qwen3MoeForCausalLM"]
    experts.save_pretrained(tmp_path)
    common = {"lr": 1e-2, "train_iters": 9, "lr_decay_style": "constant", "moe_grouped_gemm": True}
    finals = []
    for recompute in (False, True):
        keys = MegatronConfig(**common, recompute_activation_function=recompute)
        engine = build_random(keys, tmp_path)
        finals.append((steps(engine, 2), weights(engine)))
        assert engine.model.models[0].decoder.layers[0].mlp.experts.activation_recompute == recompute
    assert finals[0][0] == finals[1][0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(finals[0][1], finals[1][1]))
    keys = MegatronConfig(**common, recompute_activation_function=True, lora_target_modules=["linear_fc1"])
    with pytest.raises(ValueError, match="recompute_activation_function: true cannot be used with adapters on grouped"):
        build_model(keys, plan_model(keys, tmp_path), trainable=True)


# ---------------------------------------------------------------- ranks and model keys


@pytest.mark.parametrize("tp_pp_dp", [False, True])
def test_ranks_are_ordered_as_in_the_run_file_and_the_plan(tp_pp_dp: bool) -> None:
    order = parallel._get_rank_order(MegatronConfig(use_tp_pp_dp_mapping=tp_pp_dp))
    ours = _list_parallel_groups(Layout(num_npus=8, tensor=2, pipeline=2, context=1), tp_pp_dp)
    ranks = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order=order)
    for axis in ("tp", "dp", "pp"):
        assert sorted(ranks.get_ranks(axis)) == sorted(ours[axis])
    assert ([0, 2] if not tp_pp_dp else [0, 4]) in ranks.get_ranks("dp")


NETWORK = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def test_model_keys_that_describe_the_model_are_accepted(llama: Path) -> None:
    assert plan_model(MegatronConfig(**NETWORK), llama).model_config.rope_scaling.factor == 8.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling_type", None),
        ("rope_scaling_factor", 32.0),
        ("low_freq_factor", 2.0),
        ("disable_bias_linear", False),
        ("norm_epsilon", 1e-5),
        ("rotary_base", 10000),
        ("ffn_hidden_size", 5),
        ("kv_channels", 9),
        ("group_query_attention", False),
    ],
)
def test_model_keys_that_contradict_the_model_are_named(llama: Path, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"do not describe the model of .*{key}: {value} .there "):
        plan_model(MegatronConfig(**{**NETWORK, key: value}), llama)


# ---------------------------------------------------------------- the schedule of a resumed run


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (2, 2)])
def test_the_learning_rate_follows_iterations_whatever_their_steps(
    make_engine: Callable[..., TrainEngine], tmp_path: Path, before: int, after: int
) -> None:
    keys = {"lr": 0.08, "lr_decay_style": "linear", "train_iters": 8}
    engine = make_engine(steps_per_iteration=before, **keys)
    for _ in range(4 * before):
        result = engine.train_step(ROWS, MicroBatching(1), negative_log_prob)
    CheckpointSaver(engine, tmp_path).save(4, {})
    resumed = make_engine(steps_per_iteration=after, **keys)
    load_checkpoint(resumed, tmp_path)
    rates = [resumed.train_step(ROWS, MicroBatching(1), negative_log_prob).lr for _ in range(4 * after)]
    # linear from 0.08 to 0 over 8 iterations: the second half is left
    assert rates == pytest.approx([0.08 * (1 - (4 + step / after) / 8) for step in range(4 * after)])
    assert result.lr == pytest.approx(0.08 * (1 - (4 - 1 / before) / 8))
    # Adam's correction of its bias counts its own steps
    steps_taken = {int(group["step"]) for group in resumed.optimizer.param_groups if "step" in group}
    assert steps_taken <= {4 * before + 4 * after} and resumed.num_updates == 4 * before + 4 * after
