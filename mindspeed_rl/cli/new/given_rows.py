"""Rows that `mindspeed-rl new` reads: of the user, of data sets, of tasks of reasoning-gym, of environments of verifiers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.cli.new.made_rows import Row
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.forms import Reading, find_form
from mindspeed_rl.data.prompts import open_rows
from mindspeed_rl.data.sources import read_rows
from mindspeed_rl.tools import verifiers_program

_MIN_ROWS = 8
#: rows of a data set that are copied; a run file may name the data set itself
_MAX_ROWS = 20_000
#: handler of the forms with a question and an answer
_QUESTIONS = "AlpacaStyleInstructionHandler"
#: columns of a data set of a hub with the question, and with the answer; the first pair that its first row has
_COLUMNS = (
    *((question, answer) for question in ("question", "problem", "query") for answer in ("answer", "solution", "response")),
    *(("prompt", answer) for answer in ("completion", "answer", "label", "labels", "response", "solution", "reward_model")),
    ("instruction", "output"),
    ("input", "output"),
    ("messages", "messages"),
    ("conversations", "conversations"),
)
_LEVEL = "level"
_NUM_LEVELS, _ROWS_OF_LEVEL = 4, 200
_LIST_LIMIT_S = 300.0


@dataclass(frozen=True)
class Source:
    """Origin of the rows of a task, from the command line.

    Attributes:
        kind: kind of the task.
        data: file, folder or name on a hub.
        task: name of a task of reasoning-gym, or of an environment of verifiers.
        arguments: arguments of the task or the environment.
        level: column of a data set with the level of a row.
        levels: number of levels of a task.
        python: interpreter that has the verifiers library; None for this one.
    """

    kind: str
    data: str | None = None
    task: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    level: str | None = None
    levels: int | None = None
    python: str | None = None


@dataclass(frozen=True)
class Given:
    """Rows from outside.

    Attributes:
        columns: further columns that a sample needs.
        values: for the templates of the files.
        scoring: template of the keys for rewards, where the rows decide it.
        files: further files with their templates, where the rows decide them.
        note: a sentence for the user.
    """

    rows: list[Row]
    columns: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    scoring: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def has_levels(self) -> bool:
        """True where the rows have levels, from easy to hard."""
        return _LEVEL in self.columns


def _read(path: str) -> Iterator[tuple[str, Row]]:
    """Yield where a row is, and the row.

    Raises:
        ValueError: the data cannot be read.
    """
    try:
        data = open_rows(path)
    except ValueError as error:
        raise ValueError(f"--data: {str(error).removeprefix('input: ')}") from error
    for file, number, row in read_rows(data):
        where = f"--data {file}, row {number}"
        if isinstance(row, MalformedRowError) or not isinstance(row, Mapping):
            raise ValueError(f"{where}: {row if isinstance(row, MalformedRowError) else 'not an object'}")
        yield where, dict(row)


def _check_count(path: str, rows: list[Row]) -> list[Row]:
    if len(rows) < _MIN_ROWS:
        raise ValueError(f"{path} has {len(rows)} rows; {_MIN_ROWS} or more are needed to train and to hold some out")
    return rows


def read_own(source: Source) -> Given:
    """Read rows of a question and an answer from data of the user.

    Raises:
        ValueError: the data cannot be read, or have no columns of questions and answers.
    """
    assert source.data is not None
    rows: list[Row] = []
    reading: Reading | None = None
    for where, row in _read(source.data):
        reading = reading or find_form(row, "samples")
        if reading is None or reading.handler != _QUESTIONS:
            raise ValueError(
                f"--data {source.data}: rows have the columns {', '.join(map(str, row))}, but question and answer, prompt and"
                " completion or instruction and output are needed: rename yours, or write the folder without --data and change"
                " map_keys"
            )
        question, answer = (str(row.get(name) or "").strip() for name in reading.columns)
        if not question or not answer:
            raise ValueError(f"{where}: {' and '.join(reading.columns)} must not be empty")
        extra = str(row.get("input") or "").strip() if reading.form == "Alpaca" else ""
        rows.append({"question": "\n".join(filter(None, (question, extra))), "answer": answer})
    return Given(_check_count(f"--data {source.data}", rows))


def read_dataset(source: Source) -> Given:
    """Read the questions and answers of a data set, such as one of a hub, and choose a reward that fits its answers.

    Raises:
        ValueError: the data cannot be read, or have no columns of questions and answers, or not the one of the level.
    """
    assert source.data is not None
    rows: list[Row] = []
    names: tuple[str, str] | None = None
    is_cut = False
    for where, row in _read(source.data):
        names = names or next((pair for pair in _COLUMNS if row.keys() >= set(pair)), None)
        if names is None:
            raise ValueError(
                f"--data {source.data}: rows have the columns {', '.join(map(str, row))}; question and answer, problem and"
                " answer or solution, prompt and completion, label or reward_model, instruction and output, or messages are"
                " needed: rename yours"
            )
        if len(rows) == _MAX_ROWS:
            is_cut = True
            break
        if (pair := _split_row(row, names)) is None:
            raise ValueError(f"{where}: {' and '.join(dict.fromkeys(names))} must have a question and an answer")
        rows.append(dict(zip(("question", "answer"), pair)) | _read_level(row, source.level, where))
    _check_count(f"--data {source.data}", rows)
    note = f"the first {_MAX_ROWS} rows were copied; data_path: {source.data} in run.yaml reads all of them" if is_cut else ""
    answers = [str(row["answer"]) for row in rows]
    columns = () if source.level is None else (_LEVEL,)
    if all("####" in answer for answer in answers):
        return Given(rows, columns, {"verifier": "gsm8k_flexible"}, "verifier_keys.yaml", {}, note)
    template = "number_reward.py" if all(answer.lstrip("-").isdigit() for answer in answers) else "own_reward.py"
    return Given(rows, columns, scoring="reward_keys.yaml", files={"reward.py": template}, note=note)


def _split_row(row: Row, names: tuple[str, str]) -> tuple[object, object] | None:
    """Return the question and the answer of a row; None where one is missing."""
    question, answer = row.get(names[0]), row.get(names[1])
    if names[0] == names[1]:  # a conversation: its last turn is the answer
        turns = [_read_turn(turn) for turn in question or ()]
        if len(turns) < 2 or turns[-1]["role"] != "assistant":
            return None
        question, answer = turns[:-1], turns[-1]["content"]
    if isinstance(answer, Mapping):  # as verl writes it
        answer = answer.get("ground_truth")
    answer = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return (question, answer.strip()) if question and answer.strip() else None


#: ShareGPT's names
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def _read_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    role = turn.get("role") or _ROLES.get(str(turn.get("from")), "user")
    return {"role": role, "content": turn.get("content", turn.get("value"))}


def _read_level(row: Row, column: str | None, where: str) -> Row:
    if column is None:
        return {}
    try:
        return {_LEVEL: float(str(row[column]))}
    except KeyError:
        raise ValueError(f"--level {column}: {where} has no such column; it has {', '.join(map(str, row))}") from None
    except ValueError:
        problem = f"{where} has {row[column]!r}, but a level is a number, lower for easier rows"
        raise ValueError(f"--level {column}: {problem}") from None


def read_reasoning_gym(source: Source) -> Given:
    """Generate rows of a task of reasoning-gym, from its lowest level up where it has levels.

    Raises:
        ValueError: the library is not installed, has no such task or takes no such arguments.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import CURRICULA, DATASETS
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--kind reasoning-gym needs the package reasoning-gym ({error.name} is not installed): pip install reasoning-gym"
        ) from None
    task = source.task
    if task is None or task not in DATASETS:
        near = registry.find_similar(str(task), DATASETS)
        hint = f"did you mean '{near}'?" if near else f"it has {len(DATASETS)}: {', '.join(sorted(DATASETS))}"
        raise ValueError(f"--task {task}: reasoning-gym has no task of this name; {hint}")
    if task not in CURRICULA and (source.levels or 1) > 1:
        raise ValueError(f"--levels {source.levels}: {task} of reasoning-gym has no levels")
    levels = (source.levels or _NUM_LEVELS) if task in CURRICULA else 1
    rows: list[Row] = []
    for level in range(levels):
        given = {"seed": level, "size": _ROWS_OF_LEVEL, **source.arguments}
        try:
            dataset = reasoning_gym.create_dataset(task, **given) if levels == 1 else _open_level(task, level, given)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"--arguments {json.dumps(dict(source.arguments))}: {task} does not take them: {error}") from None
        try:
            rows += [row if levels == 1 else {**row, _LEVEL: level} for row in _list_checked(dataset)]
        except (TypeError, ValueError, AssertionError, LookupError) as error:
            raise ValueError(f"--task {task}: reasoning-gym cannot make questions of level {level}: {error}") from None
    # easy levels of some tasks have few questions
    rows = list({row["question"]: row for row in rows}.values())
    if not rows:
        raise ValueError(f"--task {task}: its checker accepts none of its own answers as text; choose another task")
    columns = ("entry",) if levels == 1 else ("entry", _LEVEL)
    return Given(_check_count(f"--task {task}", rows), columns, {"task": str(task)})


def _list_checked(dataset: Any) -> Iterator[Row]:
    """Yield the rows of a task whose checker accepts their own answers, with what it needs as the text of a column."""
    for item in dataset:
        entry = json.dumps(item, default=str)
        if item["answer"] is not None and dataset.score_answer(str(item["answer"]), json.loads(entry)) >= 1.0:
            yield {"question": item["question"], "answer": str(item["answer"]), "entry": entry}


def _open_level(task: str, level: int, given: Mapping[str, Any]) -> Any:
    """Open a task with all its attributes at a level, or at their highest where they have fewer."""
    import reasoning_gym
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import DATASETS, create_curriculum

    curriculum = create_curriculum(task)
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    context = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
    fields = DATASETS[task][1].__dataclass_fields__
    config = curriculum.generate_configuration({name: value for name, value in given.items() if name in fields}, context)
    if unknown := given.keys() - fields.keys():
        raise ValueError(f"it has no {', '.join(sorted(unknown))}")
    return reasoning_gym.create_dataset(task, **vars(config))


def read_verifiers(source: Source) -> Given:
    """Let the verifiers library list the rows of an environment.

    Raises:
        ValueError: there is no such interpreter, it lacks the library, or the environment cannot be loaded.
    """
    python = source.python or sys.executable
    if shutil.which(python) is None:
        raise ValueError(f"--python {python}: there is no such interpreter")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        words = [str(source.task), "--arguments", json.dumps(dict(source.arguments)), "--rows", str(path)]
        try:
            command = [python, str(verifiers_program.HOST), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ValueError(f"--task {source.task}: its rows were not listed within {_LIST_LIMIT_S:g} s") from None
        if done.returncode:
            try:
                reason = json.loads(done.stdout.splitlines()[-1])["error"]
            except (LookupError, ValueError):
                reason = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
            raise ValueError(
                f"--task {source.task}: verifiers cannot load this environment by {python}: {reason}. --python names an"
                " interpreter that has the verifiers library (pip install verifiers) and the package of the environment"
            )
        listed = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [{"question": row["prompt"], **row} for row in listed if row.get("prompt")]
    _check_count(f"--task {source.task}", rows)
    has_answers = all(row.get("answer") not in (None, "") for row in rows)
    columns = tuple(name for name in ("prompt", "example_id", "answer", "info", "task") if name in rows[0])
    values = {
        "label": "answer" if has_answers else "null",
        "environment": str(source.task),
        "python": f"\npython: {python}" if source.python else "",
        "arguments": json.dumps(dict(source.arguments)),
    }
    return Given(rows, columns, values)
