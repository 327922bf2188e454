"""The process between the pool and its workers: forks them warm, watches them, and sees that nothing outlives anything.

It imports what the workers need once (for scorers, sympy alone takes a third of a second) and forks a worker in milliseconds
whenever the pool asks, so killing a stuck worker costs next to nothing. What a worker does is named in the first message:
scorers (`worker.py`), or the tools of agents. It stays single-threaded, which makes the fork safe whatever the pool's own
process runs. It is a child subreaper: a process that a scorer left behind becomes its child, and children that are not workers
are killed. When the pool's process ends, in whatever way, the pidfd and the socket tell, and everything below goes too.

Started by the pool as `python -m mindspeed_rl.rewards.spawner FD PID`. Messages, pool -> spawner: {"op": "start",
"worker": "module:function" that gets the worker's channel and this message, "preload", "sys_path", "memory_bytes", ...} once,
{"op": "fork", "id"}, {"op": "kill", "id"}; spawner -> pool: {"op": "forked", "id"} with the worker's socket attached,
{"op": "died", "id", "reason", "state"}.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.importing import collecting_seldom
from mindspeed_rl.rewards.channel import Channel, pack

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCH_INTERVAL_S = 0.1


def launch() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a spawner for the calling process; returns the socket to it, on which its first message is to be sent."""
    control, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "mindspeed_rl.rewards.spawner", str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        # signals of the terminal reach the pool's process only, whose end is the spawner's
        start_new_session=True,
    )
    theirs.close()
    return control, process


def end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a spawner and every process below it, and waits for that."""
    control.close()  # the order to kill everything and end
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children(pid: int) -> list[int]:
    """Return the pids of a process's children, none if it is gone."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listing:
            return [int(child) for child in listing.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all its descendants, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            pages = int(statm.read().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident_bytes(child) for child in _children(pid))


def _kill_tree(pid: int) -> None:
    """Kill a process, its process group and every descendant, also those that left the group."""
    below = _children(pid)
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    for child in below:
        _kill_tree(child)


class Spawner:
    """The event loop described above."""

    def __init__(self, control: socket.socket, pool_pid: int) -> None:
        self._control = control
        self._channel = Channel(control)
        self._pool_pid = pool_pid
        self._workers: dict[int, int] = {}  # pid -> worker id
        self._idle_bytes: dict[int, int] = {}  # pid -> resident memory right after the fork
        self._killed_for_memory: set[int] = set()
        self._memory_bytes: int | None = None
        self._setup: dict[str, Any] = {}
        self._run_worker: Callable[[Channel, dict[str, Any]], None]

    def run(self) -> None:
        """Serve the pool until its process ends or closes the socket; then kills every descendant."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        # Python writes to the wakeup descriptor only for signals that have a handler
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's business; its end is ours
        signal.set_wakeup_fd(wake.fileno())
        self._to_close_in_worker = [woken, wake]
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._channel, selectors.EVENT_READ, "control")
                selector.register(woken, selectors.EVENT_READ, "child")
                if hasattr(os, "pidfd_open"):
                    self._pool_pidfd = os.pidfd_open(self._pool_pid)
                    selector.register(self._pool_pidfd, selectors.EVENT_READ, "pool")
                while self._serve({key.data for key, _ in selector.select(_WATCH_INTERVAL_S)}, woken):
                    pass
        except BrokenPipeError:
            pass  # the pool has ended while it was told something
        finally:
            self._kill_all()

    def _kill_all(self) -> None:
        for worker in self._workers:
            _kill_tree(worker)
        while _children(os.getpid()):  # until nothing is left: what the dead leave behind becomes ours
            for child in _children(os.getpid()):
                _kill_tree(child)
                os.waitpid(child, 0)

    def _serve(self, events: set[str], woken: socket.socket) -> bool:
        """Handle what happened; returns False once the pool has ended."""
        if "pool" in events:
            return False
        if "control" in events:
            messages, alive = self._channel.receive_ready()
            if not alive:
                return False
            for message in messages:
                self._handle(message)
        if "child" in events:
            woken.recv(4096)
        self._reap()
        self._watch()
        return True

    def _handle(self, message: dict[str, Any]) -> None:
        if message["op"] == "start":
            self._setup = message
            self._memory_bytes = message["memory_bytes"]
            sys.path[:] = message["sys_path"]
            with collecting_seldom():
                self._run_worker = registry.load(message["worker"], "the worker")
                for module in [importlib.import_module(name) for name in message["preload"]]:
                    if hasattr(module, "warm_up"):
                        module.warm_up()
            gc.collect()
            gc.freeze()  # keeps the workers' collections off the shared pages
        elif message["op"] == "fork":
            self._fork(message["id"])
        elif message["op"] == "kill":
            for pid in [pid for pid, worker in self._workers.items() if worker == message["id"]]:
                _kill_tree(pid)

    def _fork(self, worker: int) -> None:
        ours, theirs = socket.socketpair()
        spawner_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become_worker(theirs, spawner_pid)
        theirs.close()
        self._workers[pid] = worker
        self._idle_bytes[pid] = _resident_bytes(pid)
        socket.send_fds(self._control, [pack({"op": "forked", "id": worker})], [ours.fileno()])
        ours.close()

    def _become_worker(self, theirs: socket.socket, spawner_pid: int) -> None:
        """Never returns: the child leaves by `os._exit`, whatever happens."""
        status = 1
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # the spawner died before the signal for that was asked for
            if os.getppid() != spawner_pid:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._channel.close()
            for end in self._to_close_in_worker:
                end.close()
            if hasattr(self, "_pool_pidfd"):
                os.close(self._pool_pidfd)
            self._run_worker(Channel(theirs), self._setup)
            status = 0
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self._workers.pop(pid, None)
            if worker is None:
                continue
            try:
                # what the dead worker's scorers have left in its group
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._report_death(pid, worker, status)

    def _report_death(self, pid: int, worker: int, status: int) -> None:
        self._idle_bytes.pop(pid)
        state = "crashed"
        if pid in self._killed_for_memory:
            self._killed_for_memory.remove(pid)
            state, reason = "memory", "took more memory than reward_memory_gib"
        elif os.WIFSIGNALED(status):
            reason = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            reason = f"exited with status {os.WEXITSTATUS(status)}"
        self._control.sendall(pack({"op": "died", "id": worker, "reason": reason, "state": state}))

    def _watch(self) -> None:
        """Kill workers above their memory, and processes that scorers left behind."""
        for child in _children(os.getpid()):
            if child not in self._workers:
                _kill_tree(child)
            elif self._memory_bytes is not None and _resident_bytes(child) - self._idle_bytes[child] > self._memory_bytes:
                self._killed_for_memory.add(child)
                _kill_tree(child)


if __name__ == "__main__":
    Spawner(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run()
