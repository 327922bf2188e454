"""Held-out records of the base model, the supervised baseline and every seed of GRPO, by plain transformers; table and curve.

    python examples/records/compare.py FOLDER DTYPE RUN=MODEL ...     FOLDER/results.md and FOLDER/curve.svg

A RUN is the folder of a GRPO run, its MODEL what it has exported. The supervised baseline is in FOLDER/sft.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES / "real_model"), str(Path(__file__).parent)]

MAX_TOKENS = 96
BATCH = 25
#: in bfloat16 two implementations may choose another of two nearly equal tokens, and go on differently
TOLERANCE = 0.08
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 700, 36, 256
INK, REWARD, EXACT = "#808890", "#2f81f7", "#d29922"

Points = Mapping[int, Sequence[float]]  # iteration -> a value per seed


def score_model(folder: Path, rows: Sequence[Mapping[str, str]], dtype: str) -> tuple[list[str], list[float], list[float]]:
    """Returns greedy answers of transformers with their reward and their exact check."""
    import torch
    from compare import answer  # of examples/real_model
    from record_rewards import exact_record, record

    questions, labels = [row["question"] for row in rows], [row["answer"] for row in rows]
    answers: list[str] = []
    for first in range(0, len(rows), BATCH):
        answers += answer(folder, questions[first : first + BATCH], getattr(torch, dtype), MAX_TOKENS)
    pairs = list(zip(answers, labels))
    return answers, [record(*pair) for pair in pairs], [exact_record(*pair) for pair in pairs]


def read_curves(runs: Sequence[Path]) -> tuple[Points, Points]:
    """Returns held-out reward and exact share of the runs; iteration 0 is before training."""
    curves: list[dict[int, list[float]]] = []
    for name in ("eval/reward", "eval/exact_record"):
        curve: dict[int, list[float]] = {}
        for run in runs:
            for line in (run / "metrics.jsonl").read_text().splitlines():
                row = json.loads(line)
                if name in row:
                    curve.setdefault(row["iteration"], []).append(row[name])
        curves.append({iteration: values for iteration, values in sorted(curve.items()) if len(values) == len(runs)})
    return curves[0], curves[1]


def count_seeds(count: int) -> str:
    """Returns the number of seeds in words."""
    return "1 seed" if count == 1 else f"{count} seeds"


def draw(reward: Points, exact: Points) -> str:
    """Returns an SVG: the mean of the seeds as a line, and from the lowest to the highest of them as a band."""
    last = max(reward)

    def x(iteration: float) -> float:
        return LEFT + (RIGHT - LEFT) * iteration / last

    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * share

    def text(at_x: float, at_y: float, words: str, anchor: str, color: str) -> str:
        weight = "normal" if color == INK else "bold"
        place = f'x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"'
        return f'<text {place} fill="{color}" font-weight="{weight}">{words}</text>'

    def show(points: Points, color: str) -> list[str]:
        upper = [f"{x(at):.1f},{y(max(values)):.1f}" for at, values in points.items()]
        lower = [f"{x(at):.1f},{y(min(values)):.1f}" for at, values in reversed(points.items())]
        mean = [f"{x(at):.1f},{y(sum(values) / len(values)):.1f}" for at, values in points.items()]
        return [
            f'<polygon points="{" ".join(upper + lower)}" fill="{color}" fill-opacity="0.2"/>',
            f'<polyline points="{" ".join(mean)}" fill="none" stroke="{color}" stroke-width="2.5"/>',
        ]

    seeds = len(next(iter(reward.values())))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>Held-out records in {last} iterations of GRPO, {count_seeds(seeds)}</title>",
    ]
    for percent in range(0, 101, 20):
        height, opacity = y(percent / 100), 0.25 if percent else 0.9
        parts.append(f'<path d="M{LEFT} {height:.1f}H{RIGHT}" stroke="{INK}" stroke-opacity="{opacity}"/>')
        parts.append(text(LEFT - 8, height + 4, f"{percent} %", "end", INK))
    parts += [text(x(last * part / 3), BOTTOM + 20, f"{last * part / 3:.0f}", "middle", INK) for part in range(4)]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 38, "iteration", "middle", INK))
    parts += show(reward, REWARD) + show(exact, EXACT)
    parts.append(text(LEFT, 20, "held-out reward", "start", REWARD))
    parts.append(text(LEFT + 130, 20, "records that are exactly right", "start", EXACT))
    parts.append(text(RIGHT, 20, f"mean and range of {count_seeds(seeds)}", "end", INK))
    return "\n".join([*parts, "</svg>\n"])


def make_table(results: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """Returns the table of the README: mean over the models of a row, and their range where there are several."""

    def show(values: Sequence[float]) -> str:
        mean = f"{100 * sum(values) / len(values):.0f} %"
        return mean if len(values) == 1 else f"{mean} ({100 * min(values):.0f} to {100 * max(values):.0f})"

    lines = ["| model | held-out reward | exactly right |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {show(reward)} | {show(exact)} |" for name, (reward, exact) in results.items())])


def main(folder: Path, dtype: str, pairs: Sequence[str]) -> int:
    """Writes table and curve; 1 when the engines disagree or no seed has learnt."""
    rows = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    runs, models = zip(*(map(Path, pair.split("=", 1)) for pair in pairs))
    base, sft = (score_model(path, rows, dtype) for path in (folder / "model", folder / "sft" / "hf" / "latest"))
    trained = [score_model(model, rows, dtype) for model in models]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    results = {
        "SmolLM2-135M-Instruct": ([mean(base[1])], [mean(base[2])]),
        "supervised fine-tuning": ([mean(sft[1])], [mean(sft[2])]),
        f"GRPO, {count_seeds(len(runs))}": ([mean(each[1]) for each in trained], [mean(each[2]) for each in trained]),
    }
    samples = []
    improved = sorted(range(len(rows)), key=lambda index: base[1][index] - trained[0][1][index])
    for index in improved[:2]:
        before, after = (" ".join(answers[index].split()) for answers in (base[0], trained[0][0]))
        samples += [f"\n> {rows[index]['question'].splitlines()[0]}\n", f"- before: `{before}`", f"- after: `{after}`"]
    text = "\n".join([make_table(results), *samples])
    (folder / "results.md").write_text(text + "\n", encoding="utf-8")
    reward, exact = read_curves(runs)
    (folder / "curve.svg").write_text(draw(reward, exact), encoding="utf-8")
    print(text)
    measured = [json.loads((run / "report.json").read_text())["results"]["eval/reward"] for run in runs]
    if any(abs(ours - mean(each[1])) > TOLERANCE for ours, each in zip(measured, trained)):
        print("error: vLLM and transformers disagree about the same weights.", file=sys.stderr)
        return 1
    return 0 if min(results[f"GRPO, {count_seeds(len(runs))}"][0]) > mean(base[1]) + 0.1 else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
