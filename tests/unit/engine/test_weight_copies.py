"""Copies of weights in a world of one rank: there are none that differ; tests/dist/test_equal_copies.py has more ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.build import build_model
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.resharding.weight_copies import WeightCopies, _name_ranks, _Shard

ROWS = Rows(input_ids=[torch.arange(3, 15)], prompt_lengths=[4])
LORA = {"lora_target_modules": ["linear_qkv", "linear_fc2"], "lora_r": 2}


def negative_log_prob(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.outputs[0] * inputs.mask).sum(), inputs.mask.sum())


@pytest.mark.parametrize("keys", [{}, {"bf16": True}, LORA, {"use_distributed_optimizer": True}], ids=str)
def test_one_rank_has_no_copies_that_differ(make_engine: Callable[..., TrainEngine], keys: dict[str, object]) -> None:
    engine = make_engine(check_weight_copies_interval=1, **keys)
    copies = WeightCopies.build(engine.config, engine.model)
    assert copies is not None
    engine.add_part(copies)
    for _ in range(2):
        engine.train_step(ROWS, MicroBatching(1), negative_log_prob)
    assert engine.num_updates == 2


def test_only_a_model_that_trains_is_compared_and_only_by_key(make_engine: Callable[..., TrainEngine]) -> None:
    engine = make_engine()
    assert WeightCopies.build(engine.config, engine.model) is None
    on = MegatronConfig(bf16=False, check_weight_copies_interval=1)
    assert WeightCopies.build(on, build_model(on, engine.model.plan, trainable=False)) is None


def test_the_error_names_shard_and_ranks() -> None:
    assert str(_Shard(("a.q", "a.k", "a.v"), 0, "", 4, 2)) == "a.q and 2 more in one, shard 2 of 4"
    assert str(_Shard(("norm",), None, "", 1, 0)) == "norm"
    assert _name_ranks([3]) == "rank 3"
    assert _name_ranks(range(0, 20, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more"
