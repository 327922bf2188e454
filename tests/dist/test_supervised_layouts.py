"""Every supervised stage gives the same figures under every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stage_jobs
import tiny_hf
from ranks import Ranks
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data.indexed import IndexedWriter, column_prefix
from mindspeed_rl.observability.metrics import merge

STEPS, PAD, EOS, STEP, GOOD, BAD = 3, 0, 1, 90, 91, 92


def _write(path: str, rows: Sequence[Sequence[int]]) -> None:
    writer = IndexedWriter(path)
    for row in rows:
        writer.add_documents(np.array(row, dtype=np.int32), [len(row)])
    writer.close()


def _write_columns(prefix: Path, rows: Sequence[Mapping[str, Sequence[int]]]) -> str:
    for column in rows[0]:
        _write(column_prefix(prefix, column), [row[column] for row in rows])
    return str(prefix)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a tokenizer of single characters, and data of random tokens for every stage."""
    folder = tmp_path_factory.mktemp("stages")
    tiny_hf.save("tied", folder)
    characters = {chr(number + 30): number for number in range(3, 97)}
    tokenizer = Tokenizer(models.BPE({"<pad>": PAD, "<eos>": EOS, "<unk>": 2, **characters}, [], unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    rng = np.random.RandomState(5)

    def tokens(low: int, high: int) -> list[int]:
        return rng.randint(3, 90, rng.randint(low, high)).tolist()

    pairs, packs, steps = [], [], []
    for _ in range(20):
        prompt = tokens(1, 9)
        sides = {side: [*tokens(1, 14), EOS] for side in ("chosen", "rejected")}
        pairs.append({f"{side}_input_ids": prompt + answer for side, answer in sides.items()})
        pairs[-1] |= {f"{side}_labels": [-100] * len(prompt) + answer for side, answer in sides.items()}
        pack: dict[str, list[int]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for number in range(1, rng.randint(2, 5)):
            prompt, answer = tokens(1, 5), [*tokens(1, 6), EOS]
            pack["input_ids"] += prompt + answer
            pack["labels"] += [-100] * len(prompt) + answer
            pack["attention_mask"] += [number] * len(prompt + answer)
        rest = 48 - len(pack["input_ids"])
        packs.append({name: row + [-100 if name == "labels" else 0] * rest for name, row in pack.items()})
        judged = [(tokens(1, 6), int(rng.choice((GOOD, BAD)))) for _ in range(rng.randint(1, 4))]
        steps.append(
            {
                "input_ids": [token for step, _ in judged for token in [*step, STEP]],
                "labels": [label for step, verdict in judged for label in [*[-100] * len(step), verdict]],
            }
        )
    _write_columns(folder / "pairs", pairs)
    _write_columns(folder / "packs", packs)
    _write_columns(folder / "steps", steps)
    _write(column_prefix(folder / "documents", "text", packed=False), [[*tokens(2, 30), EOS] for _ in range(200)])
    return folder


STAGES: dict[str, dict[str, Any]] = {
    "dpo": {"data_path": "pairs", "dpo_beta": 0.5, "pref_ftx": 0.1, "no_pad_to_seq_lengths": True},
    "simpo": {"data_path": "pairs", "reset_attention_mask": True},
    "kto": {"data_path": "pairs", "kto_beta": 0.5, "no_pad_to_seq_lengths": True},
    "orm": {"data_path": "pairs", "no_pad_to_seq_lengths": True},
    "prm": {"data_path": "steps", "reward_tokens": [chr(GOOD + 30), chr(BAD + 30)]},
    "sft": {"data_path": "packs", "pack": True, "neat_pack": True, "reset_attention_mask": True},
    "pretrain": {"data_path": "documents_text_document", "reset_attention_mask": True},
}
ADAPTERS = {"lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "lora_r": 4}
STAGES |= {f"{stage} adapters": {"stage": stage, **STAGES[stage], **ADAPTERS} for stage in ("dpo", "orm", "prm", "sft")}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"use_distributed_optimizer": True},
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2, "no_pad_to_seq_lengths": True},
    "cp": {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"},
}


def figures(
    group: Ranks,
    folder: Path,
    stage: str,
    keys: Mapping[str, Any],
    rl_config: dict[str, Any] | None = None,
    steps: int = STEPS,
) -> list[dict[str, float]]:
    """What the driver would see after each step and after the evaluation."""
    training = {
        "stage": stage,
        "bf16": False,
        "load": str(folder),
        "tokenizer_name_or_path": str(folder),
        "num_npus": group.size,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seq_length": 48,
        "train_iters": STEPS,
        "split": "80,20,0",
        "eval_iters": 1,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "adam_eps": 1e-5,
        "finetune": True,
        **STAGES[stage],
        **keys,
    }
    training["data_path"] = str(folder / training["data_path"])
    reports = group.run(stage_jobs.train_stage, training=training, rl_config=rl_config, steps=steps)
    steps = [merge(report[step] for report in reports).results() for step in range(len(reports[0]))]
    # what a rank holds is the layout's matter
    return [{name: value for name, value in step.items() if not name.startswith("memory/")} for step in steps]


@pytest.fixture(scope="module")
def single_process(ranks: Callable[[int], Ranks], folder: Path) -> Callable[[str], list[dict[str, float]]]:
    """(stage) -> its figures in one process."""
    known: dict[str, list[dict[str, float]]] = {}

    def get(stage: str) -> list[dict[str, float]]:
        if stage not in known:
            known[stage] = figures(ranks(1), folder, stage, {})
        return known[stage]

    return get


def assert_same(result: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(result) == len(expected) == STEPS + 1
    for step, (ours, theirs) in enumerate(zip(result, expected)):
        names = [name for name in theirs if name not in ("train/memory_gib", "train/model_tflop")]
        assert set(names) <= set(ours)
        for name in names:
            if step == 0 and name.endswith("/accuracies"):  # the policy is its reference: margins are rounding
                continue
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5, abs=2e-5), (step, name)


#: one stage a layout and one layout a stage; all the others are slow
QUICK = {("dpo", "tp"), ("kto", "dp"), ("orm", "pp"), ("prm", "cp"), ("sft", "dp"), ("dpo adapters", "pp")}


@pytest.mark.parametrize(
    ("stage", "layout"),
    [
        pytest.param(stage, layout, id=f"{stage}-{layout}", marks=() if (stage, layout) in QUICK else pytest.mark.slow)
        for stage in STAGES
        for layout in LAYOUTS
    ],
)
def test_a_stage_gives_the_same_figures_under_every_layout(
    ranks: Callable[[int], Ranks], single_process: Callable, folder: Path, stage: str, layout: str
) -> None:
    assert_same(figures(ranks(2), folder, stage, LAYOUTS[layout]), single_process(stage))


@pytest.mark.parametrize(
    ("stage", "balanced"),
    [
        ("dpo", True),
        ("sft", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sft", True), ("pretrain", True), ("simpo", False))),
    ],
)
def test_token_budgets_that_give_ranks_unequal_work_change_no_figure(
    ranks: Callable[[int], Ranks], single_process: Callable, folder: Path, stage: str, balanced: bool
) -> None:
    budget = {
        "use_remove_padding": True,
        "use_dynamic_bsz": True,
        "max_packing_token_size": 60,
        "use_dp_batch_balance": balanced,
    }
    keys = {"reset_attention_mask": True, "no_pad_to_seq_lengths": True}
    assert_same(figures(ranks(2), folder, stage, keys, budget), single_process(stage))


@pytest.mark.parametrize(
    ("stage", "saved", "loaded"),
    [
        ("orm", "tp", "pp"),
        pytest.param("orm adapters", "dp", "tp", marks=pytest.mark.slow),
        pytest.param("orm", "pp", "dp", marks=pytest.mark.slow),
        pytest.param("prm adapters", "pp", "cp", marks=pytest.mark.slow),
    ],
)
def test_a_stage_goes_on_under_another_layout(
    ranks: Callable[[int], Ranks], single_process: Callable, folder: Path, tmp_path: Path, stage: str, saved: str, loaded: str
) -> None:
    schedule = {"train_iters": 2 * STEPS, "pretrained_checkpoint": str(folder)}
    whole = figures(ranks(1), folder, stage, schedule, steps=2 * STEPS)
    figures(ranks(2), folder, stage, LAYOUTS[saved] | schedule | {"save": str(tmp_path)})
    goes_on = {"load": str(tmp_path), "finetune": False, "use_distributed_optimizer": loaded == "dp"}
    rest = figures(ranks(2), folder, stage, schedule | LAYOUTS[loaded] | goes_on)
    assert_same(rest, whole[STEPS:])
