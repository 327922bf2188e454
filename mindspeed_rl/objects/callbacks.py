"""Callbacks of a trainer: they see figures and samples of every iteration, and may end the run; and progress in a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_rl.observability.completions import Completion, choose_group
from mindspeed_rl.observability.observer import EndingObserver

if TYPE_CHECKING:
    from mindspeed_rl.objects.arguments import TrainerConfig

#: figures that a notebook shows, and the head of their column
_SHOWN = {
    "rewards/total_mean": "reward",
    "train/loss": "loss",
    "eval/accuracy": "held-out accuracy",
    "eval/reward": "held-out reward",
    "eval/loss": "held-out loss",
    "response_length/mean": "tokens per response",
    "actor/grad_norm": "gradient norm",
    "timing/all": "seconds",
}
#: rows of the table, and characters of a response
_MAX_ROWS, _MAX_TEXT = 30, 300


@dataclass
class TrainerState:
    """The state of a run, which callbacks read.

    Attributes:
        global_step: iterations that have ended.
        max_steps: iterations of the run; 0 before it starts.
        log_history: figures of each iteration, the evaluation before the first one as 0.
        samples: samples of the newest iteration that has any.
    """

    global_step: int = 0
    max_steps: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    samples: Sequence[Completion] = ()


@dataclass
class TrainerControl:
    """What callbacks request.

    Attributes:
        should_training_stop: save and end after this iteration.
    """

    should_training_stop: bool = False


class TrainerCallback:
    """Base of callbacks; override what you need. Names and arguments are as in transformers' callbacks.

    The files of an iteration are written before its methods are called.
    """

    def on_train_begin(self, args: TrainerConfig, state: TrainerState, control: TrainerControl, **further: Any) -> None:
        """Take note that the loop begins."""

    def on_samples(
        self,
        args: TrainerConfig,
        state: TrainerState,
        control: TrainerControl,
        *,
        samples: Sequence[Completion],
        **further: Any,
    ) -> None:
        """Take responses of an iteration with their rewards; only trainers that sample have any."""

    def on_log(
        self, args: TrainerConfig, state: TrainerState, control: TrainerControl, *, logs: Mapping[str, float], **further: Any
    ) -> None:
        """Take the figures of an iteration."""

    def on_evaluate(
        self, args: TrainerConfig, state: TrainerState, control: TrainerControl, *, metrics: Mapping[str, float], **further: Any
    ) -> None:
        """Take the figures of an evaluation."""

    def on_step_end(self, args: TrainerConfig, state: TrainerState, control: TrainerControl, **further: Any) -> None:
        """Take note that an iteration has ended."""

    def on_train_end(self, args: TrainerConfig, state: TrainerState, control: TrainerControl, **further: Any) -> None:
        """Take note that the run has ended, also with an error."""


class CallbackObserver(EndingObserver):
    """Give the figures and samples of a run to callbacks."""

    def __init__(self, callbacks: Sequence[TrainerCallback], args: TrainerConfig, state: TrainerState) -> None:
        super().__init__()
        self._callbacks, self._args, self._state = callbacks, args, state
        self._control = TrainerControl()

    def on_loop(self, num_iterations: int) -> None:
        """Tell the callbacks that the loop begins."""
        self._state.max_steps = num_iterations
        self._call("on_train_begin")

    def on_samples(self, iteration: int, samples: Sequence[Completion]) -> None:
        """Pass on the samples of an iteration."""
        self._state.samples = samples
        self._call("on_samples", samples=samples)

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Pass on the figures of an iteration, and end the run where a callback requests it."""
        self._state.global_step = iteration
        self._state.log_history.append({"iteration": iteration, **results})
        self._call("on_log", logs=dict(results))
        if evaluation := {name: value for name, value in results.items() if name.startswith("eval/")}:
            self._call("on_evaluate", metrics=evaluation)
        if not iteration:
            return
        self._call("on_step_end")
        if self._control.should_training_stop:
            self.end_run()

    def close(self) -> None:
        """Tell the callbacks that the run has ended."""
        self._call("on_train_end")

    def _call(self, event: str, **further: object) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self._args, self._state, self._control, **further)


class NotebookProgress(TrainerCallback):
    """Show a bar, the figures and a group of responses below the cell of a notebook, and refresh them in place.

    Args:
        display: shows a page of HTML anew in the place of the last one; None shows it in the notebook.
    """

    def __init__(self, display: Callable[[str], object] | None = None) -> None:
        self._display = display

    def on_train_begin(self, args: TrainerConfig, state: TrainerState, control: TrainerControl, **further: Any) -> None:
        """Show the bar."""
        if self._display is None:
            self._display = _open_display()
        self._show(state)

    def on_log(
        self, args: TrainerConfig, state: TrainerState, control: TrainerControl, *, logs: Mapping[str, float], **further: Any
    ) -> None:
        """Refresh the page."""
        self._show(state)

    def _show(self, state: TrainerState) -> None:
        assert self._display is not None, "on_train_begin comes first"
        self._display(render_progress(state))


def render_progress(state: TrainerState) -> str:
    """Return the state of a run as HTML; texts of models are text in it."""
    names = [name for name in _SHOWN if any(name in line for line in state.log_history)]
    rows = []
    for line in state.log_history[-_MAX_ROWS:]:
        cells = (f"{line[name]:.4g}" if name in line else "" for name in names)
        rows.append(f"<tr><td>{line['iteration']:.0f}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{_SHOWN[name]}</th>" for name in names)
    parts = [f"<progress value='{state.global_step}' max='{state.max_steps}'></progress> {state.global_step}/{state.max_steps}"]
    if rows:
        parts.append(f"<table><tr><th>iteration</th>{head}</tr>{''.join(rows)}</table>")
    if group := choose_group(state.samples):
        texts = (
            f"<tr><td>{'-' if sample.reward is None else f'{sample.reward:.3g}'}</td>"
            f"<td>{html.escape(sample.response[:_MAX_TEXT])}</td></tr>"
            for sample in (group[0], group[-1])
        )
        parts.append(f"<p>{html.escape(group[0].prompt[-_MAX_TEXT:])}</p><table><tr><th>reward</th><th>response</th></tr>")
        parts.append("".join(texts) + "</table>")
    return "".join(parts)


def is_notebook() -> bool:
    """Return True in a cell of a notebook; nothing is imported for it."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def _open_display() -> Callable[[str], object]:
    """Return a function that shows HTML below the cell, in place of what it showed before."""
    from IPython.display import HTML, display  # only notebooks have it

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))
