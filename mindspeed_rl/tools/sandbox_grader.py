"""Grading of a sample in its sandbox, by a command and files that the model has not seen.

The model may have changed anything before: there may be a folder, a link, a pipe or an immutable file where a file of the
tests belongs, and code that the tests import may end their process with status 0. So the files replace what is there, and a
status of 0 is not enough where the grader can prove that it came to its end: `{proof}` in its command or files stands for a
text that is new for each grading, and has to be a line of the output. A command `python FILE`, whose file is one of the
tests, proves it without a `{proof}`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mindspeed_rl.tools.sandbox_interface import Sandbox, SandboxError

_PROOF = "{proof}"
#: a command of plain words, of which the first is Python and the next ones are its flags without a value
_PYTHON = re.compile(
    r"(?P<python>(?:[\w./+-]*/)?python[\d.]*(?: -[BEIOPsSudbq]+)*) (?P<file>[\w./+-]+\.py)(?P<rest>(?: [\w./:=,@%+-]+)*)"
)
_REPLACE_LIMIT_S = 20.0

#: removes what is at the paths, which are its arguments; with $1 = 1 also links in place of their folders
_REMOVE = r"""
links=$1; shift
free() { chattr -i -- "$1"; chmod u+rwx -- "$1"; }
free .
for path in "$@"; do
  rest=${path#/}; place=${path%"$rest"}
  while [ "${rest#*/}" != "$rest" ]; do
    place=$place${rest%%/*}; rest=${rest#*/}
    if [ ! -d "$place" ] || { [ "$links" = 1 ] && [ -L "$place" ]; }; then chattr -i -- "$place"; rm -rf -- "$place"; fi
    [ -d "$place" ] && free "$place"
    place=$place/
  done
  if [ -L "$path" ]; then rm -f -- "$path"; fi
  if [ -e "$path" ]; then chattr -R -i -- "$path"; chmod -R u+rwX -- "$path"; rm -rf -- "$path"; fi
done
exit 0
"""

#: runs a file of the tests; prints the proof once that file has come to its end, or has ended the process itself
_RUNNER = r'''
import os, sys

def run(proof, tests):
    here = sys.argv.pop(0)
    os.remove(here)
    path = sys.argv[0]
    main = type(sys)("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    folder = os.path.realpath(".") + os.sep
    tests = {os.path.realpath(name) for name in tests}
    write, flush, realpath = sys.stdout.write, sys.stdout.flush, os.path.realpath
    try:
        exec(code, main.__dict__)
    except SystemExit as error:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        file = realpath(last.tb_frame.f_code.co_filename)
        # code of the sample must not end the tests
        if file.startswith(folder) and file not in tests:
            print("the tests were ended by", file, file=sys.stderr)
            raise
        write("\n" + proof + "\n")
        flush()
        raise
    write("\n" + proof + "\n")
    flush()

run(PROOF, TESTS)
'''


@dataclass(frozen=True)
class Grader:
    """A command that grades a sample.

    Attributes:
        command: exit status 0 is a reward of 1, others of 0.
        files: path -> content; written before the command.
    """

    command: str
    files: Mapping[str, str] = field(default_factory=dict)

    async def grade(self, sandbox: Sandbox, timeout_s: float) -> float:
        """Return the reward, 1.0 or 0.0.

        Raises:
            SandboxError: the files cannot be written, or the command cannot be run.
            asyncio.TimeoutError: the sandbox does not reply.
        """
        proof = secrets.token_hex(16)
        files = {path: content.replace(_PROOF, proof) for path, content in self.files.items()}
        command = self.command.replace(_PROOF, proof)
        demands_proof = _PROOF in self.command or files != dict(self.files)
        match = _PYTHON.fullmatch(command)
        if match is not None and not demands_proof and (name := match["file"].removeprefix("./")) in files:
            runner = str(PurePosixPath(name).with_name(f"run_{secrets.token_hex(8)}.py"))
            files[runner] = _RUNNER.replace("PROOF", repr(proof)).replace("TESTS", repr(sorted(self.files)))
            command = f"{match['python']} {runner} {match['file']}{match['rest']}"
            demands_proof = True
        await self._write_files(sandbox, files, timeout_s)
        result = await asyncio.wait_for(sandbox.run(command, timeout_s), 2 * timeout_s + _REPLACE_LIMIT_S)
        return float(result.status == 0 and (not demands_proof or proof in result.output.split()))

    async def check(self, sandbox: Sandbox, timeout_s: float) -> None:
        """Write the files into a sandbox, and run a command there.

        Raises:
            SandboxError, asyncio.TimeoutError: see `grade`.
        """
        await self._write_files(sandbox, self.files, timeout_s)
        if (await asyncio.wait_for(sandbox.run("true", timeout_s), 2 * timeout_s + _REPLACE_LIMIT_S)).status:
            raise SandboxError("no command runs there")

    async def _write_files(self, sandbox: Sandbox, files: Mapping[str, str], timeout_s: float) -> None:
        """Write the files in place of whatever is there."""
        for links in (0, 1):
            if files:
                command = shlex.join(["sh", "-c", _REMOVE, "sh", str(links), *files])
                await asyncio.wait_for(sandbox.run(f"{command} 2>/dev/null", timeout_s), 2 * timeout_s + _REPLACE_LIMIT_S)
            try:
                for path, content in files.items():
                    await asyncio.wait_for(sandbox.write(path, content.encode()), _REPLACE_LIMIT_S + timeout_s)
            except SandboxError:
                if links:
                    raise
            else:
                return
