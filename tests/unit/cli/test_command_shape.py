"""Commands: each is one file and one line, and answers --help without heavy libraries."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

import mindspeed_rl
from mindspeed_rl.cli import audit, plan, recipe
from mindspeed_rl.cli.main import _EXAMPLES, COMMANDS, main

PACKAGE = Path(mindspeed_rl.__file__).parent
#: commands whose --help may load numpy, and the one that is a calculation with torch
WITHOUT_TORCH = [name for name in COMMANDS if name != "parity"]
HELP = """
import contextlib, io, json, sys
from mindspeed_rl.cli.main import main
lengths = {}
for name in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([name, "--help"])
    lengths[name] = len(shown.getvalue())
print(json.dumps([lengths, [name for name in ("torch", "ray", "vllm", "transformers", "megatron") if name in sys.modules]]))
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_module(name: str) -> None:
    module, text = COMMANDS[name]
    assert callable(importlib.import_module(module).main) and text


def test_help_needs_no_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *WITHOUT_TORCH], capture_output=True, text=True, check=True)
    lengths, loaded = json.loads(done.stdout)
    assert min(lengths.values()) > 100, lengths
    assert loaded == []


def test_a_command_is_one_file_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "greeting.py").write_text("def main(argv):\n    print('hello', *argv)\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "greet", ("greeting", "says hello"))
    assert main(["greet", "you"]) == 3
    assert main(["--help"]) == 0
    assert main(["gret"]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("hello you\n") and "greet" in shown.out and "  says hello" in shown.out
    assert "Did you mean 'greet'?" in shown.err


PRINTS_MUCH = """
import sys
from mindspeed_rl.cli import main
main.COMMANDS["many"] = ("many_lines", "prints much")
sys.exit(main.main(["many"]))
"""


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "many_lines.py").write_text("def main(argv):\n    print('x\\n' * 10**6)\n    return 0\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE.parent}"}
    command = subprocess.Popen(
        [sys.executable, "-c", PRINTS_MUCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert command.stdout is not None and command.stderr is not None
    assert command.stdout.readline() == "x\n"
    command.stdout.close()
    assert (command.stderr.read(), command.wait(timeout=patient(60))) == ("", 128 + signal.SIGPIPE)
    command.stderr.close()


def test_drafts_of_a_standalone_server_that_are_no_json_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["rollout", "--model", str(tmp_path), "--speculative-config", "suffix"]) == 2
    assert "--speculative-config suffix: must be a JSON object with a method" in capsys.readouterr().err


_ENDING = """
import atexit, concurrent.futures, sys, threading, time
from mindspeed_rl.cli import main as command

def late():
    time.sleep(0.2)
    print("thread", flush=True)

def main():
    atexit.register(print, "handler")
    pool.submit(late)
    print("command")
    return 3

pool = concurrent.futures.ThreadPoolExecutor(1)
command.main = main
command.run()
"""


def test_a_command_ends_with_its_status_behind_threads_handlers_and_output() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stdout.split()) == (3, ["command", "thread", "handler"]), done.stderr


#: kinds that work without options
_COMPLETE = {"plan run", "recipe list", "recipe plan"}


def test_every_kind_of_a_command_has_an_example() -> None:
    kinds = {f"audit {kind}" for kind in audit._AUDITS} | {f"plan {kind}" for kind in plan._PLANS}
    kinds |= {f"recipe {kind}" for kind in recipe._COMMANDS}
    assert kinds - _COMPLETE == {name for name in _EXAMPLES if " " in name}


@pytest.mark.parametrize("name", sorted(_EXAMPLES.keys() | COMMANDS.keys() - {"doctor"}))
def test_a_command_without_arguments_shows_what_to_do_next(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(name.split()) == 2
    shown = capsys.readouterr().err
    assert f"  mindspeed-rl {name} {_EXAMPLES[name]}" in shown and shown.rstrip().endswith("--help shows all")


@pytest.mark.parametrize("flag", ["--config", "--config-name"])
@pytest.mark.parametrize(
    "words",
    [
        ["train"], ["explain"], ["plan"], ["plan", "memory"], ["plan", "time"], ["diff", "train", "rollout"],
        ["npu-cost"], ["preprocess"], ["promise"], ["parity", "--engines", "megatron,fsdp"], ["audit", "reward"],
        ["serve"], ["rollout"], ["teacher-log-probs", "--server", "http://127.0.0.1:1/v1"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_run_file_has_the_same_options_in_every_command(
    words: list[str], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, flag, "nothing_of_this_name.yaml"]) == 2
    shown = capsys.readouterr()
    assert "nothing_of_this_name" in shown.out + shown.err and "unrecognized" not in shown.err


WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray", "vllm", "megatron", "transformers"):
            return None
        return super().find_spec(name, path, target)
sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from mindspeed_rl.cli.main import main
for words in sys.argv[1:]:
    print("#", words, main(words.split()), flush=True)
"""


def test_without_torch_plans_are_printed_and_other_commands_say_what_is_missing(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "run.yaml").write_text("defaults: [sft_tiny_cpu, _self_]\nmegatron_training: {load: model}\n")
    codes = {
        "explain --config run.yaml": 0,
        "explain --config run.yaml --validate": 2,
        "plan --config grpo_tiny_cpu": 0,
        "new task": 2,
        "chat --load model": 2,
        "convert --load-dir model --save-dir out": 2,
        "parity batch.safetensors": 2,
        "train --config run.yaml": 2,
    }
    done = subprocess.run([sys.executable, "-c", WITHOUT, *codes], cwd=tmp_path, capture_output=True, text=True, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert results == [f"# {words} {code}" for words, code in codes.items()], done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr and "No module named 'torch'" in done.stdout
    assert "chat needs torch, which is not installed here" in done.stderr
