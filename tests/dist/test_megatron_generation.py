"""The Megatron model generates what transformers' own model does, in one process and under tensor and pipeline parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generation_jobs import NUM_NEW, PENALTIES, PROMPTS, Letters, generate
from ranks import RankFailureError, Ranks
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

LAYOUTS = [("tied", 1, 1), ("untied", 2, 1), ("tied", 1, 2), ("moe", 1, 1), ("moe", 1, 2), ("deepseek", 1, 1), ("tied", 2, 2)]


def by_transformers(folder: Path) -> tuple[list[list[int]], list[float]]:
    """Greedy answers without a cache, with the sum of their log-probs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers, sums = [], []
    for prompt in PROMPTS:
        ids, total = list(prompt), 0.0
        for _ in range(NUM_NEW):
            with torch.no_grad():
                log_probs = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            ids.append(int(log_probs.argmax()))
            total += float(log_probs.max())
        answers.append(ids[len(prompt) :])
        sums.append(total)
    return answers, sums


def penalize(folder: Path, stop: int) -> list[int]:
    """The greedy answer to the first prompt with penalties on repeated tokens, a token at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answer: list[int] = []
    while len(answer) < NUM_NEW and answer[-1:] != [stop]:
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[0] + answer]), use_cache=False).logits[0, -1].tolist()
        for token in {*PROMPTS[0], *answer}:
            logits[token] *= PENALTIES["repetition_penalty"] ** (-1 if logits[token] > 0 else 1)
        for token in set(answer):
            logits[token] -= PENALTIES["presence_penalty"] + PENALTIES["frequency_penalty"] * answer.count(token)
        if len(answer) < PENALTIES["min_tokens"]:
            logits[stop] = -math.inf
        answer.append(logits.index(max(logits)))
    return answer


@pytest.mark.parametrize(("name", "tensor", "pipeline"), LAYOUTS)
def test_greedy_answers_are_those_of_transformers(
    name: str, tensor: int, pipeline: int, ranks: Callable[[int], Ranks], models: dict[str, Path]
) -> None:
    expected, sums = by_transformers(models[name])
    for report in ranks(tensor * pipeline).run(generate, folder=str(models[name]), tensor=tensor, pipeline=pipeline, rows=3):
        assert report["tokens"] == expected
        assert report["log_probs"] == pytest.approx(sums, abs=1e-3)
        assert [row[0][0] for row in report["next"]] == [tokens[0] for tokens in expected]
        stop = expected[0][2]
        assert report["stopped"].token_ids == expected[0][: expected[0].index(stop) + 1] and report["stopped"].finish == "stop"
        letters = Letters().decode(expected[0], skip_special_tokens=True)
        assert report["at_text"] == expected[0][: letters.index(letters[1:3]) + 2]
        assert report["scores"] == [[(pytest.approx(value, abs=1e-4), True) for value in scores] for scores in report["each"]]
        assert report["penalized"] == penalize(models[name], stop) != expected[0]
        assert len(report["allowed"]) == 2 and set(report["allowed"]) <= {7, 8}


def test_sampled_answers_depend_only_on_their_own_seed(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> None:
    (together,) = ranks(1).run(generate, folder=str(models["tied"]), temperature=1.5)
    (alone,) = ranks(1).run(generate, folder=str(models["tied"]), temperature=1.5, rows=1)
    assert together["tokens"] == alone["tokens"]
    assert together["tokens"] != by_transformers(models["tied"])[0]


def test_experts_under_tensor_parallelism_are_refused(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> None:
    with pytest.raises(RankFailureError, match="use --pipeline-parallel-size"):
        ranks(2).run(generate, folder=str(models["moe"]), tensor=2)
