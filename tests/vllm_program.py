"""Programs of tests that use vLLM, each in a process of its own that is forked off one with vLLM's modules.

vLLM takes 12 s of a processor to import, and what such a program does takes 1 to 5. Programs that compare an unpatched vLLM
with a patched one, or that watch its import, need an interpreter of their own.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from fork_server import fork_server
from patience import patient


def _import_vllm() -> None:
    from mindspeed_rl import adaptors, platform

    platform.select("cpu")
    os.environ.update(platform.current().worker_env() | {"RANK": "0", "LOCAL_RANK": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    adaptors.apply("rollout")
    for module in ("mindspeed_rl.rollout.vllm_engine", "transformers", "safetensors.torch"):
        import_module(module)


def _run(connection: Connection) -> None:
    source, words, outputs = connection.recv()
    for descriptor, path in zip((1, 2), outputs):
        os.dup2(os.open(path, os.O_WRONLY), descriptor)
    sys.argv, code = words, 0
    try:
        if source:
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(source, "<program>", "exec"), vars(main))
        else:
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (shown to the test)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_program(program: str | Path, *arguments: object, timeout_s: float = 300.0) -> Any:
    """Run a Python file, or Python text, as `python FILE ARGUMENTS` does, and return the JSON of the last line that it prints.

    Raises:
        AssertionError: it failed, or did not end in time; the message is the end of what it printed as errors.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        source, name = ("", str(program)) if isinstance(program, Path) else (program, "-c")
        process = fork_server(_import_vllm).start(_run)
        process.connection.send((source, [name, *map(str, arguments)], [str(path) for path in outputs]))
        ended = process.connection.poll(patient(timeout_s))  # its end of the connection closes
        if not ended:
            process.kill()
        code = process.join()
        printed, errors = (path.read_text(errors="replace") for path in outputs)
    assert ended, f"did not end in {timeout_s:g} s: {errors[-3000:]}"
    assert code == 0, errors[-3000:]
    lines = printed.splitlines()
    return json.loads(lines[-1]) if lines else None
