"""Files of a run have no secret of its environment or its run file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rl.config.keys.rl import AgentKeys
from mindspeed_rl.redaction import (
    LEFT_OUT,
    find_in_configuration,
    find_secrets,
    hide_in_configuration,
    hide_in_environment,
    hide_in_text,
)
from mindspeed_rl.tools.agent_program import AgentProgram

PLANTED = {
    "AWS_SECRET_ACCESS_KEY": "planted",
    "GITHUB_PAT": "planted",
    "DATABASE_URL": "postgres://user:planted@host/db",
    "http_proxy": "http://user:planted@proxy:3128",
    "HTTPS_PROXY": "http://user:planted@proxy:3128",
    "PIP_INDEX_URL": "https://user:planted@host/simple",
    "SENTRY_DSN": "https://planted@host/1",
    "PGPASSWORD": "planted",
    "HF_TOKEN": "planted",
    "VLLM_API_KEY": "planted",
    "RAY_AUTH_TOKEN": "planted",
    "HF_ENDPOINT": "https://user:planted@host",
    "MY_SETTING": "planted",
    "SSH_AUTH_SOCK": "planted",
}


def test_values_of_the_environment_are_shown_by_a_list_of_names() -> None:
    shown = hide_in_environment({**PLANTED, "PATH": "/bin", "HCCL_BUFFSIZE": "200", "OMP_NUM_THREADS": "1"})
    assert "planted" not in json.dumps(shown) and shown.keys() >= PLANTED.keys()
    assert (shown["PATH"], shown["HCCL_BUFFSIZE"], shown["OMP_NUM_THREADS"]) == ("/bin", "200", "1")
    assert shown["MY_SETTING"] == LEFT_OUT


def test_a_configuration_is_shown_without_variables_of_programs_and_passwords() -> None:
    written = {
        "rl_config": {
            "judge_url": "http://user:planted@host:1/v1?api_key=planted&x=1",
            "agent": {"command": ["run", "https://planted@host/a"], "env": {"TOKEN": "planted"}, "timeout_s": 3.0},
            "reward_funcs": ("a", "b"),
        }
    }
    shown = hide_in_configuration(written)
    assert "planted" not in json.dumps(shown)
    assert shown["rl_config"]["judge_url"] == f"http://{LEFT_OUT}@host:1/v1?api_key={LEFT_OUT}&x=1"
    assert shown["rl_config"]["agent"]["env"] == {"TOKEN": LEFT_OUT} and shown["rl_config"]["reward_funcs"] == ("a", "b")
    assert written["rl_config"]["agent"]["env"] == {"TOKEN": "planted"}  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    [
        *("", "no address", "a@b.c", "http://host/a@b", "path/to?x=1", "max_tokens=3&key"),
        *("the authorization of a call", "KeyError: 'key'", "tokens: 3, key: 4", "hf_model"),
        *("task-specific-heads", "ask-me-anything-about-the-results"),
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert hide_in_text(text) == text


def test_a_variable_that_is_named_must_be_set() -> None:
    with pytest.raises(ValueError, match=r"rl_config\.agent\.env\.A: the environment variable NO_SUCH_ONE is not set"):
        AgentProgram(AgentKeys(command=["x"], env={"A": "${NO_SUCH_ONE}"}))


@pytest.mark.parametrize(
    "text",
    [
        "headers: {'Authorization': 'Bearer PLANTED'}, next",
        "authorization: Basic PLANTED\r\nnext",
        "X-API-Key: PLANTED, next",
        '"api-key": "PLANTED", "next": 1',
        "the key sk-proj-PLANTED-0123456789-abcdefgh is wrong, next",
        "token ghp_PLANTED0123456789abcdefghijklmnopqrs next",
        "token hf_PLANTED0123456789abcdefghijklmnop next",
        "-----BEGIN RSA PRIVATE KEY-----\nPLANTED\nPLANTED\n-----END RSA PRIVATE KEY----- next",
        "PUT https://host/a?X-Amz-Signature=PLANTED&b=next",
    ],
)
def test_texts_have_no_headers_and_keys_of_services(text: str) -> None:
    shown = hide_in_text(text)
    assert "PLANTED" not in shown and LEFT_OUT in shown and "next" in shown


def test_secrets_of_an_environment_are_found_by_names_and_addresses(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.touch()
    found = set(find_secrets({**PLANTED, "TLS_KEY_FILE": str(key), "USER_URL": "ssh://somebody@host", "PATH": "/usr/bin"}))
    # MY_SETTING has no name of a secret, and the key's file is none
    assert found == {"planted"}


def test_secrets_of_a_run_file_are_those_of_addresses_and_of_programs() -> None:
    agent = {"env": {"SERVICE_KEY": "key of the program", "MARKS": "/some/folder"}, "url": "http://u:pass-word@h/"}
    tokenizer = {"tokenizer_name_or_path": "no secret", "placeholder_token": "no secret"}
    assert set(find_in_configuration({"rl": {"agent": agent}, **tokenizer})) == {"key of the program", "pass-word"}


PROGRAM = """
import json, logging, os, sys
from urllib.parse import quote
from pathlib import Path
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
from mindspeed_rl.observability.run_files import LineWriter

folder = Path(sys.argv[1])
secret = os.environ["MY_TOKEN"]
redirect_output(folder / "logs/worker.log")
set_up_logging(folder / "run.log", console=True)
print("a word", secret, json.dumps([secret]), [secret], quote(secret, safe=""), "the end")
sys.stderr.write(f"a word {secret} the end\\n")
logging.getLogger("mindspeed_rl").warning("a word %s %s the end", secret, dict(os.environ))
try:
    raise ValueError(f"a word {secret} http://u:pass@host the end")
except ValueError:
    logging.getLogger("mindspeed_rl").exception("it failed")
lines = LineWriter(folder / "completions.jsonl")
lines.write({"response": f"a word {secret} the end", "error": "\\u2028", "numbers": [12345678, 0.5], "password": [secret]})
lines.close()
if os.fork() == 0:
    print("of a fork", secret, "the end", flush=True)
    raise RuntimeError(f"a word {secret} the end")
os.wait()
"""


def test_logs_output_and_samples_of_a_process_have_no_secret_of_its_environment(tmp_path: Path) -> None:
    secret = "plan\"ted/\\+=:'01"
    env = {**os.environ, "MY_TOKEN": secret, "A_KEY": "12345678", "B_KEY": "password"}  # no name or number is lost
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == done.stderr == ""
    files = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert files.keys() == {"worker.log", "run.log", "completions.jsonl"}
    assert not [name for name, text in files.items() if "plan" in text or "pass@" in text]
    counts = {name: text.count("the end") for name, text in files.items()}
    assert counts == {"worker.log": 6, "run.log": 2, "completions.jsonl": 1}
    expected = {"response": f"a word {LEFT_OUT} the end", "error": "\u2028", "numbers": [12345678, 0.5], "password": [LEFT_OUT]}
    assert json.loads(files["completions.jsonl"]) == expected
