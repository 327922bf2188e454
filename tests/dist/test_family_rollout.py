"""The rollout engine generates with the pushed and proven weights of each family, and has the log-probs of the trainer.

It is vLLM, and transformers' own module for the families that vLLM's CPU build does not serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rollout_jobs as jobs
import tiny_families
import torch
from megatron_release import GROUPED_EXPERTS
from ranks import Ranks
from slow_layouts import EP, SP
from training_jobs import Setting

KIND = "rollout"
_QUICK = ("glm4_moe",)


def _case(*values: str) -> Any:
    return pytest.param(*values, id="-".join(values), marks=[] if values == _QUICK else [pytest.mark.slow])


def _plan(name: str, folder: Path, keys: dict[str, Any]) -> Setting:
    """Write a family's tiny model; vLLM's CPU kernel of gated delta nets takes only bfloat16."""
    halves = {"bf16": True} if name in tiny_families.HALVES else {}
    return Setting(str(tiny_families.save(name, folder)), keys | tiny_families.KEYS.get(name, {}) | halves)


def _check(name: str, report: dict[str, Any]) -> None:
    assert len(report["proven"]) == 3 and min(report["proven"]) > 10
    if name in tiny_families.HALVES:  # the median: where two experts score alike, mere rounding sends a token to another one
        assert max(report["medians"]) < 2 * _find_rounding(name, report["tokens"][0])
    else:
        assert max(report["differences"]) < 1e-4
    assert report["grad_norm"][0] > 0 and report["tokens"][0] != report["tokens"][2]


def _find_rounding(name: str, responses: list[list[int]]) -> float:
    """Return the median difference of log-probs between transformers in bfloat16 and in float32, on the same tokens."""
    model, rows = tiny_families.build(name).eval(), jobs.all_rows()
    log_probs: list[list[torch.Tensor]] = [[], []]
    for dtype, values in zip((torch.float32, torch.bfloat16), log_probs):
        model.to(dtype)
        for index, response in enumerate(responses):
            prompt = rows.input_ids[index // 2][: rows.prompt_lengths[index // 2]]
            ids = torch.cat([prompt, torch.tensor(response)])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / jobs.TEMPERATURE
            values.append(logits.log_softmax(-1).gather(1, ids[len(prompt) :, None]))
    single, half = map(torch.cat, log_probs)
    return float((single - half).abs().median())


#: with experts one, as both layouts below have the others
_ALONE = [name for name in tiny_families.ROLLED_OUT if name not in tiny_families.EXPERTS or name in _QUICK]


@pytest.mark.parametrize("name", [_case(name) for name in [*_ALONE, *tiny_families.BY_MODULE]])
def test_the_engine_has_the_trained_weights_and_the_trainer_s_log_probs(tmp_path: Path, name: str) -> None:
    setting = _plan(name, tmp_path, {})
    kind = "transformers" if name in tiny_families.BY_MODULE else "vllm"
    alone = Ranks(1, "rollout")  # a process of its own: what vLLM set up for a model without experts does for none with them
    try:
        (report,) = alone.run(jobs.learn, setting=setting, infer_tp=1, kind=kind, timeout_s=400)
    finally:
        alone.close()
    _check(name, report)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        _case(layout, name)
        for layout, names in (("TP2", tiny_families.ROLLED_OUT), ("EP2", tiny_families.EXPERTS))
        for name in names
        if name in tiny_families.ROLLED_OUT
    ],
)
def test_engines_over_two_ranks_have_the_weights_and_the_trainer_s_log_probs(tmp_path: Path, layout: str, name: str) -> None:
    training = SP if layout == "TP2" else EP | {"moe_grouped_gemm": GROUPED_EXPERTS and name != "gpt_oss"}
    setting = _plan(name, tmp_path, training)
    engine = {"infer_tp": 2} if layout == "TP2" else {"infer_tp": 1, "sharing": 2}
    _run_pair(name, setting, engine)


def _run_pair(name: str, setting: Setting, engine: dict[str, Any]) -> None:
    group = Ranks(2, "rollout")
    try:
        for report in group.run(jobs.learn, setting=setting, timeout_s=400, **engine):
            _check(name, report)
    finally:
        group.close()


@pytest.mark.parametrize(("layout", "name"), [_case(kind, name) for kind in ("TP2", "EP2") for name in tiny_families.BY_MODULE])
def test_a_module_on_each_rank_has_the_weights_of_either_layout(tmp_path: Path, layout: str, name: str) -> None:
    setting = _plan(name, tmp_path, SP if layout == "TP2" else EP)
    _run_pair(name, setting, {"infer_tp": 1, "kind": "transformers"})
