"""Random runs against one slow reference: whatever the layout, packing, mode and loss, an iteration equals plain torch's.

`RANDOM_RUNS_SEED=N` makes others; `RANDOM_RUNS_SEED=N RANDOM_RUNS_COUNT=1` one run alone, which a failure names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_run_jobs as jobs
import tiny_hf
import torch
import transformers
from random_runs import SEED_OF_ATTEMPT, RandomRun, all_layouts, generate
from ranks import RankFailureError, Ranks
from slow_reference import TIE, SlowRun, Step

_SEED = int(os.environ.get("RANDOM_RUNS_SEED", "1"))
#: numbers of processes; a dozen is to be quick
_ALL_SIZES = (1, 2, 4)
_SIZES = _ALL_SIZES if "RANDOM_RUNS_SEED" in os.environ else (1, 2)
_MODELS = ("tied", "untied", "moe_mixed")
#: relative difference of a gradient or of an update, by norm
_TOLERANCE = 3e-4
_EXPONENTIAL = ("k3", "k3+", "low_var_kl")


@pytest.fixture(scope="session")
def folders(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """name of a model -> folders of actor, reference and critic, all different."""
    results = {}
    for name in _MODELS:
        folder = tmp_path_factory.mktemp(f"{name}-roles")
        transformers.logging.disable_progress_bar()
        torch.manual_seed(11)
        reference, tokenizer = tiny_hf.build(name), tiny_hf.word_tokenizer()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.003)
        reference.save_pretrained(folder / "ref")
        actor = tiny_hf.build(name)
        actor.save_pretrained(folder / "actor")
        tokenizer.save_pretrained(folder / "actor")
        results[name] = {"actor": str(folder / "actor"), "ref": str(folder / "ref")}
        if name == "moe_mixed":
            continue
        critic = transformers.AutoModelForSequenceClassification.from_config(
            transformers.Qwen2Config(**tiny_hf.CONFIGS[name].to_dict() | {"num_labels": 1}), dtype=torch.float32
        )
        critic.model.load_state_dict(reference.model.state_dict())
        critic.save_pretrained(folder / "critic")
        results[name]["critic"] = str(folder / "critic")
    return results


def _check_steps(name: str, result: Any, expected: list[Step]) -> None:
    for number, (gradients, step) in enumerate(zip(result, expected, strict=True)):
        if gradients is None or step.is_skipped:  # of a distributed optimizer norm and weights show it
            continue
        total = np.sqrt(sum(np.square(value).sum() for value in step.gradients.values()))
        assert sorted(gradients) == sorted(step.gradients) or set(step.gradients) - set(gradients) == {"lm_head.weight"}
        for key, value in gradients.items():
            right = step.gradients[key]
            distance = np.linalg.norm(value - right)
            assert distance <= _TOLERANCE * (np.linalg.norm(right) + 0.01 * total) + 1e-8, (name, number, key, distance, total)


def _check_weights(name: str, result: dict[str, Any], model: Any, folder: str) -> None:
    start = transformers.AutoModelForSequenceClassification if model._is_critic else transformers.AutoModelForCausalLM
    before = dict(start.from_pretrained(folder, dtype=torch.float32).named_parameters())
    expected = model.named(gradients=False)
    moved = np.sqrt(sum(np.square(expected[key] - before[key].detach().numpy()).sum() for key in expected if key in before))
    for key, value in result.items():
        assert np.linalg.norm(value - expected[key]) <= _TOLERANCE * moved + 1e-5, (name, key)


def _check(run: RandomRun, ranks: Callable[[int], Ranks], folders: dict[str, str]) -> str:
    """Compares a run with the reference; the reason why it shows nothing, if it does not."""
    slow = SlowRun(run, folders)
    log_probs = [values.tolist() for values in slow.rollout]
    try:
        reports = ranks(run.size).run(jobs.iterate, run=run, rollout_log_probs=log_probs, timeout_s=240)
    except RankFailureError as error:
        # after a large step the exponential of this KL form overflows float32, and the run says so
        is_unclamped = run.rl["kl_penalty"] in _EXPONENTIAL and not run.rl["kl_clamp"]
        if is_unclamped and "the norm of the gradient is not finite" in str(error):
            return "unclamped KL"
        raise
    report, (metrics, groups) = reports[0], jobs.merge_reports(reports)
    columns, steps = report["columns"], report["steps"]
    slow.prepare(has_old="old_log_probs" in columns)
    expected = {"advantages": slow.advantages, "returns": slow.returns, "scored_mask": slow.sampled, "loss_mask": slow.train}
    expected |= {"old_log_probs": slow.old, "entropies": slow.entropies} if "old_log_probs" in columns else {}
    expected |= {"ref_log_probs": slow.ref_log_probs} if "ref_log_probs" in columns else {}
    expected |= {"values": slow.values} if slow.has_critic else {}
    trains = "update_actor" in report
    critic_steps = slow.update_critic(steps, groups["update_critic"][: len(steps)]) if slow.has_critic else []
    actor_steps = slow.update_actor(steps, groups["update_actor"][: len(steps)]) if trains else []
    if slow.margins.smallest < TIE:
        return slow.margins.where
    assert sorted(columns) == sorted(expected)
    for name, values in expected.items():
        for number, (result, right) in enumerate(zip(columns[name], values, strict=True)):
            np.testing.assert_allclose(result, right.numpy(), rtol=2e-4, atol=5e-5, err_msg=f"{name} of row {number}")
    for _ in range(run.rl["epochs"]):  # every row once in each epoch, groups complete
        assert sorted(row for step in steps[: len(steps) // run.rl["epochs"]] for row in step) == list(range(len(run.rows)))
    if slow.has_critic:
        _check_steps("critic", report["update_critic"], critic_steps)
        _check_weights("critic", report["update_critic weights"], slow.critic, folders["critic"])
    if trains:
        _check_steps("actor", report["update_actor"], actor_steps)
        _check_weights("actor", report["update_actor weights"], slow.actor, folders["actor"])
    for name, value in slow.metrics().items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=2e-5), (name, metrics[name], value)
    return ""


def _run(
    seed: int, ranks: Callable[[int], Ranks], folders: dict[str, dict[str, str]], path: Path, sizes: tuple[int, ...]
) -> None:
    for attempt in range(5):
        run = generate(seed + SEED_OF_ATTEMPT * attempt, sizes, path, folders, _MODELS)
        try:
            if not _check(run, ranks, folders[run.model]):
                return
        except Exception as error:
            raise AssertionError(f"RANDOM_RUNS_SEED={seed} ({run.model}, {run.size} processes, {run.keys}): {error}") from error
    pytest.fail(f"seed {seed}: each of five draws has a choice too close to a tie")


@pytest.mark.parametrize("number", range(int(os.environ.get("RANDOM_RUNS_COUNT", "8"))))
def test_a_random_run_is_that_of_the_slow_reference(
    ranks: Callable[[int], Ranks], folders: dict[str, dict[str, str]], tmp_path: Path, number: int
) -> None:
    _run(_SEED + number, ranks, folders, tmp_path, _SIZES)


@pytest.mark.slow
def test_a_random_run_of_each_layout_and_model_is_that_of_the_slow_reference(
    ranks: Callable[[int], Ranks], folders: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """Losses, estimators, modes and packing are drawn: another RANDOM_RUNS_SEED combines others with each layout."""
    count, first = len(all_layouts(_ALL_SIZES, _MODELS)), _SEED + 1000
    failed = []
    for seed in range(first, first + count):
        try:
            _run(seed, ranks, folders, tmp_path, _ALL_SIZES)
        except AssertionError as error:
            failed.append(str(error)[-1500:])
    assert not failed, f"{len(failed)} of the runs {first} to {first + count - 1}:\n" + "\n".join(failed)
