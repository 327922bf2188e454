"""Models that send a token to one expert compute what transformers does, whatever the scores of their router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from megatron_release import PLAIN_LATENT_QUERIES
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.models import find_architecture

_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
_SHARED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
_LATENT = {
    **_SHARED,
    **{"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}
_INDEXED = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 64}
_DELTAS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN = {**_EXPERTS, "num_experts": 4}
#: case -> (class of transformers, keys)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4-moe": ("Glm4Moe", _SHARED),
    "glm5": ("GlmMoeDsa", _LATENT | _INDEXED | {"mlp_layer_types": ["dense", "sparse"]}),
    "deepseek3": ("DeepseekV3", _LATENT | {"n_group": 1, "topk_group": 1}),
    "deepseek32": ("DeepseekV32", _LATENT | _INDEXED | {"n_group": 1, "topk_group": 1}),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "hy3": ("HYV3", _QWEN | {"num_shared_experts": 1, "router_scaling_factor": 1.7}),
    "ernie4.5-moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 1, "moe_intermediate_size": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": None}),
    "qwen2-moe": ("Qwen2Moe", _QWEN | {"shared_expert_intermediate_size": 16, "norm_topk_prob": True}),
    "qwen2-moe, scores": ("Qwen2Moe", _QWEN | {"shared_expert_intermediate_size": 16, "norm_topk_prob": False}),
    "qwen3-moe": ("Qwen3Moe", _QWEN | {"norm_topk_prob": True}),
    "qwen3-moe, scores": ("Qwen3Moe", _QWEN | {"norm_topk_prob": False}),
    "qwen3-next": ("Qwen3Next", _QWEN | _DELTAS | {"shared_expert_intermediate_size": 16, "norm_topk_prob": True}),
    "qwen3.5-moe": ("Qwen3_5MoeText", _QWEN | _DELTAS | {"shared_expert_intermediate_size": 16}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 64}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": [1, 1], "moe_intermediate_size": [24, 24]}),
    "deepseek2": ("DeepseekV2", _LATENT | {"q_lora_rank": None, "norm_topk_prob": False}),
}


def build(family: str) -> transformers.PreTrainedModel:
    """A random model whose routers and biases are far from uniform."""
    kind, keys = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**_SIZES | keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name and "norm" not in name:
                tensor.normal_(0.0, 0.3)
    return model


def weighted_loss(inputs: LossInputs) -> LossOutput:
    """-log p of the response tokens."""
    return LossOutput(torch.where(inputs.mask, -inputs.outputs[0], 0).sum(), inputs.mask.sum())


def compute_reference(model: transformers.PreTrainedModel, rows: list[Tensor]) -> tuple[list[Tensor], float]:
    """Return log-probs of all tokens but the first of each row, and the norm of the mean loss's gradient."""
    log_probs = [model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0].float() for row in rows]
    (-torch.cat(log_probs).mean()).backward()
    squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return [one.detach() for one in log_probs], float(torch.stack(squares).sum().sqrt())


_PLAIN_QUERIES = pytest.mark.skipif(not PLAIN_LATENT_QUERIES, reason="this Megatron has no latent queries without a rank")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=_PLAIN_QUERIES) if family == "deepseek2" else family for family in FAMILIES]
)
def test_log_probs_and_gradients_are_those_of_transformers(make_engine: Callable[..., TrainEngine], family: str) -> None:
    model, generator = build(family), torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 67, (length,), generator=generator) for length in (12, 9, 15)]
    engine = make_engine(model=model, moe_aux_loss_coeff=0.0)
    expected, norm = compute_reference(model, rows)
    given = Rows(rows, [1] * len(rows))
    found = engine.forward(given, MicroBatching(4))
    assert found is not None
    for mine, theirs in zip(found[0], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert engine.train_step(given, MicroBatching(4), weighted_loss).grad_norm == pytest.approx(norm, rel=1e-3)


def test_deepseek_v2_with_a_normalized_expert_is_refused() -> None:
    keys = FAMILIES["deepseek2"][1] | {"norm_topk_prob": True, "model_type": "deepseek_v2", "topk_method": "greedy"}
    with pytest.raises(ValueError, match="norm_topk_prob true and num_experts_per_tok 1"):
        find_architecture("deepseek_v2").read_model_config(_SIZES | keys)
