"""The process that ends a server whose call keeps Python's lock beyond its limit.

usage: call_watch_process.py FD PID GRACE_S NOTE

`call_watch` starts it with nothing of the package. The memory FD has the call that runs: its number, its seconds, what is to be
said where it has not ended in them, and its requests; or null while none runs. NOTE is the file in which the next start of the
server finds these requests.
"""

import json
import os
import signal
import sys
import time

#: between two looks
LOOK_S = 0.5
#: stacks are written in this time
_STACKS_S = 1.0
#: bytes of the memory
RECORD_BYTES = 4096


class Looks:
    """Seconds for which work has run, counted by looks at it.

    Between two looks at most twice their interval counts: a process that was stopped, and a machine that did not come to it,
    have not worked.
    """

    def __init__(self) -> None:
        self._work: object = None
        self._counted_s, self._last_s = 0.0, time.monotonic()

    def count(self, work: object, *, is_stopped: bool = False) -> float:
        """Return the seconds that this work was seen to run, or 0 where it is other work than at the last look."""
        now_s = time.monotonic()
        passed_s, self._last_s = min(now_s - self._last_s, 2 * LOOK_S), now_s
        if work != self._work:
            self._work, self._counted_s = work, 0.0
        elif not is_stopped:
            self._counted_s += passed_s
        return self._counted_s


def write_note(path: str, requests: "list[str]", text: str) -> None:
    """Write which requests a call that has not ended was for; the server counts them at its next start."""
    partial = f"{path}.{os.getpid()}.part"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({"requests": requests, "text": text}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def main(number: int, pid: int, grace_s: float, note: str) -> None:
    """Look at the memory until the server has ended, or has to be killed."""
    looks = Looks()
    while os.getppid() == pid:
        try:
            call = json.loads(os.pread(number, RECORD_BYTES, 0))
        except ValueError:  # half written
            call = None
        run_s = looks.count(call, is_stopped=_is_stopped(pid))
        if call is not None and run_s > call[1] + grace_s:
            # a process ends all of its threads, also those in which nothing can be raised
            print(f"{call[2]}, and the server does not end by itself; it is killed", file=sys.stderr, flush=True)
            try:
                os.kill(pid, signal.SIGUSR2)
                time.sleep(_STACKS_S)
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has ended meanwhile
                pass
            # afterwards: the disk may be what does not answer
            if call[3]:
                write_note(note, call[3], call[2])
            return
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
