"""`mindspeed-rl <command>`: one name for all tools; each command is a module with `main(argv) -> int`."""

from __future__ import annotations

import os
import select
import signal
import sys

from mindspeed_rl import __version__, registry

#: command -> module and description
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("mindspeed_rl.cli.train", "train with a run file: GRPO, PPO, SFT, DPO ..."),
    "explain": ("mindspeed_rl.cli.explain", "print the plan of a run without claiming a device"),
    "import": ("mindspeed_rl.cli.import_run", "write a run file from a command of ms-swift or verl"),
    "plan": ("mindspeed_rl.cli.plan", "compute whether a run fits, before a device is booked"),
    "convert": ("mindspeed_rl.cli.convert", "convert checkpoints between Hugging Face and Megatron"),
    "preprocess": ("mindspeed_rl.cli.preprocess", "turn raw data into Megatron indexed datasets"),
    "generate": ("mindspeed_rl.cli.generate", "generate responses to prompts"),
    "chat": ("mindspeed_rl.cli.chat", "talk with a model on the console"),
    "evaluate": ("mindspeed_rl.cli.evaluate", "score a model on benchmark data"),
    "rollout": ("mindspeed_rl.cli.rollout", "serve a model to runs on other machines"),
    "parity": ("mindspeed_rl.cli.parity", "replay a saved rollout batch through the losses"),
    "report": ("mindspeed_rl.cli.report", "write a run, or several, as one HTML file"),
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
            print(f"  {name:<12}{text}")
        print("\nmindspeed-rl <command> --help shows the options of one.")
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        near = registry.find_similar(argv[0], COMMANDS)
        hint = "" if near is None else f" Did you mean '{near}'?"
        print(f"error: unknown command '{argv[0]}'.{hint} Known: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    command = registry.load(f"{COMMANDS[argv[0]][0]}:main", f"command '{argv[0]}'")
    try:
        status = command(argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_reader_ended():
            raise
        status = 128 + signal.SIGPIPE
    return status


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
    sys.exit(main())
