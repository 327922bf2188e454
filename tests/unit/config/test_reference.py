"""The reference of all keys: complete, in both languages, and what the generator makes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mindspeed_rl.cli import explain
from mindspeed_rl.config import GenerateConfig, MegatronConfig, MsprobeConfig, ProfilerConfig, RLConfig, SamplingConfig
from mindspeed_rl.config.bounds import RANGES
from mindspeed_rl.config.errors import reference as pointer
from mindspeed_rl.config.explain import key_reference as reference
from mindspeed_rl.config.loader import TOP_LEVEL

ROOT = Path(__file__).resolve().parents[3]
GROUPS = (MegatronConfig, RLConfig, GenerateConfig, SamplingConfig, ProfilerConfig, MsprobeConfig)
CHINESE = json.loads((ROOT / "mindspeed_rl/config/keys/keys.zh.json").read_text(encoding="utf-8"))
PAGES = {"en": ROOT / "docs/keys.md", "zh": ROOT / "docs/zh/keys.md"}


@pytest.mark.parametrize("language", PAGES)
def test_the_committed_page_is_what_the_generator_makes(language: reference.Language) -> None:
    made = PAGES[language].read_text(encoding="utf-8") == reference.page(language)
    assert made, "run python -m mindspeed_rl.config.explain.key_reference"


def test_every_field_of_every_group_has_an_entry() -> None:
    expected = sum(len(dataclasses.fields(group)) for group in GROUPS)
    plain = [entry for entry in reference.entries() if entry.owner[0] in {group.__name__ for group in GROUPS}]
    # sampling_config is a group of its own, no row
    assert len({entry.path for entry in plain}) == len(plain) == expected - 1


def test_every_key_has_a_chinese_description_and_none_is_left_over() -> None:
    described = {(owner, name) for owner, keys in CHINESE["keys"].items() for name in keys if owner != "top"}
    needed = {entry.owner for entry in reference.entries()}
    assert needed == described
    assert set(CHINESE["keys"]["top"]) == set(reference.TOP)
    assert set(CHINESE["upstream"]) == set(reference.UPSTREAM)
    chinese = re.compile(r"[\u4e00-\u9fff]")
    texts = [text for keys in CHINESE["keys"].values() for text in keys.values()]
    plain = [text for text in (*texts, *CHINESE["sentences"].values()) if not chinese.search(text)]
    assert plain == ["AdamW"]


def test_no_chinese_sentence_is_left_over() -> None:
    english = (ROOT / "docs/keys.md").read_text(encoding="utf-8").replace("\\|", "|")
    assert [text for text in CHINESE["sentences"] if text.rstrip(".") not in english] == []


def test_notes_and_bounds_belong_to_keys() -> None:
    paths = {entry.path for entry in reference.entries()}
    assert set(reference.UPSTREAM) <= paths
    assert {path.replace("actor_config", "megatron_training") for path in RANGES} <= paths


def test_every_pointer_leads_to_an_anchor() -> None:
    anchors = set(re.findall(r'<a id="([^"]+)"></a>', PAGES["en"].read_text(encoding="utf-8")))
    for path in ("actor_config.lr", "critic_config.map_keys.prompt", "rl_config.actor_resource.num_npus", "rl_config", *RANGES):
        assert pointer(path).partition("#")[2] in anchors
    assert pointer("actor_config.lr") == "docs/keys.md#megatron_training.lr"
    groups = {path.partition(".")[0] for path in reference.GROUPS}
    assert groups | {"actor_config", "ref_config", "reward_config", "critic_config", "vit_config"} == set(TOP_LEVEL)


def test_a_row_says_type_default_bounds_names_and_readers() -> None:
    english, chinese = ({entry.path: entry for entry in reference.entries(language)} for language in ("en", "zh"))
    gamma = english["rl_config.gamma"]
    assert (gamma.kind, gamma.default) == ("number", "1")
    assert gamma.meaning == (
        "discount of later tokens; at least 0 and at most 1. Read while `adv_estimator` is reinforce_plus_plus, remax, gae"
    )
    assert chinese["rl_config.gamma"].meaning == (
        "对后面 token 的折扣；不小于 0，不大于 1。`adv_estimator` 为 reinforce_plus_plus, remax, gae 时才读取"
    )
    assert english["rl_config.kl_ctrl_type"].kind == "`fixed` `adaptive`"
    assert english["megatron_training.lr"].kind == "number or null"
    assert "Only on npu" in english["megatron_training.swap_attention"].meaning
    assert "**No effect**: text models only" in english["megatron_training.mm_model"].meaning
    assert "*MindSpeed-RL*: skips names" in english["rl_config.verifier_function"].meaning


def test_explain_prints_the_keys_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["--keys", "clip_ratio_c"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rl_config.clip_ratio_c  [number or null, default null]\n    dual clip")
    assert explain.main(["--keys", "no_such_thing"]) == 2
    assert "no key has 'no_such_thing'" in capsys.readouterr().err
