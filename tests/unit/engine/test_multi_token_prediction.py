"""Targets of multi-token-prediction layers, what a plan counts of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_engine_batching import CPU, random_rows, shapes

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import build_micro_batch
from mindspeed_rl.models.costs import ModelFlops
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.planner.shapes import count_stage_elements

MODELS = Path(__file__).resolve().parents[2] / "data" / "models"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_layer_k_predicts_a_token_from_the_one_k_and_two_before_it_in_its_own_sequence(packed: bool, seed: int) -> None:
    rows, indexes = random_rows(seed), [4, 0, 5, 2]
    chosen = rows.select(indexes)
    width = max(1, *chosen.response_lengths)
    expected: list[list[tuple[int, ...]]] = [[], []]
    for row, (ids, prompt) in enumerate(zip(chosen.input_ids, chosen.prompt_lengths)):
        for layer in range(2):
            for token in range(max(prompt, layer + 2), len(ids)):
                # slot, token of the hidden state, its position, token whose embedding is added, target
                start = token - layer - 2
                values = (row * width + token - prompt, int(ids[start]), start, int(ids[token - 1]), int(ids[token]))
                expected[layer].append(values)
    for ranks in shapes(packed):
        results: list[list[tuple[int, ...]]] = [[], []]
        for shape in ranks:
            micro_batch = build_micro_batch(rows, indexes, shape.__class__(**vars(shape) | {"num_predictions": 2}), CPU)
            for layer, targets in enumerate(micro_batch.predictions):
                at = [
                    values.t().flatten()[targets.hidden_index] for values in (micro_batch.input_ids, micro_batch.position_ids)
                ]
                added = targets.input_ids.t().flatten()[targets.hidden_index]
                values = (targets.slots, *at, added, targets.labels)
                results[layer] += zip(*(value.tolist() for value in values))
        assert [sorted(values) for values in results] == [sorted(values) for values in expected]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    config = json.loads((MODELS / "DeepSeek-R1.json").read_text()) | {"num_hidden_layers": 6, "n_routed_experts": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_plan_counts_the_layer_on_the_last_stage_with_a_copy_of_the_embedding(deepseek: Path) -> None:
    def count(stages: int, layers: int) -> list[int]:
        config = MegatronConfig(mtp_num_layers=layers, pipeline_model_parallel_size=stages)
        return [elements.parameters for elements in count_stage_elements(plan_model(config, deepseek), config)]

    hidden, vocab, heads, ffn = 7168, 129280, 128, 2048
    latent = hidden * (1536 + 512 + 64) + 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * hidden + 1536 + 512
    experts = 17 * 3 * hidden * ffn + 16 * hidden
    # projection, norms of embedding, hidden state and output, norms of the decoder layer
    layer = latent + experts + 2 * hidden * hidden + 5 * hidden
    (plain,), (predicting,) = count(1, 0), count(1, 1)
    assert predicting - plain == layer
    assert [b - a for a, b in zip(count(2, 0), count(2, 1))] == [0, layer + hidden * vocab]


def test_operations_of_the_layer_are_its_products_its_attention_and_a_head(deepseek: Path) -> None:
    costs = []
    for layers in (0, 1):
        plan = plan_model(MegatronConfig(mtp_num_layers=layers), deepseek)
        costs.append(ModelFlops.count(plan.architecture, plan.model_config))
    hidden, heads, ffn = 7168, 128, 2048
    latent = hidden * (1536 + 512 + 64) + 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * hidden
    products = latent + (8 + 1) * 3 * hidden * ffn + 16 * hidden + 2 * hidden * hidden + hidden * 129280
    assert costs[1].per_token - costs[0].per_token == pytest.approx(2 * products)
    assert costs[1].per_squared_token - costs[0].per_squared_token == pytest.approx(2 * heads * (192 + 128) / 2)


def test_a_tied_head_is_the_copy_of_the_embedding_on_the_last_stage(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "max_position_embeddings": 512, "tie_word_embeddings": True, "hidden_act": "silu", "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def count(stages: int, layers: int) -> list[int]:
        config = MegatronConfig(mtp_num_layers=layers, pipeline_model_parallel_size=stages)
        return [elements.parameters for elements in count_stage_elements(plan_model(config, tmp_path), config)]

    layer = count(1, 1)[0] - count(1, 0)[0]
    assert [b - a for a, b in zip(count(2, 0), count(2, 1))] == [0, layer]


def test_a_family_without_such_layers_is_refused_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODELS / "Qwen2.5-7B.json").read_text())
    with pytest.raises(ValueError, match="mtp_num_layers: 1: qwen2 has no multi-token-prediction layers"):
        plan_model(MegatronConfig(mtp_num_layers=1), tmp_path)
