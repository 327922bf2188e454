"""Drafts of trained multi-token-prediction layers: their weights come with each weight sync, and responses stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rollout_jobs
import tiny_prediction
from ranks import Ranks
from training_jobs import Setting

KIND = "rollout"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("glm4_moe", 1), ("deepseek_v3", 2)])
def test_drafts_come_from_the_trained_layers_and_change_no_token(
    ranks: Callable[[int], Ranks], tmp_path: Path, family: str, layers: int
) -> None:
    folder = tiny_prediction.Predicting.build(family).save(tmp_path / family)
    keys = {"mtp_num_layers": layers, "mtp_loss_scaling_factor": 1.0, "mtp_detach_heads": True}
    setting = Setting(str(folder), keys, micro_batch_size=16)
    (plain,) = ranks(1).run(rollout_jobs.learn_with_drafts, setting=setting, drafts=False, timeout_s=300)
    (drafted,) = ranks(1).run(rollout_jobs.learn_with_drafts, setting=setting, drafts=True, timeout_s=300)
    assert drafted["tokens"] == plain["tokens"]
    assert max(drafted["differences"] + plain["differences"]) < 1e-4
    # the parameters of the layers are proven too, and what trained is what drafts
    assert min(drafted["proven"]) > max(plain["proven"])
    assert drafted["changed"] > 0.01 and drafted["is_trained"]
    shares = [accepted / proposed for proposed, accepted, _ in drafted["drafts"]]
    assert shares[-1] > shares[0]
