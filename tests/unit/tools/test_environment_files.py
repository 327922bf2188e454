"""What rl_config.environment may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.tools.environments import EnvironmentSpec, read_environment


def test_a_target_is_itself_and_a_file_says_more(tmp_path: Path) -> None:
    assert read_environment("worlds:Chess") == EnvironmentSpec("worlds:Chess")
    file = tmp_path / "env.yaml"
    file.write_text("environment: verifiers:guess\nargs: {number: 2}\npython: /opt/python\ntimeout_s: 9\n")
    assert read_environment(str(file)) == EnvironmentSpec("verifiers:guess", {"number": 2}, "/opt/python", 9.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("args: {}\n", "it has no key 'environment'"),
        ("environment: a:B\narg: {}\n", "arg .* is unknown; did you mean 'args'"),
        ("environment: a:B\nargs: [1]\n", "args must be a mapping, not list"),
        ("environment: a:B\ntimeout_s: -1\n", "timeout_s is -1, but must be a number"),
        ("- environment\n", "must be a mapping, not list"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "env.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_environment(str(file))
    with pytest.raises(ValueError, match="there is no file"):
        read_environment(str(tmp_path / "other.yaml"))
