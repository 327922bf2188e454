"""Who is heard where. Each test runs in a process of its own: logging is process-wide."""

import subprocess
import sys
from pathlib import Path

SPEAKERS = """
import logging, os, sys, warnings
from pathlib import Path
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
log = Path(sys.argv[1])
noisy = logging.getLogger("vllm")
noisy.addHandler(logging.StreamHandler())
noisy.propagate = False
{setup}
logging.getLogger("mindspeed_rl.trainers").info("iteration done")
logging.getLogger("vllm.engine").warning("vllm narrates")
logging.getLogger("vllm.engine").error("vllm fails")
logging.getLogger("somebody").warning("somebody warns")
logging.getLogger("somebody").info("somebody talks")
warnings.warn("old call")
{after}
"""


def run(log: Path, setup: str, after: str = "") -> subprocess.CompletedProcess:
    code = SPEAKERS.format(setup=setup, after=after)
    return subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=True)


def test_the_console_hears_us_and_the_trouble_of_others(tmp_path):
    done = run(tmp_path / "run.log", "set_up_logging(log, worker='driver')")
    assert done.stderr.splitlines() == ["iteration done", "vllm fails", "somebody warns"]
    assert done.stdout == ""


def test_the_file_hears_everybody_and_says_who_spoke(tmp_path):
    run(tmp_path / "run.log", "set_up_logging(log, worker='rank 3', console=False)")
    text = (tmp_path / "run.log").read_text()
    for words in ("iteration done", "vllm narrates", "vllm fails", "somebody warns", "somebody talks", "old call"):
        assert words in text
    assert "WARNING [rank 3] vllm.engine: vllm narrates" in text


def test_other_ranks_are_silent_on_the_console(tmp_path):
    done = run(tmp_path / "run.log", "set_up_logging(log, worker='rank 1', console=False)")
    assert done.stderr == ""


def test_setting_up_twice_writes_each_record_once(tmp_path):
    run(tmp_path / "run.log", "set_up_logging(log)\nset_up_logging(log)")
    assert (tmp_path / "run.log").read_text().count("iteration done") == 1


def test_redirected_output_catches_native_prints_too(tmp_path):
    after = "redirect_output(log)\nprint('from python', flush=True)\nos.write(1, b'from native code\\n')"
    done = run(tmp_path / "run.log", "set_up_logging(log, console=False)", after)
    text = (tmp_path / "run.log").read_text()
    assert "from python" in text and "from native code" in text and "from" not in done.stdout


def test_a_full_disk_costs_one_line_and_no_traceback():
    result = run(Path("/dev/full"), "set_up_logging(log)", "logging.getLogger('mindspeed_rl').info('one more')")
    assert "Traceback" not in result.stderr and "Logging error" not in result.stderr
    assert result.stderr.count("/dev/full cannot be written, lines will be missing: [Errno 28] No space left on device") == 1
    assert "one more" in result.stderr
