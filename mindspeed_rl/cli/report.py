"""`mindspeed-rl report`: one run or several runs as one HTML file."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.cli.options import print_status
from mindspeed_rl.config.keys import PATH_KEYS
from mindspeed_rl.files import write_file
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.observability.page import collect_figures, write_page
from mindspeed_rl.observability.picture import Line, draw_chart
from mindspeed_rl.observability.run_files import RunFiles, read_run

#: parts of the names of keys whose values are the user's own, and texts that can only be names of algorithms
_PRIVATE = ("host", "url", "token_file", "project", "exp_name", "run_name", "path", "prefix", "experiment", "command", "env")
_PLAIN = re.compile(r"[A-Za-z][\w+-]{0,39}")


def main(argv: list[str]) -> int:
    """Write the page and print the alerts; return 0, or 2 for a folder that holds no run."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl report",
        description="Write one HTML file that needs no network: curves, warnings, samples, timeline, configuration. "
        "Several runs are drawn into the same pictures; samples and timeline show the first run.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("-o", "--output", type=Path, help="default: report.html in the folder, comparison.html for several")
    parser.add_argument(
        "--share", action="store_true",
        help="leave out private content: samples, paths, hosts, names of projects, texts of errors; default: share.html",
    )  # fmt: skip
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write each chart as a picture, for slides")
    arguments = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in arguments.runs]
        name = "share.html" if arguments.share else "report.html"
        output = arguments.output or (runs[0].folder / name if len(runs) == 1 else Path(name.replace("report", "comparison")))
        if arguments.share:
            runs = [_make_shareable(run, index) for index, run in enumerate(runs, 1)]
        if not output.parent.is_dir():
            raise ValueError(f"--output {output}: {output.parent} is not a folder.")
        write_page(output, runs)
        pictures = [] if arguments.png is None else _write_pictures(arguments.png, runs)
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    for run in runs:
        for alert in run.find_alerts():
            print(clean_text(f"{run.name}, iteration {alert.iteration}: {alert.text} {alert.advice}"))
    print(f"report: {output}")
    if arguments.png is not None:
        print(f"pictures: {arguments.png} ({', '.join(pictures) or 'no chart has values'})")
    return 0


def _write_pictures(folder: Path, runs: Sequence[RunFiles]) -> list[str]:
    """Write the charts of the page as PNG files; return their names."""
    names, several = list[str](), len(runs) > 1
    for chart in collect_figures(runs)["charts"]:
        lines = [
            Line(f"{runs[line['run']].name}: {line['label']}" if several else line["label"], line["x"], line["y"])
            for line in chart["lines"]
        ]
        name = re.sub(r"\W+", "_", chart["title"].lower()).strip("_") + ".png"
        write_file(folder / name, draw_chart(chart["title"], lines, unit=chart["unit"], log=chart["log"]), makes_folder=True)
        names.append(name)
    return names


def _make_shareable(run: RunFiles, index: int) -> RunFiles:
    """Return the figures of a run, its versions and the settings that name nothing of the user's."""
    report = run.report
    names = ("mindspeed_rl", "python", "machine", "versions", "planned_iterations")
    public = {name: report[name] for name in names if name in report}
    public["outcome"] = str(report.get("outcome", "running")).partition(":")[0].partition(";")[0]
    public["plan"] = {name: value for name, value in report.get("plan", {}).items() if name in ("chip", "rows")}
    public["config_set"] = _select_settings(report.get("config_set", {}))
    title = str(public["config_set"].get("megatron_training", {}).get("stage", "run"))
    return RunFiles(Path(f"{title}-{index}"), run.history, report=public | {"title": title})


def _select_settings(group: Mapping[str, object]) -> dict[str, Any]:
    """Return the numbers, switches and names of algorithms of a group, without names and places that are the user's own."""
    settings: dict[str, Any] = {}
    for name, value in group.items():
        items = value if isinstance(value, list) else [value]
        if isinstance(value, Mapping):
            settings[name] = _select_settings(value)
        elif name in PATH_KEYS or any(word in name for word in _PRIVATE):
            continue
        elif all(not isinstance(item, str) or _PLAIN.fullmatch(item) for item in items):
            settings[name] = value
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
