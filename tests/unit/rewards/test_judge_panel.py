"""Panels of judges: real HTTP servers that judge well or badly, and votes counted by hand."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from typing import Any

import pytest
from patience import patient

from mindspeed_rl.config import RLConfig
from mindspeed_rl.rewards import judge as judge_module
from mindspeed_rl.rewards.judge import Judge, JudgeError
from mindspeed_rl.rewards.judge_addresses import list_judges
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.rubric import Criterion, score_verdicts
from mindspeed_rl.rewards.samples import RewardResult, RewardSample, RewardSettings
from mindspeed_rl.rewards.totals import compute_reward_metrics
from mindspeed_rl.rewards.votes import Vote, VoteError, count_votes
from mindspeed_rl.run.machine import check_judges

#: model of the server -> its reply, to a request with a seed; with a rubric the list of what is met
REPLIES: dict[str, Callable[[int], str]] = {
    "good": lambda seed: "Score: 9",
    "mild": lambda seed: "Score: 6",
    "hard": lambda seed: "Score: 2",
    "nan": lambda seed: "Score: NaN",
    "silent": lambda seed: "I would rather not say.",
    "moody": lambda seed: f"Score: {(10, 0, 5)[seed % 3]}",
    "both": lambda seed: '{"1": true, "2": true}',
    "first": lambda seed: '{"1": true, "2": false}',
    "second": lambda seed: '{"1": false, "2": true}',
    "short": lambda seed: '{"1": true}',
    "long": lambda seed: '{"1": true, "2": true, "3": true}',
}


class Handler(BaseHTTPRequestHandler):
    """A judge by the name of its model: `html` replies no JSON, `slow` is late, `busy` refuses."""

    requests: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append({**body, "key": self.headers.get("Authorization")})
        model = body["model"]
        if model == "slow":
            time.sleep(1.0)
        text = REPLIES.get(model, REPLIES["good"])(body.get("seed", 0))
        content = b"<html>" if model == "html" else json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(403 if model == "busy" else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        try:
            self.wfile.write(content)
        except OSError:  # the client of the slow one has left
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    Handler.requests = []
    monkeypatch.setattr(judge_module, "_ATTEMPTS", 1)


def settings_of(url: str, models: str, **keys: Any) -> RewardSettings:
    first, *others = models.split()
    panel = tuple(f"{model}@{url}" for model in others)
    values = {"judge_url": url, "judge_model": first, "judge_panel": panel, "judge_timeout_s": patient(20), **keys}
    return RewardSettings(**values)


def ask(settings: RewardSettings, **columns: Any) -> Any:
    sample = RewardSample(prompt="how?", response="so", label="so", columns=columns)
    return asyncio.run(Judge(settings)(sample))


@pytest.mark.parametrize(
    ("rule", "expected"), [("mean", (0.9 + 0.6 + 0.2) / 3), ("median", 0.6), ("majority", 1.0), ("min", 0.2)]
)
def test_three_judges_vote_by_the_rule_and_their_agreement_is_a_part(url: str, rule: str, expected: float) -> None:
    found = ask(settings_of(url, "good mild hard", judge_vote=rule))
    # two of three find it right: one pair of three agrees
    assert found == pytest.approx(
        {"score": expected, "agreement": 1 / 3, "missing": 0.0, "of_good": 0.9, "of_mild": 0.6, "of_hard": 0.2}
    )


def test_one_judge_that_is_asked_several_times_votes_with_different_seeds(url: str) -> None:
    settings = settings_of(url, "moody", judge_repeats=3, judge_temperature=0.7)
    assert ask(settings) == pytest.approx({"score": 0.5, "agreement": 1 / 3, "missing": 0.0, "of_moody": 0.5})
    assert sorted(request["seed"] for request in Handler.requests) == [0, 1, 2]
    assert {request["temperature"] for request in Handler.requests} == {0.7}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # scores 1, 3/4 and 1/4 of the weights 3 and 1; by criterion both are met by two of three
        ("mean", 2 / 3),
        ("median", 0.75),
        ("majority", 1.0),
        ("min", 0.25),
    ],
)
def test_a_rubric_is_one_request_of_each_judge_and_a_majority_counts_by_criterion(url: str, rule: str, expected: float) -> None:
    settings = settings_of(url, "both first second", judge_rubric="rubric", judge_vote=rule)
    found = ask(settings, rubric=[{"criterion": "a", "points": 3}, "b"])
    assert len(Handler.requests) == 3 and found["score"] == pytest.approx(expected)
    # of the pairs of three judges about two criteria: one and one agree
    assert found["agreement"] == pytest.approx(2 / 6) and found["met"] == pytest.approx(1.0 if rule == "majority" else 2 / 3)


FAULTS = {
    "malformed": ("html", {}, "not a chat completion"),
    "refused": ("busy", {}, "answers 403"),
    "slow": ("slow", {"judge_timeout_s": 0.3}, "no reply in 0.3 s"),
    "no number": ("nan", {}, "no 'Score: N'"),
    "no score": ("silent", {}, "I would rather not say"),
    "NaN of a parser": ("nan", {"judge_parser": "panel_parsers:nan_if_silent"}, "judge_parser: it returned nan"),
    "text of a parser": ("nan", {"judge_parser": "panel_parsers:text_if_silent"}, "judge_parser: it returned 'none'"),
    "no opinion": ("nan", {"judge_parser": "panel_parsers:none_if_silent"}, "it has no opinion"),
    "a parser that raises": ("nan", {"judge_parser": "panel_parsers:raise_if_silent"}, "IndexError"),
    "too few verdicts": ("short", {"judge_rubric": "rubric"}, "criteria 1 to 2"),
    "too many verdicts": ("long", {"judge_rubric": "rubric"}, "criteria 1 to 2"),
}
PARSERS = """
from mindspeed_rl.rewards.judge import _parse_score

def _or(value):
    def parse(reply):
        return value(reply) if "NaN" in reply else _parse_score(reply)
    return parse

nan_if_silent = _or(lambda reply: float("nan"))
text_if_silent = _or(lambda reply: "none")
none_if_silent = _or(lambda reply: None)
raise_if_silent = _or(lambda reply: [][1])
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_vote_that_is_missing_fails_the_response_or_the_rest_decides(
    url: str, fault: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "panel_parsers.py").write_text(PARSERS)
    monkeypatch.syspath_prepend(tmp_path)
    model, keys, reason = FAULTS[fault]
    others = ("both", "first") if "judge_rubric" in keys else ("good", "hard")
    models = f"{others[0]} {model} {others[1]}"
    with pytest.raises(JudgeError) as error:
        ask(settings_of(url, models, **keys), rubric=["a", "b"])
    assert "2 of 3 votes are there, and a response needs all (rl_config.judge_quorum)" in str(error.value)
    assert f"{model}: " in str(error.value) and reason in str(error.value)
    caplog.clear()
    found = ask(settings_of(url, models, judge_quorum=2, **keys), rubric=["a", "b"])
    assert len(caplog.messages) == 1 and f"a vote of the judge {model} is missing: " in caplog.text and reason in caplog.text
    assert found["missing"] == 1.0 and f"of_{model}" not in found
    assert found["score"] == pytest.approx((1.0 + 0.5) / 2 if "judge_rubric" in keys else (0.9 + 0.2) / 2)


def test_a_judge_that_cannot_be_reached_is_an_error_or_is_said_and_the_rest_decides(
    url: str,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    keys = {"judge_url": url, "judge_model": "good", "judge_panel": (f"gone@{nowhere}", f"hard@{url}")}
    with pytest.raises(JudgeError, match="gone: the judge at 127.0.0.1:.* answers nothing"):
        ask(RewardSettings(**keys))
    assert ask(RewardSettings(**keys, judge_quorum=1))["score"] == pytest.approx(0.55)
    rl = {**keys, "judge_panel": list(keys["judge_panel"])}
    with pytest.raises(ValueError, match=r"rl_config.judge_panel: http://127.0.0.1:\d+/v1 cannot be reached"):
        check_judges(RLConfig(**rl))
    with pytest.raises(ValueError, match="cannot be reached"):
        check_judges(RLConfig(**rl, judge_quorum=3))
    (sentence,) = check_judges(RLConfig(**rl, judge_quorum=2))
    assert sentence.startswith("rl_config.judge_panel: ") and "the other judges decide" in sentence


def test_the_pool_has_votes_as_parts_and_iterations_their_agreement(url: str) -> None:
    settings = settings_of(url, "good hard slow", judge_quorum=2, judge_timeout_s=0.3, reward_failure_limit=1.0)
    with RewardPool(["judge"], [2.0], settings=settings) as pool:
        (result,) = pool.score([RewardSample(response="so")])
    assert result.total == pytest.approx(1.1) and result.state == "ok"
    names = {"judge", "judge/agreement", "judge/missing", "judge/of_good", "judge/of_hard"}
    assert set(result.parts) == names and result.parts["judge/missing"] == 1.0
    metrics = compute_reward_metrics([result])
    assert (metrics["judge/agreement_rewards/mean"], metrics["judge/missing_rewards/mean"]) == (0.0, 1.0)


def test_alpha_of_an_iteration_is_over_the_scores_of_the_judges() -> None:
    def parts(*scores: float) -> RewardResult:
        return RewardResult(0.5, {"judge": 0.5, **{f"judge/of_{name}": score for name, score in zip("abc", scores)}})

    assert compute_reward_metrics([parts(0.1, 0.1), parts(0.9, 0.9)])["judge_rewards/alpha"] == 1.0
    # values 0, 1, 1, 0: D_o = 1, D_e = 2 * 2 * 2 / (4 * 3): alpha = 1 - 1 / (2 / 3)
    assert compute_reward_metrics([parts(0.0, 1.0), parts(1.0, 0.0)])["judge_rewards/alpha"] == pytest.approx(-0.5)
    assert "judge_rewards/alpha" not in compute_reward_metrics([parts(0.5, 0.5)])
    assert "judge_rewards/alpha" not in compute_reward_metrics([parts(0.5), parts(0.1)])


def test_no_server_gets_the_key_of_another(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = url.rpartition(":")[2]
    monkeypatch.setenv("JUDGE_API_KEY", "first")
    monkeypatch.setenv("JUDGE_API_KEY_3", "third")
    elsewhere = f"http://localhost:{port}"
    settings = RewardSettings(
        judge_url=url, judge_model="good", judge_panel=(f"mild@{url}", f"hard@{elsewhere}", f"moody@{elsewhere}")
    )
    ask(settings)
    keys = {request["model"]: request["key"] for request in Handler.requests}
    assert keys == {"good": "Bearer first", "mild": "Bearer first", "hard": "Bearer third", "moody": None}


@pytest.mark.parametrize(
    ("panel", "sentence"),
    [
        (["llama"], "rl_config.judge_panel is 'llama'; it must look like http://host:port/v1 or MODEL@http"),
        (["m@ftp://a/v1"], "rl_config.judge_panel is"),
        (["x@http://u:planted@/v1"], "rl_config.judge_panel is"),
        (["m@http://a/v1"], "rl_config.judge_panel has m at http://a/v1 a second time; rl_config.judge_repeats"),
        (["http://b/v1", "http://b/v1"], "has the model at http://b/v1 a second time"),
    ],
)
def test_addresses_of_another_form_are_refused(panel: list[str], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        list_judges("http://a/v1", "m", panel)
    assert sentence in str(error.value) and "planted" not in str(error.value)


def test_judges_have_different_names_and_parts_of_figures() -> None:
    panel = ["Qwen/Q 2@https://u:p@b/v1", "http://c/v1", "m@http://d:1/v1", "m@http://e/v1"]
    judges = list_judges("http://a/v1", "m", panel)
    assert [one.name for one in judges] == ["m", "Qwen/Q 2", "judge 3", "m (4)", "m (5)"]
    assert [one.part for one in judges] == ["m", "Qwen_Q_2", "judge_3", "m_4_", "m_5_"]
    assert (judges[1].url, judges[1].model, judges[1].server) == ("https://u:p@b/v1", "Qwen/Q 2", "b")


def test_a_draw_is_no_majority_and_a_fault_needs_one() -> None:
    pair = [Vote("a", 0.9), Vote("b", 0.1)]
    assert count_votes(pair, "majority")["score"] == 0.0 and count_votes([*pair, Vote("c", 0.5)], "majority")["score"] == 1.0
    criteria = Criterion("right", 2.0), Criterion("invents a source", -1.0)
    votes = [Vote("a", 0.5, verdicts=(True, True)), Vote("b", 1.0, verdicts=(True, False))]
    assert count_votes(votes, "majority", criteria=criteria)["score"] == 1.0
    with pytest.raises(VoteError, match="0 of 2 votes are there, and a response needs 1"):
        count_votes([Vote("a", error="x"), Vote("b", error="y")], "mean", quorum=1)


def naive_count(scores: list[float | None], rule: str, quorum: int) -> dict[str, float] | None:
    """Votes counted as a person would; None where too few are there."""
    given = sorted(score for score in scores if score is not None)
    if len(given) < quorum:
        return None
    middle = (given[(len(given) - 1) // 2] + given[len(given) // 2]) / 2
    right = len([score for score in given if score >= 0.5])
    score = {"mean": sum(given) / len(given), "median": middle, "majority": float(right > len(given) - right), "min": given[0]}
    found = {"score": score[rule], "missing": float(len(scores) - len(given))}
    if len(given) > 1:
        pairs = list(combinations(given, 2))
        found["agreement"] = len([1 for a, b in pairs if (a >= 0.5) == (b >= 0.5)]) / len(pairs)
    return found


def test_random_votes_are_those_of_a_naive_count() -> None:
    draws = random.Random(5)
    for _ in range(400):
        size, rule = draws.randint(2, 7), draws.choice(["mean", "median", "majority", "min"])
        scores = [None if draws.random() < 0.25 else draws.choice([0.0, 0.5, 1.0, draws.uniform(-3, 3)]) for _ in range(size)]
        quorum = draws.randint(1, size)
        votes = [Vote(f"j{index % 3}", score, error="gone") for index, score in enumerate(scores)]
        draws.shuffle(votes)
        expected = naive_count(scores, rule, quorum)
        if expected is None:
            with pytest.raises(VoteError):
                count_votes(votes, rule, quorum=quorum)  # pyrefly: ignore[bad-argument-type]
            continue
        found = count_votes(votes, rule, quorum=quorum)  # pyrefly: ignore[bad-argument-type]
        assert {name: value for name, value in found.items() if not name.startswith("of_")} == pytest.approx(expected)
        by_judge = {name: statistics.fmean(s.score for s in votes if s.judge == name and s.score is not None)
                    for name in {s.judge for s in votes if s.score is not None}}  # fmt: skip
        assert {name[3:]: value for name, value in found.items() if name.startswith("of_")} == pytest.approx(by_judge)


def test_random_rubrics_stay_between_0_and_1_and_rise_with_what_is_met() -> None:
    draws = random.Random(6)
    for _ in range(300):
        weights = draws.choices([-2.0, -0.5, 1.0, 3.0], k=draws.randint(1, 6))
        criteria = [Criterion("c", weight, draws.random() < 0.2) for weight in weights]
        criteria.append(Criterion("c", draws.uniform(0.1, 5)))
        rubric_score = draws.choice(["weighted", "mean", "all", "any"])
        votes, rule = [], draws.choice(["mean", "median", "majority", "min"])
        for index in range(draws.randint(1, 5)):
            verdicts = tuple(draws.random() < 0.5 for _ in criteria)
            votes.append(Vote(str(index), score_verdicts(criteria, verdicts, rubric_score)["score"], verdicts=verdicts))
        found = count_votes(votes, rule, criteria=criteria, rubric_score=rubric_score)  # pyrefly: ignore[bad-argument-type]
        best = tuple(one.weight > 0 for one in criteria)
        raised = [Vote(v.judge, score_verdicts(criteria, best, rubric_score)["score"], verdicts=best) for v in votes]
        best_found = count_votes(raised, rule, criteria=criteria, rubric_score=rubric_score)  # pyrefly: ignore[bad-argument-type]
        assert 0.0 <= found["score"] <= best_found["score"] == 1.0 and math.isfinite(found.get("agreement", 0.0))
