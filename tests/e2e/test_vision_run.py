"""The vision example in a smaller form: preprocessing, SFT, GRPO, with pictures that rewards, trainer and engine see alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
from patience import patient
from safetensors.torch import load_file
from scripts import load_script
from shared_forks import shared

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli.parity import replay
from mindspeed_rl.config.model_metadata import VISION_VARIABLE
from mindspeed_rl.data.images import make_data_url
from mindspeed_rl.runtime.fork_server import RL

ROOT = Path(__file__).resolve().parents[2]
#: rewards whether the answer is the colour that the picture has at the shape, which the text does not say
REWARD = '''
from mindspeed_rl.data.images import open_image

SEEN = {(220, 40, 40): "r", (40, 180, 60): "g", (50, 80, 230): "b", (240, 220, 40): "y"}


def colours(prompt, response, label, images=(), **columns):
    """1 for a colour that is in the picture; raises unless the label is one of them."""
    (image,) = images
    found = {SEEN[colour] for _, colour in open_image(image).getcolors() if colour in SEEN}
    assert label in found and len(found) == 2, (label, found)
    return float(response.strip() in found)


def starts_even(prompt, response, label, images=(), **columns):
    """1 where the first character has an even code, which an untrained model reaches in about half of its samples."""
    assert len(images) == 1 and open_image(images[0]).size == (84, 84)
    return float(bool(response) and ord(response[0]) % 2 == 0)
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's task with fewer pictures, preprocessed for SFT."""
    folder = tmp_path_factory.mktemp("vision")
    example = load_script("examples/vision/make_task.py")
    example.NUM_SFT, example.NUM_TRAIN, example.NUM_HELD_OUT = 64, 32, 16
    example.main(folder)
    (folder / "data").mkdir()
    (folder / "looks.py").write_text(REWARD)
    command(
        "preprocess", "--tokenizer-name-or-path", "model", "--prompt-type", "hf", "--input", "raw/sft.jsonl",
        "--output-prefix", "data/sft", "--handler-name", "OpenAIInstructionHandler", folder=folder,
    )  # fmt: skip
    return folder


def command(*words: str, folder: Path) -> str:
    """The output of a command that ends well."""
    places = (str(ROOT), str(folder), os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1"}
    environment |= shared(RL, **{VISION_VARIABLE: "1"}) if GRPO[1] in words and "platform=npu" not in words else {}
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.cli.main", *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=patient(900),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics(run: Path) -> list[dict[str, Any]]:
    return [record for line in (run / "metrics.jsonl").read_text().splitlines() if (record := json.loads(line))["iteration"]]


SFT = [
    "--config-name", "sft_tiny_vision_cpu", "run_dir=sft_run", "megatron_training.num_npus=1",
    "megatron_training.train_iters=3", "megatron_training.log_interval=1", "megatron_training.data_path=data/sft",
    "megatron_training.tokenizer_name_or_path=model", "megatron_training.load=model", "megatron_training.save=sft",
]  # fmt: skip
GRPO = [
    "--config-name", "grpo_tiny_vision_cpu", "run_dir=grpo_run", "rl_config.actor_resource.num_npus=1",
    "actor_config.tensor_model_parallel_size=1", "actor_config.micro_batch_size=32", "megatron_training.train_iters=2",
    "megatron_training.save_interval=2", "megatron_training.eval_data_path=null", "megatron_training.global_batch_size=8",
    "rl_config.mini_batch_size=8", "rl_config.n_samples_per_prompt=4", "megatron_training.data_path=raw/train.jsonl",
    "megatron_training.image_folder=raw/pictures", "megatron_training.tokenizer_name_or_path=model", "actor_config.load=sft",
    "actor_config.save=grpo", "rl_config.verifier_function=[looks:colours]", "rl_config.log_probs_diff_limit=1e-4",
    "rl_config.log_completions=true",
]  # fmt: skip
#: one server next to one trainer
SERVERS = ["rl_config.use_integrated_worker=false", "rl_config.rollout_resource.num_npus=1"]
MODES = {
    "one_step_off": [*SERVERS, "rl_config.trainer_mode=one_step_off"],
    "async": [*SERVERS, "rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1"],
    "servers_of_two": [*SERVERS, "rl_config.rollout_resource.num_npus=2", "generate_config.infer_tensor_parallel_size=2"],
    "partial": [
        *("rl_config.partial_rollout_max_split=2", "rl_config.guarantee_order=false"),
        "generate_config.sampling_config.max_tokens=16",
    ],
    "dynamic_sample": ["rl_config.dynamic_sample=true"],
    "filter_groups": ["rl_config.filter_groups_enable=true", "rl_config.filter_groups_max_batches=4"],
}


@pytest.mark.slow
def test_experts_of_the_engine_are_replayed_on_rows_with_pictures(task: Path) -> None:
    tiny_vision.save_for_the_example(load_script("examples/vision/make_task.py"), task / "experts", experts=True)
    keys = ["run_dir=replayed", "actor_config.load=experts", "megatron_training.tokenizer_name_or_path=experts"]
    keys += ["actor_config.save=null", "actor_config.save_hf=false", "rl_config.router_replay.mode=R3"]
    keys += ["rl_config.verifier_function=[looks:starts_even]", "megatron_training.save_interval=3"]
    command("train", *GRPO, *keys, folder=task)
    records = metrics(task / "replayed")
    # routers of both sides agree in float32 where a token has the experts of its own place, after the tokens of its image
    assert len(records) == 2 and all(record["router/agreement"] > 0.999 for record in records)
    assert all(record["rollout/log_probs_diff_max"] < 1e-4 for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_on_the_pictures_that_its_engine_saw(mode: str, task: Path) -> None:
    keys = [f"run_dir={mode}", "actor_config.load=model", "actor_config.save=null", "actor_config.save_hf=false", *MODES[mode]]
    keys += ["megatron_training.train_iters=3", "rl_config.verifier_function=[looks:starts_even]"]
    # with a reference, and features of a frozen tower that are kept
    keys += ["rl_config.kl_penalty=low_var_kl", "rl_config.init_kl_coef=0.001"]
    keys += ["actor_config.freeze_vit=true", "actor_config.freeze_aligner=true"]
    # of no effect, so that log-probs of older weights equal the new weights' wherever both sides see the same picture
    keys += ["actor_config.lr=1e-12", "actor_config.min_lr=0", "rl_config.save_rollouts_interval=1"]
    command("train", *GRPO, *keys, folder=task)
    records = metrics(task / mode)
    assert len(records) == 3 and records[0]["actor/grad_norm"] > 0.0
    for record in records:
        assert record["rollout/log_probs_diff_max"] < 1e-4, record["iteration"]
        batch = RolloutBatch.load(task / mode / "rollouts" / f"iteration_{record['iteration']:07d}.safetensors")
        again = replay(batch, {}, torch.float64)
        loss = record["actor/pg_loss"] + record["actor/kl_coef"] * record["actor/kl_loss"]
        assert again.loss == pytest.approx(loss, abs=1e-6)


def test_pictures_train_and_are_seen_alike_by_trainer_engine_and_rewards(task: Path) -> None:
    plan = command("explain", *SFT, folder=task)
    assert "tokens of images in the first 8 rows: 9, 9, 9, 9, 9, 9, 9, 9" in plan
    command("train", *SFT, folder=task)
    losses = [record["train/loss"] for record in metrics(task / "sft_run")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    command("train", *GRPO, folder=task)
    records = metrics(task / "grpo_run")
    # the limit of the run file stops a run whose trainer and engine differ; the tower trains, and is sent
    assert len(records) == 2 and all(record["rollout/log_probs_diff_max"] < 1e-4 for record in records)
    assert all(record["prompt_length/min"] >= 9 + 2 + 7 for record in records)
    lines = [json.loads(line) for line in (task / "grpo_run" / "completions.jsonl").read_text().splitlines()]
    pictures = [line["extra"]["images"] for line in lines if "images" in line["extra"]]
    assert pictures and all(url.startswith("data:image/jpeg;base64,") for (url,) in pictures)
    assert "<|image_pad|><|image_pad|>" not in lines[0]["prompt"] and "<|image_pad|>" in lines[0]["prompt"]


@pytest.mark.slow
def test_transformers_modules_train_on_pictures_as_megatron_does(task: Path) -> None:
    """SFT, then GRPO from its result; the tower trains in both, and is sent to the rollout engine and proven."""
    engines = ("megatron", "fsdp")
    for name in engines:
        keys = [f"megatron_training.engine={name}", f"run_dir=sft_{name}", f"megatron_training.save=sft_{name}_weights"]
        command("train", *SFT, *keys, folder=task)
        keys = [f"megatron_training.engine={name}", f"run_dir=grpo_{name}", f"actor_config.save=grpo_{name}_weights"]
        keys += [f"actor_config.load=sft_{name}_weights/hf/latest", "rl_config.verifier_function=[looks:starts_even]"]
        command("train", *GRPO, *keys, folder=task)
    of_rl = "grpo/score/mean actor/pg_loss actor/grad_norm response_length/mean rollout/proven_parameters"
    for kind, figures in (("sft", ("train/loss", "train/grad_norm")), ("grpo", of_rl.split())):
        ours, theirs = (metrics(task / f"{kind}_{name}") for name in engines)
        for mine, other in zip(ours, theirs, strict=True):
            for figure in figures:
                assert mine[figure] == pytest.approx(other[figure], rel=1e-3, abs=1e-5), figure
    weights = [load_file(task / f"grpo_{name}_weights/hf/latest/model.safetensors") for name in engines]
    assert weights[0].keys() == weights[1].keys()
    start = load_file(task / "sft_megatron_weights/hf/latest/model.safetensors")
    towers = [name for name in weights[0] if "visual." in name]
    assert any(not torch.equal(weights[0][name], start[name]) for name in towers)


#: asks about the picture of its row, and shows another one with the second question
PROGRAM = """
import json, os, pathlib, urllib.request

def post(messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 8, **more}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"]

def ask(url, text):
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]}

task = json.loads(pathlib.Path(os.environ["AGENT_TASK"]).read_text())
(picture,) = task["images"]
(first,) = post([ask(picture, "what?")])
post([ask(picture, "what?"), first["message"], ask(OTHER, "and?")], n=2)
print(json.dumps({"reward": float(first["message"]["content"].strip() == task["label"])}))
"""


@pytest.mark.slow
def test_a_program_that_sends_pictures_is_trained_on_what_the_engine_saw(task: Path) -> None:
    # a random model samples image tokens, after which the engine cannot place another image
    more = ["run_dir=sft_program", "megatron_training.save=sft_program_weights", "megatron_training.train_iters=30"]
    command("train", *SFT, *more, folder=task)
    other = make_data_url(str(next((task / "raw" / "pictures").iterdir())))
    (task / "program.py").write_text(PROGRAM.replace("OTHER", repr(other)))
    more = [
        "run_dir=program_run", "actor_config.load=sft_program_weights", "rl_config.verifier_function=[]",
        "rl_config.verifier_weight=[]", "rl_config.multi_turn_enable=true",
        f"rl_config.agent={{command: [{sys.executable}, {task / 'program.py'}]}}",
        "rl_config.trajectory_reward=final", "rl_config.use_prefix_grouper=true", "generate_config.limit_mm_image_per_prompt=2",
        "generate_config.max_model_len=128", "megatron_training.seq_length=128",
    ]  # fmt: skip
    command("train", *GRPO, *more, folder=task)
    records = metrics(task / "program_run")
    assert len(records) == 2 and all(record["rollout/log_probs_diff_max"] < 1e-4 for record in records)
    assert all(record["branches/mean"] == 1 and record["turns/mean"] == 3 for record in records)
    assert all(record["rollout/failed_trajectories"] == 0 for record in records)
    line = json.loads((task / "program_run" / "completions.jsonl").read_text().splitlines()[0])
    # of each sequence: the picture of the row, and the other one
    assert len(line["extra"]["images"]) == 4
