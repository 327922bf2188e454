"""The reference of all keys, docs/keys.md and docs/zh/keys.md: what the schema, the rules and the catalogue know of each.

`python -m mindspeed_rl.config.explain.key_reference` writes both pages; a test holds them against it. The Chinese descriptions are
in config/keys/keys.zh.json, by class and key; the sentences that several keys share are there by their English words.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mindspeed_rl.catalogue import ADVANTAGES, POLICY_LOSSES, readers
from mindspeed_rl.catalogue.records import Bounds, exact
from mindspeed_rl.config.bounds import bounds_of
from mindspeed_rl.config.explain.effects import MOE_KEYS, STAGE_KEYS, SUPERVISED_RL_KEYS
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig, ProfilerConfig
from mindspeed_rl.config.keys.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.schema import default_of, field_types

Language = Literal["en", "zh"]

#: dotted name of a group -> its class
GROUPS: dict[str, type] = {
    "megatron_training": MegatronConfig,
    "rl_config": RLConfig,
    "generate_config": GenerateConfig,
    "generate_config.sampling_config": SamplingConfig,
    "profiler_config.integrated": ProfilerConfig,
    "msprobe_config": MsprobeConfig,
}

#: keys outside every group
TOP: dict[str, tuple[str, str, str]] = {
    "defaults": ("list", "", "Hydra's list of model blocks to load, [{model: [qwen25_7b]}]; they lie in `configs/model/`"),
    "platform": ("`auto` `npu` `cpu` `cuda`", "`auto`", "auto takes the devices this machine has"),
    "run_dir": ("text or null", "null", "folder of the run; a new one below `runs/` when unset"),
}

#: keys whose meaning or default is another one in MindSpeed-RL
UPSTREAM: dict[str, str] = {
    "megatron_training.load": "reads Megatron checkpoints only",
    "megatron_training.data_path": "reads indexed datasets only",
    "megatron_training.log_interval": "read by dpo only",
    "rl_config.max_packing_token_size": "does not reach the three passes, which then have 4096 each",
    "rl_config.dynamic_max_batch_size": "does not reach the three passes",
    "rl_config.kl_ctrl_type": "the adapted coefficient never reaches the loss",
    "rl_config.beta": "has the default 0.1 and is never read",
    "rl_config.advantage_whiten": "never read",
    "rl_config.verifier_parallel": "never read",
    "rl_config.verifier_timeout": "never read",
    "rl_config.verifier_function": "skips names it does not know",
    "rl_config.adv_estimator": "group_norm and gae only",
    "rl_config.kl_penalty": "kl, abs, mse and low_var_kl only",
    "rl_config.loss_type": "no such key; the token mean is taken in each micro-batch, here over the global batch",
    "rl_config.use_integrated_worker": "false is documented but not supported",
    "rl_config.log_max_throughput": "read by grpo only",
    "rl_config.blocking": "false waits for single rows without a limit; here wait_timeout_s ends a wait",
    "generate_config.sampling_config.temperature": "a group sampling_config without it fails in the workers",
}

_CHINESE = Path(__file__).parents[1] / "keys" / "keys.zh.json"
_PAGES: dict[Language, str] = {"en": "docs/keys.md", "zh": "docs/zh/keys.md"}


@dataclass(frozen=True)
class Entry:
    """One key.

    Attributes:
        path: dotted name, which is its anchor too.
        section: first sentence of the class that declares it.
        owner: class and field by which keys.zh.json has it.
        kind: type, or the allowed names.
        meaning: description and, behind it, bounds and conditions.
    """

    path: str
    section: str
    owner: tuple[str, str]
    kind: str
    default: str
    meaning: str


@cache
def _chinese() -> dict[str, Any]:
    return json.loads(_CHINESE.read_text(encoding="utf-8"))


def entries(language: Language = "en") -> Iterator[Entry]:
    """Yield every key of every group in the order of the schema."""
    for group, schema in GROUPS.items():
        yield from _entries(group, schema, language)


def _entries(group: str, schema: type, language: Language, section: str | None = None) -> Iterator[Entry]:
    hints = field_types(schema)
    for field in _in_order(schema):
        path, kind = f"{group}.{field.name}", hints[field.name]
        if path in GROUPS:
            continue
        heading = section if section is not None else _declaring(schema, field.name)
        inner = next((member for member in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(member)), None)
        yield Entry(
            path=path,
            section=heading,
            owner=(schema.__name__, field.name),
            kind=_kind(kind, field.metadata["names"], language),
            default=_default(default_of(field)),
            meaning=_meaning(path, schema, field, language),
        )
        if isinstance(inner, type):
            yield from _entries(path, inner, language, heading)


def _in_order(schema: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of the class itself, then those of its bases from left to right; a dataclass has them the other way."""
    fields = {field.name: field for field in dataclasses.fields(schema)}
    return [fields[name] for item in schema.__mro__ for name in vars(item).get("__annotations__", {}) if name in fields]


def _declaring(schema: type, name: str) -> str:
    """Return what the class that declares a field says of itself."""
    return _first_line(next(item for item in schema.__mro__ if name in vars(item).get("__annotations__", {})))


# --- cells -----------------------------------------------------------------------------------------------------------

_TYPES: dict[Language, dict[Any, str]] = {
    "en": {bool: "true, false", int: "whole number", float: "number", str: "text", type(None): "null", list: "list of"},
    "zh": {bool: "true、false", int: "整数", float: "数", str: "文本", type(None): "null", list: "列表："},
}


def _kind(kind: Any, names: tuple[str, ...], language: Language) -> str:
    words, members = _TYPES[language], typing.get_args(kind)
    if names:
        listed = " ".join(f"`{name}`" for name in (*names, "module:function"))
        return f"{listed} {'or' if language == 'en' else '或'} null" if type(None) in members else listed
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return (" or " if language == "en" else " 或 ").join(_kind(member, (), language) for member in members)
    if typing.get_origin(kind) is Literal:
        return " ".join(f"`{member}`" for member in members)
    if typing.get_origin(kind) is list:
        return f"{words[list]} {_kind(members[0], (), language)}"
    if dataclasses.is_dataclass(kind):
        return "group" if language == "en" else "组"
    return words[kind]


def _default(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return ""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{json.dumps(value, ensure_ascii=False)}`" if isinstance(value, (list, str)) else str(value)


_PHRASES: dict[Language, dict[str, str]] = {
    "en": {
        "bounded": "{}; {}",
        "idle": "**No effect**: {}",
        "platforms": "Only on {}",
        "needs": "Read while `{}` is {}",
        "stages": "Read in stage {}",
        "experts": "Read for models with experts",
        "losses": "Read by `loss_type` {}",
        "estimators": "Read by `adv_estimator` {}",
        "supervised": "Read in supervised stages too",
        "upstream": "*MindSpeed-RL*: {}",
        "to": "{} to {}",
        "stop": ". ",
    },
    "zh": {
        "bounded": "{}；{}",
        "idle": "**无作用**：{}",
        "platforms": "只在 {} 上",
        "needs": "`{}` 为 {} 时才读取",
        "stages": "在阶段 {} 中读取",
        "experts": "有专家的模型才读取",
        "losses": "由 `loss_type` {} 读取",
        "estimators": "由 `adv_estimator` {} 读取",
        "supervised": "监督阶段也读取",
        "upstream": "*MindSpeed-RL*：{}",
        "to": "{} 到 {}",
        "stop": "。",
    },
}


def _meaning(path: str, schema: type, field: dataclasses.Field[Any], language: Language) -> str:
    phrases, facts, name = _PHRASES[language], field.metadata, field.name
    description = _description(schema, field, language)
    bounds = bounds_of(path)
    parts = [description if bounds is None else phrases["bounded"].format(description, _bounds(bounds, language))]
    if facts["needs"]:
        other, values = facts["needs"]
        parts.append(phrases["needs"].format(other, _listed(values, language)))
    if facts["only_on"]:
        parts.append(phrases["platforms"].format(", ".join(facts["only_on"])))
    if schema is MegatronConfig and name in STAGE_KEYS:
        parts.append(phrases["stages"].format(", ".join(STAGE_KEYS[name])))
    if schema is MegatronConfig and name in MOE_KEYS and name != "num_experts":
        parts.append(phrases["experts"])
    if schema is RLConfig and not facts["needs"]:
        for table, word in ((POLICY_LOSSES, "losses"), (ADVANTAGES, "estimators")):
            if who := readers(table, name):
                parts.append(phrases[word].format(", ".join(who)))
    if schema is RLConfig and name.startswith(SUPERVISED_RL_KEYS):
        parts.append(phrases["supervised"])
    if facts["no_effect"]:
        reason = facts["no_effect"] if language == "en" else _chinese()["sentences"][facts["no_effect"]]
        parts.append(phrases["idle"].format(reason))
    if path in UPSTREAM:
        note = UPSTREAM[path] if language == "en" else _chinese()["upstream"][path]
        parts.append(phrases["upstream"].format(note))
    # a bar would end the cell of the table
    return phrases["stop"].join(parts).replace("|", "\\|")


def _description(schema: type, field: dataclasses.Field[Any], language: Language) -> str:
    return field.metadata["doc"] if language == "en" else _chinese()["keys"][schema.__name__][field.name]


def _bounds(bounds: Bounds, language: Language) -> str:
    if language == "en":
        return str(bounds)
    parts = [f"{'大于' if bounds.excludes_low else '不小于'} {exact(bounds.low)}"] if bounds.low is not None else []
    parts += [f"{'小于' if bounds.excludes_high else '不大于'} {exact(bounds.high)}"] if bounds.high is not None else []
    return "，".join(parts)


def _listed(values: tuple[Any, ...], language: Language) -> str:
    if len(values) > 2 and all(isinstance(value, int) for value in values):
        return _PHRASES[language]["to"].format(values[0], values[-1])
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in values)


# --- pages -----------------------------------------------------------------------------------------------------------

_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "title": "All keys of a run file",
        "made": "Made from the schema by `python -m mindspeed_rl.config.explain.key_reference`; "
        "change the schema, not this page.",
        "other": "[中文](zh/keys.md)",
        "how": "Each key has an anchor, `keys.md#rl_config.clip_ratio`. `mindspeed-rl explain --keys clip` prints what is here "
        "of every key with `clip` in its name or meaning; `mindspeed-rl explain --config-name X` says which keys of a run "
        "have no effect in it. Hyphens in keys count as underscores; a number may be quoted or written as 1e-6.",
        "roles": "`actor_config`, `ref_config`, `reward_config` and `critic_config` take the same keys; what a role sets wins "
        "over `megatron_training`, and that over the model block.",
        "top": "Top level",
        "head": "| Key | Type | Default | Meaning |",
    },
    "zh": {
        "title": "运行文件的所有键",
        "made": "由 `python -m mindspeed_rl.config.explain.key_reference` 从 schema 生成；"
        "请改 schema 与 keys.zh.json，不要改本页。",
        "other": "[English](../keys.md)",
        "how": "每个键都有锚点，例如 `keys.md#rl_config.clip_ratio`。`mindspeed-rl explain --keys clip` 打印名称或"
        "含义中带 `clip` 的所有键；`mindspeed-rl explain --config-name X` 说明一次运行中哪些键没有作用。"
        "键中的连字符视同下划线；数可以加引号，也可写成 1e-6。",
        "roles": "`actor_config`、`ref_config`、`reward_config` 与 `critic_config` 的键相同；角色自己的设置优先于 "
        "`megatron_training`，后者又优先于模型块。",
        "top": "顶层",
        "head": "| 键 | 类型 | 默认 | 含义 |",
    },
}


def page(language: Language) -> str:
    """Return the page in one language."""
    words = _WORDS[language]
    lines = [f"# {words['title']}", "", f"{words['other']} · {words['made']}", "", words["how"], ""]
    lines += [f"- [{group}](#{group}): {_about(schema, language)}" for group, schema in GROUPS.items()]
    lines += ["", f"## {words['top']}", "", words["head"], "|---|---|---|---|"]
    for name, (kind, default, doc) in TOP.items():
        text = doc if language == "en" else _chinese()["keys"]["top"][name]
        lines.append(f'| <a id="{name}"></a>`{name}` | {_translated_kind(kind, language)} | {default} | {text} |')
    for group, schema in GROUPS.items():
        lines += ["", f'<a id="{group}"></a>', "", f"## {group}", "", _about(schema, language)]
        if schema is MegatronConfig:
            lines += ["", words["roles"]]
        section = None
        for entry in _entries(group, schema, language):
            if entry.section != section:
                section = entry.section
                if section != _first_line(schema):
                    lines += ["", f"### {_sentence(section, language).rstrip('.。')}"]
                lines += ["", words["head"], "|---|---|---|---|"]
            short = entry.path.removeprefix(f"{group}.")
            lines.append(f'| <a id="{entry.path}"></a>`{short}` | {entry.kind} | {entry.default} | {entry.meaning} |')
    return "\n".join(lines) + "\n"


def _first_line(schema: type) -> str:
    return (schema.__doc__ or "").strip().splitlines()[0]


def _about(schema: type, language: Language) -> str:
    if schema is SamplingConfig and language == "en":
        rest = (schema.__doc__ or "").strip().split("\n\n")[1]
        return f"{_first_line(schema)} {' '.join(rest.split())}".replace(" (see `ENGINE_SAMPLING`)", "")
    return _sentence(_first_line(schema), language)


def _sentence(text: str, language: Language) -> str:
    return text if language == "en" else _chinese()["sentences"][text]


def _translated_kind(kind: str, language: Language) -> str:
    return kind if language == "en" else {"list": "列表", "text or null": "文本 或 null"}.get(kind, kind)


def matching(text: str, language: Language = "en") -> list[Entry]:
    """Return the keys with `text` in their name or meaning, those with it in the name first."""
    text = text.lower()
    everything = list(entries(language))
    named = [entry for entry in everything if text in entry.path.lower()]
    return named + [entry for entry in everything if text in entry.meaning.lower() and entry not in named]


def main() -> None:
    """Write both pages into the project's docs/."""
    root = Path(__file__).resolve().parents[2]
    for language, name in _PAGES.items():
        (root / name).write_text(page(language), encoding="utf-8")
        print(root / name)


if __name__ == "__main__":
    main()
