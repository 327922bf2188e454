"""`mindspeed-rl report`: one run or several runs as one HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_rl.cli.options import print_status
from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.observability.page import write_page
from mindspeed_rl.observability.run_files import read_run


def main(argv: list[str]) -> int:
    """Write the page and print the alerts; return 0, or 2 for a folder that holds no run."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl report",
        description="Write one HTML file that needs no network: curves, warnings, samples, timeline, configuration. "
        "Several runs are drawn into the same pictures; samples and timeline are those of the first.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("-o", "--output", type=Path, help="default: report.html in the folder, comparison.html for several")
    arguments = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in arguments.runs]
        output = arguments.output or (runs[0].folder / "report.html" if len(runs) == 1 else Path("comparison.html"))
        if not output.parent.is_dir():
            raise ValueError(f"--output {output}: {output.parent} is not a folder.")
        write_page(output, runs)
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    for run in runs:
        for alert in find_alerts(run.history, run.completions):
            print(clean_text(f"{run.name}, iteration {alert.iteration}: {alert.text} {alert.advice}"))
    print(f"report: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
