"""GRPO on prompts with videos as a command: engines in the workers, servers, programs with several turns, and learning."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from moving_shapes import save_model, write_rows
from test_vision_run import SERVERS, SFT, command, metrics

#: rewards a first character with an even code, and raises unless the frames are those of the row
REWARD = '''
import numpy as np
from mindspeed_rl.data.images import open_frames


def even(prompt, response, label, images=(), **columns):
    """1 where the first character has an even code, which an untrained model reaches in about half of its samples."""
    frames = [np.asarray(frame, dtype=int) for frame in open_frames(images[0])]
    assert len(frames) == 4 and all(frame.shape == (56, 56, 3) for frame in frames)
    where = [np.argwhere(frame.sum(-1) > 200).mean(0) for frame in frames]
    down, right = where[-1] - where[0]
    assert label == ("lr"[int(right > 0)] if abs(right) > abs(down) else "ud"[int(down > 0)]), (label, down, right)
    return float(bool(response) and ord(response[0]) % 2 == 0)
'''
GRPO = [
    "--config-name", "grpo_tiny_vision_cpu", "rl_config.actor_resource.num_npus=1", "actor_config.tensor_model_parallel_size=1",
    "actor_config.micro_batch_size=32", "megatron_training.train_iters=2", "megatron_training.save_interval=100",
    "megatron_training.global_batch_size=8", "rl_config.mini_batch_size=8", "rl_config.n_samples_per_prompt=4",
    "megatron_training.data_path=train.jsonl", "megatron_training.eval_data_path=null", "megatron_training.image_folder=null",
    "actor_config.save=null", "actor_config.save_hf=false", "rl_config.verifier_function=[clips:even]",
    "rl_config.log_probs_diff_limit=1e-4", "rl_config.max_prompt_length=96", "megatron_training.seq_length=128",
    "generate_config.max_model_len=128", "generate_config.limit_mm_video_per_prompt=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of moving squares, and two tiny models."""
    folder = tmp_path_factory.mktemp("videos")
    for family in ("qwen2.5", "qwen3"):
        save_model(folder / family, family)
    write_rows(folder, "train", 16, 1)
    (folder / "clips.py").write_text(REWARD)
    return folder


def model(family: str) -> list[str]:
    return [f"actor_config.load={family}", f"megatron_training.tokenizer_name_or_path={family}"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_a_run_trains_on_the_frames_that_its_engine_and_rewards_saw(family: str, task: Path) -> None:
    command("train", *GRPO, *model(family), f"run_dir={family}_run", folder=task)
    records = metrics(task / f"{family}_run")
    assert len(records) == 2 and all(record["rollout/log_probs_diff_max"] < 1e-4 for record in records)
    assert all(record["actor/grad_norm"] > 0 for record in records)


@pytest.mark.slow
def test_servers_sample_from_videos_one_step_ahead(task: Path) -> None:
    # of no effect, so that log-probs of older weights equal the new weights' wherever both sides see the same frames
    keys = [*SERVERS, "rl_config.trainer_mode=one_step_off", "actor_config.lr=1e-12", "actor_config.min_lr=0"]
    command("train", *GRPO, *keys, *model("qwen3"), "run_dir=served", "megatron_training.train_iters=3", folder=task)
    records = metrics(task / "served")
    assert len(records) == 3 and all(record["rollout/log_probs_diff_max"] < 1e-4 for record in records)


#: asks about the video of its row, and shows frames of its own with the second question
PROGRAM = """
import base64, io, json, os, pathlib, urllib.request
from PIL import Image

def post(messages):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def picture(level):
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), (level, 0, 0)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

task = json.loads(pathlib.Path(os.environ["AGENT_TASK"]).read_text())
(clip,) = task["images"]
row = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": clip}}, {"type": "text", "text": "to?"}]}
first = post([row])
own = {"type": "video", "video": [picture(level) for level in (0, 80, 160, 240)], "fps": 2}
second = post([row, first, {"role": "user", "content": [own, {"type": "text", "text": "and?"}]}])
print(json.dumps({"reward": float(second["content"][:1] == task["label"])}))
"""


@pytest.mark.slow
def test_a_program_that_shows_videos_in_two_turns_is_trained_on_what_the_engine_saw(task: Path) -> None:
    # a random model samples video tokens, after which the engine cannot place another video
    rows = write_rows(task, "sft", 64, 2)
    words = ["run_dir=sft_run", "megatron_training.save=sft_weights", "megatron_training.train_iters=30", *SFT[4:]]
    words = [word for word in words if "data/sft" not in word and "=model" not in word and not word.endswith("save=sft")]
    words += ["megatron_training.load=qwen3", "megatron_training.tokenizer_name_or_path=qwen3"]
    words += [f"megatron_training.data_path={rows}", "megatron_training.prompt_type=hf"]
    command("train", "--config-name", "sft_tiny_vision_cpu", *words, folder=task)
    (task / "program.py").write_text(PROGRAM)
    keys = [
        "actor_config.load=sft_weights", "megatron_training.tokenizer_name_or_path=qwen3", "run_dir=program_run",
        "rl_config.verifier_function=[]", "rl_config.verifier_weight=[]", "rl_config.multi_turn_enable=true",
        f"rl_config.agent={{command: [{sys.executable}, {task / 'program.py'}]}}", "rl_config.trajectory_reward=final",
        "generate_config.limit_mm_video_per_prompt=2", "generate_config.max_model_len=256", "megatron_training.seq_length=256",
        "rl_config.log_completions=true",
    ]  # fmt: skip
    command("train", *GRPO, *keys, folder=task)
    records = metrics(task / "program_run")
    assert len(records) == 2 and all(record["rollout/log_probs_diff_max"] < 1e-4 for record in records)
    assert all(record["turns/mean"] == 2 and record["rollout/failed_trajectories"] == 0 for record in records)


@pytest.mark.slow
@pytest.mark.extra
def test_a_model_learns_from_rewards_which_way_a_square_moves(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    # half of the answers of the warm start name the opposite direction: only the reward tells which one is meant
    rows, prompts, held_out = (
        write_rows(tmp_path, name, count, seed, right=right)
        for name, count, seed, right in (("sft", 640, 1, 0.5), ("train", 256, 2, 1.0), ("heldout", 64, 3, 1.0))
    )
    base = ["megatron_training.tokenizer_name_or_path=model", "megatron_training.load=model", "megatron_training.save=sft"]
    base += [f"megatron_training.data_path={rows}", "megatron_training.prompt_type=hf", "megatron_training.num_npus=1"]
    base += ["megatron_training.train_iters=280", "megatron_training.lr=1e-3", "megatron_training.global_batch_size=32"]
    command("train", "--config-name", "sft_tiny_vision_cpu", *base, "run_dir=sft_run", folder=tmp_path)
    keys = [
        "run_dir=grpo", "actor_config.load=sft", "megatron_training.tokenizer_name_or_path=model",
        f"megatron_training.data_path={prompts}", f"megatron_training.eval_data_path={held_out}",
        "megatron_training.train_iters=20", "megatron_training.eval_interval=20", "megatron_training.global_batch_size=32",
        "rl_config.mini_batch_size=32", "rl_config.n_samples_per_prompt=8", "rl_config.verifier_function=[exact_match]",
        "actor_config.micro_batch_size=256",
    ]  # fmt: skip
    command("train", *GRPO, *keys, folder=tmp_path)
    records = metrics(tmp_path / "grpo")
    rewards = [record["rewards/mean"] for record in records]
    assert sum(rewards[:2]) / 2 < 0.6 < 0.8 < sum(rewards[-3:]) / 3, rewards
    assert json.loads((tmp_path / "grpo" / "report.json").read_text())
