"""The reference of all keys, docs/keys.md and docs/zh/keys.md, made from the declarations, the rules and the catalogue.

`python -m mindspeed_rl.run.explain.key_reference` writes both pages; a test compares them with it.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_rl.catalogue import ADVANTAGES, POLICY_LOSSES
from mindspeed_rl.catalogue.records import Bounds, format_exact
from mindspeed_rl.config.keys import GROUPS, collect_keys, find_range
from mindspeed_rl.config.keys.generate import SamplingConfig
from mindspeed_rl.config.keys.ignored import IGNORED, AnyGroup
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.schema import ON_RESUME, Key

_Language = Literal["en", "zh"]

#: keys outside every group: type, default, meaning; then type and meaning in Chinese
_TOP: dict[str, tuple[str, str, str, str, str]] = {
    "defaults": (
        "list",
        "",
        "Hydra's list of model blocks to load, [{model: [qwen25_7b]}]; they are in `configs/model/`",
        "列表",
        "Hydra 的列表：要载入的模型块，例如 [{model: [qwen25_7b]}]，文件在 `configs/model/`",
    ),
    "platform": (
        "`auto` `npu` `cpu` `cuda`",
        "`auto`",
        "auto takes the devices of this machine",
        "`auto` `npu` `cpu` `cuda`",
        "auto、npu、cpu 或 cuda；auto 取本机已有的设备",
    ),
    "run_dir": (
        "text or null",
        "null",
        "folder of the run; a new one below `runs/` when unset",
        "文本 或 null",
        "本次运行的文件夹；不设时为 `runs/` 下的一个新文件夹",
    ),
}

#: Chinese for the first lines of the classes that declare keys, which are the headings
_SECTIONS: dict[str, str] = {
    "Shape of a decoder-only transformer.": "decoder-only transformer 的形状；通常来自模型块。",
    "Data, tokenizer and sample layout.": "数据、tokenizer 与样本形式。",
    "Parallelism: the split of a model over devices.": "并行：模型如何切分到设备。",
    "Optimizer, schedule and the communication around it.": "优化器、学习率曲线与相关通信。",
    "Loading, saving, resuming.": "读入、保存、断点续训。",
    "Recomputation, swapping, low-rank adapters.": "重计算、换出、低秩适配器。",
    "Training of the vision tower of a model that sees images.": "图像模型视觉塔的训练。",
    "Fused kernels and builder switches; off the NPU the plain modules compute the same.": (
        "融合算子与构建开关；NPU 之外普通模块的结果相同。"
    ),
    "Losses of stage sft and of the stages that compare two answers.": "阶段 sft 与比较两个回答的各阶段的损失。",
    "One role's training engine. `megatron_training` holds what all roles share.": (
        "一个角色的训练引擎。`megatron_training` 放所有角色共用的键。"
    ),
    "Sizes. Prompt-level and completion-level keys describe the same plan; `Run.plan` has the rest.": (
        "大小。按 prompt 计数与按回答计数的键描述同一个计划；其余见 `Run.plan`。"
    ),
    "Overlap of generation with training, and the age that responses may have.": "生成与训练的重叠，以及回答最多可以多旧。",
    "From rewards to advantages.": "从奖励到优势。",
    "From advantages to the policy loss.": "从优势到策略损失。",
    "KL divergence to the reference model.": "与参考模型的 KL 散度。",
    "Reward functions and models, failed scores, filters of groups.": "奖励函数与奖励模型、失败的打分、组的过滤。",
    "Samples of several turns: tools, environments, schedulers.": "多轮样本：工具、环境与调度器。",
    "Reinforcement learning: everything that is neither model, engine nor sampling.": "强化学习：模型、引擎与采样之外的一切。",
    "Rollout engine: layout, limits, offloading of training state, sampling.": "推理引擎：切分、上限、训练状态的卸载、采样。",
    "Sampling of one response.": (
        "一个回答如何采样。运行文件没有 `sampling_config` 时取这里的默认值；写了这一组就整组替换：未写的键取引擎的中性值"
        "（top_p 1.0、top_k -1、min_p 0、temperature 1.0）。"
    ),
    "Device profiler: phases, steps and content of traces; one group, `integrated`, for the workers that share a device.": (
        "设备 profiler 记录的阶段、步与内容；只有一组 `integrated`，用于共用设备的工作进程。"
    ),
    "Accuracy dumps: tensors of a run that `mindspeed-rl diff-dump` compares with another run's.": (
        "精度导出：一次运行的张量，由 `mindspeed-rl diff-dump` 与另一次运行比较。"
    ),
    "A check that the policy is not trained on: where the reward rises and the check does not, the reward is tricked.": (
        "策略不训练的检查：奖励上升而检查不升时，说明奖励被钻了空子。"
    ),
    "Models, address, keys and limits of a server; a run file with this group has no loop of its own.": (
        "训练服务的模型、地址、API key 与各项上限；有这一组的配置文件没有自己的训练循环。"
    ),
    "Accepted without effect.": "接受但不起作用的键。",
}


@dataclass(frozen=True)
class _Entry:
    """One key.

    Attributes:
        path: dotted name, which is its anchor too.
        section: first line of the class that declares it.
        kind: type, or the allowed names.
        meaning: description, bounds and conditions.
    """

    path: str
    section: str
    kind: str
    default: str
    meaning: str


def _list_entries(language: _Language = "en") -> Iterator[_Entry]:
    """Yield every key of every group; those without effect come last in their group."""
    for group in GROUPS:
        yield from _list_group(group, language)


def _list_group(group: str, language: _Language) -> Iterator[_Entry]:
    phrases, schema, index = _PHRASES[language], GROUPS[group], 0 if language == "en" else 1
    for path, key in collect_keys().items():
        if max((other for other in GROUPS if path.startswith(f"{other}.")), key=len) != group:
            continue
        name = path.removeprefix(f"{group}.").partition(".")[0]
        section = _read_heading(next(item for item in schema.__mro__ if name in vars(item).get("__annotations__", {})))
        kind, default = _describe_kind(key.kind, key.names, language), _describe_default(key.default)
        yield _Entry(path, section, kind, default, _describe_key(path, key, language))
    for name, item in IGNORED.get(schema.__name__, {}).items():
        meaning = phrases["stop"].join(((item.doc, item.zh)[index], phrases["idle"].format(item.reason[index])))
        kind, default = _describe_kind(item.kind, (), language), _describe_default(item.default)
        yield _Entry(f"{group}.{name}", "Accepted without effect.", kind, default, meaning)


def _read_heading(schema: type) -> str:
    return (schema.__doc__ or "").strip().splitlines()[0]


# --- cells -----------------------------------------------------------------------------------------------------------

_TYPES: dict[_Language, dict[object, str]] = {
    "en": {bool: "true, false", int: "whole number", float: "number", str: "text", type(None): "null", AnyGroup: "group"},
    "zh": {bool: "true、false", int: "整数", float: "数", str: "文本", type(None): "null", AnyGroup: "组"},
}


def _describe_kind(kind: object, names: tuple[str, ...], language: _Language) -> str:
    words, members, is_english = _TYPES[language], typing.get_args(kind), language == "en"
    if names:
        listed = " ".join(f"`{name}`" for name in (*names, "module:function"))
        return f"{listed} {'or' if is_english else '或'} null" if type(None) in members else listed
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return (" or " if is_english else " 或 ").join(_describe_kind(member, (), language) for member in members)
    if typing.get_origin(kind) is Literal:
        return " ".join(f"`{member}`" for member in members)
    if typing.get_origin(kind) is list:
        return f"{'list of' if is_english else '列表：'} {_describe_kind(members[0], (), language)}"
    return words[AnyGroup] if dataclasses.is_dataclass(kind) else words[kind]


def _describe_default(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return ""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{json.dumps(value, ensure_ascii=False)}`" if isinstance(value, (list, str)) else str(value)


_PHRASES: dict[_Language, dict[str, str]] = {
    "en": {
        "bounded": "{}; {}",
        "idle": "**No effect**: {}",
        "platforms": "Only on {}",
        "needs": "Read while `{}` is {}",
        "set": "set",
        "above 1": "above 1",
        "stages": "Read in stage {}",
        "experts": "Read for models with experts",
        "losses": "Read by `loss_type` {}",
        "estimators": "Read by `adv_estimator` {}",
        "supervised": "Read in supervised stages too",
        "upstream": "*MindSpeed-RL*: {}",
        "stop": ". ",
    },
    "zh": {
        "bounded": "{}；{}",
        "idle": "**无作用**：{}",
        "platforms": "只在 {} 上",
        "needs": "`{}` 为 {} 时才读取",
        "set": "已设",
        "above 1": "大于 1",
        "stages": "在阶段 {} 中读取",
        "experts": "有专家的模型才读取",
        "losses": "由 `loss_type` {} 读取",
        "estimators": "由 `adv_estimator` {} 读取",
        "supervised": "监督阶段也读取",
        "upstream": "*MindSpeed-RL*：{}",
        "stop": "。",
    },
}


def _describe_key(path: str, key: Key, language: _Language) -> str:
    phrases, index, bounds = _PHRASES[language], 0 if language == "en" else 1, find_range(path)
    description = (key.doc, key.zh)[index]
    parts = [description if bounds is None else phrases["bounded"].format(description, _describe_bounds(bounds, language))]
    if key.needs is not None and key.needs[0] == "num_experts":
        parts.append(phrases["experts"])
    elif key.needs is not None:
        other, values = key.needs
        listed = (
            phrases[values]
            if isinstance(values, str)
            else ", ".join(value if isinstance(value, str) else json.dumps(value) for value in values)
        )
        parts.append(phrases["needs"].format(other, listed))
    if key.only_on:
        parts.append(phrases["platforms"].format(", ".join(key.only_on)))
    if key.stages:
        parts.append(phrases["stages"].format(", ".join(key.stages)))
    if path.startswith("rl_config.") and key.needs is None:
        for algorithms, phrase in ((POLICY_LOSSES, "losses"), (ADVANTAGES, "estimators")):
            if listed := [name for name, record in algorithms.items() if record.may_read(path.removeprefix("rl_config."))]:
                parts.append(phrases[phrase].format(", ".join(listed)))
    if key.supervised:
        parts.append(phrases["supervised"])
    if key.no_effect is not None:
        parts.append(phrases["idle"].format(key.no_effect[index]))
    if key.upstream is not None:
        parts.append(phrases["upstream"].format(key.upstream[index]))
    # a bar would end the cell of the table
    return phrases["stop"].join(parts).replace("|", "\\|")


def _describe_bounds(bounds: Bounds, language: _Language) -> str:
    if language == "en":
        return str(bounds)
    parts = [f"{'大于' if bounds.excludes_low else '不小于'} {format_exact(bounds.low)}"] if bounds.low is not None else []
    parts += [f"{'小于' if bounds.excludes_high else '不大于'} {format_exact(bounds.high)}"] if bounds.high is not None else []
    return "，".join(parts)


# --- pages -----------------------------------------------------------------------------------------------------------

_WORDS: dict[_Language, dict[str, str]] = {
    "en": {
        "title": "All keys of a run file",
        "made": "Made from the schema by `python -m mindspeed_rl.run.explain.key_reference`; "
        "change the schema, not this page.",
        "other": "[中文](zh/keys.md)",
        "how": "Each key has an anchor, `keys.md#rl_config.clip_ratio`. `mindspeed-rl explain --keys clip` prints the rows "
        "of every key with `clip` in its name or meaning; `mindspeed-rl explain --config-name X` lists the keys of a run "
        "that have no effect in it. Hyphens in keys count as underscores; a number may be quoted or written as 1e-6.",
        "roles": "`actor_config`, `ref_config`, `reward_config`, `critic_config` and `teacher_config` take the same keys; "
        "a value of a role wins "
        "over `megatron_training`, and that over the model block.",
        "top": "Top level",
        "head": "| Key | Type | Default | Meaning |",
        "resume": "Resume with a changed key",
        "resume_how": "A checkpoint records the keys of the run that wrote it. What a run does that resumes from it (same "
        "`load` and `save`, `finetune: false`) after one of them has changed; the console names each key whose change has "
        "an effect, with both values. The position in the data is a number of prompts or samples, and that in the "
        "schedule a number of iterations, so that neither depends on the batch.",
        "resume_head": "| Keys | Effect of a change |",
        "others": "all others, such as `global_batch_size`, `mini_batch_size`, `epochs`, `weight_decay`, `clip_ratio`, "
        "`adv_estimator`, `save_interval`, `keep_last`",
    },
    "zh": {
        "title": "运行文件的所有键",
        "made": "由 `python -m mindspeed_rl.run.explain.key_reference` 从 schema 生成；请改 schema，不要改本页。",
        "other": "[English](../keys.md)",
        "how": "每个键都有锚点，例如 `keys.md#rl_config.clip_ratio`。`mindspeed-rl explain --keys clip` 打印名称或"
        "含义中带 `clip` 的所有键；`mindspeed-rl explain --config-name X` 说明一次运行中哪些键没有作用。"
        "键中的连字符视同下划线；数可以加引号，也可写成 1e-6。",
        "roles": "`actor_config`、`ref_config`、`reward_config`、`critic_config` 与 `teacher_config` 的键相同；"
        "角色自己的设置优先于 "
        "`megatron_training`，后者又优先于模型块。",
        "top": "顶层",
        "head": "| 键 | 类型 | 默认 | 含义 |",
        "resume": "改了键之后续训",
        "resume_how": "检查点记下写它的那次运行的键。下表说明改了其中某个键之后从它续训（`load` 与 `save` 相同，"
        "`finetune: false`）会怎样；改动有影响时，控制台会写出该键及其前后两个值。"
        "数据的位置按 prompt 或样本数计，学习率曲线的位置按迭代数计，"
        "因此二者都与批大小无关。",
        "resume_head": "| 键 | 改动的影响 |",
        "others": "其余所有键，例如 `global_batch_size`、`mini_batch_size`、`epochs`、`weight_decay`、`clip_ratio`、"
        "`adv_estimator`、`save_interval`、`keep_last`",
    },
}


def _render_page(language: _Language) -> str:
    """Return the page in one language."""
    words, head = _WORDS[language], [_WORDS[language]["head"], "|---|---|---|---|"]
    lines = [f"# {words['title']}", "", f"{words['other']} · {words['made']}", "", words["how"], ""]
    lines += [f"- [{group}](#{group}): {_describe_group(schema, language)}" for group, schema in GROUPS.items()]
    lines += ["", f"## {words['top']}", "", *head]
    for name, (kind, default, doc, zh_kind, zh_doc) in _TOP.items():
        kind, doc = (kind, doc) if language == "en" else (zh_kind, zh_doc)
        lines.append(f'| <a id="{name}"></a>`{name}` | {kind} | {default} | {doc} |')
    for group, schema in GROUPS.items():
        lines += ["", f'<a id="{group}"></a>', "", f"## {group}", "", _describe_group(schema, language)]
        if schema is MegatronConfig:
            lines += ["", words["roles"]]
        section = None
        for entry in _list_group(group, language):
            if entry.section != section:
                section = entry.section
                if section != _read_heading(schema):
                    lines += ["", f"### {(section if language == 'en' else _SECTIONS[section]).rstrip('.。')}"]
                lines += ["", *head]
            short = entry.path.removeprefix(f"{group}.")
            lines.append(f'| <a id="{entry.path}"></a>`{short}` | {entry.kind} | {entry.default} | {entry.meaning} |')
    return "\n".join([*lines, *_list_resume_effects(language)]) + "\n"


def _list_resume_effects(language: _Language) -> list[str]:
    """Return the lines of the table of keys by what a change of them does to a run that resumes."""
    words, index = _WORDS[language], ("en", "zh").index(language)
    lines = ["", f"## {words['resume']}", "", words["resume_how"], "", words["resume_head"], "|---|---|"]
    for effect, texts in ON_RESUME.items():
        paths = [path for path, key in collect_keys().items() if key.on_resume == effect]
        named = ", ".join(f"[`{path.rpartition('.')[2]}`](#{path})" for path in paths)
        lines.append(f"| {words['others'] if effect == 'exact' else named} | {texts[index]} |")
    return lines


def _describe_group(schema: type, language: _Language) -> str:
    heading = _read_heading(schema)
    if language == "zh":
        return _SECTIONS[heading]
    if schema is not SamplingConfig:
        return heading
    second = (schema.__doc__ or "").strip().split("\n\n")[1]
    return f"{heading} {' '.join(second.split())}".replace(" (see `ENGINE_SAMPLING`)", "")


def find_entries(text: str, language: _Language = "en") -> list[_Entry]:
    """Return the keys with `text` in their name or meaning, those with it in the name first."""
    text, entries = text.lower(), list(_list_entries(language))
    named = [entry for entry in entries if text in entry.path.lower()]
    return named + [entry for entry in entries if text in entry.meaning.lower() and entry not in named]


def main() -> None:
    """Write both pages into the project's docs/."""
    root = Path(__file__).resolve().parents[3]
    pages: dict[_Language, str] = {"en": "docs/keys.md", "zh": "docs/zh/keys.md"}
    for language, name in pages.items():
        (root / name).write_text(_render_page(language), encoding="utf-8")
        print(root / name)


if __name__ == "__main__":
    main()
