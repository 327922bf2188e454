"""`mindspeed-rl trace`: one sample of a run on the terminal, from its prompt to what each token was pushed by."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindspeed_rl.observability.run_files import read_lines

#: what tokens can be coloured by -> least and largest value of the scale (None: as the sample has them)
COLOURS: dict[str, tuple[str, float | None, float | None]] = {
    "log-prob": ("log_probs", -4.0, 0.0),
    "advantage": ("advantages", None, None),
    "weight": ("weights", 0.5, 1.5),
    "ratio": ("ratios", 0.5, 1.5),
    "clipped": ("clipped", 0.0, 1.0),
    "version": ("versions", None, None),
}
_SCALE = ("red", "yellow", "green")


def main(argv: list[str]) -> int:
    """Print the sample, or a table of the group; return 0, or 2 when there is none like it."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl trace",
        description="Show one written sample: prompt, response coloured token by token, reward parts, advantage. "
        "Needs a run with rl_config.log_completions.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--iteration", type=int, help="default: the last one that was written")
    parser.add_argument("--sample", type=int, help="number of the sample in the iteration; default: a table of all")
    parser.add_argument("--colour", "--color", choices=COLOURS, default="log-prob", help="what tokens are coloured by")
    parser.add_argument("--tokens", action="store_true", help="also print a table with a row for each token")
    arguments = parser.parse_args(argv)
    try:
        samples = _samples(arguments.run, arguments.iteration)
        # brackets in a response are text, not rich's markup
        console = Console(highlight=False, markup=False)
        if arguments.sample is None:
            _print_table(console, samples)
        elif 0 <= arguments.sample < len(samples):
            _print_sample(console, samples[arguments.sample], arguments.colour, with_table=arguments.tokens)
        else:
            at = samples[0]["iteration"]
            raise ValueError(f"--sample {arguments.sample}: iteration {at} has samples 0 to {len(samples) - 1}.")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _samples(run: Path, iteration: int | None) -> list[dict[str, Any]]:
    """The samples that were written of one iteration.

    Raises:
        ValueError: there are none; says which iterations have some, or how to get them.
    """
    everything = list(read_lines(run / "completions.jsonl"))
    if not everything:
        raise ValueError(f"{run} has no completions.jsonl: set rl_config.log_completions=true to have samples written.")
    written = sorted({sample["iteration"] for sample in everything})
    iteration = written[-1] if iteration is None else iteration
    if iteration not in written:
        some = ", ".join(map(str, written[:8])) + (f" ... {written[-1]}" if len(written) > 8 else "")
        raise ValueError(f"--iteration {iteration} was not written; there are {some} (rl_config.log_completions_interval).")
    return [sample for sample in everything if sample["iteration"] == iteration]


def _print_table(console: Console, samples: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=f"iteration {samples[0]['iteration']}")
    for name in ("sample", "prompt", "reward", "advantage", "tokens", "response"):
        table.add_column(name, overflow="fold" if name == "response" else "ellipsis", no_wrap=name != "response")
    for number, sample in enumerate(samples):
        tokens = sample.get("tokens")
        response = " ".join(sample["response"].split())
        table.add_row(
            str(number),
            str(sample.get("group", "")),
            _figure(sample["reward"]),
            _figure(sample["advantage"]),
            "" if tokens is None else str(len(tokens["ids"])),
            Text(response if len(response) <= 160 else response[:157] + "..."),
        )
    console.print(table)


def _print_sample(console: Console, sample: Mapping[str, Any], colour: str, *, with_table: bool) -> None:
    tokens = sample.get("tokens")
    console.print(Text("prompt", style="bold"))
    console.print(Text(sample["prompt"], style="dim"))
    console.print(Text("response", style="bold"))
    console.print(Text(sample["response"]) if tokens is None else _coloured(tokens, colour))
    parts = ", ".join(f"{name} {_figure(value)}" for name, value in (sample.get("parts") or {}).items())
    extra = ", ".join(f"{name} {value}" for name, value in (sample.get("extra") or {}).items())
    console.print(f"reward {_figure(sample['reward'])} ({parts}), advantage {_figure(sample['advantage'])}")
    console.print(Text(extra, style="dim"))
    if tokens is None:
        return
    behind = Text(" high; struck through: does not train", style="dim")
    console.print(Text(f"colour: {colour}, low ", style="dim") + _legend() + behind)
    if with_table:
        console.print(_token_table(tokens))


def _coloured(tokens: Mapping[str, Any], colour: str) -> Text:
    key, low, high = COLOURS[colour]
    values = tokens.get(key)
    if values is None:
        raise ValueError(f"--colour {colour}: this run did not write {key}, for it did not compute them.")
    least, most = (min(values) if low is None else low), (max(values) if high is None else high)
    text = Text()
    for index, piece in enumerate(tokens["texts"]):
        place = (values[index] - least) / (most - least) if most > least else 1.0
        style = _SCALE[min(int(max(place, 0.0) * len(_SCALE)), len(_SCALE) - 1)]
        if not tokens["loss_mask"][index]:
            style += " strike"
        text.append(piece, style=style)
    return text


def _legend() -> Text:
    return Text.assemble(*((name, name) for name in _SCALE))


def _token_table(tokens: Mapping[str, Any]) -> Table:
    table = Table()
    known = ("log_probs", "trainer_log_probs", "weights", "ratios", "clipped", "advantages", "versions", "loss_mask")
    columns = [key for key in known if key in tokens]
    for name in ("", "id", "token", *columns):
        table.add_column(name.replace("_", " "))
    for index, piece in enumerate(tokens["texts"]):
        cells = [_figure(tokens[key][index]) for key in columns]
        table.add_row(str(index), str(tokens["ids"][index]), Text(repr(piece)[1:-1]), *cells)
    return table


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
