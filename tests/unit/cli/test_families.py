"""Every family and stage from a folder with only config.json and a tokenizer: `new`, `explain`, `plan`, `promise` and `fit`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import transformers
from scripts import load_script

from mindspeed_rl.cli.main import main
from mindspeed_rl.config.keys.megatron import SUPERVISED_STAGES
from mindspeed_rl.models import ARCHITECTURES
from mindspeed_rl.rewards import REWARDS

sys.path.append(str(Path(__file__).parents[1] / "models"))
import tiny_models

EXAMPLE = load_script("examples/vision/make_task.py")
#: name of a family -> its tiny configuration in tests/unit/models, where that has another name
TEXT = {
    **{name: name.replace("_", "-") for name in ("qwen2_moe", "qwen3_moe", "qwen3_next", "glm4_moe", "minimax_m2", "seed_oss")},
    **{"qwen3_5": "qwen3.5", "qwen3_5_moe": "qwen3.5-moe", "deepseek_v2": "deepseek2-lite", "deepseek_v3": "deepseek3"},
    **{"deepseek_v32": "deepseek32", "ernie4_5": "ernie4.5", "ernie4_5_moe": "ernie4.5-moe", "hunyuan_moe": "hunyuan-moe"},
    **{"hy_v3": "hy3", "gpt_oss": "gpt-oss"},
}
VISION = {"qwen2_5_vl": "qwen2.5", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen3_5_vl": "qwen3.5"}
#: sizes for which the CPU's rollout engine has kernels
SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "head_dim": 32, "max_position_embeddings": 4096, "v_head_dim": 64,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
    "index_head_dim": 128,
}  # fmt: skip
#: kind of a task -> more words of `new`
KINDS: dict[str, Callable[[str], list[str]]] = {
    "sft": lambda model: [],
    "dpo": lambda model: [],
    "maths": lambda model: [],
    "ppo": lambda model: [],
    "distillation": lambda model: ["--teacher", model],
}

def _build(family: str) -> dict[str, Any]:
    """Content of config.json."""
    if family == "qwen3_5_moe_vl":
        seeing = tiny_vision.CONFIGS["qwen3.5"].to_dict()
        config = transformers.Qwen3_5MoeConfig(
            text_config={**seeing["text_config"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            vision_config=seeing["vision_config"],
        )
        return {**config.to_dict(), "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    if family in VISION:
        config = tiny_vision.CONFIGS[VISION[family]]
        return {**config.to_dict(), "architectures": [type(config).__name__.replace("Config", "ForConditionalGeneration")]}
    name = TEXT.get(family, family)
    config = tiny_models.CONFIGS[name]()
    class_name = type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    hf_class, kind = tiny_models.RENAMED.get(name, (class_name, config.model_type))
    return {**config.to_dict(), "architectures": [hf_class], "model_type": kind}


def _write(family: str, folder: Path) -> str:
    folder.mkdir()
    config, tokenizer = _build(family), EXAMPLE.make_tokenizer()
    text = config.get("text_config", config)
    text |= {name: value for name, value in SIZES.items() if text.get(name) is not None}
    tokenizer.save_pretrained(folder)
    if "vision_config" in config:
        ids = [tokenizer.convert_tokens_to_ids(token) for token in EXAMPLE.SPECIAL]
        config |= dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), ids[3:]))
        config["vision_config"]["out_hidden_size"] = text["hidden_size"]
        width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        rope = text["rope_parameters"]
        rope["mrope_section"] = [size * width // 16 for size in rope["mrope_section"]]  # heads had 16 numbers
        EXAMPLE.save_processor(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(autouse=True)
def rewards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the tasks register is forgotten after a test."""
    kept = dict(REWARDS)
    yield
    REWARDS.clear()
    REWARDS.update(kept)


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_all_commands_take_the_folder_of_a_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, failed = _write(family, tmp_path / "model"), list[tuple[str, ...]]()

    def call(*words: str) -> str:
        code, output = main([*words]), capsys.readouterr()
        problems = output.out.partition("INVALID\n")[2].splitlines()
        # explain shows the run of a folder without weights, and that these are missing
        if code != 0 and not (words[0] == "explain" and problems and all("no weights (" in line for line in problems)):
            failed.append((*words, output.err[-500:] + output.out[-300:]))
        return output.out

    sizes = "--npus 2 --prompt 512 --response 512 --prompts 8 --samples 4 --top 1".split()
    assert "on 2 x A3" in call("plan", "fit", "--model", model, *sizes), failed
    for kind, words in KINDS.items():
        monkeypatch.chdir(tmp_path)
        call("new", kind, "--kind", kind, "--model", model, *words(model))
        monkeypatch.chdir(tmp_path / kind)
        call("explain", "--config", "run.yaml")
        changes = [f"megatron_training.stage={stage}" for stage in SUPERVISED_STAGES] if kind == "sft" else [""]
        for change in changes:
            call("plan", "memory", "--config", "run.yaml", *filter(None, [change]))
            call("promise", "run.yaml", *filter(None, [change]))
    assert not failed, "\n".join(map(str, failed))
