"""A published Qwen3.5, which has a tower and a prediction layer: the layer's drafts change no response to a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_vision
from scripts import load_script
from test_vision_run import GRPO, REWARD, command, metrics

_KEYS = [
    *("actor_config.load=model", "actor_config.save=null", "actor_config.save_hf=false", "actor_config.bf16=true"),
    *("rl_config.verifier_function=[looks:starts_even]", "rl_config.log_probs_diff_limit=0.5"),
    *("generate_config.dtype=bfloat16", "+megatron_training.mtp_num_layers=1"),
    # of no effect: with drafts responses end in another order, and a trainer in bfloat16 rounds another order otherwise
    *("actor_config.lr=1e-12", "actor_config.min_lr=0"),
    *("megatron_training.train_iters=3", "rl_config.use_prefix_grouper=false"),
]
_DRAFTS = "+generate_config.speculative_config={method: mtp, num_speculative_tokens: 1}"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    example = load_script("examples/vision/make_task.py")
    example.NUM_SFT, example.NUM_TRAIN, example.NUM_HELD_OUT = 8, 32, 16
    example.main(folder)
    tiny_vision.save_hybrid_for_the_example(example, folder / "model")
    (folder / "looks.py").write_text(REWARD)
    return folder


def run(task: Path, name: str, *changes: str) -> tuple[list[dict], list[str]]:
    """Records of a run, and its responses."""
    command("train", *GRPO, *_KEYS, *changes, f"run_dir={name}", folder=task)
    lines = [json.loads(line) for line in (task / name / "completions.jsonl").read_text().splitlines()]
    return metrics(task / name), sorted(f"{line['iteration']} {line['prompt']} {line['response']}" for line in lines)


@pytest.mark.slow
def test_drafts_of_the_prediction_layer_change_no_response_to_a_picture(task: Path) -> None:
    plain, expected = run(task, "plain")
    drafted, responses = run(task, "drafted", _DRAFTS)
    assert responses == expected and len(responses) > 20
    assert max(record["rollout/draft_acceptance"] for record in drafted) > 0
    # the layer that trains is sent, and proven
    name = "rollout/proven_parameters"
    assert min(record[name] for record in drafted) > max(record[name] for record in plain)
    # bfloat16 itself is as far from the trainer
    assert all(record["rollout/log_probs_diff_mean"] < 0.03 for record in (*plain, *drafted))


@pytest.mark.slow
def test_a_prediction_layer_drafts_where_the_tower_is_left_out(task: Path) -> None:
    rows = [{"instruction": f"Say {letter}.", "output": letter} for letter in "abcdefghijklmnopqrstuvwx"]
    (task / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task / "letters.py").write_text(
        "def starts_even(prompt, response, label, **columns):\n"
        "    return float(bool(response) and ord(response[0]) % 2 == 0)\n"
    )
    keys = ["megatron_training.data_path=text.jsonl", "megatron_training.image_folder=null"]
    keys += ["rl_config.verifier_function=[letters:starts_even]", "actor_config.language_model_only=true"]
    keys += ["actor_config.freeze_vit=true", "actor_config.freeze_aligner=true"]
    _, expected = run(task, "text", *keys)
    drafted, responses = run(task, "text_drafted", *keys, _DRAFTS)
    assert responses == expected and max(record["rollout/draft_acceptance"] for record in drafted) > 0
