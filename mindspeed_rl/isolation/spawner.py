"""The process between the pool and its workers: forks them with imported libraries, watches them, and ends all of them.

It imports the workers' libraries once (for scorers, sympy takes a third of a second) and forks a worker in milliseconds
when the pool requests one, so killing a stuck worker is cheap. The first message names the code of the workers: scorers
(`rewards/worker.py`), or the tools of agents. The spawner stays single-threaded, so that its forks are safe regardless of the
pool's threads. It is a child subreaper: an orphan of a scorer becomes its child, and children that are not workers are killed.
When the pool's process ends in any way, the pidfd and the socket signal it, and all processes below are killed.

Started by the pool as `python -m mindspeed_rl.isolation.spawner FD PID`. Messages, pool -> spawner: {"op": "start",
"worker": "module:function" that gets the worker's channel and this message, "preload", "sys_path", "memory_bytes",
"memory_reason", ...} once, {"op": "fork", "id"}, {"op": "kill", "id"}; spawner -> pool: {"op": "forked", "id"} with the
worker's socket attached, {"op": "died", "id", "reason", "state"}.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping

from mindspeed_rl import registry
from mindspeed_rl.importing import collecting_seldom
from mindspeed_rl.isolation.channel import Channel, Message, pack
from mindspeed_rl.redaction import redact_streams

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCH_INTERVAL_S = 0.1
#: signals that end a run; its driver handles them
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: size at which a log is rotated, and what is kept of it then
_MAX_LOG_BYTES, _KEPT_LOG_BYTES = 32 << 20, 8 << 20


def launch(environment: Mapping[str, str] | None = None) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a spawner for the calling process; return the socket for its messages, starting with "start".

    Args:
        environment: variables of the spawner and its workers; None for this process's variables.
    """
    variables = os.environ if environment is None else environment
    control, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "mindspeed_rl.isolation.spawner", str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**variables, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        # signals of the terminal reach the pool's process only, and the spawner ends with it
        start_new_session=True,
    )
    theirs.close()
    return control, process


def end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a spawner and every process children it, and wait until they have ended."""
    control.close()  # the spawner then kills everything and ends
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _list_children(pid: int) -> list[int]:
    """Return the pids of a process's children; none if it has ended."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listing:
            return [int(child) for child in listing.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _measure_resident(pid: int) -> int:
    """Return the resident memory of a process and all its descendants; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            pages = int(statm.read().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_measure_resident(child) for child in _list_children(pid))


def _rotate_output() -> None:
    """Move the end of this process's log to `<log>.1` if functions print without bound; all writers append, so they go on."""
    for descriptor in (1, 2):
        status = os.fstat(descriptor)
        appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        if not (stat.S_ISREG(status.st_mode) and appends and status.st_size > _MAX_LOG_BYTES):
            continue
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            with open(path, "rb") as log, open(f"{path}.1", "wb") as old:
                log.seek(status.st_size - _KEPT_LOG_BYTES)
                shutil.copyfileobj(log, old)
            os.truncate(path, 0)
        except OSError:  # deleted, or a full disk: the next check tries again
            continue


def _kill_tree(pid: int) -> None:
    """Kill a process, its process group and every descendant, including those that left the group."""
    children = _list_children(pid)
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    for child in children:
        _kill_tree(child)


class _Spawner:
    """The event loop of the spawner process."""

    def __init__(self, control: socket.socket, pool_pid: int) -> None:
        self._control = control
        self._channel = Channel(control)
        self._pool_pid = pool_pid
        self._workers: dict[int, int] = {}  # pid -> worker id
        self._idle_bytes: dict[int, int] = {}  # pid -> resident memory right after the fork
        self._killed_for_memory: set[int] = set()
        self._memory_bytes: int | None = None
        self._setup: Message = {}
        self._run_worker: Callable[[Channel, Message], None]

    def run(self) -> None:
        """Serve the pool until its process ends or closes the socket; then kill every descendant."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        wakeup, signaled = socket.socketpair()
        wakeup.setblocking(False)
        signaled.setblocking(False)
        # Python writes to the wakeup descriptor only for signals that have a handler
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C; the spawner ends with it
        signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINATION_SIGNALS)  # as above, where each process of a run is signalled
        signal.set_wakeup_fd(signaled.fileno())
        self._to_close_in_worker = [wakeup, signaled]
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._channel, selectors.EVENT_READ, "control")
                selector.register(wakeup, selectors.EVENT_READ, "child")
                if hasattr(os, "pidfd_open"):
                    self._pool_pidfd = os.pidfd_open(self._pool_pid)
                    selector.register(self._pool_pidfd, selectors.EVENT_READ, "pool")
                while self._serve({key.data for key, _ in selector.select(_WATCH_INTERVAL_S)}, wakeup):
                    pass
        except BrokenPipeError:
            pass  # the pool has ended during a message to it
        finally:
            self._kill_all()

    def _kill_all(self) -> None:
        for worker in self._workers:
            _kill_tree(worker)
        while _list_children(os.getpid()):  # repeated, because orphans become children of this process
            for child in _list_children(os.getpid()):
                _kill_tree(child)
                os.waitpid(child, 0)

    def _serve(self, events: set[str], wakeup: socket.socket) -> bool:
        """Handle events; return False after the pool has ended."""
        if "pool" in events:
            return False
        if "control" in events:
            messages, alive = self._channel.receive_ready()
            if not alive:
                return False
            for message in messages:
                self._handle(message)
        if "child" in events:
            wakeup.recv(4096)
        self._reap()
        self._watch()
        return True

    def _handle(self, message: Message) -> None:
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
        self._idle_bytes[pid] = _measure_resident(pid)
        socket.send_fds(self._control, [pack({"op": "forked", "id": worker})], [ours.fileno()])
        ours.close()

    def _become_worker(self, theirs: socket.socket, spawner_pid: int) -> None:
        """Run a worker in the forked child, which leaves by `os._exit` in all cases."""
        status = 1
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # the spawner died before the death signal was set
            if os.getppid() != spawner_pid:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # a sample that is being scored is not lost; processes that the functions start have the usual handlers again
            for number in _TERMINATION_SIGNALS:
                signal.signal(number, lambda *_: None)
                os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINATION_SIGNALS)
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
                # children of the dead worker that are still in its group
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._report_death(pid, worker, status)

    def _report_death(self, pid: int, worker: int, status: int) -> None:
        self._idle_bytes.pop(pid)
        state = "crashed"
        if pid in self._killed_for_memory:
            self._killed_for_memory.remove(pid)
            state, reason = "memory", self._setup["memory_reason"]
        elif os.WIFSIGNALED(status):
            reason = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            reason = f"exited with status {os.WEXITSTATUS(status)}"
        self._control.sendall(pack({"op": "died", "id": worker, "reason": reason, "state": state}))

    def _watch(self) -> None:
        """Kill workers above their memory limit, and orphans of scorers; rotate the log."""
        _rotate_output()
        for child in _list_children(os.getpid()):
            if child not in self._workers:
                _kill_tree(child)
            elif self._memory_bytes is not None and _measure_resident(child) - self._idle_bytes[child] > self._memory_bytes:
                self._killed_for_memory.add(child)
                _kill_tree(child)


if __name__ == "__main__":
    redact_streams()
    _Spawner(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run()
