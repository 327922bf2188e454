"""Complete runs of random combinations, of the modes that the product of features has not.

Elastic rollout needs servers with devices of their own; videos, and text without the tower, processes that load models of
images. The rollout is in float32 or in a quantized format. What trained is compared with what the engines sampled; the loss is
computed again in float64 from the saved rollouts.

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
from test_language_model_only import drop
from test_language_model_only import task as texts  # noqa: F401  (a fixture)
from test_rollout_modes import iterations
from test_video_run import GRPO, command, metrics, model
from test_video_run import task as videos  # noqa: F401  (a fixture)
from test_vision_run import GRPO as PICTURES

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
#: format of the rollout engine -> largest mean difference of log-probs
_FORMATS = {"int8": 0.03, "mxfp8": 0.1, "w4a8": 0.3}
_QUANTIZED = {
    name: [f"+generate_config.quantization={name}", "generate_config.enforce_eager=true", "rl_config.log_probs_diff_limit=auto"]
    for name in _FORMATS
}
_DRAFTS = {"drafts": ["+generate_config.speculative_config={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 3}"]}
#: of models with a tower
_SEEING: Mapping[str, Sequence[str]] = {**_BOTH, **_QUANTIZED, **_DRAFTS}
_ELASTIC: Mapping[str, Sequence[str]] = {
    **_BOTH,
    **_QUANTIZED,
    **_DRAFTS,
    "partial": ["+rl_config.partial_rollout=true"],
    "wait": ["+rl_config.max_off_policy_strategy=wait"],
    "eager": ["+rl_config.elastic_rollout_low=0.9", "+rl_config.elastic_rollout_high=1.5"],
}


def draw(name: str, options: Mapping[str, Sequence[str]], config: str, base: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names, keys) of a random combination that the rules allow."""
    r = random.Random(name)
    for _ in range(200):
        names = r.sample(sorted(options), r.randint(3, 5))
        if len({*names} & {*_FORMATS}) > 1:
            continue
        keys = list(dict.fromkeys(key for option in names for key in options[option]))
        try:
            resolve(load_run_config(config, None, [*base, *keys]), platform="cpu")
        except ConfigError as error:
            refused = error
            continue
        return names, keys
    raise AssertionError(f"the rules refuse 200 draws; the last: {refused}")


def check_difference(record: Mapping[str, Any], names: Sequence[str]) -> None:
    """Log-probs of engine and trainer are those of one policy, or of one and its quantized form."""
    prefix = "rollout/old_log_probs_diff" if "recorded" in names else "rollout/log_probs_diff"
    form = next((name for name in names if name in _FORMATS), None)
    if form is None:
        assert record[f"{prefix}_max"] < 1e-4
    else:
        assert 1e-6 < record[f"{prefix}_mean"] < _FORMATS[form]


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
        for record in run.metrics:
            if not bound or record["rollout/staleness_max"] == 0:
                check_difference(record, names)
        check_losses(run.folder / "run", run.metrics)
        assert not run.leftovers()
    except AssertionError as error:
        raise AssertionError(f"RANDOM_MODES_SEED={_SEED + number} ({', '.join(names)}): {error}") from error


def train_random(
    kind: str, number: int, config: Sequence[str], base: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train a model of images in `folder`, with keys that are drawn by the kind and the number, and check its records.

    Args:
        config: the option of the run file, and its name.
        base: keys of the run, with `run_dir=random_<number>`.
    """
    monkeypatch.chdir(folder)
    with monkeypatch.context() as within:
        within.setenv(VISION_VARIABLE, "1")
        within.syspath_prepend(str(folder))
        names, keys = draw(f"{kind} {_SEED + number}", _SEEING, config[1], base)
    try:
        command("train", *config, *base, *keys, folder=folder)
        records = metrics(folder / f"random_{number}")
        assert len(records) == 2
        for record in records:
            check_difference(record, names)
        check_losses(folder / f"random_{number}", records)
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
    train_random("videos", number, GRPO[:2], base, videos, monkeypatch)


@pytest.mark.parametrize("number", range(3))
def test_a_random_run_without_the_tower_trains_on_what_its_engine_sampled(
    texts: Path,  # noqa: F811  (the fixture)
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = [
        *PICTURES[2:], *drop("actor_config"), "megatron_training.data_path=text.jsonl", "megatron_training.image_folder=null",
        "actor_config.load=model", "rl_config.verifier_function=[evens:even]", f"run_dir=random_{number}", _SAVED,
        "actor_config.tensor_model_parallel_size=1", "rl_config.actor_resource.num_npus=1", "actor_config.save=null",
        "actor_config.save_hf=false", "rl_config.log_completions=false",
    ]  # fmt: skip
    train_random("text", number, PICTURES[:2], base, texts, monkeypatch)
