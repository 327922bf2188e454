"""Draws a run's curve as an SVG: held-out accuracy or reward, and the mean reward of what was sampled.

    python examples/quickstart/plot_curve.py runs/quickstart/grpo_run curve.svg

Reads metrics.jsonl and, for the value before the first iteration, report.json. No background and middle tones: the
picture is legible on light and on dark pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 700, 36, 256  # edges of the axes, in pixels
INK, ACCURACY, REWARD = "#808890", "#2f81f7", "#d29922"

Points = list[tuple[float, float]]  # iteration, share between 0 and 1


def read(run: Path) -> tuple[Points, Points, str]:
    """Returns held-out accuracy, or graded reward (iteration 0 is before training), sampled reward, and the name."""
    results = json.loads((run / "report.json").read_text())["results"]
    name = "accuracy" if "eval/accuracy/first" in results else "reward"
    accuracy: Points = [(0, results[f"eval/{name}/first"])]
    reward: Points = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "grpo/score/mean" in row:
            reward.append((row["iteration"], row["grpo/score/mean"]))
        if f"eval/{name}" in row and row["iteration"]:
            accuracy.append((row["iteration"], row[f"eval/{name}"]))
    return accuracy, reward, name


def draw(accuracy: Points, reward: Points, name: str) -> str:
    """Returns the SVG; a reward has three digits, an accuracy is in percent."""
    shows = (lambda share: f"{share:.1%}") if name == "accuracy" else (lambda share: f"{share:.3f}")
    last = reward[-1][0]

    def x(iteration: float) -> float:
        return LEFT + (RIGHT - LEFT) * iteration / last

    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * share

    def text(at_x: float, at_y: float, words: str, *, anchor: str = "middle", color: str = INK) -> str:
        weight = "normal" if color == INK else "bold"
        place = f'x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"'
        return f'<text {place} fill="{color}" font-weight="{weight}">{words}</text>'

    def curve(points: Sequence[tuple[float, float]], color: str, width: float, opacity: float = 1.0) -> str:
        path = " ".join(f"{x(iteration):.1f},{y(share):.1f}" for iteration, share in points)
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>Held-out {name} from {shows(accuracy[0][1])} to {shows(accuracy[-1][1])} in {last:.0f} iterations</title>",
    ]
    for percent in range(0, 101, 20):
        height, opacity = y(percent / 100), 0.25 if percent else 0.9
        parts.append(f'<path d="M{LEFT} {height:.1f}H{RIGHT}" stroke="{INK}" stroke-opacity="{opacity}"/>')
        parts.append(text(LEFT - 8, height + 4, f"{percent} %" if name == "accuracy" else f"{percent / 100:.1f}", anchor="end"))
    parts += [text(x(last * part / 4), BOTTOM + 20, f"{last * part / 4:.0f}") for part in range(5)]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 38, "iteration"))
    parts.append(curve(reward, REWARD, 1.2, 0.8))
    parts.append(curve(accuracy, ACCURACY, 2.5))
    for iteration, share in accuracy:
        parts.append(f'<circle cx="{x(iteration):.1f}" cy="{y(share):.1f}" r="3.5" fill="{ACCURACY}"/>')
    for (iteration, share), shift, anchor in ((accuracy[0], 30, "start"), (accuracy[-1], -12, "end")):
        parts.append(text(x(iteration) + 4, y(share) + shift, shows(share), anchor=anchor, color=ACCURACY))
    parts.append(text(LEFT, 20, f"held-out {name}, greedy", anchor="start", color=ACCURACY))
    parts.append(text(LEFT + 190, 20, "mean reward of the sampled responses", anchor="start", color=REWARD))
    return "\n".join([*parts, "</svg>\n"])


def main(run: Path, picture: Path) -> None:
    """Reads a run folder and writes the picture."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(draw(*read(run)), encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
