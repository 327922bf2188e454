"""The process that ends a server whose call keeps Python's lock beyond its limit.

usage: call_watch_process.py FD PID GRACE_S

`call_watch` starts it with nothing of the package. The file FD has the time at which the call that runs has to have ended, by
the clock that all processes of a machine share, and what is to be said where it has not; or null while none runs.
"""

import json
import os
import signal
import sys
import time

_LOOK_S = 0.5
#: stacks are written in this time
_STACKS_S = 1.0


def main(number: int, pid: int, grace_s: float) -> None:
    """Look at the record until the server has ended, or has to be killed."""
    last = None
    while os.getppid() == pid:
        try:
            call = json.loads(os.pread(number, 4096, 0))
        except ValueError:  # half written
            call = None
        # the same at two looks: what is read in the moment of a change may be of two calls
        if call is not None and call == last and time.monotonic() > call[0] + grace_s:
            # a process ends all of its threads, also those in which nothing can be raised
            print(f"{call[1]}, and the server does not end by itself; it is killed", file=sys.stderr, flush=True)
            os.kill(pid, signal.SIGUSR2)
            time.sleep(_STACKS_S)
            os.kill(pid, signal.SIGKILL)
            return
        last = call
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
