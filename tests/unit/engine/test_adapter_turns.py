"""Adapters that take turns in one model are, bit for bit, those of models with one adapter each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.checkpoint.model_source import find_model
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.adapter_turns import AdapterTurns
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.head_outputs import HeadOutputs
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.models.plan import RoleModel, plan_model
from mindspeed_rl.workers.role_adapters import PLACES, RoleAdapters, divide_rows
from mindspeed_rl.workers.roles import PassSettings, Role

EACH = MicroBatching(2)
LORA = {
    "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_ckpt_filter": True,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 1,
}
#: number formats and kinds of optimizers, whose states have different forms
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16 distributed": {"bf16": True, "use_distributed_optimizer": True},
    "fp32 distributed": {"use_distributed_optimizer": True},
    "bf16 gradients": {"bf16": True, "grad_reduce_in_fp32": False},
}


def rows_of(seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 60, (length,), generator=generator) for length in (7, 11, 6)]
    return Rows(ids, [3, 2, 1])


def negative_log_prob(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.outputs[0] * inputs.mask).sum(), inputs.mask.sum())


def adapter_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in engine.list_trained().items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def alone(
    make: Callable[..., TrainEngine], seeds: list[int], **keys: Any
) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    engine = make(**LORA, **keys)
    steps = [engine.train_step(rows_of(seed), EACH, negative_log_prob) for seed in seeds]
    return adapter_of(engine), [(step.grad_norm, step.lr) for step in steps]


@pytest.mark.parametrize("form", FORMS)
def test_each_adapter_trains_as_in_a_model_of_its_own(make_engine: Callable[..., TrainEngine], form: str) -> None:
    keys, seeds = FORMS[form], {"a": [1, 2, 3], "b": [11, 12, 13], "c": [21, 22]}
    expected = {name: alone(make_engine, own, **keys) for name, own in seeds.items()}
    engine = make_engine(**LORA, **keys)
    turns = AdapterTurns(engine, list(seeds))
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in seeds}
    # c joins late and misses a turn, as a role that has not spoken
    for index, name in ((0, "a"), (0, "b"), (1, "b"), (0, "c"), (1, "a"), (2, "a"), (2, "b"), (1, "c")):
        turns.train(name)
        step = engine.train_step(rows_of(seeds[name][index]), EACH, negative_log_prob)
        steps[name].append((step.grad_norm, step.lr))
        turns.use("a")  # as a push or a pass between two steps
    for name in seeds:
        turns.use(name)
        assert equal(adapter_of(engine), expected[name][0]), name
        assert steps[name] == expected[name][1]
    assert len({rate for _, rate in steps["a"]}) == 3


def test_checkpoints_of_all_adapters_resume_exactly(make_engine: Callable[..., TrainEngine], tmp_path: Path) -> None:
    def train(engine: TrainEngine, turns: AdapterTurns, first: int) -> dict[str, dict[str, Tensor]]:
        for name, offset in (("a", 0), ("b", 10)):
            turns.train(name)
            for seed in (first, first + 1):
                engine.train_step(rows_of(seed + offset), EACH, negative_log_prob)
        trained = {}
        for name in turns.names:
            turns.use(name)
            trained[name] = adapter_of(engine)
        return trained

    engine = make_engine(**LORA, bf16=True)
    turns = AdapterTurns(engine, ["a", "b"])
    train(engine, turns, 0)
    for name in turns.names:
        turns.train(name)
        CheckpointSaver(engine, tmp_path / name).save(2, {})
    expected = train(engine, turns, 2)

    other = make_engine(**LORA, bf16=True)
    resumed = AdapterTurns(other, ["a", "b"])
    for name in ("b", "a"):
        resumed.train(name)
        load_checkpoint(other, tmp_path / name)
    actual = train(other, resumed, 2)
    assert all(equal(actual[name], expected[name]) for name in expected)


def role_of(load: Path, tiny: Path, names: tuple[str, ...], **keys: Any) -> Role:
    config = MegatronConfig(
        **{**LORA, "bf16": False, "lr": 1e-2, "train_iters": 10, "load": str(load), "pretrained_checkpoint": str(tiny), **keys}
    )
    source = find_model(config, "actor_config")
    model = RoleModel(config, source, plan_model(config, tiny))
    return Role("actor", model, PassSettings(True, 0, 1.0), steps_per_iteration=1, adapter_names=names)


def adapters_of(role: Role) -> dict[str, dict[str, Tensor]]:
    assert role.turns is not None
    found = {}
    for name in role.turns.names:
        role.turns.use(name)
        found[name] = adapter_of(role.megatron)
    return found


def test_each_adapter_of_a_checkpoint_is_taken_by_its_name(
    make_engine: Callable[..., TrainEngine], training_world: None, tmp_path: Path
) -> None:
    tiny, save = tmp_path / "tiny", tmp_path / "save"
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=67, num_hidden_layers=2, **shape)).save_pretrained(tiny)
    role = role_of(tiny, tiny, ("s", "c"), save=str(save))
    assert role.turns is not None
    for name, seed in (("s", 1), ("c", 2)):
        role.turns.train(name)
        for _ in range(2):
            role.engine.train_step(rows_of(seed), EACH, negative_log_prob)
    role.save(2, {})
    expected = adapters_of(role)
    assert not equal(expected["s"], expected["c"])

    for names in (("s", "c"), ("c", "s"), ("c",)):
        started = adapters_of(role_of(save, tiny, names, finetune=True))
        assert all(equal(started[name], expected[name]) for name in names), names
    with pytest.raises(ValueError, match="has the adapters s, c, and not 'z' of rl_config.role_adapters"):
        role_of(save, tiny, ("s", "z"), finetune=True)
    # the only adapter of a folder is the start of all
    started = adapters_of(role_of(save / "adapters/c", tiny, ("x", "y"), finetune=True))
    assert equal(started["x"], expected["c"]) and equal(started["y"], expected["c"])

    shutil.rmtree(save / "adapters/c")
    for keys in ({}, {"finetune": True}):
        with pytest.raises(ValueError, match="adapters/c/iter_0000002 has no run_state.json"):
            role_of(save, tiny, ("s", "c"), **keys)


def test_rows_are_divided_by_the_adapter_of_each_sequence() -> None:
    # p: prompt, r: response; adapters of the sequences: row 0 a b a, row 1 b
    rows = Rows(
        [torch.arange(100, 112), torch.arange(200, 205)],
        [2, 3],
        {"advantages": [torch.arange(6.0), torch.arange(2.0)], "row": [torch.tensor(7), torch.tensor(8)]},
        sequences=[[(2, 3), (1, 2), (3, 1)], [(3, 2)]],
    )
    first, second, third = divide_rows(rows, [torch.tensor([0, 1, 0]), torch.tensor([1])], ["a", "b", "c"])
    assert (first.indexes, second.indexes, third.indexes) == ([0], [0, 1], [])
    assert first.rows.input_ids[0].tolist() == [100, 101, 102, 103, 104, 108, 109, 110, 111]
    assert first.rows.sequences == [[(2, 3), (3, 1)]] and first.rows.prompt_lengths == [2]
    assert first.rows.columns[PLACES][0].tolist() == [0, 1, 2, 5]
    assert first.rows.columns["advantages"][0].tolist() == [0, 1, 2, 5] and first.rows.columns["row"] == [torch.tensor(7)]
    # one sequence a row: as rows that never had several
    assert [ids.tolist() for ids in second.rows.input_ids] == [[105, 106, 107], [200, 201, 202, 203, 204]]
    assert second.rows.sequences is None and second.rows.prompt_lengths == [1, 3]
    assert [values.tolist() for values in second.rows.columns["advantages"]] == [[3, 4], [0, 1]]
    assert len(third.rows) == 0 and third.rows.pattern is rows


def test_log_probs_of_a_row_are_those_of_each_sequences_adapter(make_engine: Callable[..., TrainEngine]) -> None:
    engine = make_engine(**LORA)
    turns = AdapterTurns(engine, ["a", "b"])
    for name, seed in (("a", 1), ("b", 2)):
        turns.train(name)
        for _ in range(3):
            engine.train_step(rows_of(seed), EACH, negative_log_prob)
    ids = [torch.arange(5, 17), torch.arange(30, 35)]
    rows = Rows(ids, [2, 3], sequences=[[(2, 3), (1, 2), (3, 1)], [(3, 2)]])
    adapters = [torch.tensor([0, 1, 0]), torch.tensor([1])]
    computed = RoleAdapters(turns, lambda indexes: [adapters[index] for index in indexes]).forward(engine, rows, EACH, [0, 1])
    assert computed is not None
    expected = []
    for sequence, prompt, name in (((5, 10), 2, "a"), ((10, 13), 1, "b"), ((13, 17), 3, "a"), ((30, 35), 3, "b")):
        turns.use(name)
        output = engine.forward(Rows([torch.arange(*sequence)], [prompt]), EACH, HeadOutputs())
        assert output is not None
        expected.append(output[0][0])
    torch.testing.assert_close(computed[0][0], torch.cat(expected[:3]), atol=1e-6, rtol=0)
    torch.testing.assert_close(computed[0][1], expected[3], atol=1e-6, rtol=0)
