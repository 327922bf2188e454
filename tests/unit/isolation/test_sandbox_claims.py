"""What docs/security.md says that programs of the model can and cannot do: each sentence with a program that tries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mindspeed_rl.isolation.sandbox import SandboxLimits, SandboxResult, available_isolation, run_python
from mindspeed_rl.rewards.code import code
from mindspeed_rl.rewards.samples import RewardSettings
from mindspeed_rl.tools.code_interpreter import run_blocks

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
SHORT = SandboxLimits(wall_s=5.0)


@dataclass(frozen=True)
class Claim:
    """One row of the page's table.

    Attributes:
        says: what stands there, with "can" or "cannot".
        program: tries it; @FILE@ is a file that anybody may read, @PID@ the process that scores.
        holds: of the result.
        needs: isolation that the machine has to give.
    """

    area: str
    says: str
    program: str
    holds: Callable[[SandboxResult], bool]
    needs: str = ""
    limits: SandboxLimits = SHORT


def prints(text: str) -> Callable[[SandboxResult], bool]:
    return lambda result: result.output.decode().strip() == text


def refused(attempt: str) -> str:
    """A program that says whether the attempt ended in an error of the system."""
    lines = [
        "import ctypes, os, socket",
        "try:",
        f"    {attempt}",
        "    print('done')",
        "except OSError:",
        "    print('refused')",
    ]
    return "\n".join(lines)


def fails(call: str) -> str:
    """The same for a function of the C library, which says so with a negative number."""
    return refused(f"if ctypes.CDLL(None).{call} < 0: raise OSError")


FILL = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sizes = []
for number in range(9):
    size = 0
    try:
        with open(str(number), "wb", buffering=0) as file:
            while True:
                size += file.write(bytes(1 << 20))
    except OSError:
        sizes.append(size >> 20)
print(max(sizes) <= 16, sum(sizes) <= 64)
"""
CHILD = """
import subprocess, sys
print(subprocess.run([sys.executable, "-S", "-c", "print(7)"], capture_output=True, text=True).stdout)
"""
#: found again in a list of processes
NAME = "a-child-that-stays"
STAYING_CHILD = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)  # {NAME}"], start_new_session=True)
print("gone")
"""
GREEDY_CHILDREN = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        break
held = b"x" * (200 << 20)
time.sleep(99)
"""
DEAF = """
import signal, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)
time.sleep(99)
"""
VARIABLES = "import os; print(sorted(set(os.environ) - {'PATH', 'LANG', 'HOME', 'TMPDIR', 'LC_CTYPE'}))"
OPEN_FILES = """
import os
found = []
for number in range(3, 64):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(found)
"""
LONG = SandboxLimits(wall_s=60.0)


def is_gone(result: SandboxResult) -> bool:
    time.sleep(0.2)
    left = [process for process in psutil.process_iter(["cmdline"]) if NAME in " ".join(process.info["cmdline"] or [])]
    return prints("gone")(result) and left == []


CLAIMS = [
    Claim("files", "can use the standard library", "import decimal, json, re; print('works')", prints("works")),
    Claim("files", "can write into a folder of its own", "open('a', 'w').write('b'); print(open('a').read())", prints("b")),
    Claim(
        "files", "cannot read a file of the machine, whatever its rights", refused("open('@FILE@')"), prints("refused"), "files"
    ),
    Claim("files", "cannot import packages that are installed", "try: import torch\nexcept ImportError: print(1)", prints("1")),
    Claim("files", "cannot change the interpreter", refused("open(os.__file__, 'a')"), prints("refused"), "files"),
    Claim("files", "cannot write more than 64 MiB in all, or 16 MiB into a file", FILL, prints("True True"), "files", LONG),
    Claim("network", "cannot make a socket of any kind", refused("socket.socketpair()"), prints("refused"), "sockets"),
    Claim("network", "cannot ask for a name", refused("socket.getaddrinfo('localhost', 80)"), prints("refused"), "files"),
    Claim("processes", "can start processes", CHILD, prints("7"), limits=LONG),
    Claim("processes", "cannot see or end processes of others", refused("os.kill(@PID@, 9)"), prints("refused"), "processes"),
    Claim("processes", "cannot have more than 32 of them", "import os\nwhile True: os.fork()", lambda r: r.status != 0, "user"),
    Claim("processes", "cannot leave one behind, in a session of its own either", STAYING_CHILD, is_gone, "processes"),
    Claim("processes", "cannot become another user", refused("os.setuid(0)"), prints("refused"), "user"),
    Claim("processes", "cannot look into another one (ptrace)", fails("ptrace(16, 1, 0, 0)"), prints("refused"), "sockets"),
    Claim("processes", "cannot mount anything", fails("mount(b'none', b'/home', b'tmpfs', 0, None)"), prints("refused")),
    Claim("processes", "cannot make a namespace", fails("unshare(0x10000000)"), prints("refused"), "sockets"),
    Claim(
        "memory",
        "cannot have more than 512 MiB in a process",
        "try: bytearray(600 << 20)\nexcept MemoryError: print('refused')",
        prints("refused"),
    ),
    Claim("memory", "cannot have more in all of them", GREEDY_CHILDREN, lambda r: r.out_of_memory, limits=LONG),
    Claim("memory", "cannot make shared memory that stays", fails("shmget(0, 1 << 20, 0o1777)"), prints("refused"), "sockets"),
    Claim("memory", "cannot make a message queue", fails("msgget(0, 0o1600)"), prints("refused"), "sockets"),
    Claim("time", "cannot outlast its time, asleep and deaf to signals", DEAF, lambda r: r.timed_out),
    Claim("time", "cannot be read without end: 1 MiB is", "while True: print('x' * 99999)", lambda r: len(r.output) == 1 << 20),
    Claim("secrets", "cannot see variables of the run", VARIABLES, prints("[]")),
    Claim("secrets", "cannot use open files of the process that scores", OPEN_FILES, prints("[]")),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the programs are told."""
    folder = tmp_path_factory.mktemp("open")
    for place in (folder, folder.parent, folder.parent.parent):
        place.chmod(0o755)
    answers = folder / "answers.jsonl"
    answers.write_text("42")
    answers.chmod(0o644)
    return {"@FILE@": str(answers), "@PID@": str(os.getpid())}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.says)
def test_the_program_can_and_cannot_do_what_the_page_says(claim: Claim, places: dict[str, str]) -> None:
    if claim.needs and claim.needs not in available_isolation():
        pytest.skip(f"this machine gives no isolation of {claim.needs}")
    program = claim.program
    for name, value in places.items():
        program = program.replace(name, value)
    result = run_python(program, limits=claim.limits)
    assert claim.holds(result), result


def test_the_page_has_these_sentences_and_no_others() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    start = rows.index("| What | A program of the model | Required isolation |")
    end = rows.index("| What | How it is read |")  # the table of files
    assert rows[start + 2 : end] == [f"| {claim.area} | {claim.says} | {claim.needs or 'none'} |" for claim in CLAIMS]


READS = "print(open('@FILE@').read())"


def test_the_reward_and_the_tool_run_programs_there(places: dict[str, str]) -> None:
    if "files" not in available_isolation():
        pytest.skip("this machine gives no isolation of files")
    program = READS.replace("@FILE@", places["@FILE@"])
    settings = RewardSettings()
    assert code(f"```python\n{program}\n```", settings, label={"inputs": [""], "outputs": ["42\n"]})["score"] == 0.0
    assert code("```python\nprint(42)\n```", settings, label={"inputs": [""], "outputs": ["42\n"]})["score"] == 1.0
    assert "FileNotFoundError" in run_blocks([program], 5.0, 512).text
