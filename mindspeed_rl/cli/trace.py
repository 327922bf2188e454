"""`mindspeed-rl trace`: show one sample of a run on the terminal, token by token."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindspeed_rl.cli.options import print_status
from mindspeed_rl.observability.agent_turns import describe_turns, write_spans
from mindspeed_rl.observability.logging import clean_record
from mindspeed_rl.observability.run_files import check_folder, read_completions

#: colour scale of tokens -> column, minimum and maximum (None: of the sample)
_COLOURS: dict[str, tuple[str, float | None, float | None]] = {
    "log-prob": ("log_probs", -4.0, 0.0),
    "advantage": ("advantages", None, None),
    "weight": ("weights", 0.5, 1.5),
    "ratio": ("ratios", 0.5, 1.5),
    "clipped": ("clipped", 0.0, 1.0),
    "version": ("versions", None, None),
}
_SCALE = ("red", "yellow", "green")


def main(argv: list[str]) -> int:
    """Print the sample, or a table of the group; return 0, or 2 when it does not exist."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl trace",
        description="Show one written sample: prompt, response coloured token by token, reward components, advantage. "
        "Needs a run with rl_config.log_completions.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--iteration", type=int, help="default: the last written one")
    parser.add_argument("--sample", type=int, help="index of the sample in the iteration; default: a table of all")
    parser.add_argument("--colour", "--color", choices=_COLOURS, default="log-prob", help="value that colours the tokens")
    parser.add_argument("--tokens", action="store_true", help="also print a table with a row for each token")
    parser.add_argument(
        "--otlp", type=Path, metavar="FILE", help="write turns and calls of the samples as OpenTelemetry's OTLP/JSON instead"
    )
    arguments = parser.parse_args(argv)
    try:
        samples = _read_samples(arguments.run, arguments.iteration)
        # brackets in a response are text, not rich's markup
        console = Console(highlight=False, markup=False)
        if arguments.otlp is not None:
            count = write_spans(samples if arguments.sample is None else samples[arguments.sample :][:1], arguments.otlp)
            if not count:
                raise ValueError(f"these samples of iteration {samples[0]['iteration']} have one turn each, and no spans.")
            print(f"{count} spans written to {arguments.otlp}")
        elif arguments.sample is None:
            _print_table(console, samples)
        elif 0 <= arguments.sample < len(samples):
            _print_sample(console, samples[arguments.sample], arguments.colour, with_table=arguments.tokens)
        else:
            at = samples[0]["iteration"]
            raise ValueError(f"--sample {arguments.sample}: iteration {at} has samples 0 to {len(samples) - 1}.")
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    return 0


def _read_samples(run: Path, iteration: int | None) -> list[dict[str, Any]]:
    """Return the written samples of one iteration.

    Raises:
        ValueError: the folder does not exist, or there are none; the message lists iterations that have some.
    """
    check_folder(run)
    everything = list(read_completions(run))
    if not everything:
        raise ValueError(f"{run} has no completions.jsonl: set rl_config.log_completions=true to write samples.")
    written = sorted({sample["iteration"] for sample in everything})
    iteration = written[-1] if iteration is None else iteration
    if iteration not in written:
        some = ", ".join(map(str, written[:8])) + (f" ... {written[-1]}" if len(written) > 8 else "")
        raise ValueError(f"--iteration {iteration} was not written; there are {some} (rl_config.log_completions_interval).")
    return [clean_record(sample) for sample in everything if sample["iteration"] == iteration]


def _print_table(console: Console, samples: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=f"iteration {samples[0]['iteration']}")
    for name in ("sample", "prompt", "reward", "advantage", "tokens", "response"):
        table.add_column(name, overflow="fold" if name == "response" else "ellipsis", no_wrap=name != "response")
    for index, sample in enumerate(samples):
        tokens = sample.get("tokens")
        response = " ".join(sample["response"].split())
        table.add_row(
            str(index),
            str(sample.get("group", "")),
            _format(sample.get("reward")),
            _format(sample.get("advantage")),
            "" if tokens is None else str(len(tokens["ids"])),
            Text(response if len(response) <= 160 else response[:157] + "..."),
        )
    console.print(table)


def _print_sample(console: Console, sample: Mapping[str, Any], colour: str, *, with_table: bool) -> None:
    tokens = sample.get("tokens")
    console.print(Text("prompt", style="bold"))
    console.print(Text(sample["prompt"], style="dim"))
    console.print(Text("response", style="bold"))
    console.print(Text(sample["response"]) if tokens is None else _colour_tokens(tokens, colour))
    parts = ", ".join(f"{name} {_format(value)}" for name, value in (sample.get("parts") or {}).items())
    extra = ", ".join(f"{name} {value}" for name, value in (sample.get("extra") or {}).items())
    console.print(f"reward {_format(sample.get('reward'))} ({parts}), advantage {_format(sample.get('advantage'))}")
    console.print(Text(extra, style="dim"))
    for depth, line in describe_turns(sample):
        console.print(Text(f"{'  ' * depth}{line}"))
    if tokens is None:
        return
    legend = Text.assemble(*((name, name) for name in _SCALE))
    suffix = Text(" high; struck through: does not train", style="dim")
    console.print(Text(f"colour: {colour}, low ", style="dim") + legend + suffix)
    if with_table:
        console.print(_build_token_table(tokens))


def _colour_tokens(tokens: Mapping[str, Any], colour: str) -> Text:
    key, low, high = _COLOURS[colour]
    values = tokens.get(key)
    if values is None:
        raise ValueError(f"--colour {colour}: this run did not compute {key}.")
    minimum, maximum = (min(values) if low is None else low), (max(values) if high is None else high)
    text = Text()
    for index, token in enumerate(tokens["texts"]):
        position = (values[index] - minimum) / (maximum - minimum) if maximum > minimum else 1.0
        position = position if math.isfinite(position) else 1.0
        style = _SCALE[min(int(max(position, 0.0) * len(_SCALE)), len(_SCALE) - 1)]
        if not tokens["loss_mask"][index]:
            style += " strike"
        text.append(token, style=style)
    return text


def _build_token_table(tokens: Mapping[str, Any]) -> Table:
    table = Table()
    known = ("log_probs", "trainer_log_probs", "weights", "ratios", "clipped", "advantages", "versions", "loss_mask")
    columns = [key for key in known if key in tokens]
    for name in ("", "id", "token", *columns):
        table.add_column(name.replace("_", " "))
    for index, token in enumerate(tokens["texts"]):
        cells = [_format(tokens[key][index]) for key in columns]
        table.add_row(str(index), str(tokens["ids"][index]), Text(repr(token)[1:-1]), *cells)
    return table


def _format(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
