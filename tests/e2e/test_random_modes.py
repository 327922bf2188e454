"""Complete runs of random combinations, of the modes that the product of features has not: elastic rollout, and videos.

Both need what a product's run has not: servers with devices of their own, and processes that load models of images. What
trained is compared with what the engines sampled; the loss is computed again in float64 from the saved rollouts.

`RANDOM_MODES_SEED=N` draws others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_command import finished, overrides
from test_elastic_run import ELASTIC, check_consumed
from test_rollout_modes import iterations
from test_video_run import GRPO, command, metrics, model
from test_video_run import task as videos  # noqa: F401  (a fixture)

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli.parity import replay
from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.config.model_metadata import VISION_VARIABLE
from mindspeed_rl.run.resolve import resolve

pytestmark = [pytest.mark.slow, pytest.mark.extra]

_SEED = int(os.environ.get("RANDOM_MODES_SEED", "1"))
_SAVED = "rl_config.save_rollouts_interval=1"
_NOT_DISTRIBUTED = "actor_config.use_distributed_optimizer=false"
_TARGETS = "+actor_config.lora_target_modules=[linear_qkv,linear_proj]"
_ADAPTERS = [_TARGETS, "+actor_config.lora_r=4", "+actor_config.lora_alpha=8"]
#: each is in a run or not; those that the rules refuse together are drawn again
_BOTH: Mapping[str, Sequence[str]] = {
    "adapters": _ADAPTERS,
    "fsdp": ["+actor_config.engine=fsdp", _NOT_DISTRIBUTED],
    "muon": ["+actor_config.optimizer=muon", _NOT_DISTRIBUTED],
    "delta": ["+generate_config.update_weight_mode=delta"],
    "recorded": ["+rl_config.old_log_probs=rollout"],
    "sync_ref": ["+rl_config.sync_ref_model=true", "+rl_config.ref_model_sync_steps=1", "+rl_config.ref_model_mixup_alpha=0.5"],
    "correction": ["+rl_config.rollout_importance_sampling_mode=token_truncate"],
    "recompute": [f"+actor_config.recompute_{name}" for name in ("granularity=full", "method=uniform", "num_layers=1")],
    "prefix_caching": ["+generate_config.enable_prefix_caching=true"],
    "offload": ["+generate_config.offload_train_optimizer=true"],
    "budget": ["+rl_config.use_dynamic_bsz=true", "+rl_config.max_packing_token_size=512"],
    "copies": ["+megatron_training.check_weight_copies_interval=1"],
}
_ELASTIC: Mapping[str, Sequence[str]] = {
    **_BOTH,
    "drafts": ["+generate_config.speculative_config={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 3}"],
    "partial": ["+rl_config.partial_rollout=true"],
    "wait": ["+rl_config.max_off_policy_strategy=wait"],
    "eager": ["+rl_config.elastic_rollout_low=0.9", "+rl_config.elastic_rollout_high=1.5"],
}


def draw(name: str, options: Mapping[str, Sequence[str]], config: str, base: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names, keys) of a random combination that the rules allow."""
    r = random.Random(name)
    for _ in range(200):
        names = r.sample(sorted(options), r.randint(3, 5))
        keys = list(dict.fromkeys(key for option in names for key in options[option]))
        try:
            resolve(load_run_config(config, None, [*base, *keys]), platform="cpu")
        except ConfigError as error:
            refused = error
            continue
        return names, keys
    raise AssertionError(f"the rules refuse 200 draws; the last: {refused}")


def check_losses(folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """The loss of each iteration's only step is that of its saved rollout in float64."""
    for record in records:
        batch = RolloutBatch.load(folder / "rollouts" / f"iteration_{record['iteration']:07d}.safetensors")
        kl = record["actor/kl_coef"] * record["actor/kl_loss"] if "actor/kl_coef" in record else 0.0  # runs without a reference
        expected = record["actor/pg_loss"] + kl
        assert replay(batch, {}, torch.float64).loss == pytest.approx(expected, abs=2e-6), record["iteration"]
        assert record["actor/grad_norm"] > 0.0


@pytest.mark.parametrize("number", range(3))
def test_a_random_elastic_run_trains_on_what_its_engines_sampled(task: Path, tmp_path: Path, number: int) -> None:
    bound = (_SEED + number) % 2
    base = [*ELASTIC, f"rl_config.max_off_policy_threshold={bound}", _SAVED, iterations(3)]
    names, keys = draw(f"elastic {_SEED + number}", _ELASTIC, "grpo_tiny_cpu", [*overrides(task, tmp_path), *base])
    try:
        run = finished(task, tmp_path, *base, *keys)
        check_consumed(run, 3, bound=bound)
        assert run.metrics[0]["rollout/elastic_servers"] == 1
        difference = "rollout/old_log_probs_diff_max" if "recorded" in names else "rollout/log_probs_diff_max"
        for record in run.metrics:
            if not bound or record["rollout/staleness_max"] == 0:
                assert record[difference] < 1e-4
        check_losses(run.folder / "run", run.metrics)
        assert not run.leftovers()
    except AssertionError as error:
        raise AssertionError(f"RANDOM_MODES_SEED={_SEED + number} ({', '.join(names)}): {error}") from error


@pytest.mark.parametrize("number", range(3))
def test_a_random_run_with_videos_trains_on_what_its_engine_sampled(
    videos: Path,  # noqa: F811  (the fixture)
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = ("qwen3", "qwen2.5")[(_SEED + number) % 2]
    base = [*GRPO[2:], *model(family), f"run_dir=random_{number}", _SAVED]
    monkeypatch.chdir(videos)
    with monkeypatch.context() as within:
        within.setenv(VISION_VARIABLE, "1")
        within.syspath_prepend(str(videos))
        names, keys = draw(f"videos {_SEED + number}", _BOTH, GRPO[1], base)
    try:
        command("train", *GRPO[:2], *base, *keys, folder=videos)
        records = metrics(videos / f"random_{number}")
        difference = "rollout/old_log_probs_diff_max" if "recorded" in names else "rollout/log_probs_diff_max"
        assert len(records) == 2 and all(record[difference] < 1e-4 for record in records)
        check_losses(videos / f"random_{number}", records)
    except AssertionError as error:
        raise AssertionError(f"RANDOM_MODES_SEED={_SEED + number} ({', '.join(names)}): {error}") from error
