"""From a run file to a run: everything that follows from it, decided once; see `resolve`, and `Run` for the result."""

from mindspeed_rl.run.record import Run

__all__ = ["Run"]
