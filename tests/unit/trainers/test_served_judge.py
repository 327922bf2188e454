"""A judge that the run serves: which requests are made, what becomes of replies, and which folders are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.rewards.pool import RewardFailureError
from mindspeed_rl.rewards.samples import RewardResult, RewardSettings
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.trainers.model_rewards import ModelRewards, ServedJudge, _add_judgements, _read_judgement


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, with its ASCII code as id."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a judge, and the template of its requests; nothing loads its weights here."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "prompt.txt").write_text("{prompt}>{response}|{topic}")
    return tmp_path


@dataclass
class Engines:
    """Engines whose reply is the score that the last digit of a request asks for; requests with an x are too long."""

    requests: list[str] = field(default_factory=list)
    in_rollout: bool | None = None
    seeds: list[int] = field(default_factory=list)
    temperature: float = 0.0

    def generate_judgements(
        self, requests: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], *, in_rollout: bool
    ) -> list[Any]:
        """Return the replies."""
        assert sampling.temperature == self.temperature and sampling.stop_token_ids == (1,)
        texts, self.in_rollout, self.seeds = ["".join(map(chr, ids)) for ids in requests], in_rollout, list(seeds)
        self.requests += texts
        return [self._reply(text) for text in texts]

    def _reply(self, text: str) -> Generated | Exception:
        if "x" in text:
            return ValueError("a prompt of 99 tokens leaves no room")
        score = re.findall(r"\d", text)
        reply = [*map(ord, f"Score: {score[-1]}" if score else "I like it"), 1]
        return Generated(tuple(reply), (0.0,) * len(reply), (0,) * len(reply), "stop")


def build(folder: Path, engines: Engines, **keys: object) -> ModelRewards:
    rl = RLConfig(judge_model=str(folder), judge_prompt=str(folder / "prompt.txt"), **keys)
    settings = RewardSettings.from_config(rl, max_tokens=8)
    fleet: Any = engines
    plane: Any = None
    return ModelRewards(fleet, plane, None, 1.0, judge=ServedJudge(settings, make_tokenizer()), in_rollout=True)


def score(rewards: ModelRewards, responses: Sequence[str], results: Sequence[RewardResult] | None = None) -> list[RewardResult]:
    items = [PromptItem(prompt_ids=[ord("p")], label="", columns={"topic": "art"}) for _ in responses]
    result = list(results or (RewardResult(1.0, {"acc": 1.0}) for _ in responses))
    return rewards.add(result, items, [[*map(ord, text)] for text in responses])


def test_equal_requests_are_made_once_and_each_response_has_the_weighted_score_of_its_reply(folder: Path) -> None:
    engines = Engines()
    rewards = build(folder, engines, judge_weight=0.5)
    results = score(rewards, ["7", "3", "7"])
    assert [result.total for result in results] == pytest.approx([1.35, 1.15, 1.35])
    assert [result.parts for result in results[:2]] == [{"acc": 1.0, "judge": 0.7}, {"acc": 1.0, "judge": 0.3}]
    assert engines.requests == ["[p>7|art]", "[p>3|art]"] and engines.in_rollout is True
    score(rewards, ["3", "9"])
    assert engines.requests[2:] == ["[p>9|art]"]  # the other one is remembered


@pytest.mark.parametrize(("policy", "total"), [("drop", None), ("retry", None), ("zero", 0.0)])
def test_replies_without_a_score_and_refused_requests_fail_alone(folder: Path, policy: str, total: float | None) -> None:
    rewards = build(folder, Engines(), reward_failure_policy=policy, reward_failure_limit=0.7)
    results = score(rewards, ["7", "no", "x"])
    assert [result.total for result in results] == [1.7, total, total]
    assert [result.state for result in results] == ["ok", "failed", "failed"]
    assert results[1].error.startswith("judge: no 'Score: N'") and "99 tokens" in results[2].error
    failed = score(rewards, ["7"], [RewardResult(None, {}, "timeout", "slow")])
    assert (failed[0].total, failed[0].state, failed[0].parts) == (None, "timeout", {"judge": 0.7})


class Moody(Engines):
    """Engines whose reply depends on the seed: the last digit of the request, 5 less, or no score."""

    def generate_judgements(
        self, requests: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], *, in_rollout: bool
    ) -> list[Any]:
        replies = super().generate_judgements(requests, sampling, seeds, in_rollout=in_rollout)
        texts = [f"Score: {max(0, int(re.findall(r'[0-9]', text)[-1]) - 5)}" for text in self.requests[-len(requests) :]]
        changed = [None, texts, ["None." for _ in texts]]
        for index, seed in enumerate(seeds):
            if (words := changed[seed]) is not None:
                reply = [*map(ord, words[index]), 1]
                replies[index] = Generated(tuple(reply), (0.0,) * len(reply), (0,) * len(reply), "stop")
        return replies


def test_a_served_judge_that_is_asked_several_times_votes(folder: Path) -> None:
    engines = Moody(temperature=0.7)
    keys = {"judge_repeats": 3, "judge_temperature": 0.7, "judge_quorum": 2}
    rewards = build(folder, engines, **keys)
    results = score(rewards, ["7", "3", "7"])
    # votes 7 and 2, 3 and 0; the third vote of each is missing
    assert [result.parts["judge"] for result in results] == pytest.approx([0.45, 0.15, 0.45])
    assert [result.parts["judge/agreement"] for result in results] == [0.0, 1.0, 0.0]
    assert [result.parts["judge/missing"] for result in results] == [1.0, 1.0, 1.0]
    assert sorted(engines.seeds) == [0, 0, 1, 1, 2, 2] and len(engines.requests) == 6
    score(rewards, ["7"])
    assert engines.seeds == [2]  # the votes that are there are remembered
    keys["judge_quorum"] = 3
    (result,) = score(build(folder, Moody(temperature=0.7), reward_failure_limit=1.0, **keys), ["7"])
    assert result.state == "failed" and "2 of 3 votes are there" in result.error and "no 'Score: N'" in result.error


def test_more_responses_than_are_remembered_keep_their_rubric(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The criteria of a request are in the request: those of a batch do not push each other out."""
    monkeypatch.setattr("mindspeed_rl.rewards.judge._REMEMBERED", 2)
    (folder / "prompt.txt").write_text("{prompt}>{response}|{criteria}")

    class Met(Engines):
        """Engines that find all criteria met."""

        def _reply(self, text: str) -> Generated | Exception:
            reply = [*map(ord, '{"1": true}'), 1]
            return Generated(tuple(reply), (0.0,) * len(reply), (0,) * len(reply), "stop")

    rewards = build(folder, Met(), judge_rubric="topics")
    items = [PromptItem(prompt_ids=[ord("p")], label="", columns={"topics": ["art"]}) for _ in range(5)]
    results = rewards.add([RewardResult(0.0, {"acc": 0.0}) for _ in items], items, [[ord(str(n))] for n in range(5)])
    assert [result.parts["judge"] for result in results] == [1.0] * 5


def test_parsers_without_a_score_under_its_name_or_at_all(folder: Path) -> None:
    assert _read_judgement({"style": 0.25, "truth": 0.5}).score == 0.75  # as for every reward function: the sum
    for value, error in ((None, "no opinion"), ({}, "no opinion"), ("high", "'high'"), (float("nan"), "nan"), ([1], "[1]")):
        assert error in _read_judgement(value).error  # pyrefly: ignore[bad-argument-type]


def test_a_response_writes_no_special_tokens_into_its_request(folder: Path) -> None:
    class Ids(Engines):
        """Engines that keep the ids of the requests."""

        def generate_judgements(self, requests: Sequence[Sequence[int]], *others: Any, in_rollout: bool) -> list[Any]:
            self.ids = [list(ids) for ids in requests]
            return super().generate_judgements(requests, *others, in_rollout=in_rollout)

    engines = Ids()
    score(build(folder, engines), ["7<eos><pad>9", "7"])
    assert engines.ids == [[*map(ord, "[p>7<eos><pad>9|art]")], [*map(ord, "[p>7|art]")]]


def test_a_judge_that_gives_no_scores_stops_the_run(folder: Path) -> None:
    with pytest.raises(RewardFailureError, match="2 of 3 responses have no score of the judge, more than .*=0.1; .*I like it"):
        score(build(folder, Engines()), ["7", "no", "none"])


def test_parts_of_a_score_are_parts_of_the_result_and_a_parser_that_raises_gives_none(folder: Path) -> None:
    judged = _read_judgement({"style": 0.25, "score": 0.5})
    (result,) = _add_judgements([RewardResult(1.0, {"acc": 1.0})], [judged], part="judge", weight=2.0)
    assert (result.total, result.parts) == (2.0, {"acc": 1.0, "judge": 0.5, "judge/style": 0.25})
    rewards = build(folder, Engines(), judge_parser="json:JSONDecoder", reward_failure_limit=1.0)
    (result,) = score(rewards, ["7"])
    assert result.state == "failed" and "TypeError" in result.error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is not a folder with config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").write_text(json.dumps({"quantization_config": {}})), "are quantized"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (lambda folder: (folder / "prompt.txt").write_text("{prompt}"), "does not mention {response}"),
    ],
)
def test_a_folder_that_is_no_judge_is_named_before_anything_starts(folder: Path, change: Any, words: str) -> None:
    change(folder)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        build(folder, Engines())
    assert "rl_config.judge_" in str(caught.value)
