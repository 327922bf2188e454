"""The page "which algorithm", docs/which_algorithm.md and its Chinese twin, made from the catalogue.

`python -m mindspeed_rl.run.explain.algorithm_page` writes both; a test compares them with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mindspeed_rl.catalogue import ADVANTAGES, POLICY_LOSSES
from mindspeed_rl.catalogue.guide import ADVICE, NOT_AVAILABLE
from mindspeed_rl.catalogue.records import Algorithm, PolicyLoss
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.run.objective import build_objective

_Language = Literal["en", "zh"]
_FAMILIES: dict[str, Mapping[str, Algorithm]] = {"loss_type": POLICY_LOSSES, "adv_estimator": ADVANTAGES}

_TEXTS: dict[_Language, dict[str, str]] = {
    "en": {
        "title": "# Which algorithm",
        "head": "Made from the catalogue by `python -m mindspeed_rl.run.explain.algorithm_page`; formulas have the default\n"
        "numbers. Notation, differences and the other parts of the loss: [algorithms](algorithms.md). `mindspeed-rl explain`\n"
        "prints the whole loss of a run file. Several names combine: one `adv_estimator`, `loss_type`, KL and correction.\n"
        "The [optimizer](algorithms.md#optimizer-megatron_trainingoptimizer), `adam` or `muon`, is independent of them.",
        "loss_type": "## Policy losses: `rl_config.loss_type`",
        "adv_estimator": "## Advantages: `rl_config.adv_estimator`",
        "row": "| name | what it is | use it when | keys | paper | verl | ms-swift | TRL |",
        "missing": "## Names of other projects that are not available",
        "missing_row": "| name | key | what it is, and the nearest that is here |",
    },
    "zh": {
        "title": "# 选哪种算法",
        "head": "由 `python -m mindspeed_rl.run.explain.algorithm_page` 根据目录生成；公式中的数为默认值。\n"
        "记号、差异和损失的其他部分见[算法](algorithms.md)。`mindspeed-rl explain` 会打印一个配置文件的完整损失。\n"
        "各部分可组合：一个 `adv_estimator`、一个 `loss_type`、一种 KL、一种修正。\n"
        "[优化器](algorithms.md#优化器megatron_trainingoptimizer)（`adam` 或 `muon`）与它们无关。",
        "loss_type": "## 策略损失：`rl_config.loss_type`",
        "adv_estimator": "## 优势：`rl_config.adv_estimator`",
        "row": "| 名称 | 内容 | 何时使用 | 键 | 论文 | verl | ms-swift | TRL |",
        "missing": "## 其他项目有而这里没有的名称",
        "missing_row": "| 名称 | 键 | 内容，以及这里最接近的（英文） |",
    },
}


def render_page(language: _Language) -> str:
    """Return the page in a language."""
    texts = _TEXTS[language]
    lines = [texts["title"], "", texts["head"]]
    for key, table in _FAMILIES.items():
        lines += ["", texts[key], "", texts["row"], "|---|---|---|---|---|---|---|---|"]
        lines += [_render_row(key, name, record, language) for name, record in table.items()]
    lines += ["", texts["missing"], "", texts["missing_row"], "|---|---|---|"]
    lines += [f"| `{name}` | `{key}` | {text} |" for key, names in NOT_AVAILABLE.items() for name, text in names.items()]
    return "\n".join(lines) + "\n"


def _render_row(key: str, name: str, record: Algorithm, language: _Language) -> str:
    advice, rl = ADVICE[key][name], RLConfig(n_samples_per_prompt=8)
    rl = replace(rl, loss_type=name) if isinstance(record, PolicyLoss) else replace(rl, adv_estimator=name)
    if "clip_ratio_high" in record.bounds:  # the clip of a ratio is not a cap
        rl = replace(rl, clip_higher_enable=True, clip_ratio_high=record.bounds["clip_ratio_high"].default or 1.0)
    objective = build_objective(rl, "ray_grpo", max_response_length=1024)
    formula = (record.format_formula(objective.numbers()) or record.target).replace("|", "\\|")
    if isinstance(record, PolicyLoss):
        formula += f"; {record.normalizer}" + ("" if record.level == "token" else f", r of the {record.level}")
    keys = ", ".join(f"`{name}`" for name in sorted(record.reads or ()))
    paper = f"[{advice.paper}](https://arxiv.org/abs/{advice.paper})" if advice.paper else ""
    cells = (f"`{name}`", formula, advice.use[language == "zh"], keys, paper, advice.verl, advice.swift, advice.trl)
    return f"| {' | '.join(cells)} |"


def write_pages(docs: Path) -> None:
    """Write both pages below a folder of guides."""
    pages: dict[_Language, Path] = {"en": docs / "which_algorithm.md", "zh": docs / "zh" / "which_algorithm.md"}
    for language, path in pages.items():
        path.write_text(render_page(language), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(__file__).parents[3] / "docs")
