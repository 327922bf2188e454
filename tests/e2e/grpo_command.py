"""Runs `mindspeed-rl train` on the tests' task as a user would, and finds what a run leaves on the machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
from patience import patient
from shared_forks import shared

from mindspeed_rl.runtime.fork_server import RL

MARK = "MINDSPEED_RL_TEST_RUN"
SHARED_MEMORY = Path("/dev/shm")


def overrides(task: Path, folder: Path) -> list[str]:
    """Small batches of the tests' task; the run starts from the model or, when there is one, from its own checkpoint."""
    model = task / "model"
    return [
        f"run_dir={folder / 'run'}",
        f"actor_config.load={folder / 'save'}",
        f"actor_config.save={folder / 'save'}",
        f"actor_config.pretrained_checkpoint={model}",
        "actor_config.finetune=false",
        "actor_config.micro_batch_size=16",
        "model.tiny_qwen25.num_layers=null",  # config.json has the shape
        f"megatron_training.tokenizer_name_or_path={model}",
        f"megatron_training.data_path={task / 'train.jsonl'}",
        "megatron_training.eval_data_path=null",
        "megatron_training.global_batch_size=8",
        "megatron_training.save_interval=1",
        "rl_config.mini_batch_size=8",
        "rl_config.n_samples_per_prompt=4",
        f"rl_config.wait_timeout_s={patient(120):.0f}",
        "generate_config.kv_cache_memory_gib=0.03",
        "generate_config.sampling_config.max_tokens=4",
    ]


def preprocess_prompts(task: Path, prefix: Path) -> Path:
    """The prefix of the task's prompts as `preprocess` writes them: without tools, which a template would describe."""
    words: list[str | Path] = ["--input", task / "train.jsonl", "--output-prefix", prefix, "--prompt-type", "empty"]
    words += ["--tokenizer-name-or-path", task / "model", "--handler-name", "R1AlpacaStyleInstructionHandler"]
    words += ["--map-keys", json.dumps({"prompt": "prompt", "query": "", "response": "labels", "system": ""})]
    words += ["--dataset-additional-keys", "labels"]
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.cli.main", "preprocess", *words],
        capture_output=True,
        text=True,
        timeout=patient(200),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return prefix


#: figures that two runs of the same samples have in common
FIGURES = ("grpo/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "response_length/mean")


def records(run_folder: Path) -> list[dict[str, Any]]:
    """The records of the iterations in metrics.jsonl so far; iteration 0 is the evaluation before them."""
    path = run_folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [line for line in lines if line["iteration"]]


def marked(mark: str) -> list[psutil.Process]:
    """All live processes whose environment has this mark."""
    results = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                results.append(process)
    return results


#: seconds in which whatever a command started has ended after it
ENDS_S = 15
#: Ray's agents report a node's end to a control service that may have ended before it, and wait for that; seconds they get
AGENTS = ("DashboardAgent", "RuntimeEnvAgent", "dashboard/agent.py", "runtime_env/agent/main.py")
AGENTS_S = 60

ONE_PROCESS = ["rl_config.actor_resource.num_npus=1", "actor_config.tensor_model_parallel_size=1"]


class Command:
    """A started `mindspeed-rl train`, in a session of its own so that Ctrl-C reaches all of it and nothing else.

    Attributes:
        folder: of the run's files.
        shares: its workers are copies of a server that other commands use too.
        config: name of the run file.
        wrap: the command that runs it, for example a shell.
    """

    shares = True
    config = "grpo_tiny_cpu"
    wrap: tuple[str, ...] = ()

    def __init__(self, task: Path, folder: Path, *changes: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._shared: set[str] = set()
        self._looked_s = 0.0
        words = [*self.wrap, sys.executable, "-m", "mindspeed_rl.cli.main", "train", "--config-name", self.config]
        self._output = (folder / "output.txt").open("w+")
        self.process = subprocess.Popen(
            [*words, *self.keys(task), *changes],
            cwd=folder,
            # two runs that are compared bit by bit must not choose by a trial each
            env={"MINDSPEED_RL_CPU_ATTENTION": "torch", **os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", **self.forks()},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell's background job ignores Ctrl-C, and so would what it starts
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def keys(self, task: Path) -> list[str]:
        """What is set in the run file."""
        return overrides(task, self.folder)

    def forks(self) -> dict[str, str]:
        """Environment by which its workers are copies of a server that other commands use too; empty where they are not."""
        return shared(RL) if self.shares else {}

    @property
    def output(self) -> str:
        """What the user has seen so far."""
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl so far."""
        return records(self.folder / "run")

    def wait_until(self, reached: Callable[[], Any], timeout_s: float = 300.0) -> None:
        """Returns once the condition holds; fails when the command ends before, or after the timeout."""
        deadline = time.monotonic() + patient(timeout_s)
        while not reached():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"not reached in {timeout_s} s:\n{self.output[-4000:]}"
            self._note_shared()
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> int:
        """The exit code; fails when the command has not ended in time."""
        deadline = time.monotonic() + patient(timeout_s)
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, f"still running after {timeout_s} s:\n{self.output[-4000:]}"
            self._note_shared()
            time.sleep(0.05)
        return code

    def interrupt(self) -> None:
        """Ctrl-C in the terminal of the command."""
        os.killpg(self.process.pid, signal.SIGINT)

    def worker(self, rank: int) -> psutil.Process:
        """The process of a device worker: the one that writes this rank's log."""
        log = str(self.folder / "run" / "logs" / f"rank_{rank}.log")
        for process in self.processes():
            if "ray::WorkerProcess" in " ".join(_words(process)) and os.readlink(f"/proc/{process.pid}/fd/1") == log:
                return process
        raise AssertionError(f"no worker writes {log}")

    def processes(self) -> list[psutil.Process]:
        """All live processes that descend from the command, wherever they have moved to."""
        return marked(self._mark)

    def leftovers(self) -> list[str]:
        """Live processes and shared-memory files that nobody uses, after the command has ended."""
        start = time.monotonic()
        while left := self._left():
            waited = time.monotonic() - start
            if waited > AGENTS_S or (waited > ENDS_S and not all(any(agent in line for agent in AGENTS) for line in left)):
                break
            time.sleep(0.5)  # ends are on their way; what others put there meanwhile is in use soon
        return left

    def _left(self) -> list[str]:
        left = [f"process {process.pid}: {' '.join(_words(process))[:100]}" for process in self.processes()]
        new = {path for path in self._shared if Path(path).exists()}
        used = _mapped_files(psutil.process_iter()) if new else set()
        return left + sorted(new - used)

    def _note_shared(self) -> None:
        """The shared-memory files of this command's processes are known, so that others' files are not taken for them."""
        if time.monotonic() - self._looked_s > 2.0:
            self._looked_s = time.monotonic()
            self._shared |= {path for path in _mapped_files(self.processes()) if path.startswith(f"{SHARED_MEMORY}/")}

    def close(self) -> None:
        """Nothing of the command is left, whatever happened."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._output.close()


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _mapped_files(processes: Iterable[psutil.Process]) -> set[str]:
    """Files in shared memory that one of these processes maps or holds open."""
    used = set()
    for process in processes:
        with contextlib.suppress(OSError):
            used |= {
                line.split(maxsplit=5)[5] for line in _lines(Path("/proc", str(process.pid), "maps")) if "/dev/shm/" in line
            }
            used |= {os.readlink(link) for link in Path("/proc", str(process.pid), "fd").iterdir()}
    return {path.removesuffix(" (deleted)").strip() for path in used}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@contextlib.contextmanager
def running(task: Path, folder: Path, *changes: str) -> Iterator[Command]:
    """A started command that is gone after the block."""
    command = Command(task, folder, *changes)
    try:
        yield command
    finally:
        command.close()


def finished(task: Path, folder: Path, *changes: str, timeout_s: float = 400.0) -> Command:
    """A command that has ended well."""
    with running(task, folder, *changes) as command:
        assert command.wait(timeout_s) == 0, command.output[-4000:]
        left = command.leftovers()
        assert not left, left
    return command
