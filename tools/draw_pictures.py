"""Draws the pictures of the guides from data of the package: `python tools/draw_pictures.py [FOLDER]`, by default docs/images.

| picture | made from |
|---|---|
| iteration.svg | the phases of a run (`run/phases.py`) |
| memory_plan.svg | the planner's bytes of a run file, by owner and phase |
| algorithms.svg | a tree of questions, whose answers are names of the catalogue |
| families.svg | the table of families in docs/models.md, which tests write |

Each has a version in Chinese, NAME_zh.svg. A test compares the files with what this program draws.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.catalogue import ADVANTAGES, POLICY_LOSSES, STAGES
from mindspeed_rl.config import load_run_config
from mindspeed_rl.config.keys.megatron import SUPERVISED_STAGES
from mindspeed_rl.planner.devices import GIB, find_device
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.phases import Phase, Phases

ROOT = Path(__file__).resolve().parents[1]
INK, GREY, LINE = "#1b1f24", "#57606a", "#8c959f"
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b5ea7", "#a6761d", "#8c8c8c", "#1b4f72"),
    *("#f0e442", "#7a2e00", "#9ad0c2", "#444444", "#c2185b", "#b3cde3"),
)
TINTS = {"rollout": "#dbeafe", "cpu": "#fef3c7", "train": "#dcfce7", "sync": "#fae8ff", "plain": "#f6f8fa"}
#: run file whose plan is drawn
PLANNED = "grpo_qwen25_7b_A3"


@dataclass
class Drawing:
    """An SVG in the making; it has a white ground, so that it can be read on dark pages too."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", bold: bool = False, fill: str = INK
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
        self.parts.append(f"<text {place}{weight}>{html.escape(words)}</text>")

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = LINE) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {place} rx="6" fill="{fill}" stroke="{stroke}"/>')

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>')

    def arrow(self, points: Sequence[tuple[float, float]]) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.4" marker-end="url(#head)"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dash: bool = False) -> None:
        style = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{LINE}"{style}/>')

    def render(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" font-family="sans-serif">\n'
            f"<title>{html.escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


# ---------------------------------------------------------------------- an iteration

#: phase, kind of place, what it does (English, Chinese), what leaves it
_STEPS: tuple[tuple[Phase, str, tuple[str, str], tuple[str, str]], ...] = (
    (Phases.GENERATE, "rollout", ("vLLM samples n responses per prompt", "vLLM 为每个 prompt 采样 n 个回答"),
     ("token ids, log-probs, weight version", "token id、log-prob、权重版本")),
    (Phases.RULE_REWARDS, "cpu", ("reward functions score them", "奖励函数打分"), ("rewards", "奖励")),
    (Phases.REF_LOG_PROBS, "train", ("reference, critic, reward model: forward passes", "参考模型、critic、奖励模型做前向"),
     ("log-probs, values, scores", "log-prob、价值、分数")),
    (Phases.ACTOR_LOG_PROBS, "train", ("Megatron: log-probs before the update", "Megatron：更新前的 log-prob"),
     ("old log-probs", "旧 log-prob")),
    (Phases.UPDATE_ACTOR, "train", ("advantages, then one step per mini-batch", "计算优势，每个 mini-batch 更新一步"),
     ("new weights", "新权重")),
    (Phases.PUSH_WEIGHTS, "sync", ("training layout to rollout layout, proven", "训练布局转推理布局，并逐位验证"),
     ("nothing: weights go from device to device", "无：权重在设备之间直接传输")),
)  # fmt: skip
_PLACES = {
    "rollout": ("devices: rollout engine", "设备：推理引擎"),
    "cpu": ("CPU: processes that can be killed", "CPU：可被终止的进程"),
    "train": ("devices: training engine", "设备：训练引擎"),
    "sync": ("devices: both", "设备：两者"),
}


def draw_iteration(zh: int) -> str:
    """Draw the phases of an iteration with where they run and what they pass on."""
    drawing = Drawing(920, 82 + 76 * len(_STEPS), ("One iteration of reinforcement learning", "强化学习的一次迭代")[zh])
    drawing.text(20, 32, drawing.title, size=18, bold=True)
    heads = ((20, ("phase", "阶段")), (250, ("what happens", "内容")), (610, ("through the data plane", "经数据平面传递")))
    for x, words in heads:
        drawing.text(x, 58, words[zh], fill=GREY)
    for index, (phase, place, does, gives) in enumerate(_STEPS):
        y = 70 + 76 * index
        drawing.box(20, y, 210, 50, TINTS[place])
        drawing.text(125, y + 22, phase.name, anchor="middle", bold=True)
        drawing.text(125, y + 40, _PLACES[place][zh], size=11, anchor="middle", fill=GREY)
        drawing.text(250, y + 30, does[zh])
        drawing.text(610, y + 30, gives[zh], fill=COLOURS[0])
        if index + 1 < len(_STEPS):
            drawing.arrow([(125, y + 50), (125, y + 75)])
    # back to the start, around the texts
    bottom = 70 + 76 * (len(_STEPS) - 1) + 50
    drawing.arrow([(125, bottom), (125, bottom + 16), (10, bottom + 16), (10, 95), (18, 95)])
    drawing.text(140, bottom + 20, ("next iteration", "下一次迭代")[zh], size=11, fill=GREY)
    return drawing.render()


# ---------------------------------------------------------------------- the planner's bars


def draw_memory_plan(zh: int) -> str:
    """Draw the bytes of a device in each phase of a run file, by owner."""
    run = draft(load_run_config(PLANNED))
    plan = plan_memory(run, find_device(run))
    phases = plan.fullest.phases
    owners = list(dict.fromkeys(owner for phase in phases for owner in phase.owners))
    title = (
        f"mindspeed-rl plan memory --config-name {PLANNED}: GiB per device by phase",
        f"mindspeed-rl plan memory --config-name {PLANNED}：各阶段每设备的显存（GiB）",
    )[zh]
    rows = -(-len(owners) // 4)
    drawing = Drawing(920, 110 + 34 * len(phases) + 24 * rows, title)
    drawing.text(20, 32, title, size=16, bold=True)
    left, right, most = 150, 890, max(plan.capacity, *(phase.total for phase in phases)) / GIB
    bottom = 56 + 34 * len(phases)

    def place(gib: float) -> float:
        return left + gib / most * (right - left)

    for gib in range(0, int(most) + 1, 10):
        drawing.line(place(gib), 50, place(gib), bottom)
        drawing.text(place(gib), bottom + 16, str(gib), size=11, anchor="middle", fill=GREY)
    for index, phase in enumerate(phases):
        y, start = 56 + 34 * index, 0.0
        drawing.text(left - 10, y + 17, phase.name, anchor="end")
        for owner, count in phase.owners.items():
            end, colour = start + count / GIB, COLOURS[owners.index(owner) % len(COLOURS)]
            drawing.bar(place(start), y, place(end) - place(start), 24, colour)
            start = end
        drawing.text(place(start) + 6, y + 17, f"{start:.1f}", size=11, fill=INK)
    drawing.line(place(plan.capacity / GIB), 44, place(plan.capacity / GIB), bottom, dash=True)
    capacity = ("capacity", "容量")[zh]
    drawing.text(place(plan.capacity / GIB), 42, f"{capacity} {plan.capacity / GIB:.0f}", size=11, anchor="end", fill=GREY)
    for index, owner in enumerate(owners):
        x, y = 20 + 222 * (index % 4), bottom + 40 + 24 * (index // 4)
        drawing.bar(x, y - 10, 12, 12, COLOURS[index % len(COLOURS)])
        drawing.text(x + 18, y, owner, size=12)
    return drawing.render()


# ---------------------------------------------------------------------- which algorithm


@dataclass(frozen=True)
class Choice:
    """An answer of the tree: what one has, and what to take.

    Attributes:
        has: what one has, in English and Chinese.
        takes: values of a run file.
        names: names of the catalogue in them.
    """

    has: tuple[str, str]
    takes: str
    names: tuple[str, ...]


#: question -> answers
TREE: tuple[tuple[tuple[str, str], tuple[Choice, ...]], ...] = (
    (("Good answers are written down", "有写好的答案"), (
        Choice(("questions with answers", "问题与答案"), "stage: sft", ("sft",)),
        Choice(("a better and a worse answer", "较好与较差的答案成对"), "stage: dpo", ("dpo",)),
        Choice(("single answers, good or bad", "单个答案，好或坏"), "stage: kto", ("kto",)),
    )),
    (("Answers can be scored", "答案可以打分"), (
        Choice(("right or wrong by a program", "由程序判断对错"), "loss_type: dapo, adv_estimator: group_norm",
               ("dapo", "group_norm")),
        Choice(("the same, a model with experts", "同上，MoE 模型"), "loss_type: gspo", ("gspo",)),
        Choice(("wrong answers grow longer", "错误回答越来越长"), "loss_type: dr_grpo", ("dr_grpo",)),
        Choice(("several rewards of different size", "多个量级不同的奖励"), "adv_estimator: gdpo", ("gdpo",)),
        Choice(("one response per prompt", "每个 prompt 一个回答"), "adv_estimator: reinforce_plus_plus",
               ("reinforce_plus_plus",)),
        Choice(("credit per token, memory for a critic", "要逐 token 归因，且放得下 critic"),
               "stage: ray_ppo, adv_estimator: gae", ("ray_ppo", "gae")),
        Choice(("a judge that only orders answers", "裁判只给出优劣次序"), "loss_type: online_dpo", ("online_dpo",)),
    )),
    (("A better model is at hand", "手头有更强的模型"), (
        Choice(("it can score the student's tokens", "它能给学生的 token 打分"), "rl_config.distillation", ()),
        Choice(("only its answers are stored", "只存有它的回答"), "stage: sft", ("sft",)),
    )),
)  # fmt: skip


def draw_algorithms(zh: int) -> str:
    """Draw the tree of questions."""
    known = {*STAGES, *SUPERVISED_STAGES, *POLICY_LOSSES, *ADVANTAGES}
    unknown = [name for _, choices in TREE for choice in choices for name in choice.names if name not in known]
    assert not unknown, f"not in the catalogue: {unknown}"
    count = sum(len(choices) for _, choices in TREE)
    drawing = Drawing(920, 70 + 38 * count + 18 * len(TREE), ("Which algorithm", "选哪种算法")[zh])
    drawing.text(20, 32, drawing.title, size=18, bold=True)
    y = 56.0
    for question, choices in TREE:
        middle = y + 38 * len(choices) / 2
        drawing.box(20, middle - 22, 230, 38, TINTS["rollout"])
        drawing.text(135, middle + 1, question[zh], size=12, anchor="middle", bold=True)
        for choice in choices:
            drawing.arrow([(250, middle - 3), (275, middle - 3), (275, y + 15), (298, y + 15)])
            drawing.box(300, y, 270, 30, TINTS["plain"])
            drawing.text(312, y + 20, choice.has[zh])
            drawing.arrow([(570, y + 15), (598, y + 15)])
            drawing.text(606, y + 20, choice.takes, fill=COLOURS[0])
            y += 38
        y += 18
    return drawing.render()


# ---------------------------------------------------------------------- models x features


def draw_families(zh: int) -> str:
    """Draw the table of families: a green field was tested, an orange one is refused."""
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    body = text[text.index("<!-- table of families: start -->") : text.index("<!-- table of families: end -->")]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in body.splitlines() if line.startswith("|")]
    head, families = rows[0][:-1], [row[:-1] for row in rows[2:]]
    title = ("Families of models and what was tested of each", "各系列模型及测试过的功能")[zh]
    drawing = Drawing(920, 96 + 22 * len(families), title)
    drawing.text(20, 30, title, size=18, bold=True)
    step = (900 - 230) / (len(head) - 1)
    for index, name in enumerate(head[1:]):
        words = name.split(" ")
        for at, word in enumerate(words):
            drawing.text(230 + step * (index + 0.5), 66 - 13 * (len(words) - 1 - at), word, size=11, anchor="middle", fill=GREY)
    fills = {"yes": COLOURS[2], "yes, slow": COLOURS[2], "refused": COLOURS[4], "-": "#eef1f4", "not run": "#ffffff"}
    for row, (family, *cells) in enumerate(families):
        y = 76 + 22 * row
        drawing.text(20, y + 13, family, size=12)
        for index, cell in enumerate(cells):
            drawing.bar(230 + step * index + 2, y, step - 4, 17, fills[cell])
    y = 76 + 22 * len(families) + 12
    names = {"yes": ("tested", "已测试"), "refused": ("refused", "会被拒绝"), "-": ("does not apply", "不适用")}
    for index, (cell, words) in enumerate(names.items()):
        drawing.bar(230 + 150 * index, y - 10, 12, 12, fills[cell])
        drawing.text(248 + 150 * index, y, words[zh], size=12)
    return drawing.render()


PICTURES = {
    "iteration": draw_iteration,
    "memory_plan": draw_memory_plan,
    "algorithms": draw_algorithms,
    "families": draw_families,
}


def main(folder: Path) -> None:
    """Write all pictures in both languages."""
    for name, draw in PICTURES.items():
        for zh, suffix in enumerate(("", "_zh")):
            (folder / f"{name}{suffix}.svg").write_text(draw(zh), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images")
