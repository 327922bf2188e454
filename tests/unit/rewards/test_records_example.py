"""The example of records: held-out sentences are new, the reward has no shortcut, and both run files are valid."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.run.draft import load_run
from mindspeed_rl.run.explain.plan_page import explain

ROOT = Path(__file__).parents[3]
LABEL = {"name": "Wei Khan", "age": 30, "job": "cook", "city": "Oslo", "item": "pens", "count": 4}


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_script("examples/records/make_records.py")


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("record", "exact_record"):
        monkeypatch.setitem(REWARDS, name, None)
        monkeypatch.delitem(REWARDS, name)
    return load_script("examples/records/record_rewards.py")


def changed(**values: object) -> str:
    return json.dumps({**LABEL, **values})


@pytest.mark.parametrize(
    ("response", "points", "exact"),
    [
        (json.dumps(LABEL), 1.0, 1.0),
        (f"  {json.dumps(LABEL, indent=1)}\n", 1.0, 1.0),
        (changed(age="30"), 1.0, 0.0),  # a text in place of a number
        (changed(age=30.0), 5 / 6, 0.0),
        (changed(age=31), 5 / 6, 0.0),
        (changed(age=31, count=5, job="nurse"), 3 / 6, 0.0),
        (changed(country="Norway"), 5 / 6, 0.0),  # an unknown key
        (f"Here it is: {json.dumps(LABEL)}", 0.8, 0.0),
        (f"{json.dumps(LABEL)} This is the record.", 0.8, 0.0),
        (json.dumps(LABEL)[:-1] + ', "age": 30}', 5 / 6, 0.0),  # a repeated key
        ('{"name": "Wei Khan"}', 1 / 6, 0.0),
        ("{}", 0.0, 0.0),
        ("[1]", 0.0, 0.0),
        ("", 0.0, 0.0),
        ('{"name": "Wei Khan", "age": 30', 0.0, 0.0),  # cut
        ("{" + ", ".join(f'"age": {age}' for age in range(18, 80)) + "}", 0.0, 0.0),  # every age
        (json.dumps(dict.fromkeys(map(str, range(50)), 1) | LABEL), 0.0, 0.0),
    ],
)
def test_reward_and_check_of_a_response(response: str, points: float, exact: float, rewards: Any) -> None:
    label = json.dumps(LABEL)
    assert rewards.record(response, label) == pytest.approx(points)
    assert rewards.exact_record(response, label) == exact


def test_held_out_sentences_have_other_templates_names_and_cities(task: Any, tmp_path: Path) -> None:
    task.main(tmp_path)
    rows = {
        part: [json.loads(line) for line in (tmp_path / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "heldout")
    }
    assert (len(rows["train"]), len(rows["heldout"])) == (400, 100)
    records = {part: [json.loads(row["answer"]) for row in rows[part]] for part in rows}
    for key in ("name", "city"):
        assert not {record[key] for record in records["train"]} & {record[key] for record in records["heldout"]}
    assert not set(task.TRAIN) & set(task.HELD_OUT)
    for row, record in zip(rows["train"] + rows["heldout"], records["train"] + records["heldout"]):
        assert list(record) == list(LABEL) and all(str(value) in row["question"] for value in record.values())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    task.main(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_constant_response_earns_more_than_chance(task: Any, rewards: Any) -> None:
    rows = task.make_rows(400, 0, held_out=False)
    records = [json.loads(row["answer"]) for row in rows]
    common = {key: [value for value, _ in Counter(record[key] for record in records).most_common(2)] for key in LABEL}
    best = max(
        sum(rewards.record(json.dumps(dict(zip(common, values))), row["answer"]) for row in rows) / len(rows)
        for values in itertools.product(*common.values())
    )
    assert best < 0.09  # the start of the model is 0.08 sampled, 0.4 greedy


@pytest.mark.parametrize("name", ["run", "sft"])
def test_the_run_files_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = explain(load_run(f"examples/records/{name}.yaml"))
    assert report["errors"] == [] and report["missing"] == []
    assert not {key for key in report["keys_without_effect"] if "verifier" in key}
