"""Uses the stand-in services by the clients that the services publish; run by a Python that has them (envs/cpu/extras.sh).

python service_clients.py URL
Prints {name: [exit status, output, content of a file]} as JSON.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

COMMAND = "cat a.txt; echo wrong >&2; exit 3"


def use_e2b(url: str) -> list[Any]:
    from e2b import CommandExitException, Sandbox

    # one address for all sandboxes, so the server takes the last one
    sandbox = Sandbox.create(template="base", timeout=60, api_key="secret", api_url=url, sandbox_url=f"{url}/last")
    sandbox.files.write("a.txt", "one\n")
    try:
        sandbox.commands.run(COMMAND)
        raise AssertionError("the exit status is lost")
    except CommandExitException as error:
        found = [error.exit_code, error.stdout + error.stderr, sandbox.files.read("a.txt")]
    snapshot = sandbox.create_snapshot()
    assert snapshot.snapshot_id
    sandbox.kill()
    return found


def use_daytona(url: str) -> list[Any]:
    from daytona import CreateSandboxFromSnapshotParams, Daytona, DaytonaConfig

    client = Daytona(DaytonaConfig(api_key="secret", api_url=url))
    sandbox = client.create(CreateSandboxFromSnapshotParams(auto_stop_interval=1, auto_delete_interval=0))
    sandbox.fs.upload_file(b"one\n", "a.txt")
    ran = sandbox.process.exec(COMMAND, timeout=20)
    found = [ran.exit_code, ran.result, sandbox.fs.download_file("a.txt").decode()]
    client.delete(sandbox)
    return found


def use_sandbox_fusion(url: str) -> list[Any]:
    from sandbox_fusion import RunCodeRequest, run_code

    files = {"a.txt": base64.b64encode(b"one\n").decode()}
    request = RunCodeRequest(code=COMMAND, language="bash", files=files, fetch_files=["a.txt"], run_timeout=20)
    ran = run_code(request, endpoint=url, max_attempts=1)
    assert ran.run_result is not None
    content = base64.b64decode(ran.files["a.txt"]).decode()
    return [ran.run_result.return_code, f"{ran.run_result.stdout}{ran.run_result.stderr}", content]


if __name__ == "__main__":
    used = {"e2b": use_e2b, "daytona": use_daytona, "sandbox_fusion": use_sandbox_fusion}
    print(json.dumps({name: use(sys.argv[1]) for name, use in used.items()}))
