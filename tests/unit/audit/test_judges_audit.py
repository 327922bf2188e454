"""The audit of judges: such as agree pass, one that guesses is found, and marks of people are read or refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from audited_rows import write_rows

from mindspeed_rl.rewards.judge_addresses import list_judges

Audit = Callable[..., tuple[int, Any]]


class Judges(BaseHTTPRequestHandler):
    """Judges by the name of the model: by the label, all right, by a number of the response, or not at all."""

    keys: dict[tuple[str, str], str | None] = {}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, model = body["messages"][0]["content"], body["model"]
        self.keys[self.headers["Host"].partition(":")[0], model] = self.headers.get("Authorization")
        label, answer = re.search(r"\[Reference answer\]\n(.*?)\n\n\[Answer to judge\]\n(\d+)", text, re.DOTALL).groups()
        is_right = {"exact": label == answer, "also_exact": label == answer, "kind": True, "odd": int(answer) % 2 == 1}
        self.reply(is_right.get(model), answer, has_criteria="[Criteria]" in text)

    def reply(self, is_right: bool | None, answer: str, *, has_criteria: bool) -> None:
        if has_criteria:
            reply = json.dumps({"1": is_right, "2": len(answer) == 2})
        else:
            reply = "I am silent." if is_right is None else f"Score: {10 if is_right else 2}"
        content = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


#: eight responses, half of them right; numbers are odd in half of both halves
ROWS = [
    {"prompt": f"{n}?", "response": str(n if n < 14 else n + 4), "label": str(n), "human": n < 14} for n in range(10, 18)
]  # fmt: skip


@pytest.fixture
def judge(audit: Audit, url: str, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    def run(models: str, rows: list[dict[str, Any]] = ROWS, *options: str) -> tuple[int, Any]:
        file = write_rows(tmp_path / "responses.jsonl", rows)
        flags = [f"--judge={model}@{url}" for model in models.split()]
        return audit("judges", [{}], f"--responses={file}", *flags, *options)

    return run


def test_judges_that_agree_pass_and_one_that_guesses_fails(judge: Callable[..., tuple[int, Any]]) -> None:
    code, found = judge("exact also_exact", ROWS, "--human=human")
    assert (code, found["krippendorff_alpha"], found["fleiss_kappa"]) == (0, 1.0, 1.0)
    assert [one["kappa"] for one in found["people"]] == [1.0, 1.0, 1.0] and found["people"][2]["judge"] == "all judges"
    code, found = judge("exact odd", ROWS)
    # 2 of 4 right ones are odd, and 2 of 4 wrong ones: agreement by chance, kappa 0; alpha 1 - 15 * 8 / (2 * 8 * 8)
    assert code == 1 and found["pairs"] == [{"judges": ["exact", "odd"], "percent": 0.5, "kappa": 0.0}]
    assert found["krippendorff_alpha"] == pytest.approx(1 - 15 * 8 / 128)


def test_a_judge_next_to_people_needs_no_second_one_and_kind_ones_are_found(judge: Callable[..., tuple[int, Any]]) -> None:
    assert judge("exact", ROWS, "--human=human")[0] == 0
    code, found = judge("kind", ROWS, "--human=human")
    assert code == 1 and found["people"] == [{"judge": "kind", "units": 8, "percent": 0.5, "kappa": 0.0}]
    # where all is right nothing tells a kind judge from a good one
    code, found = judge("kind also_exact", ROWS[:4])
    assert code == 1 and found["krippendorff_alpha"] is None


def test_replies_without_a_score_are_counted(judge: Callable[..., tuple[int, Any]]) -> None:
    code, found = judge("exact silent", ROWS)
    assert code == 1 and [one["failed"] for one in found["judges"]] == [0, 8]
    assert "I am silent" in found["judges"][1]["failures"][0]


def test_nothing_scored_says_why(judge: Callable[..., tuple[int, Any]]) -> None:
    code, found = judge("silent", ROWS, "--human=human")
    assert code == 1 and found["people"] == [{"judge": "silent", "units": 0, "percent": None, "kappa": None}]


def test_criteria_are_units_where_the_run_has_a_rubric(judge: Callable[..., tuple[int, Any]]) -> None:
    rows = [{**row, "rubric": ["is right", "has two digits"], "human": [row["human"], True]} for row in ROWS]
    code, found = judge("exact also_exact", rows, "--human=human", "rl_config.judge_rubric=rubric")
    assert (code, found["units"], found["people"][0]["units"]) == (0, "criteria", 16)
    code, found = judge("exact odd", rows, "--human=human", "rl_config.judge_rubric=rubric")
    assert code == 1 and found["pairs"][0]["percent"] == 0.75
    code, text = judge("exact odd", [{**rows[0], "human": [True] * 3}], "--human=human", "rl_config.judge_rubric=rubric")
    assert code == 2 and "people have marked 3 criteria, but its rubric has 2" in text


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{**ROWS[0], "human": "maybe"}], "row 1: human: 'maybe' is not a mark"),
        ([{**ROWS[0], "human": 0.7}], "row 1: human: 0.7 is not a mark"),
        ([{**ROWS[0], "human": [True, False]}], "people have marked 2 criteria, but the run has no rl_config.judge_rubric"),
        ([{**ROWS[0], "human": []}], "a list of marks has none"),
        ([{"prompt": "a", "response": "1", "label": "1"}], "no row of"),
        ([{"prompt": "a", "label": "1"}], "row 1: response must be a text"),
        ([{**ROWS[0], "prompt": [{"role": "user"}]}], "row 1: prompt must be a text, not list"),
        (["[1]"], "row 1: a row is an object with prompt and response, not"),
        (["3"], "row 1: "),
        (['{"prompt"'], "row 1: is not valid JSON"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(
    judge: Callable[..., tuple[int, Any]], rows: list[dict[str, Any]], sentence: str
) -> None:
    code, text = judge("exact", rows, "--human=human")
    assert code == 2 and sentence in text


def test_one_judge_alone_and_an_address_without_a_server_are_refused(judge: Callable[..., tuple[int, Any]]) -> None:
    with pytest.raises(SystemExit):
        judge("exact")
    code, text = judge("", ROWS, "--judge=a@http://user:planted@127.0.0.1:9/v1", "--human=human")
    assert code == 2 and "cannot be reached" in text and "planted" not in text
    code, text = judge("", ROWS, "--judge=no_address", "--human=human")
    assert code == 2 and "must look like http://host:port/v1" in text
    assert "the run has no rl_config.judge_url" in judge("", ROWS, "--human=human")[1]
    code, text = judge("exact", ROWS, "--human=human", "--responses=nothere")
    assert code == 2 and "'nothere' does not exist" in text


def test_the_panel_of_the_run_is_asked_and_each_vote_of_a_judge_is_one(judge: Callable[..., tuple[int, Any]], url: str) -> None:
    keys = [f"rl_config.judge_url={url}", "rl_config.judge_model=exact", f"rl_config.judge_panel=[also_exact@{url}]"]
    code, found = judge("odd", ROWS, *keys)
    assert code == 1 and [one["name"] for one in found["judges"]] == ["exact", "also_exact", "odd"]
    assert [pair["percent"] for pair in found["pairs"]] == [1.0, 0.5, 0.5]
    code, found = judge("", ROWS, *keys[:2], "rl_config.judge_repeats=2", "rl_config.judge_temperature=0.7")
    assert code == 0 and [one["name"] for one in found["judges"]] == ["exact, vote 1", "exact, vote 2"]


def test_judges_have_the_names_and_the_keys_that_they_have_in_a_run(
    judge: Callable[..., tuple[int, Any]], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = url.replace("127.0.0.1", "localhost")
    for variable in ("JUDGE_API_KEY", "JUDGE_API_KEY_2", "JUDGE_API_KEY_3"):
        monkeypatch.setenv(variable, variable)
    keys = [f"rl_config.judge_url={url}", "rl_config.judge_model=exact"]
    Judges.keys = {}
    _, found = judge("", ROWS, *keys, f"--judge=exact@{elsewhere}", f"--judge=odd@{elsewhere}", f"--judge={url}")
    names = [one["name"] for one in found["judges"]]
    assert names == ["exact", "exact (2)", "odd", "judge 4"]
    panel = [f"exact@{elsewhere}", f"odd@{elsewhere}", url]
    assert names == [one.name for one in list_judges(url, "exact", panel)]
    assert Judges.keys == {
        ("127.0.0.1", "exact"): "Bearer JUDGE_API_KEY",
        ("localhost", "exact"): "Bearer JUDGE_API_KEY_2",
        ("localhost", "odd"): "Bearer JUDGE_API_KEY_3",
        ("127.0.0.1", "default"): "Bearer JUDGE_API_KEY",
    }
    code, text = judge("exact", ROWS, *keys)
    assert code == 2 and "--judge has exact at" in text and "a second time" in text
