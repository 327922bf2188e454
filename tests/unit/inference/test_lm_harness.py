"""Tasks of lm-eval on an engine whose probabilities are written down. Needs lm-eval; see docs/inference.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from mindspeed_rl.inference.engine_interface import Delta, Request
from mindspeed_rl.inference.lm_harness import _HarnessModel, _HarnessSettings, run_harness
from mindspeed_rl.rollout.requests import Sampling

#: log-prob of each byte, whatever stands before it; "b" is the most likely one
LOG_PROBS = {ord("a"): -2.0, ord("b"): -1.0, ord("c"): -3.0}


class Unigram:
    """An engine that has one distribution everywhere, and answers "x= 4" and what follows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.scored: list[tuple[str, str]] = []
        self.asked: list[tuple[str, Sampling, tuple[str, ...]]] = []

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Delta]:
        for index, request in enumerate(requests):
            self.asked.append((self.tokenizer.decode(request.prompt_ids), sampling, tuple(stop_strings)))
            ids = self.tokenizer("x= 4\nand more", add_special_tokens=False)["input_ids"]
            yield Delta(index, ids, [-1.0] * len(ids), "length")

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        raise NotImplementedError

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        results = []
        for ids, start in zip(sequences, starts):
            texts = [self.tokenizer.decode([token]) for token in ids]
            self.scored.append(("".join(texts[:start]), "".join(texts[start:])))
            values = [LOG_PROBS.get(ord(text[0]), -9.0) if text else -9.0 for text in texts[start:]]
            results.append([(value, value == -1.0) for value in values])
        return results

    def close(self) -> None:
        pass


def settings(folder: Path | None = None, length: int = 200) -> _HarnessSettings:
    return _HarnessSettings(folder, None, None, False, {}, length, (1,), 0)


@pytest.fixture
def unigram(tokenizer: PreTrainedTokenizerFast) -> Unigram:
    return Unigram(tokenizer)


def asked(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_continuations_are_scored_from_where_they_begin(unigram: Unigram, tokenizer: PreTrainedTokenizerFast) -> None:
    model = _HarnessModel(unigram, tokenizer, settings())
    result = model.loglikelihood([asked("loglikelihood", "abc", "bb"), asked("loglikelihood", "ab ", "ca")])
    assert result == [(-2.0, True), (-14.0, False)]  # the blank between belongs to the continuation
    assert unigram.scored == [("abc", "bb"), ("ab", " ca")]
    assert model.loglikelihood([asked("loglikelihood", "", "ba")]) == [(-3.0, False)]
    assert unigram.scored[-1][1] == "ba"


def test_a_context_that_is_too_long_loses_its_beginning(unigram: Unigram, tokenizer: PreTrainedTokenizerFast) -> None:
    model = _HarnessModel(unigram, tokenizer, settings(length=6))
    assert model.loglikelihood([asked("loglikelihood", "aaaabc", "bb")]) == [(-2.0, True)]
    assert unigram.scored == [("abc", "bb")]


def test_a_long_text_is_scored_once_in_windows(unigram: Unigram, tokenizer: PreTrainedTokenizerFast) -> None:
    model = _HarnessModel(unigram, tokenizer, settings(length=6))
    (result,) = model.loglikelihood_rolling([asked("loglikelihood_rolling", "abcabcabca")])
    assert result == pytest.approx(4 * -2.0 + 3 * -1.0 + 3 * -3.0)
    assert "".join(scored for _, scored in unigram.scored) == "abcabcabca"[: 4 * 2] + "ca"
    assert all(len(context) + len(scored) <= 5 or "<" in context for context, scored in unigram.scored)


def test_answers_end_at_the_stop_text_and_are_sampled_as_requested(
    unigram: Unigram, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = _HarnessModel(unigram, tokenizer, settings())
    keys = {"until": ["\n"], "max_gen_toks": 9}
    sampling = keys | {"do_sample": True, "temperature": 0.5, "top_p": 0.9}
    result = model.generate_until([asked("generate_until", "x", keys), asked("generate_until", "y", sampling)])
    assert result == ["x= 4", "x= 4"]
    (_, greedy, stops), (_, sampled, _) = unigram.asked
    assert greedy == Sampling(0.0, 9, (1,)) and stops == ("\n",)
    assert sampled == Sampling(0.5, 9, (1,), top_p=0.9)


@pytest.mark.slow
def test_a_task_of_the_users_own_runs_whole(unigram: Unigram, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = [{"question": "q", "choices": ["a", "b"], "answer": 1}, {"question": "r", "choices": ["b", "c"], "answer": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny_choice.yaml").write_text(
        f"""
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}="
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
    )
    result = run_harness(unigram, tokenizer, "tiny_choice", **vars(settings(tmp_path)))
    assert result["tiny_choice"]["acc"] == 0.5  # it prefers b: right once
    assert not any(math.isnan(value) for value in result["tiny_choice"].values())
    with pytest.raises(ValueError, match="lm-eval has no task tiny_chice"):
        run_harness(unigram, tokenizer, "tiny_chice", **vars(settings(tmp_path)))
