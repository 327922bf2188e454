"""The reference of all keys: complete, in both languages, and what the generator makes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from mindspeed_rl.cli import explain
from mindspeed_rl.config.errors import link_reference
from mindspeed_rl.config.keys import GROUPS, collect_keys
from mindspeed_rl.config.keys.ignored import IGNORED
from mindspeed_rl.config.loader import TOP_LEVEL
from mindspeed_rl.run.explain import key_reference as reference

ROOT = Path(__file__).resolve().parents[3]
CHINESE = re.compile(r"[\u4e00-\u9fff]")
PAGES = {"en": ROOT / "docs/keys.md", "zh": ROOT / "docs/zh/keys.md"}


@pytest.mark.parametrize("language", PAGES)
def test_the_committed_page_is_what_the_generator_makes(language: reference._Language) -> None:
    made = PAGES[language].read_text(encoding="utf-8") == reference._render_page(language)
    assert made, "run python -m mindspeed_rl.run.explain.key_reference"


def test_every_field_of_every_group_has_an_entry() -> None:
    fields = {f"{group}.{field.name}" for group, schema in GROUPS.items() for field in dataclasses.fields(schema)}
    ignored = {f"{group}.{name}" for group, schema in GROUPS.items() for name in IGNORED.get(schema.__name__, ())}
    paths = [entry.path for entry in reference._list_entries()]
    # sampling_config is a group of its own, no row
    assert len(set(paths)) == len(paths) and fields - {"generate_config.sampling_config"} | ignored <= set(paths)


def test_every_key_is_described_in_chinese() -> None:
    ignored = [item for items in IGNORED.values() for item in items.values()]
    texts = [key.zh for key in collect_keys().values()] + [text for item in ignored for text in (item.zh, item.reason[1])]
    texts += [text[1] for key in collect_keys().values() for text in (key.upstream, key.no_effect) if text is not None]
    assert [text for text in texts if not CHINESE.search(text)] == []


def test_no_chinese_heading_is_left_over() -> None:
    english = (ROOT / "docs/keys.md").read_text(encoding="utf-8")
    assert [text for text in reference._SECTIONS if text.rstrip(".") not in english] == []


def test_every_pointer_leads_to_an_anchor() -> None:
    anchors = set(re.findall(r'<a id="([^"]+)"></a>', PAGES["en"].read_text(encoding="utf-8")))
    roles = ("actor_config.lr", "critic_config.map_keys.prompt", "rl_config.actor_resource.num_npus", "rl_config")
    for path in (*roles, *collect_keys()):
        assert link_reference(path).partition("#")[2] in anchors
    assert link_reference("actor_config.lr") == "docs/keys.md#megatron_training.lr"
    groups = {path.partition(".")[0] for path in GROUPS}
    role_groups = {f"{role}_config" for role in ("actor", "ref", "reward", "critic", "teacher", "vit")}
    assert groups | role_groups == set(TOP_LEVEL)


def test_a_row_says_type_default_bounds_names_and_readers() -> None:
    english, chinese = ({entry.path: entry for entry in reference._list_entries(language)} for language in ("en", "zh"))
    gamma = english["rl_config.gamma"]
    assert (gamma.kind, gamma.default) == ("number", "1")
    assert gamma.meaning == (
        "discount of later tokens; at least 0 and at most 1. Read while `adv_estimator` is reinforce_plus_plus, remax, gae, "
        "grouped_gae"
    )
    assert chinese["rl_config.gamma"].meaning == (
        "对后面 token 的折扣；不小于 0，不大于 1。`adv_estimator` 为 reinforce_plus_plus, remax, gae, grouped_gae 时才读取"
    )
    assert english["rl_config.kl_ctrl_type"].kind == "`fixed` `adaptive`"
    assert english["megatron_training.lr"].kind == "number or null"
    assert "Only on npu" in english["megatron_training.swap_attention"].meaning
    assert "**No effect**: config.json of the model describes it" in english["megatron_training.mm_model"].meaning
    assert "*MindSpeed-RL*: skips names" in english["rl_config.verifier_function"].meaning


def test_explain_prints_the_keys_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["--keys", "clip_ratio_c"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rl_config.clip_ratio_c  [number or null, default null]\n    dual clip")
    assert explain.main(["--keys", "no_such_thing"]) == 2
    assert "no key has 'no_such_thing'" in capsys.readouterr().err
