"""`moe_grouped_gemm` is refused where Megatron would silently build experts one by one."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import transformers
from megatron_release import GROUPED_EXPERTS, RELEASE

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models import plan, specs

GROUPED = MegatronConfig(moe_grouped_gemm=True)
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("release", ["0.17.1", "0.18.0", "0.17.0rc1"])
def test_a_release_without_grouped_experts_refuses_the_key(moe: Path, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"megatron-core": release}.__getitem__)
    with pytest.raises(
        ValueError, match=rf"^moe_grouped_gemm: megatron-core {release} has no grouped experts .*0\.16 was the last"
    ):
        plan.plan_model(GROUPED, moe)
    plan.plan_model(MegatronConfig(), moe)


def test_a_release_with_them_takes_it_and_a_model_without_experts_never_minds(
    moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.Qwen3Config(**SIZES).save_pretrained(tmp_path)
    for release, folder in (("0.16.1", moe), ("0.17.1", tmp_path)):
        monkeypatch.setattr(importlib.metadata, "version", {"megatron-core": release}.__getitem__)
        plan.plan_model(GROUPED, folder)


def test_the_installed_megatron_has_them_up_to_the_release_that_the_refusal_names() -> None:
    last = ".".join(map(str, plan._LAST_WITH_GROUPED_EXPERTS))
    assert (specs.GROUPED_EXPERTS is not None) == RELEASE.startswith(f"{last}.") == GROUPED_EXPERTS
