"""Console output that stays readable, and a run.log that keeps everything.

The console shows records of `mindspeed_rl` (rank 0 only) and warnings of others; run.log takes every record of every process
at INFO and, for worker processes, the output of native code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.redaction import find_secrets, hide_in_text, redact_streams, remember_secrets

_PACKAGE = "mindspeed_rl"

# Libraries that log much at INFO or WARNING; their errors still reach the console.
_CHATTY = (
    "absl",
    "asyncio",
    "datasets",
    "filelock",
    "fsspec",
    "httpx",
    "huggingface_hub",
    "matplotlib",
    "megatron",
    "numba",
    "ray",
    "torch",
    "transfer_queue",
    "transformers",
    "urllib3",
    "vllm",
    "vllm_ascend",
)

#: control characters but tab and those that end a line (also U+0085, U+2028 and U+2029), marks that change the direction of
#: text, separators and tags that are not seen, and halves of characters, which no stream can encode
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)

_FILE_FORMAT = "%(asctime)s %(levelname)s [%(worker)s] %(name)s: %(message)s"


def build_quiet_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that keep libraries from configuring logging of their own, without those already set.

    Set them before the libraries are imported: in this process, and as Ray's runtime environment for the workers.
    """
    variables = {
        # vLLM would otherwise install a handler that writes to stdout; its records reach ours instead.
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TQDM_MININTERVAL": "1",
    }
    return {name: value for name, value in variables.items() if name not in environ}


def clean_text(text: str) -> str:
    r"""Return text of a model or of data as it may be printed: what a terminal would obey is shown as an escape, like \x1b.

    Every text that is not ours passes here before it reaches a terminal, a log or a report. Letters of all scripts, emoji and
    their joiners stay as they are.
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def clean_record(value: Any) -> Any:
    """Return a value of JSON with all its texts cleaned, the keys of its objects included."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(str(name)): clean_record(item) for name, item in value.items()}
    return [clean_record(item) for item in value] if isinstance(value, (list, tuple)) else value


class _CleanFormatter(logging.Formatter):
    """Formats a record without secrets, and without what a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return clean_text(hide_in_text(super().format(record)))


class _CurrentStderr(logging.Handler):
    """Writes to what standard error is at the time of a record: under a progress bar a stream that keeps the bar below it."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or its reader is gone
            print(self.format(record), file=sys.stderr, flush=True)


def set_up_logging(log_file: Path | None, *, worker: str = "driver", console: bool = True, level: int = logging.INFO) -> None:
    """Send all records of this process to the log file, and the important ones to stderr, without secrets.

    Replaces the handlers of the root logger, so the call may be repeated.

    Args:
        log_file: run.log, shared by all processes; each record is one append. None: console only.
        worker: name of this process in the file, e.g. "driver" or "rank 3".
        console: False on all ranks but one.
        level: lowest level of our own records on the console.
    """
    remember_secrets(find_secrets(os.environ))
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.INFO)
    if log_file is not None:
        log_file = Path(log_file)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        to_file = _RunLog(log_file, mode="a", encoding="utf-8")
        to_file.setFormatter(_CleanFormatter(_FILE_FORMAT, defaults={"worker": worker}))
        root.addHandler(to_file)
    if console:
        to_console = _CurrentStderr()
        to_console.setFormatter(_CleanFormatter("%(message)s"))
        to_console.addFilter(lambda record: _is_important(record, level))
        root.addHandler(to_console)
    elif log_file is None:
        root.addHandler(logging.NullHandler())
    # vLLM renders a chat to warm up, which fails with a traceback where a tokenizer has no template; no run needs it
    logging.getLogger("vllm.renderers.base").addFilter(lambda record: "Chat template warmup" not in str(record.msg))
    for name in _CHATTY:
        # their records reach the root handlers and no other
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
    # Python warnings become records: to the file always, to the console never.
    logging.captureWarnings(True)
    warnings.simplefilter("default")


class _RunLog(logging.FileHandler):
    """A log file that a run can do without: a full disk gives one line on stderr, not a traceback a record."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - of logging.Handler
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            with contextlib.suppress(OSError):  # a worker's stderr may be the same file
                print(f"{self.baseFilename} cannot be written, lines will be missing: {error}", file=sys.stderr)


def redirect_output(path: Path) -> None:
    """Append the output of this process, native code included, to the file. For worker processes.

    What Python writes there has no secrets.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    redact_streams()


def _is_important(record: logging.LogRecord, level: int) -> bool:
    origin = record.name.split(".")[0]
    if origin == _PACKAGE or origin == "__main__":
        return record.levelno >= level
    if origin == "py":  # py.warnings
        return False
    # Records named "root" come from libraries that call logging.warning() itself.
    return record.levelno >= (logging.ERROR if origin in _CHATTY or origin == "root" else logging.WARNING)
