"""Indexers train by their divergence alone, and layers without one take the tokens of another's, alike under every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_jobs
import numpy as np
import prefix_jobs
import pytest
import tiny_families
import torch
import training_jobs as jobs
from comparison import assert_same_training
from ranks import Ranks
from slow_layouts import EP, PP, RECOMPUTE, RING, SP, ULYSSES
from training_jobs import Setting

from mindspeed_rl.observability.metrics import merge

#: large, so that the gradient of this loss is not lost in the others
_LOSS = {"dsa_indexer_loss_coeff": 30.0}
_CORE = {"recompute_granularity": "selective"}
_LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "padded rows": (1, {}, {"packed": False}),
    "token budget": (1, {}, {"token_budget": 64}),
    "recomputed": (1, RECOMPUTE, {}),
    "core attention recomputed": (1, _CORE, {}),
    "TP2 SP": (2, SP, {}),
    "TP2 SP recomputed": (2, SP | RECOMPUTE, {}),
    "PP2": (2, PP, {}),
    "ring": (2, RING, {}),
    "Ulysses, padded rows": (2, ULYSSES, {"packed": False}),
    "EP2": (2, EP, {}),
    "sharded optimizer": (2, {"use_distributed_optimizer": True}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_families.save("deepseek_v32", tmp_path_factory.mktemp("sparse")))


@pytest.fixture(scope="module")
def alone(ranks: Callable[[int], Ranks], folder: str) -> list[dict[str, Any]]:
    """Report of one process, with packed micro-batches of two rows."""
    return ranks(1).run(jobs.train, setting=Setting(folder, _LOSS))


@pytest.fixture(scope="module")
def sharing(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """A model with an indexer for two layers, and the report of one process, with packed micro-batches of two rows."""
    folder = str(tiny_families.save("glm5", tmp_path_factory.mktemp("sharing")))
    return folder, ranks(1).run(jobs.train, setting=Setting(folder))


def _divergence(model: torch.nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """Sum over layers of the mean divergence of a token, from what transformers' modules get and return."""
    total, inputs, weights = torch.zeros(()), [], []
    for layer in model.model.layers:
        layer.self_attn.indexer.register_forward_pre_hook(lambda module, args: inputs.append((module, *args[:3])))
        layer.self_attn.register_forward_hook(lambda module, args, output: weights.append(output[1][0]))
    for ids in rows:
        inputs.clear(), weights.clear()
        with torch.no_grad():
            model(ids[None])
        for (indexer, hidden, query, (cos, sin)), weight in zip(inputs, weights, strict=True):
            half = cos.size(-1) // 2
            angles = cos[0, :, None, :half], sin[0, :, None, :half]

            def rotate(x: torch.Tensor, half: int = half, angles: tuple[torch.Tensor, ...] = angles) -> torch.Tensor:
                a, b, rest = x.split([half, half, x.size(-1) - 2 * half], -1)
                return torch.cat([a * angles[0] - b * angles[1], b * angles[0] + a * angles[1], rest], -1)

            queries = rotate(indexer.wq_b(query[0]).unflatten(-1, (indexer.n_heads, -1)))
            keys = rotate(indexer.k_norm(indexer.wk(hidden[0]))[:, None])[:, 0]
            products = torch.einsum("shd,td->sht", queries, keys).clamp(min=0) / math.sqrt(keys.size(-1))
            scores = torch.einsum("sh,sht->st", indexer.weights_proj(hidden[0]), products) / math.sqrt(indexer.n_heads)
            target = weight.mean(0)
            chosen = target > 0
            logs = scores.masked_fill(~chosen, -math.inf).log_softmax(-1).masked_fill(~chosen, 0.0)
            total = total + (torch.xlogy(target, target) - target * logs).sum()
    return total / sum(map(len, rows))


def test_the_loss_and_its_gradient_are_those_of_transformers_modules_and_nothing_else_changes(
    ranks: Callable[[int], Ranks], folder: str
) -> None:
    unclipped = {"clip_grad": 0.0}
    (plain,), (trained,) = (
        ranks(1).run(jobs.train, setting=Setting(folder, unclipped | keys), steps=1) for keys in ({}, _LOSS)
    )
    expected = _divergence(model := tiny_families.build("deepseek_v32").eval(), jobs.all_rows().input_ids)
    expected.backward()
    assert merge([trained["metrics"][0]]).results()["indexer_loss"] == pytest.approx(expected.item(), rel=1e-4)
    norm = torch.stack([value.grad.norm() for value in model.parameters() if value.grad is not None]).norm().item()
    added = math.sqrt(trained["grad_norm"][0] ** 2 - plain["grad_norm"][0] ** 2)
    assert added == pytest.approx(30.0 * norm, rel=1e-3)
    before = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, weight in trained["weights"].items():
        if ".indexer." in name:
            assert np.array_equal(plain["weights"][name], before[name]) and not np.array_equal(weight, before[name]), name
        else:
            assert np.array_equal(plain["weights"][name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_trains_the_indexers_as_one_process_does(
    ranks: Callable[[int], Ranks], folder: str, alone: list[dict[str, Any]], layout: str
) -> None:
    size, keys, others = _LAYOUTS[layout]
    reports = ranks(size).run(jobs.train, setting=Setting(folder, keys | _LOSS, **others), timeout_s=240)
    assert_same_training(reports, alone, tolerance=2e-5)
    ours, theirs = (
        [merge(report["metrics"][step] for report in result).results()["indexer_loss"] for step in range(5)]
        for result in (reports, alone)
    )
    assert ours == pytest.approx(theirs, rel=1e-4) and theirs[-1] < theirs[0]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, ULYSSES, SP], ids=["one rank", "Ulysses", "TP2 SP"])
def test_shared_prefixes_count_for_every_sequence(ranks: Callable[[int], Ranks], folder: str, keys: dict[str, Any]) -> None:
    alone = ranks(1).run(prefix_jobs.train, setting=Setting(folder, _LOSS))
    setting = Setting(folder, keys | _LOSS, shares_prefixes=True, micro_batch_size=4)
    assert_same_training(ranks(2 if keys else 1).run(prefix_jobs.train, setting=setting, timeout_s=240), alone, tolerance=2e-5)


#: in pipelines a stage has several micro-batches in flight, and backward recomputes other ones than forward had last
_SHARED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "padded rows, recomputed": (1, RECOMPUTE, {"packed": False}),
    "PP2 recomputed": (2, PP | RECOMPUTE, {"micro_batch_size": 1}),
    "PP2 recomputed, padded rows": (2, PP | RECOMPUTE, {"packed": False, "micro_batch_size": 1}),
    "TP2 SP recomputed": (2, SP | RECOMPUTE, {}),
    "Ulysses, padded rows": (2, ULYSSES, {"packed": False}),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=() if layout == "PP2 recomputed, padded rows" else pytest.mark.slow) for layout in _SHARED],
)
def test_layers_without_an_indexer_take_the_tokens_of_the_one_before_them(
    ranks: Callable[[int], Ranks], sharing: tuple[str, list[dict[str, Any]]], layout: str
) -> None:
    size, keys, others = _SHARED[layout]
    folder, alone = sharing
    reports = ranks(size).run(jobs.train, setting=Setting(folder, keys, **others), timeout_s=240)
    assert_same_training(reports, alone, tolerance=2e-5)


@pytest.mark.slow
def test_layers_without_an_indexer_take_the_tokens_of_shared_prefixes(
    ranks: Callable[[int], Ranks], sharing: tuple[str, list[dict[str, Any]]]
) -> None:
    folder, _ = sharing
    alone = ranks(1).run(prefix_jobs.train, setting=Setting(folder))
    setting = Setting(folder, SP | RECOMPUTE, shares_prefixes=True, micro_batch_size=4)
    assert_same_training(ranks(2).run(prefix_jobs.train, setting=setting, timeout_s=240), alone, tolerance=2e-5)


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout(
    ranks: Callable[[int], Ranks], sharing: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, _ = sharing
    expected = ranks(2).run(checkpoint_jobs.save_then_train, setting=Setting(folder, PP), folder=str(tmp_path))
    resumed = ranks(2).run(checkpoint_jobs.load_then_train, setting=Setting(folder, SP), folder=str(tmp_path))
    assert_same_training(resumed, expected)


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("deepseek_v3", _LOSS, "dsa_indexer_loss_coeff: 30: deepseek_v3 has no indexers, or set it to 0"),
        ("deepseek_v32", {**_LOSS, "lora_target_modules": ["linear_proj"]}, "leave out lora_target_modules"),
        ("deepseek_v32", RING | {"tensor_model_parallel_size": 4}, "does not divide the model's 4 attention heads"),
        ("glm5", _LOSS, "dsa_indexer_loss_coeff: 30: layers that share an indexer"),
        ("glm5", {"pipeline_model_parallel_size": 4}, "layer 1, which has no indexer .* from layer 0; .* at layers 0, 2"),
        ("glm5", PP | {"num_layer_list": "1,3"}, "begins a stage at decoder layer 1"),
    ],
)
def test_what_cannot_train_is_refused_with_its_key(tmp_path: Path, family: str, keys: dict[str, Any], words: str) -> None:
    tiny_families._CONFIGS[family]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        jobs.plan_model(jobs.MegatronConfig(**keys), tmp_path)
