"""Which evaluation is best, when a run ends, and what is kept; and the figures of several responses to a prompt."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.checkpoint.newest import list_old
from mindspeed_rl.config import MegatronConfig, build_run_config
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import validate
from mindspeed_rl.trainers.best_evaluation import EvaluationProgress
from mindspeed_rl.trainers.evaluation import compute_figures


def follow(
    values: list[float], *, metric: str = "eval/accuracy", start: int = 0, **keys: Any
) -> tuple[EvaluationProgress, list[int]]:
    """The progress over evaluations after iterations start, start + 1, ..., and the iterations that need a checkpoint."""
    progress = EvaluationProgress(MegatronConfig(**keys), lambda line: None, start_iteration=start)
    saved = []
    for iteration, value in enumerate(values, start):
        progress.add(iteration, {metric: value, "eval/response_length": 5.0})
        saved += [iteration] if progress.needs_checkpoint(iteration) else []
        if progress.end_reason:
            break
    return progress, saved


def test_without_the_keys_nothing_is_followed(tmp_path: Path) -> None:
    progress, saved = follow([0.1, 0.9], save=str(tmp_path))
    assert not progress.end_reason and saved == [] and list(tmp_path.iterdir()) == []


def test_the_run_ends_at_the_target_and_not_before(tmp_path: Path) -> None:
    progress, saved = follow([0.1, 0.79, 0.8, 0.9], save=str(tmp_path), eval_target=0.8)
    assert progress.end_reason == "eval/accuracy is 0.8 after iteration 2 (eval_target 0.8)" and saved == [2]
    assert not follow([0.1, 0.79], eval_target=0.8)[0].end_reason


def test_the_run_ends_after_as_many_evaluations_without_a_new_best_as_patience_says() -> None:
    # an equal value is not a new best
    assert "2 evaluations without a better" in follow([0.1, 0.5, 0.4, 0.5, 0.9], eval_patience=2)[0].end_reason
    assert not follow([0.1, 0.5, 0.4, 0.6, 0.5], eval_patience=2)[0].end_reason
    assert "3 after iteration 0" in follow([3.0, 2.0, 2.5], metric="eval/reward", eval_patience=2)[0].end_reason


def test_a_loss_is_better_where_it_is_lower(tmp_path: Path) -> None:
    progress, saved = follow([2.0, 1.0, 1.5, 0.5], metric="eval/loss", save=str(tmp_path), keep_best=True)
    assert progress.kept_iteration == 3 and saved == [1, 3]
    assert "0.5" in follow([2.0, 0.5], metric="eval/loss", eval_target=0.5)[0].end_reason


def test_the_best_checkpoint_is_of_a_trained_iteration_and_named_on_disk(tmp_path: Path) -> None:
    progress, saved = follow([0.9, 0.2, 0.4, 0.3], save=str(tmp_path), save_hf=True, keep_best=True)
    assert progress.kept_iteration == 2 and saved == [1, 2]
    record = json.loads((tmp_path / "evaluations.json").read_text())
    assert record["best"] == {"iteration": 2, "value": 0.4} and record["metric"] == "eval/accuracy"
    assert (tmp_path / "hf" / "best").readlink() == Path("iter_0000002")


def test_a_resumed_run_remembers_the_evaluations_before_it(tmp_path: Path) -> None:
    follow([0.1, 0.5, 0.4, 0.3], save=str(tmp_path), eval_patience=3)
    # it resumes after iteration 2: what came later is not its own
    progress, _ = follow([0.4, 0.45], start=2, save=str(tmp_path), eval_patience=2)
    assert progress.end_reason == "2 evaluations without a better eval/accuracy than 0.5 after iteration 1 (eval_patience 2)"
    lines: list[str] = []
    ended = EvaluationProgress(MegatronConfig(save=str(tmp_path), eval_patience=2), lines.append, start_iteration=3)
    assert lines == [f"an earlier evaluation has ended this run: {ended.end_reason}"]
    # a new run in the folder starts without them
    assert not EvaluationProgress(MegatronConfig(save=str(tmp_path), eval_patience=1), print, start_iteration=0).end_reason


def test_no_score_is_no_best_and_does_not_end_a_run_by_itself() -> None:
    progress, _ = follow([0.2, math.nan, 0.3], eval_patience=2)
    assert progress.kept_iteration == 2 and not progress.end_reason


def test_a_metric_that_no_evaluation_has_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ValueError, match=r"eval_metric: the evaluation has no eval/acc; it has eval/accuracy, eval/response"):
        follow([0.5], eval_metric="eval/acc", keep_best=True)


def test_the_best_checkpoint_is_spared_beside_the_last_ones(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    assert [path.name[-1] for path in list_old(tmp_path, 4, 1)] == ["1", "2", "3"]
    assert [path.name[-1] for path in list_old(tmp_path, 4, 1, best=2)] == ["1", "3"]
    assert list_old(tmp_path, 4, None, best=2) == []


def results(*scores: float | None) -> list[RewardResult]:
    return [RewardResult(score, {} if score is None else {"gsm8k": score}) for score in scores]


def test_several_responses_have_pass_at_k_and_the_majority_as_counted_by_hand() -> None:
    # two prompts, four responses each: 1 and 3 right ones
    scores = results(1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0)
    votes = ["7", "8", "8", "9", "5", "5", "5", "6"]
    figures = compute_figures("eval/x", scores, [3] * 8, accuracy_of="gsm8k", num_samples=4, votes=votes).results()
    assert figures["eval/x/accuracy"] == figures["eval/x/pass@1"] == 0.5
    # 1 - C(3, 2) / C(4, 2) = 1 / 2 and 1 - C(1, 2) / C(4, 2) = 1
    assert figures["eval/x/pass@2"] == pytest.approx(0.75) and figures["eval/x/pass@4"] == 1.0
    assert figures["eval/x/maj@4"] == 0.5 and figures["eval/x/prompts"] == 2


def test_a_response_without_a_score_is_in_no_mean_and_wrong_among_k() -> None:
    figures = compute_figures(
        "eval", results(1.0, None), [1, 1], accuracy_of="gsm8k", num_samples=2, votes=["1", "2"]
    ).results()
    assert figures["eval/accuracy"] == 1.0 and figures["eval/unscored"] == 1 and figures["eval/pass@1"] == 0.5


def test_a_reward_that_is_no_accuracy_has_a_mean_alone() -> None:
    figures = compute_figures("eval", results(0.5, 0.25), [1, 1], accuracy_of=None, num_samples=2).results()
    assert figures["eval/reward"] == 0.375 and not [name for name in figures if "@" in name or "accuracy" in name]


def broken(training: dict[str, Any], **rl: Any) -> str:
    tree = {
        "megatron_training": {"stage": "ray_grpo", "global_batch_size": 8, "train_iters": 1, **training},
        "actor_config": {},
        "rl_config": {"n_samples_per_prompt": 8, "mini_batch_size": 8, **rl},
        "generate_config": {},
    }
    return "\n".join(map(str, validate(draft(build_run_config(tree)))))


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"eval_sets": {"a b": "x.jsonl"}}, "eval_sets.a b: 'a b' is not a name"),
        ({"eval_sets": {"acc": "x.jsonl"}}, "eval_sets.acc: 'acc' is the name of a reward function"),
        ({"eval_sets": {"a": 3}}, "eval_sets.a is 3; it must be one file"),
        ({"eval_data_path": "x", "eval_n_samples": 4}, "greedy responses to a prompt are all the same"),
        ({"eval_target": 0.5}, "eval_target: there is nothing to evaluate on"),
        ({"keep_best": True, "save": "x"}, "keep_best: there is nothing to evaluate on"),
    ],
)
def test_what_no_evaluation_can_do_is_refused(training: dict[str, Any], sentence: str) -> None:
    assert sentence in broken(training, verifier_function=["acc"])


def test_sound_keys_are_taken() -> None:
    sound = {"eval_sets": {"gsm8k": "x.jsonl"}, "eval_n_samples": 4, "eval_temperature": 0.7, "eval_patience": 3}
    assert "eval" not in broken(sound, verifier_function=["acc"])
    assert "eval" not in broken({"eval_data_path": "x", "eval_n_samples": 4}, eval_greedy=False)
