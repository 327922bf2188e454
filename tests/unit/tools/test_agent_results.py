"""Result files and last lines of programs, changed by seeds: a finite reward and metrics, or one sentence."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from spoilt_values import change_field

from mindspeed_rl.tools.agent_program import ProgramError, ProgramResult, _read_result

REPORT = {"reward": 0.5, "metrics": {"tests": 3, "a/b": True, "time": 1.5}, "output": "done é", "error": ""}
#: files as they are: what is wrong with them
FILES: dict[bytes, str] = {
    b"": "is not JSON",
    b"\0\xff": "is not JSON",
    b"[" * 100_000: "is not JSON",
    b"1" + b"0" * 5000: "is not JSON",
    b"1" + b"0" * 400: "reward is",
    b"NaN": "reward is 'nan'",
    b"1e400": "reward is 'inf'",
    b'"1"': "reward is '1'",
    b"true": "reward is 'True'",
    b"[0.5]": "reward is '[0.5]'",
    b"{}": "AGENT_RESULT has [], but must have one of reward, metrics, output, error",
    b'{"score": 1}': "AGENT_RESULT has ['score'], but must have one of reward",
    b'{"Reward": 1, "steps": 2}': "has ['Reward', 'steps'], but must",
    b'{"reward": 1, "output": {"a": 1}}': "output is {'a': 1}, but must be a text",
    b'{"reward": 1, "metrics": [1]}': "metrics is [1]",
    b'{"reward": 1, "metrics": {"": 1}}': "a name is ''",
    b'{"reward": 1, "error": {"code": 5}}': "{'code': 5}",
    b'{"reward": 1, "error": "no judge"}': "no judge",
}


def read(folder: Path, content: bytes) -> ProgramResult:
    (folder / ".agent").mkdir(exist_ok=True)
    (folder / ".agent" / "result.json").write_bytes(content)
    return _read_result(folder, "")


@pytest.mark.parametrize(("content", "said"), FILES.items(), ids=[str(content[:20]) for content in FILES])
def test_a_wrong_result_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(ProgramError) as caught:
        read(tmp_path, content)
    assert said in str(caught.value) and len(str(caught.value)) < 1300


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        (b"0.5", 0.5),
        (b" -3\n", -3.0),
        (b"\xef\xbb\xbf1", 1.0),
        ("1".encode("utf-16"), 1.0),
        (b"null", None),
        (b'{"reward": null}', None),
        (b'{"metrics": {"a": 1}}', None),
        (b'{"reward": 1, "steps": 3}', 1.0),
        (b'{"reward": 1, "output": 5}', 1.0),
    ],
)
def test_a_right_result_file_is_read(tmp_path: Path, content: bytes, reward: float | None) -> None:
    assert read(tmp_path, content).reward == reward


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_report_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    at, refused = random.Random(seed), 0
    for _ in range(150):
        content = json.dumps(change_field(REPORT, at)).encode("utf-8", "surrogatepass")
        for name in ("file", "line"):
            try:
                result = read(tmp_path, content) if name == "file" else _read_line(tmp_path, content.decode())
            except ProgramError as error:
                refused += 1
                assert 0 < len(str(error)) < 1300
                continue
            numbers = [*result.metrics.values(), *([] if result.reward is None else [result.reward])]
            assert all(map(math.isfinite, numbers)) and isinstance(result.output, str)
    assert refused


def _read_line(folder: Path, line: str) -> ProgramResult:
    (folder / ".agent" / "result.json").unlink()
    return _read_result(folder, f"some output\n{line}\n")
