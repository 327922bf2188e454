"""Files that the audits write: what cannot be written, or would take the place of what is read, is refused before any call."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from audited_rows import write_rows

Audit = Callable[..., tuple[int, Any]]
ROWS = [{"prompt": f"What is {n} and {n}?", "labels": str(2 * n)} for n in range(11, 15)]
ANSWERS = [{"prompt": row["prompt"], "response": row["labels"], "label": row["labels"], "human": True} for row in ROWS]
REWARD = """
from pathlib import Path

from mindspeed_rl.rewards import register

@register("called")
def called(response: str, label: str) -> float:
    Path("{folder}/called").touch()
    return float(response == label)
"""


@pytest.fixture
def judge() -> Iterator[socket.socket]:
    """Port of a judge; a request to it is a connection that waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def refused(audit: Audit, tmp_path: Path, judge: socket.socket, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an audit that is refused before it calls a reward or a judge, and return the error."""
    (tmp_path / "rewards.py").write_text(REWARD.format(folder=tmp_path))
    for name in ("marked", "responses"):
        write_rows(tmp_path / f"{name}.jsonl", ANSWERS)
    address = f"http://127.0.0.1:{judge.getsockname()[1]}/v1"
    options = {
        "reward": [
            f"rl_config.external_plugins=[{tmp_path}/rewards.py]", "rl_config.verifier_function=[called]",
            f"--marked={tmp_path}/marked.jsonl",
        ],
        "judges": [f"--responses={tmp_path}/responses.jsonl", f"--judge=a@{address}", f"--judge=b@{address}"],
    }  # fmt: skip

    def run(kind: str, output: object) -> str:
        try:
            code, text = audit(kind, ROWS, *options[kind], f"--output={output}", held_out=ROWS[:1])
        except SystemExit as end:  # argparse
            code, text = end.code, " ".join(capfd.readouterr().err.split())
        assert code == 2 and str(text).count("error: ") == 1, text
        assert not (tmp_path / "called").exists() and not select.select([judge], [], [], 0)[0]
        return str(text)

    return run


@pytest.mark.parametrize("kind", ["reward", "judges"])
@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("/nowhere/x.html", "--output /nowhere/x.html: /nowhere is not a folder"),
        ("/", "--output /: / is a folder"),
        ("/proc/x.html", "--output /proc/x.html cannot be written"),
        ("{folder}/rewards.py/x.html", "rewards.py is not a folder"),
        ("{folder}/link.html", "link.html cannot be written: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(
    refused: Callable[..., str], tmp_path: Path, kind: str, output: str, sentence: str
) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "missing" / "page.html")
    assert sentence in refused(kind, output.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [
        ("reward", "train", "megatron_training.data_path"),
        ("reward", "heldout", "megatron_training.eval_data_path"),
        ("reward", "marked", "--marked"),
        ("judges", "responses", "--responses"),
    ],
)
def test_a_page_does_not_take_the_place_of_what_is_read(
    refused: Callable[..., str], tmp_path: Path, kind: str, name: str, key: str
) -> None:
    file = tmp_path / f"{name}.jsonl"
    (tmp_path / "other.html").symlink_to(file)
    for output in (file, tmp_path / "other.html"):
        assert f"--output {output} is a file of {key}; write another one" in refused(kind, output)
    assert len(file.read_text().splitlines()) == (1 if name == "heldout" else len(ROWS))


def test_what_a_reward_prints_is_not_in_the_result(audit: Audit, tmp_path: Path) -> None:
    prints = REWARD.replace("float:", "float:\n    print('loud')").format(folder=tmp_path)
    (tmp_path / "rewards.py").write_text(f"print('loaded')\n{prints}")
    keys = [f"rl_config.external_plugins=[{tmp_path}/rewards.py]", "rl_config.verifier_function=[called]"]
    code, found = audit("reward", ROWS, *keys, "--rows=1")
    assert code == 0 and found["functions"] == ["called"] and (tmp_path / "called").exists()


def test_an_older_page_is_replaced_when_the_audit_ends_and_stays_where_it_is_refused(
    audit: Audit, refused: Callable[..., str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("older")
    (tmp_path / "marked.jsonl").write_text("{}\n")
    assert "prompt must be a text" in refused("reward", page) and page.read_text() == "older"
    code, _ = audit("reward", ROWS, "rl_config.verifier_function=[exact_match]", "--rows=1", f"--output={page}")
    assert code == 0 and "exact_match" in page.read_text()
    assert not list(tmp_path.glob(".*"))
