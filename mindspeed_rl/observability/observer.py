"""Parts of the driver that follow a run next to its logger; a layer above or below the trainers may have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mindspeed_rl.observability.completions import Completion


class RunObserver:
    """Follow the figures of a run, for example to keep a report up to date. An observer overrides what it takes note of."""

    def on_start(self) -> None:
        """Take note that the loop begins."""

    def on_samples(self, iteration: int, samples: Sequence[Completion]) -> None:
        """Take the samples of an iteration that are written to completions.jsonl; its figures follow."""

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Take the figures of an iteration, which are in the files of the run by now; 0: evaluation before the first one."""

    def close(self) -> None:
        """Take note that no iteration follows."""


class EndingObserver(RunObserver):
    """Follow a run, and end it early.

    Attributes:
        end: saves and ends the run after this iteration; set where the run starts, before `on_loop`.
        has_ended: the observer has ended the run.
    """

    def __init__(self) -> None:
        self.end: Callable[[], None] = lambda: None
        self.has_ended = False

    def on_loop(self, num_iterations: int) -> None:
        """Take note that all processes run and the loop begins."""

    def end_run(self) -> None:
        """End the run after this iteration; a second call does nothing."""
        if not self.has_ended:
            self.has_ended = True
            self.end()


class AttemptObserver(RunObserver):
    """Pass on what the attempts of a run do to the observer of the whole run, which begins and ends only once."""

    def __init__(self, whole: EndingObserver) -> None:
        self._whole = whole
        self._has_begun = False

    def on_loop(self, num_iterations: int) -> None:
        """Take note that the loop of an attempt begins."""
        if not self._has_begun:
            self._has_begun = True
            self._whole.on_start()
            self._whole.on_loop(num_iterations)

    def on_samples(self, iteration: int, samples: Sequence[Completion]) -> None:
        """Pass on the samples."""
        self._whole.on_samples(iteration, samples)

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Pass on the figures."""
        self._whole.on_figures(iteration, results)

    def end(self) -> None:
        """Take note that no attempt follows."""
        if self._has_begun:
            self._whole.close()
