"""Writes the table of families of docs/models.md and docs/zh/models.md from what the tests really ran.

    pytest -m "" --junitxml results.xml tests/dist/test_families.py tests/dist/test_family_rollout.py \\
        tests/dist/test_prediction_layers.py tests/unit/checkpoint/test_round_trip.py
    tests/npu_sim/run.sh --junitxml simulated.xml
    python tests/dist/family_table.py results.xml simulated.xml

Several files are read as one; a later file wins. A cell is "yes" when its tests passed. Cells of tests that are in none of the
files stay as they are in the page, so that results of several runs add up.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START, END = "<!-- table of families: start -->", "<!-- table of families: end -->"

#: architecture -> (name, names of its tiny models in tests/unit/models, with prediction layers)
FAMILIES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "llama": ("Llama 2, 3, 3.1, 3.2", ("llama",), False),
    "mistral": ("Mistral", ("mistral",), False),
    "qwen2": ("Qwen2, Qwen2.5", ("qwen2-tied",), False),
    "qwen3": ("Qwen3", ("qwen3",), False),
    "mixtral": ("Mixtral", ("mixtral",), False),
    "qwen2_moe": ("Qwen2-MoE", ("qwen2-moe",), False),
    "qwen3_moe": ("Qwen3-MoE", ("qwen3-moe",), False),
    "qwen3_next": ("Qwen3-Next", ("qwen3-next",), True),
    "qwen3_5": ("Qwen3.5", ("qwen3.5",), True),
    "qwen3_5_moe": ("Qwen3.5-MoE", ("qwen3.5-moe",), True),
    "deepseek_v2": ("DeepSeek-V2-Lite", ("deepseek2-lite",), False),
    "deepseek_v3": ("DeepSeek-V3, R1, Kimi-K2", ("deepseek3",), True),
    "deepseek_v32": ("DeepSeek-V3.2", ("deepseek32",), True),
    "gemma": ("Gemma", ("gemma",), False),
    "gemma2": ("Gemma 2", ("gemma2",), False),
    "gemma3": ("Gemma 3 (text)", ("gemma3",), False),
    "glm4": ("GLM-4", ("glm4", "glm"), False),
    "glm4_moe": ("GLM-4.5, 4.6, 4.7", ("glm4-moe",), True),
    "glm5": ("GLM-5, 5.1, 5.2", ("glm5",), True),
    "minimax_m2": ("MiniMax-M2", ("minimax-m2",), False),
    "seed_oss": ("Seed-OSS", ("seed-oss",), False),
    "mimo": ("MiMo", ("mimo",), True),
    "internlm3": ("InternLM3", ("internlm3",), False),
    "phi3": ("Phi-3, Phi-4", ("phi3",), False),
    "olmo3": ("OLMo 3", ("olmo3",), False),
    "ernie4_5": ("ERNIE 4.5 (dense)", ("ernie4.5",), False),
    "ernie4_5_moe": ("ERNIE 4.5 (experts)", ("ernie4.5-moe",), False),
    "hunyuan": ("Hunyuan (dense)", ("hunyuan",), False),
    "hunyuan_moe": ("Hunyuan (experts)", ("hunyuan-moe",), False),
    "hy_v3": ("Hy3", ("hy3",), False),
    "gpt_oss": ("gpt-oss", ("gpt-oss",), False),
}
_EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("minimax_m2", "ernie4_5_moe", "hunyuan_moe", "hy_v3", "gpt_oss", "deepseek_v32", "glm5"),
)
#: which vLLM's CPU build does not serve: transformers' own module generates, a full one on each device
_BY_MODULE = ("deepseek_v32", "glm5")
_WINDOWS = ("gemma2", "gemma3", "olmo3", "gpt_oss")
_DELTA_NETS = "test_rollout.test_delta_nets_have_the_log_probs_of_transformers_after_every_sync"
_INT8 = "test_rollout.test_int8_experts_of_a_family_have_the_log_probs_of_their_definition"
#: family -> how the names of its tests on the simulated NPU begin
_SIMULATED: dict[str, str | tuple[str, ...]] = {
    "qwen2": "test_mindspeed.test_one_process",
    "qwen3_moe": "test_mindspeed.test_experts_on",
    "deepseek_v3": "test_rollout.test_latent",
    "deepseek_v32": "test_mindspeed.test_attention_to_the_tokens_of_an_indexer_trains_as_on_one_process_of_the_cpu[deepseek32",
    "glm5": "test_mindspeed.test_attention_to_the_tokens_of_an_indexer_trains_as_on_one_process_of_the_cpu[glm5",
    "qwen3_next": f"{_DELTA_NETS}[qwen3_next]",
    "qwen3_5": ("test_mindspeed.test_prediction_layers_train_as_on_the_cpu[qwen3_5_predicting", f"{_DELTA_NETS}[qwen3_5]"),
    "qwen3_5_moe": f"{_DELTA_NETS}[qwen3_5_moe]",
    **{name: f"{_INT8}[{name}]" for name in ("qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe", "hy_v3", "deepseek_v2")},
    "minimax_m2": "test_rollout.test_minimax_m2_has_the_log_probs_of_its_definition_after_every_sync",
}

_LAYOUT = "test_families.test_every_layout_trains_as_one_process_does"
_TWO_RANKS = "test_family_rollout.test_engines_over_two_ranks_have_the_weights_and_the_trainer_s_log_probs"
_ROUTING = "test_families.test_given_routing_trains_as_one_process_does"
_PREDICTION = "test_prediction_layers.test_logits_losses_and_gradients_are_those_of_the_plain_computation"
#: (English, Chinese, tests with {} for the family: all that ran must have passed)
_COLUMNS = (
    ("SFT", "SFT", ("test_families.test_loss_and_gradient_of_the_first_step_are_those_of_transformers[{}]",)),
    ("GRPO", "GRPO", ("test_family_rollout.test_the_engine_has_the_trained_weights_and_the_trainer_s_log_probs[{}]",)),
    ("LoRA", "LoRA", ("test_families.test_adapters_train_alike_on_one_rank_and_on_two[{}]",)),
    ("TP", "TP", (_LAYOUT + "[TP2 SP-{}]",)),
    ("PP", "PP", (_LAYOUT + "[PP2-{}]",)),
    ("CP", "CP", (_LAYOUT + "[CP2-{}]",)),
    ("EP", "EP", (_LAYOUT + "[EP2-{}]",)),
    ("rollout TP/EP", "rollout TP/EP", (_TWO_RANKS + "[{}]", _TWO_RANKS + "[TP2-{}]", _TWO_RANKS + "[EP2-{}]")),
    ("replay", "路由重放", (_ROUTING + "[{}]",)),
    ("MTP", "MTP", (_PREDICTION + "[{}-whole]", _PREDICTION + "[{}-detached]")),
)
_VERIFIED = ("verified on", "验证平台")


def results(paths: list[Path]) -> dict[str, str]:
    """Test name with parameters -> "passed", "skipped" or "failed"."""
    result: dict[str, str] = {}
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name', '')}"
        failed = case.find("failure") is not None or case.find("error") is not None
        result[name] = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
    return result


def _join(states: list[str]) -> str:
    """One word for several results: failed before passed before skipped."""
    return next((state for state in ("failed", "passed") if state in states), "skipped")


def cells(family: str, ran: dict[str, str]) -> list[str]:
    """Keys of the words of a row but the last: passed, skipped, failed, none (the family has no such thing), refused, slow."""
    _, tiny, predicts = FAMILIES[family]
    beginnings = [f"test_round_trip.test_round_trip_is_bit_equal[{model}-t" for model in tiny]
    beginnings += [f"test_round_trip.test_round_trip_is_bit_equal_on_the_whole_grid[{model}-tp2-pp2]" for model in tiny]
    row = [_join([state for name, state in ran.items() if name.startswith(tuple(beginnings))])]
    for name, _, tests in _COLUMNS:
        if name in ("EP", "replay") and family not in _EXPERTS or name == "MTP" and not predicts:
            row.append("none")
        elif name == "CP" and family in _WINDOWS or name == "rollout TP/EP" and family in _BY_MODULE:
            row.append("refused")
        else:
            state = _join([ran.get(test.format(family), "skipped") for test in tests])
            row.append("slow" if name == "GRPO" and family in _BY_MODULE and state == "passed" else state)
    return row


def table(ran: dict[str, str], chinese: bool, page: str) -> str:
    """The table in one language; `page` has the one before, of which cells without a result are kept."""
    words = {
        "passed": ("yes", "是"), "skipped": ("not run", "未运行"), "failed": ("**failed**", "**失败**"),
        "none": ("-", "-"), "refused": ("refused", "拒绝"), "slow": ("yes, slow", "是（慢）"),
    }  # fmt: skip
    heads = [("family", "系列"), ("convert", "转换"), *((column[0], column[1]) for column in _COLUMNS), _VERIFIED]
    lines = ["| " + " | ".join(head[chinese] for head in heads) + " |", "|" + "---|" * len(heads)]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    before = {row[0]: dict(zip(rows[0], row)) for row in rows[2:]}
    for family, (title, *_) in FAMILIES.items():
        row = [title]
        for head, cell in zip(heads[1:-1], cells(family, ran), strict=True):
            kept = before.get(title, {}).get(head[chinese], "")
            row.append(words[cell][chinese] if cell != "skipped" else kept or words[cell][chinese])
        simulated = [state for name, state in ran.items() if name.startswith(_SIMULATED.get(family, "nothing"))]
        kept = before.get(title, {}).get(_VERIFIED[chinese], "CPU")
        row.append(("CPU、模拟 NPU" if chinese else "CPU, simulated NPU") if _join(simulated) == "passed" else kept)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Writes both documents."""
    ran = results([Path(argument) for argument in sys.argv[1:]])
    for page, chinese in ((ROOT / "docs" / "models.md", False), (ROOT / "docs" / "zh" / "models.md", True)):
        before, rest = page.read_text(encoding="utf-8").split(START)
        old, after = rest.split(END)
        page.write_text(f"{before}{START}\n{table(ran, chinese, old)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
