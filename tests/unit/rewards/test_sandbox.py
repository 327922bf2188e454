"""The sandbox: untrusted programs end, and take nothing with them."""

import os
import sys

import pytest

from mindspeed_rl.rewards.sandbox import SandboxLimits, available_isolation, run_python

needs = {
    name: pytest.mark.skipif(name not in available_isolation(), reason=f"this machine gives no isolation of {name}")
    for name in ("network", "processes", "files", "user")
}


def test_a_program_reads_its_input_and_writes_its_output() -> None:
    result = run_python("import sys; print(sys.stdin.read()[::-1]); print('odd', file=sys.stderr)", "天地".encode())
    assert (result.output.decode(), result.errors, result.status, result.timed_out) == ("地天\n", b"odd\n", 0, False)


def test_what_the_machine_does_not_give_is_listed() -> None:
    missing = set(run_python("").missing)
    assert missing == {"network", "processes", "files", "user"} - available_isolation()


@pytest.mark.parametrize(
    ("program", "status"),
    [("raise SystemExit(3)", 3), ("import ctypes; ctypes.string_at(0)", -11), ("1 / 0", 1), ("not python", 1)],
)
def test_the_status_tells_how_a_program_ended(program: str, status: int) -> None:
    assert run_python(program).status == status


def test_a_program_that_never_ends_is_killed() -> None:
    result = run_python("while True: pass", limits=SandboxLimits(wall_s=0.3))
    assert result.timed_out and result.status == -9


def test_memory_output_and_descriptors_are_bounded() -> None:
    assert b"MemoryError" in run_python("x = 'a' * (1 << 30)", limits=SandboxLimits(memory_mib=256)).errors
    flood = run_python("while True: print('x' * 100000)", limits=SandboxLimits(file_mib=2))
    assert flood.status != 0 and len(flood.output) == 1 << 20
    assert b"Too many open files" in run_python("files = [open('program.py') for _ in range(100)]").errors


def test_the_environment_is_not_inherited_and_the_folder_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    result = run_python("import os; print(sorted(os.environ)); print([n for n in os.listdir() if n[0] != '.'])")
    assert result.output.decode().splitlines()[0] == str(sorted(["PATH", "LANG", "HOME", "TMPDIR"]))
    assert result.output.decode().splitlines()[1] == "['program.py']"


def test_descriptors_are_not_inherited() -> None:
    ours = os.memfd_create("secret") if sys.platform == "linux" else os.dup(0)
    os.set_inheritable(ours, True)
    try:
        assert run_python(f"import os\ntry:\n os.fstat({ours})\nexcept OSError: print('closed')").output == b"closed\n"
    finally:
        os.close(ours)


@needs["network"]
def test_there_is_no_network_not_even_to_this_machine() -> None:
    program = (
        "import socket\ntry:\n socket.create_connection(('127.0.0.1', 80), 1)\nexcept OSError as error: print(error.errno)"
    )
    assert run_python(program).output == b"101\n"  # ENETUNREACH: there is no interface at all


@needs["processes"]
def test_a_child_in_its_own_session_dies_with_the_program_and_others_are_not_seen() -> None:
    program = "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(1000)\nprint(os.getpid())"
    result = run_python(program)
    assert result.output == b"1\n" and not result.timed_out
    assert run_python(f"import os; print(os.path.exists('/proc/{os.getpid()}/environ'))").output == b"False\n"


@needs["files"]
def test_files_can_be_written_in_the_folder_alone(tmp_path) -> None:
    tmp_path.chmod(0o777)
    program = f"open('here', 'w').close()\ntry:\n open({str(tmp_path / 'there')!r}, 'w')\nexcept OSError: print('refused')"
    assert run_python(program).output == b"refused\n"
    assert not (tmp_path / "there").exists()


@needs["user"]
def test_a_fork_bomb_is_stopped_by_the_limit_on_processes() -> None:
    result = run_python("import os\nwhile True: os.fork()", limits=SandboxLimits(wall_s=1.0, processes=16))
    assert result.timed_out or b"Resource temporarily unavailable" in result.errors


@needs["user"]
def test_roots_files_cannot_be_read(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o600)
    assert b"PermissionError" in run_python(f"print(open({str(secret)!r}).read())").errors
