"""Each cause of a log-prob difference, brought about in a real trainer beside a real engine, is named; and none without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from comparison_jobs import compare
from ranks import Ranks

pytestmark = pytest.mark.slow
KIND = "rollout"


def test_each_cause_is_named_and_none_where_there_is_none(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    expected = {
        "none": "",
        "transposed": "transposed experts: model.layers.0.mlp.experts",
        "stale": "stale experts: model.layers.0.mlp.experts",
        "norm": "wrong conversion: model.layers.1.post_attention_layernorm.weight (of ",
        "gate": "router: model.layers.0.mlp.gate.weight",
        "conversion": "wrong conversion: the weights under their Hugging Face names are equal, but layers.1.attention is the",
        "temperature": "temperature: the engine's log-probs fit temperature 0.8, the trainer divides its logits by",
        "template": "template: the engine read other tokens than the trainer, first at position 4: 23 where the trainer has 22",
        "router": "router: the weights are equal and so is what enters layer 0",
    }
    (report,) = ranks(1).run(compare, timeout_s=500, folder=str(models["moe"]), work=str(tmp_path), tampers=list(expected))
    wrong = {
        name: text
        for name, (text, _) in report.items()
        if not (text.startswith(expected[name]) if expected[name] else not text)
    }
    assert not wrong, "\n".join(f"{name}: {text}\n  {report[name][1]}" for name, text in wrong.items())


def test_an_engine_in_int8_has_the_quantized_weights_and_differs_by_precision_alone(
    models: dict[str, Path], tmp_path: Path
) -> None:
    alone = Ranks(1, "rollout")
    keys = ["generate_config.quantization=int8"]
    try:
        (report,) = alone.run(
            compare, timeout_s=300, folder=str(models["tied"]), work=str(tmp_path), tampers=["none", "norm"], keys=keys
        )
    finally:
        alone.close()
    text, evidence = report["none"]
    # no parameter differs from what the engine's loader makes of the quantized weights
    assert text.startswith("precision: the trainer computes in float32, the engine in int8"), (text, evidence)
    assert 1e-5 < evidence.mean_gap < 0.02
    assert report["norm"][0].startswith("wrong conversion: model.layers.1.post_attention_layernorm.weight"), report["norm"]


def test_an_engine_of_fewer_digits_is_a_matter_of_precision(models: dict[str, Path], tmp_path: Path) -> None:
    alone = Ranks(1, "rollout")  # a process of its own: vLLM builds one engine in each
    try:
        (report,) = alone.run(
            compare, timeout_s=300, folder=str(models["tied"]), work=str(tmp_path), tampers=["none"], engine_type="bfloat16"
        )
    finally:
        alone.close()
    text, evidence = report["none"]
    assert text.startswith("precision: the trainer computes in float32, the engine in bfloat16"), (text, evidence)
