"""No file that a whole run writes, and no environment that it gives to a program, has a secret of the run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, Command, running

HERE = Path(__file__).parent
#: each has a value of its own, so that a leak has a name
PLANTED = {
    "WANDB_API_KEY": "planted-wandb-0123456789",
    "HF_TOKEN": "planted-hub-0123456789",
    "OPENAI_API_KEY": "planted-openai-0123456789",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+0123456789==",
    "GITHUB_PAT": "planted-pat-0123456789",
    "PGPASSWORD": "planted pass \"word\" 'quoted' 01",
    "http_proxy": "http://user:planted-proxy-01@127.0.0.1:9",
    "HTTPS_PROXY": "http://user:planted-proxies-01@127.0.0.1:9",
    "DATABASE_URL": "postgres://user:planted-database@127.0.0.1/db",
    "SENTRY_DSN": "https://planted-dsn-0123@127.0.0.1/1",
    "PIP_INDEX_URL": "https://planted-index-0123@127.0.0.1/simple",
    "E2B_API_KEY": "planted-sandbox-0123456789",
}
#: of the values above, and of those that the run file has
NEEDLES = ("planted", "quoted")
#: the program is given one secret by name, one in words, and an address
PROGRAM = """
import json, os, pathlib, sys, urllib.request

marks = pathlib.Path(sys.argv[1])
(marks / f"{os.path.basename(sys.argv[0])}.{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))
parent = pathlib.Path(f"/proc/{os.getppid()}/environ").read_text().split("\\0")
(marks / f"parent.{os.getpid()}.json").write_text(json.dumps(parent))
label = json.load(open(os.environ["AGENT_TASK"]))["label"]
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": f"{label}="}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"}))
given = [os.environ["SERVICE_KEY"], os.environ["OWN_PASSWORD"], os.environ["STORE"]]
if int(label) % 2:
    raise ValueError(f"the service refuses {given}, Authorization: Bearer planted-header-1")
print(json.dumps({"reward": 0.5, "output": f"with {given}"}))
"""
GIVEN = {"SERVICE_KEY", "OWN_PASSWORD", "STORE"}


def find_leaks(folders: list[Path]) -> list[str]:
    """The files below these folders that have one of the words, with the words around it."""
    leaks = []
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                for needle in NEEDLES:
                    if (at := content.find(needle.encode())) >= 0:
                        leaks.append(f"{path}: {content[max(0, at - 80) : at + 60]!r}")
    return leaks


def check_environments(marks: Path) -> None:
    """What the programs saw has only what the run file gives them."""
    programs, parents = list(marks.glob("*.py.*.json")), list(marks.glob("parent.*.json"))
    assert {path.name.partition(".")[0] for path in programs} == {"program", "grader"} and parents
    for path in programs:
        seen = {name for name, value in json.loads(path.read_text()).items() if any(word in value for word in NEEDLES)}
        assert seen == GIVEN, path
    for path in parents:
        assert not [word for word in json.loads(path.read_text()) if any(needle in word for needle in NEEDLES)]


@pytest.mark.slow
def test_secrets_of_a_run_are_in_no_file_that_it_writes_and_in_no_environment_that_it_gives(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, temporary = tmp_path / "marks", tmp_path / "temporary"
    marks.mkdir()
    temporary.mkdir()
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    files = {"command": tmp_path / "program.py", "grader": tmp_path / "grader.py"}
    for file in files.values():
        file.write_text(PROGRAM)
    commands = [f"{name}: [{sys.executable}, {file}, {marks}]" for name, file in files.items()]
    given = (
        "SERVICE_KEY: '${oc.env:OPENAI_API_KEY}', OWN_PASSWORD: planted-own-0123, STORE: 'redis://u:planted-store-1@127.0.0.1'"
    )
    keys = [
        *ONE_PROCESS,
        "megatron_training.train_iters=100000",
        "megatron_training.save_interval=1",
        "rl_config.multi_turn_enable=true",
        f"rl_config.agent={{{', '.join(commands)}, timeout_s: 100, env: {{{given}}}}}",
        "rl_config.max_total_response_length=24",
        "rl_config.use_remove_padding=true",
        "rl_config.reward_failure_limit=1.0",
        "rl_config.log_completions=true",
        "rl_config.log_completions_keep=1000",
        "rl_config.save_rollouts_interval=1",
        "rl_config.verifier_function=[secret_plugins:talkative]",
        "rl_config.report_to=[tensorboard, secret_plugins:Keeper]",
        f"+msprobe_config={{msprobe: true, configurations_dump: true, dump_path: {tmp_path / 'dumps'}}}",
    ]
    before = set(Path("/tmp").glob("ray-*"))
    command: Command
    with running(task, tmp_path / "whole", *keys) as command:
        command.wait_until(lambda: len(command.metrics) > 1)
        during = find_leaks([command.folder, temporary])
        own = set(Path("/tmp").glob("ray-*")) - before
        live = find_leaks(sorted(own))
        command.worker(0).kill()
        assert command.wait(120) == 1
    folder = command.folder
    assert (folder / "run/logs/ray").is_dir() and (tmp_path / "dumps/configurations.json").is_file()
    assert "the reward function sees" in (folder / "run/logs/reward_0.log").read_text()
    assert "the tracker sees" in command.output and "the service refuses" in (folder / "run/run.log").read_text()
    check_environments(marks)
    assert during == [] and find_leaks([folder, tmp_path / "dumps", temporary]) == []
    assert live == []
