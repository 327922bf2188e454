"""Responses of saved rollouts become data of the supervised stages, selected by their rewards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli.main import main
from mindspeed_rl.data.datasets import InstructionDataset, PreferenceDataset, UnpairedDataset

#: (prompt, response, mask of sampled tokens, reward, truncated, scored) of each row
ROWS = [
    ([5, 6], [10, 11, 1], "111", 0.5, False, True),
    ([5, 6], [12, 20, 21, 1], "1001", 0.9, False, True),  # tokens of a tool in the middle
    ([5, 6], [13, 1], "11", 0.9, False, True),
    ([5, 6], [13, 1], "11", 0.9, False, True),
    ([7], [14, 15], "11", 1.0, True, True),
    ([7], [16, 1], "11", 0.2, False, True),
    ([7], [17, 1], "11", float("nan"), False, False),
    ([7], [18, 1], "11", -0.4, False, True),
]


def save_rollout(path: Path, rows: list, **extra: torch.Tensor) -> None:
    def pad(values: list) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in values], batch_first=True)

    mask = pad([[sampled == "1" for sampled in row[2]] for row in rows])
    columns = {
        "input_ids": pad([prompt + response for prompt, response, *_ in rows]),
        "response_mask": mask,
        "rewards": torch.tensor([row[3] for row in rows]),
        "truncated": torch.tensor([row[4] for row in rows]),
        "scored": torch.tensor([row[5] for row in rows]),
        "log_probs": torch.zeros(mask.shape),
        "lengths": torch.tensor([len(row[0] + row[1]) for row in rows]),
        "prompt_lengths": torch.tensor([len(row[0]) for row in rows]),
        "response_lengths": torch.tensor([len(row[1]) for row in rows]),
    }
    RolloutBatch({**columns, **extra}, 4, 8).save(path)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run whose first iteration has the rows, and whose third has better responses to the second prompt."""
    folder = tmp_path / "run"
    save_rollout(folder / "rollouts" / "iteration_0000001.safetensors", ROWS)
    later = [([7], [30 + index, 1], "11", 0.3 + index, False, True) for index in range(4)]
    save_rollout(folder / "rollouts" / "iteration_0000003.safetensors", later)
    return folder


def select(folder: Path, *words: str) -> tuple[int, Path]:
    prefix = folder.parent / "data"
    return main(["rejection-sample", "--input", str(folder), "--output-prefix", str(prefix), *words]), prefix


def test_the_best_responses_of_a_prompt_are_learnt_with_the_tokens_of_the_rollout(run_folder, capsys):
    status, prefix = select(run_folder, "--best", "2", "--threshold", "0.6", "--iterations", ":1")
    assert status == 0
    dataset = InstructionDataset(prefix)
    rows = [(row["input_ids"].tolist(), row["labels"].tolist()) for row in (dataset[index] for index in range(len(dataset)))]
    assert rows == [
        ([5, 6, 12, 20, 21, 1], [-100, -100, 12, -100, -100, 1]),
        ([5, 6, 13, 1], [-100, -100, 13, 1]),
    ]
    shown = capsys.readouterr().out
    rewards = [0.5, 0.9, 0.9, 0.9, 1.0, 0.2, -0.4]
    assert f"mean reward 0.9 of those kept, {np.mean(rewards):.4g} of all 7 responses" in shown
    for line in ("no reward: 1", "truncated at the length limit: 1", "equal to another response to the prompt: 1"):
        assert f"dropped, {line}" in shown


def test_prompts_are_the_same_in_all_iterations(run_folder):
    _, prefix = select(run_folder, "--keep-truncated")
    dataset = InstructionDataset(prefix)
    assert [dataset[index]["input_ids"].tolist() for index in range(2)] == [[5, 6, 12, 20, 21, 1], [7, 33, 1]]
    assert len(dataset) == 2


def test_best_and_worst_of_a_prompt_are_a_pair_where_their_rewards_differ(run_folder):
    _, prefix = select(run_folder, "--kind", "pairs", "--iterations", ":1", "--margin", "0.5")
    dataset = PreferenceDataset(prefix)
    assert len(dataset) == 1  # 0.9 and 0.5 of the first prompt differ by 0.4
    assert {name: values.tolist() for name, values in dataset[0].items()} == {
        "chosen_input_ids": [7, 16, 1],
        "chosen_labels": [-100, 16, 1],
        "rejected_input_ids": [7, 18, 1],
        "rejected_labels": [-100, 18, 1],
    }


def test_all_responses_are_judged_by_the_threshold(run_folder):
    _, prefix = select(run_folder, "--kind", "unpaired", "--threshold", "0.6", "--iterations", "1:1", "--keep-duplicates")
    dataset = UnpairedDataset(prefix)
    found = [(dataset[index]["input_ids"].tolist()[:3], dataset[index]["desirable"]) for index in range(len(dataset))]
    assert found[:4] == [([5, 6, 12], True), ([5, 6, 13], True), ([5, 6, 13], True), ([5, 6, 10], False)]
    assert found[4:] == [([7, 16, 1], False), ([7, 18, 1], False)]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--threshold", "9"], "no response is selected"),
        (["--kind", "unpaired"], "--threshold: not set"),
        (["--best", "0"], "--best 0 must be at least 1"),
        (["--iterations", "7:"], "is from these iterations"),
    ],
)
def test_selections_of_nothing_are_errors(run_folder, capsys, words, problem):
    assert select(run_folder, *words)[0] == 2
    assert problem in capsys.readouterr().err


def test_data_that_are_there_are_not_overwritten_and_old_rollouts_are_refused(run_folder, capsys):
    assert select(run_folder)[0] == 0
    assert select(run_folder)[0] == 2
    assert "has data already (attention_mask, input_ids, labels)" in capsys.readouterr().err
    path = run_folder / "rollouts" / "iteration_0000001.safetensors"
    batch = RolloutBatch.load(path)
    old = {name: column for name, column in batch.columns.items() if not name.endswith("lengths")}
    RolloutBatch(old, 4, 8).save(path)
    status = main(["rejection-sample", "--input", str(run_folder), "--output-prefix", str(run_folder / "other")])
    assert status == 2 and "was written by an earlier version" in capsys.readouterr().err
