"""A real run that is struck by faults, what must hold afterwards, and the record of what came of each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from fault_table import Fault
from grpo_command import Command
from shared_forks import shared

from mindspeed_rl.runtime.cluster import _set_environment
from mindspeed_rl.runtime.fork_server import RL

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TWO = ["rl_config.actor_resource.num_npus=2", "actor_config.tensor_model_parallel_size=1"]
LONG = "megatron_training.train_iters=100000"
TOLERANT = [
    "rl_config.fault_tolerance.enabled=true",
    "rl_config.fault_tolerance.max_restarts=100",
    "rl_config.fault_tolerance.heartbeat_interval_s=1",
]
#: what the console says of a restart
RESTARTED = "all workers were ended; the run resumes"


class FaultRun(Command):
    """A run whose processes have the injector.

    Args:
        stage: "grpo", "ppo", or a supervised one, whose task is the quickstart's.
        wrap, shares: see `Command`; the server that is shared has the injector too.
    """

    def __init__(
        self,
        task: Path,
        folder: Path,
        *changes: str,
        stage: str = "grpo",
        wrap: tuple[str, ...] = (),
        shares: bool = False,
    ) -> None:
        self.stage, self.wrap, self.shares = stage, wrap, shares
        self.config = "grpo_tiny_cpu" if stage == "ppo" else f"{stage}_tiny_cpu"
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self._path = os.pathsep.join([str(HERE / "site"), os.environ.get("PYTHONPATH", "")])
        with _set_environment(FAULTS=str(self.faults), PYTHONPATH=self._path):
            super().__init__(task, folder, *changes)

    def keys(self, task: Path) -> list[str]:
        """What is set in the run file of the stage."""
        if self.stage == "grpo":
            return super().keys(task)
        if self.stage == "ppo":
            critic = {"model": "tiny_qwen25", "tensor_model_parallel_size": 1, "micro_batch_size": 16, "finetune": "false"}
            critic |= {
                "lr": 1e-3,
                "pretrained_checkpoint": task / "model",
                "load": self.folder / "critic",
                "save": self.folder / "critic",
            }
            keys = [*super().keys(task), "megatron_training.stage=ray_ppo", "rl_config.adv_estimator=gae"]
            return [*keys, *(f"critic_config.{name}={value}" for name, value in critic.items())]
        data = {"dpo": "pairs"}.get(self.stage, self.stage)
        keys = {"load": task / "model", "tokenizer_name_or_path": task / "model", "data_path": task / "data" / data}
        keys |= {"save": self.folder / "save", "log_interval": 1, "eval_interval": 1000}
        return [f"run_dir={self.folder / 'run'}", *(f"megatron_training.{name}={value}" for name, value in keys.items())]

    def forks(self) -> dict[str, str]:
        """Environment of the shared server with the injector."""
        return shared(RL, PYTHONPATH=self._path) if self.shares else {}

    def signal_all(self, signum: int) -> None:
        """Signals every process of the run, as scancel and systemd do."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signum)

    def service(self, name: str) -> psutil.Process:
        """The process of Ray with this program."""
        (result,) = [process for process in self.processes() if Path((process.cmdline() or [""])[0]).name == name]
        return result

    def arm(self, fault: Fault) -> None:
        """The next process that comes to the place takes the fault."""
        draft = self.faults / f"{fault.id}.draft"
        draft.write_text(json.dumps(fault.arm))
        draft.rename(draft.with_suffix(".json"))  # nobody reads half of it

    def wait_until_taken(self, fault: Fault, timeout_s: float = 120.0) -> None:
        self.wait_until((self.faults / f"{fault.id}.taken").exists, timeout_s)

    @property
    def iterations(self) -> list[int]:
        return [record["iteration"] for record in self.metrics]

    def half_written(self) -> list[str]:
        """Files of a checkpoint that is neither finished nor gone; only right after the end."""
        return [str(path) for path in (self.folder / "save").rglob("*.partial")]


@contextlib.contextmanager
def struck(task: Path, folder: Path, *changes: str, **how: Any) -> Iterator[FaultRun]:
    """A started run that is gone after the block; see `FaultRun`."""
    command = FaultRun(task, folder, *changes, **how)
    try:
        yield command
    finally:
        command.close()


def culprit_line(output: str, said: str) -> str:
    """The line of the console that names the failed process.

    Raises:
        AssertionError: there is none.
    """
    if not said:
        return ""
    for line in output.splitlines():
        if re.search(said, line):
            return line.strip()
    raise AssertionError(f"no line says {said!r}:\n{output[-3000:]}")


def note(fault: Fault, seconds: float, line: str, *, equal: int = 0) -> None:
    """The fault was met as it should be. With RECORD_FAULTS=1 it is recorded; the docs' table is made of these records.

    Args:
        equal: iterations whose figures equal an undisturbed run's.
    """
    if not os.environ.get("RECORD_FAULTS"):
        return
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    clean = re.sub(r"/\S*/", "", re.sub(r"\d\d:\d\d:\d\d", "hh:mm:ss", re.sub(r"(process|pid) \d+", r"\1 N", line)))
    known[fault.id] = {"seconds": round(seconds, 1), "said": clean[:200]} | ({"equal": equal} if equal else {})
    ordered = {name: known[name] for name in sorted(known)}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def strike(run: FaultRun, fault: Fault, deed: Callable[[FaultRun], None] | None = None) -> tuple[float, str]:
    """The fault is armed and taken, and what comes of it is as the table says; the run goes on afterwards.

    Args:
        deed: what strikes the run in place of the injector.

    Returns:
        Seconds until the run went on, and the line that names the failed process.
    """
    said = len(run.output)
    if deed is None:
        run.arm(fault)
        run.wait_until_taken(fault)
    begun, reached = time.monotonic(), len(run.metrics)
    if deed is not None:
        deed(run)
    run.wait_until(lambda: len(run.metrics) > reached + 1, fault.within_s)
    seconds = time.monotonic() - begun
    result = run.iterations
    assert result == list(range(1, len(result) + 1)), "an iteration is missing, or was written twice"
    recovered = RESTARTED in run.output[said:]
    assert recovered == (fault.end == "recovers"), run.output[said:][-3000:]
    return seconds, culprit_line(run.output[said:], fault.said)
