"""Files of a run have no secret of its environment or its run file."""

from __future__ import annotations

import json

import pytest

from mindspeed_rl.config.keys.rl import AgentKeys
from mindspeed_rl.redaction import LEFT_OUT, hide_in_configuration, hide_in_environment, hide_in_text
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


@pytest.mark.parametrize("text", ["", "no address", "a@b.c", "http://host/a@b", "path/to?x=1", "max_tokens=3&key"])
def test_other_texts_stay(text: str) -> None:
    assert hide_in_text(text) == text


def test_a_variable_that_is_named_must_be_set() -> None:
    with pytest.raises(ValueError, match=r"rl_config\.agent\.env\.A: the environment variable NO_SUCH_ONE is not set"):
        AgentProgram(AgentKeys(command=["x"], env={"A": "${NO_SUCH_ONE}"}))
