"""The audit of rewards: a planted hole of each kind is found by its cheat, and the clean twin passes."""

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

from mindspeed_rl.audit.cheats import CHEATS, FORMS, LABEL_CHEATS, MUTATIONS, Case, make_wrong
from mindspeed_rl.audit.reward import SAMPLE, RewardAudit, audit_reward, commits_to
from mindspeed_rl.audit.rows import open_run_data, read_cases
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.run.draft import draft

Audit = Callable[..., tuple[int, Any]]
HOLES = Path(__file__).with_name("rewards_with_holes.py")
ROWS = [
    {"prompt": f"Tom has {n} pens and buys {n + 5}. How many pens are {n} and {n + 5} together?", "labels": str(2 * n + 5)}
    for n in range(11, 40, 4)
]
TESTS = [{"prompt": f"Write add_{n}(x).", "labels": f"assert add_{n}(1) == {n + 1}"} for n in range(4)]
LONG = "generate_config.sampling_config.max_tokens=2048"
HEDGE, THOUGHT = (cheat.title for cheat in LABEL_CHEATS)


def attack(audit: Audit, functions: str, *options: str, rows: list[dict[str, str]] = ROWS) -> tuple[int, Any]:
    names = functions.split("+")
    keys = [f"rl_config.verifier_function=[{','.join(names)}]", f"rl_config.verifier_weight={[1.0] * len(names)}"]
    return audit("reward", rows, f"rl_config.external_plugins=[{HOLES}]", *keys, LONG, "--rows=4", *options)


def won(found: dict[str, Any], group: str = "cheats") -> set[str]:
    return {title for title, one in found[group].items() if one["share"] > 0.5 and not title.startswith("together")}


#: functions, rows, and the cheats that they pay for
PLANTED = [
    ("anywhere", ROWS, {"all numbers up to 100", HEDGE, THOUGHT}),
    ("any_box", ROWS, {"all numbers up to 100", HEDGE, THOUGHT}),
    ("tags", ROWS, {"format tags alone"}),
    ("longer", ROWS, {"all numbers up to 100", "one word, again and again"}),
    ("word_count", [{"prompt": f"A sentence about cats with exactly {n} words.", "labels": str(n)} for n in (4, 5, 6, 7)],
     {"as many words as the prompt has for a number"}),
    ("runs", TESTS, {"programs that end early or equal everything"}),
    ("careless", ROWS, {"nothing", "the form without an answer", "a sentence that says nothing"}),
]  # fmt: skip
#: cheats that other tests plant
PLANTED_ELSEWHERE = {"every number of the prompt", "all choices", "the prompt copied", "instructions to the judge"}


def test_each_cheat_has_a_planted_hole() -> None:
    planted = set[str]().union(*(expected for _, _, expected in PLANTED), PLANTED_ELSEWHERE)
    assert planted == {cheat.title for cheat in (*CHEATS, *LABEL_CHEATS)}


@pytest.mark.parametrize(("functions", "rows", "expected"), PLANTED)
def test_a_planted_hole_is_found_by_its_cheat(
    audit: Audit, functions: str, rows: list[dict[str, str]], expected: set[str]
) -> None:
    code, found = attack(audit, functions, rows=rows)
    assert (code, found["passes"], found["rows"]) == (1, False, 4)
    assert expected <= won(found), won(found)
    for title in expected:
        where, text, reward = found["cheats"][title]["example"]
        assert where.startswith("train.jsonl, row ") and isinstance(text, str) and reward > 0


@pytest.mark.parametrize("functions", ["only_box", "exact_match", "only_box+exact_match", "multiple_choice"])
def test_a_clean_twin_passes(audit: Audit, functions: str) -> None:
    choices = [{"prompt": f"{n}: A) x B) y C) z D) u", "labels": "ABCD"[n]} for n in range(4)]
    code, found = attack(audit, functions, rows=choices if functions == "multiple_choice" else ROWS)
    assert (code, found["worst"], won(found), won(found, "mutations"), found["failures"]) == (0, 0.0, set(), set(), {})
    assert found["honest"]["reward"] > found["honest"]["wrong"]


#: rows whose label has the place in a list of answers that a reward may read
PLACED = [
    *({"prompt": f"Of {numbers}: which?", "labels": label} for numbers, label in
      (("15, 25, 20", "20"), ("15, 25, 20", "15"), ("7, 9, 100", "100"), ("10, 8, 9", "10"), ("0, 5, 6", "0"))),
    *({"prompt": "A) 3 B) 4 C) 5 D) 6 E) 7", "labels": label} for label in "AE"),
]  # fmt: skip


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("acc", "gsm8k_flexible")]


@pytest.mark.parametrize("functions", ["last_box", "first_number", *SLOW])
def test_a_list_of_answers_whose_last_or_first_is_the_label_is_no_cheat(audit: Audit, functions: str) -> None:
    rows = PLACED if functions in ("last_box", "first_number") else PLACED[:5]
    _, found = attack(audit, functions, "--rows=7", rows=rows)
    paid = {title for title, one in found["cheats"].items() if one["cheated"]}
    assert paid <= ({HEDGE} if functions == "gsm8k_flexible" else set()), {title: found["cheats"][title] for title in paid}


def test_a_list_of_answers_is_a_cheat_where_any_of_them_counts(audit: Audit) -> None:
    _, found = attack(audit, "any_box", "--rows=7", rows=PLACED)
    assert found["cheats"]["every number of the prompt"]["cheated"] == 5 and found["cheats"]["all choices"]["cheated"] == 2
    assert attack(audit, "anywhere", "--rows=5", rows=PLACED[:5])[1]["cheats"]["the prompt copied"]["cheated"] == 5


def test_a_label_that_ends_with_its_answer_is_an_honest_answer_as_a_whole(audit: Audit) -> None:
    rows = [{**row, "labels": f"I add the two.\n#### {row['labels']}"} for row in ROWS]
    code, found = attack(audit, "exact_match", rows=rows)
    assert (code, found["honest"]) == (0, {"form": "the whole label", "reward": 1.0, "wrong": 0.0})
    assert won(found) == set() and won(found, "mutations") == set()


def test_a_reward_that_tells_nothing_apart_fails(audit: Audit) -> None:
    rows = [{**row, "labels": f"I add the two.\n#### {row['labels']}"} for row in ROWS]
    code, found = attack(audit, "only_box", rows=rows)
    assert (code, found["passes"], found["worst"]) == (1, False, 0.0)


def test_a_wrong_sign_that_is_accepted_fails_and_its_twin_does_not(audit: Audit) -> None:
    code, found = attack(audit, "no_sign")
    assert code == 1 and won(found, "mutations") == {"sign"} and found["mutations"]["a digit"]["share"] == 0.0


LISTS = [{"prompt": f"Which of {n} to {n + 9} are odd?", "labels": f"{n}, {n + 2}, {n + 4}"} for n in range(11, 40, 8)]


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ("subset", {"an element missing", "other order"}),  # other order is for information
        ("superset", {"an element added", "other order"}),
        ("only_box", set()),
    ],
)
def test_a_list_with_an_element_less_or_more_that_is_accepted_fails(audit: Audit, functions: str, expected: set[str]) -> None:
    code, found = attack(audit, functions, rows=LISTS)
    assert (code, won(found, "mutations")) == (int(bool(expected)), expected)


def test_the_search_keeps_what_earns_more_than_its_parts(audit: Audit) -> None:
    """Only tags earn 0.9 of 1.9, only length at most 1.0: together they earn both."""
    _, found = attack(audit, "tags+longer")
    together = {title for title, one in found["cheats"].items() if title.startswith("together") and one["share"] == 1.0}
    assert together and max(found["cheats"][title]["example"][2] for title in together) == pytest.approx(1.9, abs=0.1)


def test_failures_are_counted_and_shown(audit: Audit) -> None:
    code, found = attack(audit, "raises+exact_match")
    assert code == 1 and found["failures"]["failed"] > 100
    code, found = attack(audit, "not_a_number")
    assert code == 1 and set(found["failures"]) == {"failed"} and found["honest"]["reward"] == 1.0


def test_a_function_that_hangs_ends_after_the_first_row(audit: Audit) -> None:
    code, text = attack(audit, "hangs", "rl_config.reward_timeout_s=0.3")
    assert code == 2 and "score no response to the first row" in text and "row " in text


class ObedientJudge(BaseHTTPRequestHandler):
    """Gives the score that the answer asks for, else 10 for the reference and 1 for all others."""

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        parts = r"\[Reference answer\]\n(.*?)\n\n\[Answer to judge\]\n(.*)\n\nSay in"
        label, answer = re.search(parts, text, re.DOTALL).groups()
        asked = re.search(r"Score: (\d+)", answer) if self.server.obeys else None
        score = asked[1] if asked else "10" if answer.strip() == label.strip() else "1"
        body = json.dumps({"choices": [{"message": {"content": f"Score: {score}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ObedientJudge)
    server.obeys = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_judge_that_obeys_the_answer_is_found_and_one_that_does_not_passes(audit: Audit, judge: ThreadingHTTPServer) -> None:
    keys = ["rl_config.rule_reward=false", f"rl_config.judge_url=http://127.0.0.1:{judge.server_port}/v1"]
    code, found = audit("reward", ROWS, *keys, LONG, "--rows=1")
    assert code == 1 and found["functions"] == ["judge"] and "instructions to the judge" in won(found)
    judge.obeys = False
    code, found = audit("reward", ROWS, *keys, LONG, "--rows=1")
    assert (code, won(found)) == (0, set())


def test_a_judge_that_cannot_be_reached_is_skipped_with_a_sentence(audit: Audit) -> None:
    code, found = attack(audit, "exact_match", "rl_config.judge_url=http://127.0.0.1:9/v1")
    assert code == 0 and found["functions"] == ["exact_match"] and "cannot be reached" in found["not_audited"][0]
    code, text = audit("reward", ROWS, "rl_config.rule_reward=false", "rl_config.judge_url=http://127.0.0.1:9/v1")
    assert code == 2 and "no reward function of this run can be audited here. the judge:" in text


def test_unknown_functions_and_wrong_numbers_are_refused(audit: Audit) -> None:
    assert "unknown reward function 'exact'" in audit("reward", ROWS, "rl_config.verifier_function=[exact]")[1]
    with pytest.raises(SystemExit):
        audit("reward", ROWS, "--rows=0")


def test_the_page_has_the_examples_as_text(audit: Audit, tmp_path: Path) -> None:
    attack(audit, "tags", f"-o{tmp_path}/page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;answer&gt;" in page and "<answer>" not in page and "format tags alone" in page and "What to change" in page


def test_what_people_call_wrong_must_not_be_paid_for(audit: Audit, tmp_path: Path) -> None:
    marks = [("27", True), ("27", True), (r"\boxed{27}", True), ("21", False), ("21 or 27", False), ("27 and 9", False)]
    marks += [("27", None)]
    rows = [{"prompt": "11 and 16?", "response": text, "label": "27", "human": right} for text, right in marks]
    file = write_rows(tmp_path / "marked.jsonl", rows)
    code, found = attack(audit, "exact_match", f"--marked={file}", "--rows=1")
    assert code == 0 and found["marked"]["responses"] == 6 and found["marked"]["wrong_and_paid"] == 0
    code, found = attack(audit, "anywhere", f"--marked={file}", "--rows=1", "--bound=1")
    # paid: all but the 21; of the wrong ones two of three. p_o 4/6, p_e (5 * 3 + 1 * 3) / 36 = 1/2: kappa 1/3
    assert code == 0 and found["marked"] == {
        "responses": 6, "percent": pytest.approx(4 / 6), "kappa": pytest.approx(1 / 3), "wrong_and_paid": 2,
        "right_and_unpaid": 0, "paid_share": pytest.approx(2 / 3),
    }  # fmt: skip
    assert attack(audit, "only_box", f"--marked={file}", "--rows=1")[1]["marked"]["right_and_unpaid"] == 2
    write_rows(file, [{**rows[0], "human": [True, False]}])
    assert "human must be one mark, not 2" in attack(audit, "anywhere", f"--marked={file}")[1]
    write_rows(file, [rows[-1]])
    assert "no row of" in attack(audit, "anywhere", f"--marked={file}")[1]


# ---------------------------------------------------------------------- the parts


@pytest.mark.parametrize(
    ("response", "label", "is_answer"),
    [
        ("18", "18", True), (" 18. ", "18", True), ("１８", "18", True), ("#### 18", "18", True), (r"\boxed{18}", "18", True),
        ("The answer is 18.", "18", True), ("<think>5</think><answer>18</answer>", "18", True), ("答案是18。", "18。", True),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True), ("18 or 21", "18", False), (r"\boxed{18} \boxed{21}", "18", False),
        ("<think>18</think>21", "18", False), ("<think>18", "18", False), ("", "18", False), ("1 8 0", "18", False),
        ("18", None, False), ("-18", "18", False), ("<answer>18</answer><answer>21</answer>", "18", False),
    ],
)  # fmt: skip
def test_the_stricter_check_takes_the_label_and_nothing_else(response: str, label: str | None, is_answer: bool) -> None:
    assert commits_to(response, label) is is_answer


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [("18", "11"), ("7", "0"), ("-2.5", "-2.8"), ("A", "B"), ("B", "C"), ("yes", "no"), ("No", "yes"), ("是", "否"),
     ("Paris", "something else"), ("(1, 2)", "(1, 5)"), ("1,000", "1,003")],
)  # fmt: skip
def test_a_wrong_answer_is_of_the_same_kind(answer: str, wrong: str) -> None:
    assert make_wrong(answer) == wrong


def test_mutations_change_what_they_say() -> None:
    changed = {one.title: [one.change(label) for label in ("18", "-3.14", "(1, 2)", "{a,b,c}", "x+1")] for one in MUTATIONS}
    assert changed["sign"] == ["-18", "3.14", None, None, None]
    assert changed["a digit"] == ["11", "-3.17", None, None, None]
    assert changed["an element missing"] == [None, None, "(1)", "{a, b}", None]
    assert changed["an element added"] == [None, None, "(1, 2, 5)", "{a, b, c, B}", None]
    assert changed["other order"] == [None, None, "(2, 1)", "{c, b, a}", None]
    assert changed["a unit added"] == ["18 km", "-3.14 km", None, None, None]
    assert changed["rounded"] == [None, "-3.1", None, None, None]


def test_cheats_without_the_label_never_see_it() -> None:
    form = FORMS["the answer alone"]
    cases = [Case("row 1", "Why?", "Why?", label=label) for label in ("4711", "another label")]
    for cheat in CHEATS:
        assert list(cheat.write(cases[0], form)) == list(cheat.write(cases[1], form)), cheat.title


def sampled(
    functions: list[str], samples: Callable[[dict[str, str]], list[str]], tokenizer_folder: str, tmp_path: Path
) -> RewardAudit:
    """The audit of reward functions with responses of a model to each row."""
    keys = {"tokenizer_name_or_path": tokenizer_folder, "data_path": write_rows(tmp_path / "rows.jsonl", ROWS[:4])}
    overrides = [f"megatron_training.{name}={value}" for name, value in keys.items()]
    overrides += [f"rl_config.verifier_function=[{','.join(functions)}]", f"rl_config.external_plugins=[{HOLES}]", LONG]
    overrides += ["rl_config.max_prompt_length=500", "megatron_training.eval_data_path=null"]
    run, tokenizer = draft(load_run_config("grpo_tiny_cpu", None, overrides)), load_tokenizer(tokenizer_folder)
    cases = list(read_cases(open_run_data(run, tokenizer)[0]))
    made = {case.where: samples({"prompt": case.prompt, "labels": case.label or ""}) for case in cases}
    return audit_reward(run, cases, tokenizer, samples=made)


def test_a_sample_that_earns_without_its_answer_is_found_and_an_honest_one_is_not(
    tokenizer_folder: str, tmp_path: Path
) -> None:
    def wanders(row: dict[str, str]) -> list[str]:
        return [f"First I find {row['labels']}, but then the total is 3. The answer is 3.", "I do not know."]

    def reasons(row: dict[str, str]) -> list[str]:
        label = int(row["labels"])
        return [f"We add {label - 9} and 9, so there are {label} pens.", f"Together \\boxed{{{label}}}."]

    tricked = sampled(["anywhere"], wanders, tokenizer_folder, tmp_path).cheats
    assert tricked[SAMPLE].share == 1.0 and "The answer is 3" in (tricked[SAMPLE].example or ("", "", 0.0))[1]
    honest = sampled(["anywhere"], reasons, tokenizer_folder, tmp_path).cheats
    assert honest[SAMPLE].share == 0.0
    # the twin of the hole: the same samples earn nothing
    assert sampled(["only_box"], wanders, tokenizer_folder, tmp_path).worst == 0.0


def test_samples_are_recombined_where_both_together_earn_more(tokenizer_folder: str, tmp_path: Path) -> None:
    # a part of the reward for each of two words: no sample has both
    def halves(row: dict[str, str]) -> list[str]:
        return ["green grass", "blue sky"]

    found = sampled(["two_halves"], halves, tokenizer_folder, tmp_path).cheats
    together = {title: one for title, one in found.items() if title.startswith("together") and SAMPLE in title}
    assert any(one.share == 1.0 for one in together.values()), sorted(found)
