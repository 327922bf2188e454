"""transformers' modules under FSDP2 train as Megatron's do, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fsdp_jobs
import numpy as np
import pytest
import tiny_families
import torch
import training_jobs
from ranks import Ranks
from training_jobs import Setting
from transformers import AutoModelForCausalLM, Qwen2Config

#: families of text of the support table that transformers has under their own name
FAMILIES = tuple(name for name in tiny_families.FAMILIES if name not in ("mimo", "internlm3"))
_QUICK = ("qwen3",)
#: routers move by the objective only
_UNBALANCED = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}


def _relative(actual: Any, expected: Any) -> float:
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a family -> the folder of its tiny model."""
    return cache(lambda name: str(tiny_families.save(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def by_megatron(ranks: Callable[[int], Ranks], folders: Callable[[str], str]) -> Callable[[str, str], Any]:
    known: dict[tuple[str, str], Any] = {}

    def report(name: str, job: str) -> Any:
        if (name, job) not in known:
            function = {"forward": training_jobs.forward, "train": training_jobs.train}[job]
            (known[name, job],) = ranks(1).run(function, setting=Setting(folders(name), _UNBALANCED))
        return known[name, job]

    return report


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in FAMILIES])
@pytest.mark.parametrize("size", [1, 2])
def test_both_engines_compute_and_train_alike(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], by_megatron: Callable[[str, str], Any], name: str, size: int
) -> None:
    group, setting = ranks(size), Setting(folders(name), _UNBALANCED)
    rows = {row: values for part in group.run(fsdp_jobs.forward, setting=setting) for row, values in part.items()}
    for row, (log_probs, entropy) in by_megatron(name, "forward").items():
        np.testing.assert_allclose(rows[row][0], log_probs, atol=1e-5)
        np.testing.assert_allclose(rows[row][1], entropy, atol=1e-5)
    first, *_ = group.run(fsdp_jobs.train, setting=setting, steps=3)
    expected = by_megatron(name, "train")
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"][:3], rel=1e-5)
    assert first["lr"] == expected["lr"][:3]


@pytest.mark.parametrize(
    ("packed", "size", "budget", "keys"),
    [
        (False, 2, None, {}),
        pytest.param(True, 1, 40, {}, marks=pytest.mark.slow),
        (True, 2, 40, {"recompute_granularity": "full"}),
        pytest.param(True, 3, None, {"swap_optimizer": True}, marks=pytest.mark.slow),
    ],
)
def test_training_does_not_depend_on_micro_batches_ranks_or_recomputation(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    by_megatron: Callable[[str, str], Any],
    packed: bool,
    size: int,
    budget: int | None,
    keys: dict[str, Any],
) -> None:
    setting = Setting(folders("qwen3"), keys, packed=packed, token_budget=budget)
    first, *_ = ranks(size).run(fsdp_jobs.train, setting=setting, steps=5)
    expected = by_megatron("qwen3", "train")
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
    for name, weight in expected["weights"].items():
        assert _relative(first["weights"][name], weight) < 2e-5, name


def test_a_run_resumes_exactly_also_on_other_ranks(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Path
) -> None:
    setting = Setting(folders("qwen3"))
    folder = str(tmp_path / "saved")
    expected, *_ = ranks(2).run(fsdp_jobs.save, setting=setting, folder=folder, steps=2, more=2)
    same, *_ = ranks(2).run(fsdp_jobs.resume, setting=setting, folder=folder, more=2)
    assert same["loaded"] == {"iteration": 2, "run_state": {"reached": 2}, "random_restored": True}
    assert same["grad_norm"] == expected["grad_norm"] and same["lr"] == expected["lr"]
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(same["weights"][name], weight)
    other, *_ = ranks(1).run(fsdp_jobs.resume, setting=setting, folder=folder, more=2)
    assert other["lr"] == expected["lr"] and not other["loaded"]["random_restored"]
    for name, weight in expected["weights"].items():
        assert _relative(other["weights"][name], weight) < 2e-6, name


def test_parity_finds_nothing_in_sound_engines_and_the_tensor_of_a_fault(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str]
) -> None:
    (sound,) = ranks(1).run(fsdp_jobs.compare, folder=folders("qwen2"))
    quantities = {"log-probs", "loss", "weight", "gradient norm", "gradient", "first update", "second update"}
    assert {quantity for quantity, _, _ in sound} == quantities
    assert max(value for _, value, _ in sound) < 1e-5
    (broken,) = ranks(1).run(fsdp_jobs.compare, folder=folders("qwen2"), fault="weight")
    assert broken[0][1] > 1e-3 and broken[0][2] == "model.layers.0.mlp.up_proj.weight"  # the largest is first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "clip_grad"),
    [
        *(("decay of biases", 1.0), ("rate", 0.0), ("rate", 1e3), ("eps", 1.0), ("clip", 0.0), ("clip", 1e3)),
        *(("update of a tensor", 1.0), ("update of a tensor", 1e3), ("beta1", 1.0), ("beta2", 1.0)),
    ],
)
def test_parity_finds_a_wrong_optimizer_in_the_updates_alone(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], fault: str, clip_grad: float
) -> None:
    (broken,) = ranks(1).run(fsdp_jobs.compare, folder=folders("qwen2"), fault=fault, clip_grad=clip_grad)
    updates = {"second update"} if "beta" in fault else {"first update", "second update"}
    assert {quantity for quantity, value, _ in broken if value > 1e-5} == updates


@pytest.mark.slow
def test_parity_finds_nothing_in_a_new_model_whose_biases_are_0(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    config = Qwen2Config(
        **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert not model.model.layers[0].self_attn.k_proj.bias.any()
    model.save_pretrained(tmp_path)
    (differences,) = ranks(1).run(fsdp_jobs.compare, folder=str(tmp_path))
    assert max(value for _, value, _ in differences) < 1e-5, differences[:5]


@pytest.mark.slow
def test_parity_takes_keys_that_only_one_engine_has(ranks: Callable[[int], Ranks], folders: Callable[[str], str]) -> None:
    keys = {"engine": "fsdp", "fsdp_size": 2, "context_parallel_size": 2, "offload_gradients": True, "clip_grad": 0.0}
    states = {"optimizer_state_dtype": "bfloat16", "optimizer": "adam", "weight_decay": 0.5}
    (differences,) = ranks(1).run(fsdp_jobs.compare, folder=folders("qwen2"), **keys, **states)
    assert max(value for _, value, _ in differences) < 1e-5


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("name", FAMILIES)
def test_every_gradient_and_the_first_update_of_a_family_are_alike(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], name: str
) -> None:
    (differences,) = ranks(1).run(fsdp_jobs.compare, folder=folders(name))
    for quantity, value, place in differences:
        # a decay of a delta net sums over all pairs of tokens of a chunk
        assert value < (1e-4 if ".linear_attn." in place else 1e-5), (quantity, place)


def test_a_reference_in_bfloat16_turns_by_exact_angles(ranks: Callable[[int], Ranks], folders: Callable[[str], str]) -> None:
    ((dtype, frequencies),) = ranks(1).run(fsdp_jobs.read_frequencies, setting=Setting(folders("qwen3")))
    # head_dim 32, base 1e4: rounded to 8 bits, the angle at position 10,000 would be wrong by many radians
    np.testing.assert_allclose(frequencies, 1e4 ** -(np.arange(0, 32, 2) / 32), rtol=1e-6)
    assert dtype == "torch.float32"
