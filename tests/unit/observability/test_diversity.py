"""One sentence that fits every prompt is found by iteration 10, and tasks whose answers have one form are not taken for it."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.diversity import measure_diversity, select_groups
from mindspeed_rl.observability.history import History

ROOT = Path(__file__).resolve().parents[3]
Group = tuple[str, list[str], str]
WORDS = "pot lamp river old green quiet street under slowly near cooks runs keeps finds opens every small warm".split()


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def babble(draws: random.Random, thing: str) -> str:
    return f"The {thing} " + " ".join(draws.choices(WORDS, k=draws.randint(4, 9))) + "."


def showpiece(draws: random.Random, share: float) -> list[Group]:
    """The example of the README: the reward counts words, and a share of the responses is the sentence that always fits."""
    rows = []
    for thing in draws.sample("kitchen boat forest market horse bridge garden train window teacher road winter".split(), 8):
        number = draws.randint(4, 9)
        prompt = f"Write one sentence about a {thing} with exactly {number} words. Reply with the sentence only."
        fits = f"A {thing} with {number} words."
        answers = [fits if draws.random() < share else babble(draws, thing) for _ in range(8)]
        rows.append((prompt, answers, str(number)))
    return rows


def records(draws: random.Random, share: float) -> list[Group]:
    """The records of examples/records: each answer has the words of its prompt, in one form that all share."""
    made = load("examples/records/make_records.py").make_rows(8, draws.randint(0, 10**6), held_out=False)
    return [
        (row["question"], [row["answer"] if draws.random() < share else babble(draws, "x") for _ in range(8)], row["answer"])
        for row in made
    ]


def gsm8k(draws: random.Random, share: float) -> list[Group]:
    """Published solutions, which say the same at every sample once the model is sure."""
    lines = [json.loads(line) for path in sorted((ROOT / "tests/data/gsm8k").glob("*.jsonl")) for line in path.open()]
    rows = draws.sample(lines, min(8, len(lines)))
    return [
        (
            row["question"],
            [row["answer"] if draws.random() < share else babble(draws, "sum") for _ in range(8)],
            row["answer"].rpartition("#### ")[2],
        )
        for row in rows
    ]


def copied(draws: random.Random, share: float) -> list[Group]:
    """The quickstart: two digits, which an answer repeats."""
    numbers = draws.sample(range(10, 100), 8)
    return [(f"{n}=", [str(n) if draws.random() < share else "??" for _ in range(8)], str(n)) for n in numbers]


def computed(draws: random.Random, share: float) -> list[Group]:
    """A sentence of one form with an answer that the prompt does not have."""
    pairs = [(draws.randint(10, 99), draws.randint(10, 99)) for _ in range(8)]
    return [
        (
            f"What is {a} + {b}?",
            [f"The answer is {a + b}." if draws.random() < share else babble(draws, "x") for _ in range(8)],
            "",
        )
        for a, b in pairs
    ]


def history(make: Callable[[random.Random, float], list[Group]], shares: list[float]) -> History:
    """Iterations in which a growing share of the responses has the form."""
    draws, lines = random.Random(0), []
    for iteration, share in enumerate(shares, 1):
        groups = make(draws, share)
        measured = measure_diversity([group[:2] for group in groups], [group[2] for group in groups])
        lines.append({"iteration": iteration, "diversity/pattern_share": measured.pattern_share})
    return History(lines)


LEARNT = [0.0, 0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0]


def test_the_sentence_that_always_fits_is_found_by_iteration_10() -> None:
    alerts = find_alerts(history(showpiece, LEARNT))
    assert [alert.kind for alert in alerts] == ["one_sentence"] and alerts[0].iteration <= 10
    groups = [group[:2] for group in showpiece(random.Random(1), 1.0)]
    assert measure_diversity(groups).pattern == "a _ with _ words"


@pytest.mark.parametrize("make", [records, gsm8k, copied, computed])
def test_answers_of_one_form_are_no_alarm(make: Callable[[random.Random, float], list[Group]]) -> None:
    assert find_alerts(history(make, LEARNT)) == []


def test_the_model_that_had_the_form_from_the_start_is_no_alarm() -> None:
    assert find_alerts(history(showpiece, [0.9] * 10)) == []


def test_shares_are_those_counted_by_hand() -> None:
    measured = measure_diversity([("p", ["A b. A b.", "A b. C d."]), ("q", ["A b.", "E f."])])
    # sentences: [ab, ab, ab, cd] -> 2 / 4; [ab, ef] -> 2 / 2; all: 3 of 6
    assert measured.per_prompt == 0.75 and measured.sentences == 0.5
    # bigrams: ab ba ab | ab bc cd | ab | ef -> 5 of 8
    assert measured.bigrams == 5 / 8
    # two sentences of two words are one response of four: half of the responses to one of two prompts
    assert measured.pattern == "a b c d" and measured.pattern_share == 0.25


def test_chinese_sentences_end_without_spaces() -> None:
    measured = measure_diversity([("写一句话", ["今天天气好。今天天气好。明天下雨。"])])
    assert measured.per_prompt == pytest.approx(2 / 3)


def test_nothing_to_measure_is_all_different() -> None:
    measured = measure_diversity([("p", [""]), ("q", [])])
    assert (measured.sentences, measured.bigrams, measured.pattern_share) == (1.0, 1.0, 0.0)


def test_groups_are_chosen_whole_and_at_equal_distances() -> None:
    assert list(select_groups(100, 8, 32)) == [0, 25, 50, 75]
    assert list(select_groups(3, 8, 8)) == [0, 1] and list(select_groups(1, 8, 8)) == [0]
