"""A pilot of `mindspeed-rl plan tune`: a few iterations of a run file, in a process of its own.

    python -m mindspeed_rl.cli.pilot FOLDER/pilot.yaml ITERATIONS NODES

It trains as `mindspeed-rl train` does with the same run file, and ends after these iterations; it is not started anew after a
fault. The exit code is `train`'s. It ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Mapping, Sequence

from mindspeed_rl import registry
from mindspeed_rl.cli.options import print_status, report_failure
from mindspeed_rl.cli.train import prepare_run
from mindspeed_rl.config import load_run_config
from mindspeed_rl.observability.observer import EndingObserver

_PR_SET_PDEATHSIG = 1


class _Limit(EndingObserver):
    """End a run after some iterations."""

    def __init__(self, iterations: int) -> None:
        super().__init__()
        self._left = iterations

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Count an iteration; 0 is an evaluation before the first one."""
        self._left -= 1 if iteration else 0
        if self._left <= 0:
            self.end_run()


def main(argv: Sequence[str]) -> int:
    """Run a pilot, and return its exit code."""
    path, iterations, nodes = argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    limit = _Limit(int(iterations))
    try:
        with prepare_run(load_run_config(path, None, []), int(nodes)) as run:
            # these also import Ray
            from mindspeed_rl.trainers.launch import launch
            from mindspeed_rl.trainers.termination import Terminated

            predict = registry.load("mindspeed_rl.planner.prediction:predict", "plan tune")
            try:
                with launch(run, predict, [limit]) as trainer:
                    limit.end = lambda termination=trainer.termination: setattr(termination, "requested", True)
                    trainer.fit()
            except Terminated as error:
                if not limit.has_ended:
                    print_status(str(error))
                    return error.exit_code
    except (ValueError, RuntimeError, OSError) as error:
        return report_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
