"""GRPO on prompts with videos as a command: engines in the workers, and servers with programs of several turns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from moving_shapes import save_model, write_rows
from test_vision_run import SERVERS, command, metrics

from mindspeed_rl.algorithms.rollout_file import RolloutBatch

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
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_responses_about_videos_are_those_without_drafts(method: str, task: Path) -> None:
    length = ["generate_config.sampling_config.max_tokens=24", "generate_config.sampling_config.temperature=0.3"]
    keys = [*model("qwen3"), *length, "megatron_training.train_iters=1", "rl_config.save_rollouts_interval=1"]
    drafts = f"generate_config.speculative_config={{method: {method}, num_speculative_tokens: 3}}"
    for name, more in (("plain", []), (method, [drafts])):
        if not (task / f"{name}_drafts").exists():
            command("train", *GRPO, *keys, *more, f"run_dir={name}_drafts", folder=task)
    batches = [
        RolloutBatch.load(task / f"{name}_drafts" / "rollouts" / "iteration_0000001.safetensors") for name in ("plain", method)
    ]
    assert all(batches[0].columns[name].equal(batches[1].columns[name]) for name in ("input_ids", "response_mask"))
    (record,) = metrics(task / f"{method}_drafts")
    assert record["rollout/draft_acceptance"] > 0 and record["rollout/log_probs_diff_max"] < 1e-4


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
def test_a_program_that_shows_videos_in_two_turns_is_trained_on_what_the_server_saw(task: Path) -> None:
    (task / "program.py").write_text(PROGRAM)
    keys = [
        *SERVERS, *model("qwen3"), "run_dir=program_run", "megatron_training.train_iters=1", "rl_config.verifier_function=[]",
        "rl_config.verifier_weight=[]", "rl_config.multi_turn_enable=true", "rl_config.trajectory_reward=final",
        f"rl_config.agent={{command: [{sys.executable}, {task / 'program.py'}]}}", "megatron_training.seq_length=256",
        "generate_config.limit_mm_video_per_prompt=2", "generate_config.max_model_len=256",
    ]  # fmt: skip
    command("train", *GRPO, *keys, folder=task)
    (record,) = metrics(task / "program_run")
    assert record["rollout/log_probs_diff_max"] < 1e-4
    # a random model samples video tokens now and then, after which the engine cannot place another video
    assert record["turns/mean"] > 1.7 and record["rollout/failed_trajectories"] < 0.2
