"""Commands and files that nobody means: each is one sentence on one line, and none ends in a traceback or fills the memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import ImportSettings

VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=/d/gsm8k.parquet data.train_batch_size=8 algorithm.adv_estimator=grpo "
    "actor_rollout_ref.model.path=/m/Qwen3-8B actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 "
    "trainer.n_gpus_per_node=8 trainer.total_training_steps=4"
)
TRL = "trl grpo --num_processes 8 --dataset_name p.jsonl --reward_funcs accuracy_reward --max_steps 4"


def refuse(project: str, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        import_command(PROJECTS[project], text, ImportSettings())
    for sentence in caught.value.errors:
        assert sentence.isprintable() and len(sentence) < 600, sentence
    return caught.value.errors[0]


@pytest.mark.parametrize(
    ("project", "text", "message"),
    [
        ("verl", f"{VERL} trainer.save_freq=\0", "a null byte"),
        ("verl", f"{VERL} trainer.total_training_steps={'9' * 400}", "a whole number beyond 2^63"),
        ("verl", f"{VERL} actor_rollout_ref.actor.clip_ratio_high={'x' * 5000}", "x... (5003 characters)"),
        ("verl", f"{VERL} actor_rollout_ref.rollout.temperature=nan", "temperature is 'nan', but must be a number"),
        ("trl", f"{TRL} --model_name_or_path {'m' * 300}", "a name is too long for a file: "),
        ("trl", f"{TRL} --model_name_or_path m --learning_rate 1e400", "learning_rate is '1e400', but must be a number"),
        ("llama-factory", "llamafactory-cli train $((1/0))", "line_1"),
    ],
)
def test_a_command_with_an_odd_value_is_one_sentence(project: str, text: str, message: str) -> None:
    assert message in refuse(project, text)


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(("project", "head"), [("roll", ""), ("easyr1", "python -m verl.trainer.main config="), ("areal", "")])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "more than 100,000 values once its aliases are written out"),
        ("x: &x\n  y: *x\n", "or refers to itself"),
        ("x: " + "[" * 200 + "]" * 200, "nested more than 60 levels deep"),
        ("a: [", "line 1: expected the node content"),
        ("a: 1\n---\nb: 1\n", "line 2: expected a single document in the stream, but found another document"),
        ("a: !!python/object/apply:os.system [x]", "line 1: could not determine a constructor"),
        ("a: 2020-13-45", "month must be in 1..12"),
    ],
)
def test_a_file_that_is_no_options_is_one_sentence(tmp_path: Path, project: str, head: str, text: str, message: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    assert message in refuse(project, f"{head}{tmp_path / 'f.yaml'}")
