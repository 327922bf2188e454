"""Copies of a process that has its libraries: what they are, what they share with whom asked, and that nobody is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import patient

from mindspeed_rl.runtime.fork_server import ForkServer, Libraries, build_worker_command, end_copies, fork_server

SCRIPT = """
import json, os, random, resource, signal, sys, tempfile
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "mark": os.environ.get("MARK"), "others": os.environ.get("OF_SERVER"),
    "torch": "torch" in sys.modules, "fallen_back": sorted(set(sys.modules) & {"asks_for_ray", "needs_no_ray"}),
    "ray": "ray" in sys.modules, "wandb": "wandb" in sys.modules,
    "own_wandb": "asks_for_wandb" in sys.modules and __import__("wandb").__file__,
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "group": os.getpgid(0) == os.getpid(), "name": __name__,
    "temporary": tempfile.gettempdir(), "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "random": random.random(),
    "shown": dict(entry.split("=", 1) for entry in open("/proc/self/environ").read().split("\\0") if "=" in entry),
    "path": sys.path, "open": sorted(int(number) for number in os.listdir("/proc/self/fd"))[:-1], "pid": os.getpid(),
}), flush=True)
sys.exit(int(sys.argv[1]))
"""

PATH = {"PATH": os.environ["PATH"]}
#: what bash and Python add to the environment
BY_OTHERS = ("PWD", "SHLVL", "_", "LC_CTYPE")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forks")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "asks_for_ray.py").write_text("try:\n    import ray\nexcept ImportError:\n    ray = None\n")
    (folder / "needs_no_ray.py").write_text("import asks_for_ray_in_a_package.inside\n")
    (folder / "asks_for_wandb.py").write_text("try:\n    import wandb\nexcept ImportError:\n    wandb = None\n")
    (folder / "wandb.py").write_text("")
    (folder / "asks_for_ray_in_a_package").mkdir()
    (folder / "asks_for_ray_in_a_package/inside.py").write_text((folder / "asks_for_ray.py").read_text())
    return folder


@pytest.fixture(scope="module")
def command(folder: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("OF_SERVER", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        with fork_server("cpu", Libraries((), ("asks_for_ray", "needs_no_ray", "asks_for_wandb"))):
            result = build_worker_command()
            assert result is not None
            yield result


def ask(command: str, folder: Path, code: int = 0, **environment: str) -> dict[str, Any]:
    """What the script says, started as Ray starts a worker."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        line = f"ulimit -n 500; exec {command} {folder}/script.py {code} 'a b'"
        subprocess.run(["bash", "-c", line], cwd=folder, env={**PATH, **environment}, stdout=file, check=True)
    end = time.monotonic() + patient(30)
    while not output.read_text().endswith("\n"):
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.02)
    return json.loads(output.read_text())


def test_a_copy_is_what_the_command_would_have_been(command: str, folder: Path, tmp_path: Path) -> None:
    told = ask(command, folder, MARK="m", TMPDIR=str(tmp_path))
    assert told["argv"] == [f"{folder}/script.py", "0", "a b"] and told["name"] == "__main__"
    assert told["folder"] == str(folder) and told["temporary"] == str(tmp_path)
    assert (told["mark"], told["others"]) == ("m", None)
    assert told["torch"] and told["group"] and told["child"] and told["files"] == 500
    assert told["open"] == [0, 1, 2]  # neither the server's socket nor the other copies' streams
    shown = {name: value for name, value in told["shown"].items() if name not in BY_OTHERS}
    assert shown == {**PATH, "MARK": "m", "TMPDIR": str(tmp_path)}
    assert str(folder) in told["path"]
    assert told["random"] != ask(command, folder)["random"]


def test_what_did_without_ray_is_imported_anew(command: str, folder: Path) -> None:
    told = ask(command, folder)
    assert told["fallen_back"] == ["needs_no_ray"] and not told["ray"]


def test_libraries_are_not_told_of_loggers_and_copies_may_import_them(command: str, folder: Path) -> None:
    told = ask(command, folder)
    assert not told["wandb"] and told["own_wandb"] == str(folder / "wandb.py")


def test_copies_that_fail_and_are_killed_leave_the_server_as_it_was(command: str, folder: Path) -> None:
    first = ask(command, folder, code=3)["pid"]
    assert ask(command, folder)["pid"] != first
    assert not psutil.pid_exists(first) or psutil.Process(first).status() != psutil.STATUS_ZOMBIE


def test_without_its_server_the_command_runs_the_script_itself(command: str, folder: Path) -> None:
    words = command.replace("/forks", "/nothing")
    told = subprocess.run(
        [*words.split(), f"{folder}/script.py", "4"], capture_output=True, text=True, check=False, timeout=patient(60)
    )
    assert told.returncode == 4 and not json.loads(told.stdout)["torch"]


def test_copies_are_ended_by_their_temporary_folder(command: str, folder: Path, tmp_path: Path) -> None:
    """As a worker that still looks for its cluster when the run ends."""
    waits = folder / "waits.py"
    waits.write_text("import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()} '); time.sleep(600)")

    def start(name: str) -> psutil.Process:
        (tmp_path / f"{name}_files").mkdir()
        words = [*command.split(), str(waits), str(tmp_path / name)]
        subprocess.run(words, env={**PATH, "TMPDIR": str(tmp_path / f"{name}_files")}, check=True, timeout=patient(30))
        end = time.monotonic() + patient(30)
        while not (tmp_path / name).exists() or not (tmp_path / name).read_text().endswith(" "):
            assert time.monotonic() < end
            time.sleep(0.02)
        return psutil.Process(int((tmp_path / name).read_text()))

    first, second = start("first"), start("second")
    end_copies(str(tmp_path / "first_files"))
    assert not psutil.wait_procs([first], timeout=patient(10))[1] and second.is_running()
    # as a command does whose server is another one's
    ForkServer(Path(command.split()[-2]).parent, None).end_copies(str(tmp_path / "second_files"))
    assert not psutil.wait_procs([second], timeout=patient(10))[1]
    assert ask(command, folder)["torch"]


def test_after_the_end_of_the_run_the_command_starts_nothing(command: str, folder: Path) -> None:
    *words, paths = command.replace("/forks", "/nothing").split()
    words += [f"{paths}.removed", f"{folder}/script.py", "4"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=patient(60))
    assert (done.returncode, done.stdout) == (0, "")
    # nor does a server, for a run whose temporary folder is gone
    words = [*command.split(), f"{folder}/script.py", "4"]
    environment = {**os.environ, "TMPDIR": str(folder / "removed")}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=patient(60), env=environment)
    assert (done.returncode, done.stdout) == (0, "")


def test_commands_share_a_server_that_is_kept_and_keep_their_own_paths(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = Libraries((), ("json",))
    server = ForkServer.start("cpu", libraries, tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("MINDSPEED_RL_FORK_SERVER", f"{tmp_path}/none{os.pathsep}{tmp_path}")
    try:
        for name in ("first", "second"):
            with monkeypatch.context() as patch:
                patch.syspath_prepend(tmp_path / name)
                with fork_server("cpu", libraries):
                    command = build_worker_command()
                    assert command is not None and str(tmp_path / "forks") in command
                    told = ask(command, folder)
            assert told["path"][0] == str(tmp_path / name) and told["torch"]
        with fork_server("cpu", Libraries((), ("csv",))):  # another one's libraries
            command = build_worker_command()
            assert command is not None and str(tmp_path) not in command
    finally:
        server.close()


def test_a_device_that_does_not_allow_it_gets_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with fork_server("cuda", Libraries((), ())):
        assert build_worker_command() is None


def test_a_cluster_that_the_run_joins_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    before = psutil.Process().children()
    with fork_server("cpu", Libraries((), ())):
        assert psutil.Process().children() == before


def test_the_server_ends_with_a_process_that_is_killed() -> None:
    program = textwrap.dedent(
        """
        import time
        from mindspeed_rl.runtime.fork_server import Libraries, fork_server, build_worker_command
        with fork_server("cpu", Libraries((), ())):
            print(build_worker_command(), flush=True)
            time.sleep(600)
        """
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and "fork_client" in parent.stdout.readline()
        (server,) = psutil.Process(parent.pid).children()
        parent.kill()
    assert psutil.wait_procs([server], timeout=patient(10))[1] == []


@pytest.mark.slow
def test_workers_that_only_train_load_no_vllm() -> None:
    program = (
        "import sys; from mindspeed_rl import adaptors, platform; platform.select('cpu'); adaptors.apply('train');"
        "import mindspeed_rl.workers.supervised_worker; print('vllm' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=patient(120))
    assert told.stdout.split()[-1] == "False"
