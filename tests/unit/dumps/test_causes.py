"""Which cause recorded numbers lead to. The numbers come from tests/dist/test_train_rollout_comparison.py, rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_rl.dumps.causes import ActivationGap, Evidence, WeightFinding

NAMES = ["embedding", *(f"layers.{layer}.{part}" for layer in (0, 1) for part in ("attention", "mlp", "output")), "final_norm"]


def places(*gaps: float) -> tuple[ActivationGap, ...]:
    return tuple(ActivationGap(name, gap) for name, gap in zip(NAMES, gaps))


CLEAN = places(0.0, 2e-7, 3e-7, 2e-7, 4e-7, 6e-7, 5e-7, 6e-7)
PARTED = Evidence(24, 0.8, 0.2, "float32", "float32", places=CLEAN, expert_layers=(0, 1), temperature=0.8)


def weight(parameter: str, fault: str, *tensors: str) -> WeightFinding:
    return WeightFinding(parameter, tensors or (parameter,), fault, 0.5)


def name(result: Evidence) -> str | None:
    cause = result.name_cause()
    return None if cause is None else cause.name


def test_no_cause_is_named_where_the_log_probs_agree() -> None:
    assert name(replace(PARTED, largest_gap=3e-6, mean_gap=5e-7)) is None
    both = {"trainer_type": "bfloat16", "engine_type": "bfloat16"}
    assert name(replace(PARTED, largest_gap=0.06, mean_gap=0.01, **both)) is None
    assert name(replace(PARTED, largest_gap=0.06, mean_gap=0.01)) is not None


def test_other_tokens_explain_everything_behind_them() -> None:
    result = replace(PARTED, first_other_token=(4, 22, 23), weights=(weight("model.norm.weight", "other"),))
    assert str(result.name_cause()).startswith(
        "template: the engine read other tokens than the trainer, first at position 4: 23"
    )


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([weight("layers.0.mlp.experts.w2_weight", "rearranged")], "transposed experts"),
        (
            [weight("layers.0.mlp.experts.w2_weight", "stale"), weight("layers.1.mlp.experts.w13_weight", "stale")],
            "stale experts",
        ),
        ([weight("layers.0.mlp.experts.w2_weight", "stale"), weight("model.norm.weight", "stale")], "wrong conversion"),
        ([weight("layers.0.mlp.experts.w2_weight", "rearranged"), weight("model.norm.weight", "other")], "wrong conversion"),
        ([weight("layers.0.mlp.gate.weight", "other")], "router"),
        ([weight("layers.0.self_attn.qkv_proj.weight", "rearranged", "q", "k", "v")], "wrong conversion"),
    ],
)
def test_weights_that_differ_are_named_by_how_they_do(weights: list[WeightFinding], expected: str) -> None:
    cause = replace(PARTED, weights=tuple(weights)).name_cause()
    assert cause is not None and cause.name == expected
    assert any(result.parameter in cause.sentence for result in weights)


def test_weights_that_differ_are_named_even_where_these_tokens_do_not_show_them() -> None:
    assert name(replace(PARTED, largest_gap=0.0, mean_gap=0.0, weights=(weight("layers.0.mlp.experts.w2_weight", "stale"),)))


def test_equal_activations_and_a_temperature_that_explains_the_rest() -> None:
    assert name(replace(PARTED, fitted_temperature=(1.04, 1e-6))) == "temperature"
    assert name(replace(PARTED, fitted_temperature=(0.8001, 1e-6))) == "unknown"
    assert name(replace(PARTED, fitted_temperature=(1.04, 0.5))) == "unknown"


def test_the_first_place_that_parts_says_router_or_conversion() -> None:
    mlp = replace(PARTED, places=places(0.0, 2e-7, 0.31, 0.2, 0.3, 0.5, 0.5, 0.6))
    assert name(mlp) == "router"
    dense = replace(mlp, expert_layers=(1,)).name_cause()
    assert dense is not None and dense.name == "wrong conversion" and "model.layers.0.mlp" in dense.sentence
    attention = replace(PARTED, places=places(0.0, 2e-7, 3e-7, 2e-7, 0.9, 0.5, 0.4, 0.6)).name_cause()
    assert attention is not None and attention.name == "wrong conversion" and "model.layers.1.self_attn" in attention.sentence


def test_rounding_that_adds_up_is_precision_and_a_step_is_not() -> None:
    mixed = replace(PARTED, engine_type="bfloat16", largest_gap=0.05, mean_gap=0.01)
    grown = replace(mixed, places=places(2e-3, 5e-3, 8e-3, 6e-3, 1e-2, 2e-2, 1e-2, 2e-2))
    cause = grown.name_cause()
    assert cause is not None and cause.name == "precision"
    assert "from 0.002 at embedding to 0.02 at final_norm" in cause.sentence
    step = places(2e-3, 5e-3, 8e-3, 6e-3, 0.9, 0.6, 0.5, 0.6)
    assert name(replace(mixed, places=step)) == "wrong conversion"


def test_the_report_ends_with_the_verdict() -> None:
    lines = list(PARTED.describe(PARTED.name_cause()))
    assert lines[0].startswith("24 sampled tokens: log-probs of trainer (float32) and engine (float32) are 0.8 apart at most")
    assert lines[-1].startswith("cause: unknown: ") and sum("layers." in line for line in lines) == 6
    assert list(PARTED.describe(None))[-1] == "no cause: trainer and engine agree as far as rounding goes"
