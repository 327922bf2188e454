"""`mindspeed-rl <command>`: one name for all tools; each command is a module with `main(argv) -> int`."""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mindspeed_rl import __version__, registry
from mindspeed_rl.redaction import RedactedOutput, find_secrets, remember_secrets

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: packages of an environment of a device kind, which plans and reports do without
_ENVIRONMENT = ("torch", "ray", "vllm", "megatron", "transformers")
#: command, with its kind where it has some -> arguments with which a first look at it works; shown where there are none
_EXAMPLES: dict[str, str] = {
    "train": "--config-name grpo_tiny_cpu",
    "new": "my-task --kind maths",
    "recipe": "list",
    "recipe show": "NAME",
    "recipe data": "NAME",
    "recipe run": "NAME",
    "explain": "--config-name grpo_qwen3_8b_A3",
    "import": "verl run_grpo.sh -o my_run.yaml",
    "plan": "--config-name grpo_qwen3_8b_A3",
    "plan memory": "--config-name grpo_qwen3_8b_A3",
    "plan time": "--config-name grpo_qwen3_8b_A3",
    "plan fit": "--model MODEL --npus 16 -o my_run.yaml",
    "plan smallest": "--model MODEL",
    "plan tune": "--config-name grpo_tiny_cpu",
    "plan experts": "--counts FOLDER --devices 16 -o map.json",
    "promise": "grpo_qwen3_8b_A3",
    "audit": "reward --config-name grpo_tiny_cpu",
    "audit reward": "--config-name grpo_tiny_cpu",
    "audit data": "--config-name grpo_tiny_cpu",
    "audit judges": "--config-name grpo_tiny_cpu --responses responses.jsonl",
    "download": "Qwen/Qwen2.5-0.5B-Instruct",
    "convert": "--load-dir MODEL --save-dir OUT --target-tensor-parallel-size 2",
    "merge": "--method linear --models MODEL_A MODEL_B -o OUT",
    "preprocess": "--input rows.jsonl --tokenizer-name-or-path MODEL --output-prefix data/rows",
    "rejection-sample": "--input runs/NAME/completions.jsonl --output-prefix data/best",
    "teacher-log-probs": "--config-name sft.yaml --server http://HOST:8000/v1",
    "generate": "--load MODEL --prompt 'What is 2 + 3?'",
    "chat": "--load MODEL",
    "evaluate": "--load MODEL --task jsonl --task-data-path heldout.jsonl --scorer exact_match",
    "rollout": "--model MODEL",
    "serve": "--config-name serve_tiny_cpu",
    "parity": "BATCH.safetensors",
    "report": "runs/NAME",
    "watch": "runs/NAME",
    "diff": "train rollout --config-name grpo_tiny_cpu",
    "diff-dump": "runs/A/dump runs/B/dump",
    "trace": "runs/NAME",
    "npu-cost": "--config-name grpo_qwen3_8b_A3",
    "launch": "--nodes 2 --npus-per-node 16 --hosts HOST1,HOST2 -- train --config-name NAME --nodes 2",
}
#: command -> module and description
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("mindspeed_rl.cli.train", "train with a run file: GRPO, PPO, SFT, DPO ..."),
    "new": ("mindspeed_rl.cli.new", "write the files of a task of your own, ready to train"),
    "recipe": ("mindspeed_rl.cli.recipe", "complete runs: run files, data, planned figures, expected curve"),
    "explain": ("mindspeed_rl.cli.explain", "print the plan of a run without claiming a device"),
    "import": ("mindspeed_rl.importers.command", "write a run file from a command of ms-swift or verl"),
    "audit": ("mindspeed_rl.cli.audit", "look for faults in the data and the reward of a run"),
    "plan": ("mindspeed_rl.cli.plan", "compute whether a run fits, before a device is booked"),
    "promise": ("mindspeed_rl.cli.promise", "say what a run will need, take and cost; of a run folder, how it was kept"),
    "download": ("mindspeed_rl.cli.download", "fetch a model or data set of a hub by name"),
    "convert": ("mindspeed_rl.cli.convert", "convert checkpoints between Hugging Face and Megatron"),
    "merge": ("mindspeed_rl.cli.merge", "merge models of one architecture: linear, SLERP, TIES, task arithmetic"),
    "preprocess": ("mindspeed_rl.cli.preprocess", "turn raw data into Megatron indexed datasets"),
    "rejection-sample": ("mindspeed_rl.cli.rejection_sample", "turn the best responses of a run into supervised data"),
    "teacher-log-probs": ("mindspeed_rl.cli.teacher_log_probs", "store a teacher's log-probs of supervised data"),
    "generate": ("mindspeed_rl.cli.generate", "generate responses to prompts"),
    "chat": ("mindspeed_rl.cli.chat", "talk with a model on the console"),
    "evaluate": ("mindspeed_rl.cli.evaluate", "score a model on benchmark data"),
    "rollout": ("mindspeed_rl.cli.rollout", "serve a model to runs on other machines"),
    "serve": ("mindspeed_rl.cli.serve", "train and sample models of clients, by the Tinker API"),
    "parity": ("mindspeed_rl.cli.parity", "replay a saved rollout batch through the losses, or compare training engines"),
    "report": ("mindspeed_rl.cli.report", "write a run, or several, as one HTML file"),
    "watch": ("mindspeed_rl.cli.watch", "follow a run, or several, in the browser"),
    "diff": ("mindspeed_rl.cli.diff", "explain why log-probs of trainer and rollout engine differ"),
    "diff-dump": ("mindspeed_rl.cli.diff_dump", "name the first tensor that differs between two dumps"),
    "trace": ("mindspeed_rl.cli.trace", "show one sample of a run token by token"),
    "npu-cost": ("mindspeed_rl.cli.npu_cost", "count the NPU work of an iteration, compared with plain Megatron"),
    "doctor": ("mindspeed_rl.cli.doctor", "check this machine and read logs for known failures"),
    "launch": ("mindspeed_rl.cli.launch", "run a command on several nodes with Ray"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; 2 for an unknown command."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: mindspeed-rl <command> [options]\n\ncommands:")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:<18} {text}")
        print("\nmindspeed-rl <command> --help shows the options of one.")
        print("Start with: mindspeed-rl new my-task, then explain and train in its folder; or mindspeed-rl doctor.")
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        near = registry.find_similar(argv[0], COMMANDS)
        hint = "" if near is None else f" Did you mean '{near}'?"
        print(f"error: unknown command '{argv[0]}'.{hint} Known: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    if (words := " ".join(argv)) in _EXAMPLES:
        print(f"{COMMANDS[argv[0]][1]}. For example:\n\n  mindspeed-rl {words} {_EXAMPLES[words]}\n", file=sys.stderr)
        print(f"error: {words} needs arguments; mindspeed-rl {words} --help shows all", file=sys.stderr)
        return 2
    registry.search_folders([Path.cwd()])
    try:
        with contextlib.ExitStack() as early:
            early.enter_context(_exit_on_signal())
            command = registry.load(f"{COMMANDS[argv[0]][0]}:main", f"command '{argv[0]}'")
            if argv[0] != "train":  # it handles signals itself, once there are workers
                early.close()
            status = command(argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_reader_ended():
            raise
        status = 128 + signal.SIGPIPE
    except (ModuleNotFoundError, ValueError) as error:
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(missing, ModuleNotFoundError) or (missing.name or "").partition(".")[0] not in _ENVIRONMENT:
            raise
        print(
            f"error: {argv[0]} needs {missing.name}, which is not installed here: install the environment of a device kind,"
            " such as bash envs/cpu/install.sh, and activate it",
            file=sys.stderr,
        )
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 128 + signal.SIGINT
    return status


def run() -> NoReturn:
    """Run the command that this process was started for, and end the process without taking apart what it has imported.

    At its end Python looks through all objects three times, and torch and vLLM are a million: 2 of 10 s of `generate`. What
    must not be missed happens here: threads end, exit handlers run, output is written.
    """
    status = main()
    cast("Any", threading)._shutdown()  # as Python does: waits for threads, and ends the threads of executors
    cast("Any", atexit)._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or it is closed
            stream.flush()
    os._exit(status)


@contextlib.contextmanager
def _exit_on_signal() -> Iterator[None]:
    """End this process, with a line and no traceback, at a signal in the block, during which no worker runs.

    An exception could be lost there: many modules are imported, and some catch everything.
    """

    def end(signum: int, frame: FrameType | None) -> None:
        if scratch := sys.modules.get("mindspeed_rl.scratch"):
            scratch.remove_scratch_folders()
        name = "interrupted" if signum == signal.SIGINT else signal.Signals(signum).name
        with contextlib.suppress(OSError):
            os.write(2, f"{name}: no worker was running.\n".encode())
        os._exit(128 + signum)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # others are ignored by the parent, as by nohup, or the caller's
    before = {number: was for number, was in before.items() if was in (signal.SIG_DFL, signal.default_int_handler)}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in before:
            signal.signal(number, end)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            for number, handler in before.items():
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else handler)


class _LastingOutput(io.FileIO):
    """Output that is dropped where it cannot be written."""

    def write(self, data: ReadableBuffer, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # the reader, or the terminal, is gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


def keep_without_reader() -> None:
    """Let this process run on when the reader of its output has ended, as `| head` does, or the disk of its output is full.

    What it writes from now on has no secrets.
    """
    remember_secrets(find_secrets(os.environ))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            raw = _LastingOutput(stream.fileno(), "wb", closefd=False)
            lines = stream.line_buffering or name == "stderr"
            lasting = RedactedOutput(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=lines)
            setattr(sys, name, lasting)


def _has_reader_ended() -> bool:
    """Return True when the output's reader has ended, as `| head` does; then the remaining output is dropped.

    Sockets of a command raise the same error, which must not be mistaken for this.
    """
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    # the interpreter flushes once more at its end, which would raise again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


if __name__ == "__main__":
    run()
