"""The result of a run for people: what was trained, on what, the gain, examples, cost, licence, the command to talk to it."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl.files import open_regular, write_file
from mindspeed_rl.observability.console import format_duration
from mindspeed_rl.observability.history import History, Series
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.observability.run_files import JsonObject, RunFiles
from mindspeed_rl.texts import cut_middle

#: metrics whose change is the gain of a run, the first that it has, and the name of each
_GAINS = {
    "eval/accuracy": "accuracy on held-out prompts",
    "eval/reward": "reward on held-out prompts",
    "eval/loss": "loss on held-out data",
    "grpo/score/mean": "reward of the rollouts",
    "dapo/score/mean": "reward of the rollouts",
    "critic/score/mean": "reward of the rollouts",
    "train/loss": "loss",
}
#: quantile of the normal distribution for an interval of 95 %
_QUANTILE = 1.96
_MAX_BETTER, _MAX_WORSE = 2, 1
_LICENCE = re.compile(r"^license(?:_name)?:\s*[\"']?([^\"'\n]+)", re.MULTILINE)
#: files of a model whose first lines name its licence
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")


@dataclass(frozen=True)
class Gain:
    """The change of a metric over a run.

    Attributes:
        metric: its name in metrics.jsonl.
        first, last: values of the first and the last measurement.
        half_width: half of the 95 % interval of their difference; None where the spread is not known.
        count: held-out prompts of each measurement; 0 where that is not known.
    """

    metric: str
    first: float
    last: float
    half_width: float | None = None
    count: int = 0

    def __str__(self) -> str:
        """Describe the gain in a sentence."""
        percent = self.metric == "eval/accuracy"
        spec, scale, unit = (".1f", 100.0, " %") if percent else (".3f", 1.0, "")
        change = self.last - self.first
        text = f"{_GAINS[self.metric]}: {self.first * scale:{spec}}{unit} -> {self.last * scale:{spec}}{unit}"
        if self.half_width is None:
            return f"{text} ({change * scale:+{spec}}; the spread was not measured)"
        low, high = ((change + sign * self.half_width) * scale for sign in (-1, 1))
        text += f" ({change * scale:+{spec}}, 95 % interval {low:+{spec}} to {high:+{spec}}, {self.count} prompts)"
        verdict = "" if (low > 0) == (high > 0) else "; the interval includes 0: no difference is shown"
        return text + verdict


@dataclass(frozen=True)
class Example:
    """A held-out prompt before and after a run."""

    prompt: str
    before: str
    after: str
    reward_before: float
    reward_after: float


@dataclass(frozen=True)
class Result:
    """The page of a run for people.

    Attributes:
        rows: label -> text, in the order of the page.
        base: folder or name of the model that the run started from; None for fresh weights.
        better, worse: held-out prompts whose reward has risen, and has fallen, most.
        curves: name -> series of the picture.
    """

    title: str
    outcome: str
    rows: Mapping[str, str]
    base: str | None = None
    gain: Gain | None = None
    better: Sequence[Example] = ()
    worse: Sequence[Example] = ()
    curves: Mapping[str, Series] = field(default_factory=dict)

    def format_markdown(self) -> list[str]:
        """Return the lines of the page in Markdown."""
        lines = ["| | |", "|---|---|", *(f"| {name} | {_escape(text)} |" for name, text in self.rows.items()), ""]
        for title, examples in (("Better after the run", self.better), ("Worse after the run", self.worse)):
            if examples:
                lines += [f"**{title}**", "", "| prompt | before | after | reward |", "|---|---|---|---|"]
                for item in examples:
                    texts = (_escape(cut_middle(" ".join(text.split()))) for text in (item.prompt, item.before, item.after))
                    lines.append(f"| {' | '.join(texts)} | {item.reward_before:.3g} -> {item.reward_after:.3g} |")
                lines.append("")
        return lines


def build_result(run: RunFiles) -> Result:
    """Make the page of a run out of its folder; also of a run that goes, or ended early."""
    report, config = run.report, run.report.get("config", {})
    actor, training = (config.get(name) or {} for name in ("actor_config", "megatron_training"))
    base, save = _find_models(report)
    gain = find_gain(run.history)
    better, worse = _compare_examples(run.examples)
    iterations = report.get("iterations", len(run.history.iterations))
    rows = {
        "what": f"{training.get('stage') or actor.get('stage') or 'run'} of {base or 'fresh weights'}, {iterations} iterations",
        "data": _describe_data(actor or training),
        "gain": "not measured" if gain is None else str(gain),
        "expected": "" if run.expected is None else str(run.expected.judge(run.history)),
        "cost": _describe_cost(run.history),
        "licence": "" if not base else f"{find_licence(Path(base).expanduser())} (of the base; it also binds what was trained)",
        "try it": f"`mindspeed-rl chat --load {_find_export(save)}`" if save else "",
    }
    curves = {text: series for name, text in _GAINS.items() if len((series := run.history.finite(name)).y) > 1}
    shown = {name: text for name, text in rows.items() if text}
    return Result(report.get("title", run.name), report.get("outcome", "running"), shown, base, gain, better, worse, curves)


def _find_models(report: JsonObject) -> tuple[str | None, str | None]:
    """Return where the weights of a run came from, and where its checkpoints are."""
    groups = [report.get("config", {}).get(name) or {} for name in ("actor_config", "megatron_training")]
    base, save = (
        next((str(group[key]) for key in keys for group in groups if group.get(key)), None)
        for keys in (("pretrained_checkpoint", "load"), ("save",))
    )
    return base, save


def find_gain(history: History) -> Gain | None:
    """Return the change of the first of the metrics of a gain that was measured twice.

    The interval takes both measurements as independent; they have the same prompts, so it is rather too wide.
    """
    for metric in _GAINS:
        series = history.finite(metric)
        if len(series.y) < 2:
            continue
        first, last = series.y[0], series.y[-1]
        counts = history.finite("eval/prompts").y
        spreads = history.finite("eval/reward_std").y
        variances: tuple[float, float] | None = None
        if metric == "eval/accuracy":
            variances = first * (1 - first), last * (1 - last)
        elif metric == "eval/reward" and len(spreads) > 1:
            variances = spreads[0] ** 2, spreads[-1] ** 2
        if not metric.startswith("eval/") or variances is None or not counts or counts[-1] < 2:
            return Gain(metric, first, last)
        half = _QUANTILE * math.sqrt(sum(variances) / counts[-1])
        return Gain(metric, first, last, half, int(counts[-1]))
    return None


def find_licence(folder: Path) -> str:
    """Return the licence of a model by its model card, else by its licence file."""
    if match := _LICENCE.search(_read_start(folder / "README.md")):
        return clean_text(match[1].strip())
    for name in _LICENCE_FILES:
        if lines := _read_start(folder / name).split():
            return f"{clean_text(' '.join(lines)[:60])} ({name})"
    return f"not stated in {folder}: look it up where the model was published"


def _read_start(path: Path) -> str:
    """Return the start of a file of text; "" where it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(8192).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def find_exports(report: JsonObject) -> list[Path]:
    """Return the folders in the format of Hugging Face that a run has written."""
    _, save = _find_models(report)
    if save is None:
        return []
    return [path for path in sorted((Path(save).expanduser() / "hf").glob("iter_*")) if (path / "config.json").is_file()]


def write_model_card(folder: Path, result: Result) -> None:
    """Write a model card beside an export in the format of Hugging Face, where it has none."""
    path = folder / "README.md"
    if path.exists():
        return
    base = [f"base_model: {json.dumps(result.base)}"] if result.base else []
    head = ["---", "library_name: transformers", *base, "tags: [mindspeed_rl]", "---"]
    body = [f"# {result.title}", "", f"Trained with mindspeed_rl. Outcome of the run: {result.outcome}.", ""]
    write_file(path, clean_text("\n".join([*head, "", *body, *result.format_markdown()])) + "\n")


def write_index(folder: Path) -> Path | None:
    """Write index.html of a folder of runs: a line for each; return its path, or None without a run."""
    lines = []
    for path in sorted(folder.glob("*/report.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            outcome, iterations = str(report["outcome"]).partition(":")[0], report["iterations"]
            metrics: Mapping[str, Any] = report["metrics"]
            name = next((name for name in _GAINS if name in metrics), None)
            figure = "" if name is None else f"{metrics[name]['first']:.3f} &rarr; {metrics[name]['last']:.3f} {_GAINS[name]}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
        link = html.escape(f"{path.parent.name}/report.html", quote=True)
        cells = [f'<a href="{link}">{html.escape(path.parent.name)}</a>', html.escape(clean_text(str(report.get("title", ""))))]
        cells += [html.escape(clean_text(outcome)), str(iterations), figure]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if not lines:
        return None
    heads = "".join(f"<th>{name}</th>" for name in ("run", "run file", "outcome", "iterations", "first and last figure"))
    page = (
        '<!doctype html><meta charset="utf-8"><title>runs</title><style>body{font:15px system-ui;margin:2em}'
        "td,th{padding:.3em 1em;text-align:left}"
        f"</style><h1>Runs</h1><table><tr>{heads}</tr>{''.join(lines)}</table>\n"
    )
    path = folder / "index.html"
    write_file(path, page)
    return path


def _describe_data(group: JsonObject) -> str:
    path, held_out = group.get("data_path"), group.get("eval_data_path")
    names = ", ".join(map(str, path)) if isinstance(path, list) else str(path or "")
    return f"{names}{f', held out {held_out}' if held_out else ''}"


def _describe_cost(history: History) -> str:
    seconds = history.finite("timing/all").y
    parts = [f"{format_duration(math.fsum(seconds))} in {len(seconds)} iterations"] if seconds else []
    if memory := history.finite("memory/peak_gib").y:
        parts.append(f"{max(memory):.2f} GiB per device at the peak")
    return ", ".join(parts)


def _find_export(save: str) -> str:
    """Return the folder that `chat` loads: the newest export where there is one, else the checkpoints."""
    export = Path(save).expanduser() / "hf" / "latest"
    return str(export) if export.exists() else save


def pair_evaluations(examples: Sequence[JsonObject]) -> list[tuple[JsonObject, JsonObject]]:
    """Return held-out prompts in the first and the last evaluation, those whose reward has risen most before others.

    Args:
        examples: rows of examples.jsonl, in order.
    """
    if not examples:
        return []
    first, last = examples[0]["iteration"], examples[-1]["iteration"]
    before, after = ({row["index"]: row for row in examples if row["iteration"] == iteration} for iteration in (first, last))
    pairs = [(before[index], after[index]) for index in sorted(before.keys() & after.keys())]

    def gain(pair: tuple[JsonObject, JsonObject]) -> float:
        return float(pair[1].get("reward") or 0.0) - float(pair[0].get("reward") or 0.0)

    return sorted(pairs, key=gain, reverse=True)


def _compare_examples(examples: Sequence[JsonObject]) -> tuple[list[Example], list[Example]]:
    """Return the held-out prompts that the last evaluation answers better than the first, and worse, largest change first."""
    scored = [row for row in examples if isinstance(row.get("reward"), (int, float))]
    pairs = [
        Example(str(old["prompt"]), str(old["response"]), str(new["response"]), float(old["reward"]), float(new["reward"]))
        for old, new in pair_evaluations(scored)
        if new is not old
    ]
    better = [item for item in pairs if item.reward_after > item.reward_before]
    worse = [item for item in reversed(pairs) if item.reward_after < item.reward_before]
    return better[:_MAX_BETTER], worse[:_MAX_WORSE]


def _escape(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    text = " ".join(text.split())
    return text if text.startswith("`") else re.sub(r"([|<*_\[\]`\\])", r"\\\1", text)
