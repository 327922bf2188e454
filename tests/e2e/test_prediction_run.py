"""`mindspeed-rl train` on a model whose multi-token-prediction layer trains, and makes drafts in every kind of rollout."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, Command, finished
from patience import patient
from ports import find_free_port
from safetensors.torch import load_file, save_file
from test_disaggregated_rollout import completions
from tiny_task import make_other_task

_LAYER = "model.layers.2."
_KEYS = [
    *ONE_PROCESS,
    "rl_config.log_completions=true",
    "rl_config.use_prefix_grouper=false",
    "actor_config.save=null",
    "megatron_training.train_iters=4",
    "+megatron_training.mtp_num_layers=1",
    "+megatron_training.mtp_loss_scaling_factor=1.0",
    "actor_config.lr=5e-3",
]
_DRAFTS = ["+generate_config.speculative_config={method: mtp, num_speculative_tokens: 1}"]
_SERVERS = ["rl_config.use_integrated_worker=false", "generate_config.vllm_server_timeout=60"]


def predicting_task(folder: Path) -> Path:
    """The tests' task for a tiny DeepSeek-V3 with one prediction layer, which has learnt nothing."""
    task = make_other_task(folder, "deepseek-v3")
    path, generator = task / "model" / "model.safetensors", torch.Generator().manual_seed(4)
    tensors = load_file(path)
    layer = {
        name.replace(".layers.1.", ".layers.2."): tensor.clone() for name, tensor in tensors.items() if ".layers.1." in name
    }
    hidden = tensors["model.norm.weight"].numel()
    layer |= {f"{_LAYER}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    layer[f"{_LAYER}eh_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)
    save_file(tensors | layer, path, {"format": "pt"})
    config = task / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    return task


def predicting_hybrid_task(folder: Path) -> Path:
    """The same for a tiny Qwen3.5, in which every second layer is a gated delta net."""
    task = make_other_task(folder, "qwen3.5")
    path, generator = task / "model" / "model.safetensors", torch.Generator().manual_seed(4)
    tensors = load_file(path)
    layer = {
        name.replace("model.layers.1.", "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.1." in name
    }
    hidden = tensors["model.norm.weight"].numel()
    # norms multiply by 1 + weight
    layer |= {f"mtp.{name}.weight": torch.zeros(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    layer["mtp.fc.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)
    save_file(tensors | layer, path, {"format": "pt"})
    config = task / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mtp_num_hidden_layers": 1}))
    return task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predicting_task(tmp_path_factory.mktemp("task"))


@contextlib.contextmanager
def standalone_server(task: Path, folder: Path, *words: str) -> Iterator[list[str]]:
    """The keys of a run that generates on a server that a user started with these words."""
    port = find_free_port()
    base = [
        "--platform=cpu",
        f"--model={task / 'model'}",
        "--dtype=float32",
        "--max-model-len=64",
        "--kv-cache-memory-gib=0.05",
    ]
    command = [sys.executable, "-m", "mindspeed_rl.cli.main", "rollout", "--port", str(port), *base, *words]
    environment = {**os.environ, "MINDSPEED_RL_SERVER_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    (folder / "token").write_text("secret")
    with (folder / "server.log").open("w+") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + patient(300)
            while "serving model" not in (text := (folder / "server.log").read_text()):
                assert server.poll() is None and time.monotonic() < deadline, text
                time.sleep(0.5)
            keys = {"host": "127.0.0.1", "port": port, "token_file": folder / "token"}
            yield [f"generate_config.vllm_server_{name}={value}" for name, value in keys.items()]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def samples(command: Command) -> list[str]:
    """Return all responses, in an order that no timing changes."""
    return sorted(f"{row['iteration']} {row['prompt']} {row['response']}" for row in completions(command))


@pytest.mark.slow
def test_the_layer_that_trains_makes_the_drafts_of_an_engine_and_of_servers(task: Path, tmp_path: Path) -> None:
    plain = finished(task, tmp_path / "plain", *_KEYS)
    runs = [finished(task, tmp_path / "own engine", *_KEYS, *_DRAFTS)]
    runs.append(finished(task, tmp_path / "own server", *_KEYS, *_DRAFTS, *_SERVERS, "rl_config.rollout_resource.num_npus=1"))
    words = "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    with standalone_server(task, tmp_path, *words) as at:
        runs.append(finished(task, tmp_path / "standalone server", *_KEYS, *_DRAFTS, *at))

    def column(run: Command, name: str) -> list[float]:
        return [record[name] for record in run.metrics]

    for run in runs:
        assert samples(run) == samples(plain)
        losses = column(run, "actor/mtp_loss")
        # rows of servers come in an order of their own: other roundings of sums, of which Adam makes 1e-5 in three steps
        bound = 1e-6 if run is runs[0] else 1e-4
        assert losses == pytest.approx(column(plain, "actor/mtp_loss"), rel=bound) and losses[-1] < losses[0]
        # the parameters of the layer are proven too
        assert min(column(run, "rollout/proven_parameters")) > max(column(plain, "rollout/proven_parameters"))
        for name in ("rollout/proven_parameters", "rollout/draft_acceptance"):
            assert column(run, name) == column(runs[0], name)
    assert max(column(runs[0], "rollout/draft_acceptance")) > 0


@pytest.mark.slow
def test_drafts_over_gated_delta_nets_change_no_token(tmp_path: Path) -> None:
    """The layer that trains makes them, in an engine and in a server."""
    task = predicting_hybrid_task(tmp_path / "task")
    keys = [*_KEYS, "actor_config.bf16=true", "generate_config.dtype=bfloat16", "rl_config.log_probs_diff_limit=0.5"]
    # of no effect: with drafts responses end in another order, and a trainer in bfloat16 rounds another order otherwise
    keys += ["actor_config.lr=1e-12", "actor_config.min_lr=0"]
    plain = finished(task, tmp_path / "plain", *keys)
    server = [*_DRAFTS, *_SERVERS, "rl_config.rollout_resource.num_npus=1"]
    for name, changes in (("engine", _DRAFTS), ("server", server)):
        run = finished(task, tmp_path / name, *keys, *changes)
        assert samples(run) == samples(plain), name
        assert max(record["rollout/draft_acceptance"] for record in run.metrics) > 0, name
        proven = [min(record["rollout/proven_parameters"] for record in command.metrics) for command in (run, plain)]
        assert proven[0] > proven[1], name


_TWO_RANKS = ["rl_config.actor_resource.num_npus=2", "actor_config.tensor_model_parallel_size=2"]
_TWO_RANKS += ["generate_config.infer_tensor_parallel_size=2"]
#: what drafts over delta nets are combined with: keys of both runs, drafts
COMBINED = {
    "two ranks": (_TWO_RANKS, _DRAFTS),
    "int8": (
        ["+generate_config.quantization=int8"],
        ["+generate_config.speculative_config={method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 2}"],
    ),
    "responses over several steps": (
        ["rl_config.partial_rollout_max_split=2", "rl_config.guarantee_order=false", "megatron_training.save_interval=100"],
        _DRAFTS,
    ),
}


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("name", COMBINED)
def test_drafts_over_gated_delta_nets_change_no_token_combined_with(name: str, tmp_path: Path) -> None:
    task, (both, drafts) = predicting_hybrid_task(tmp_path / "task"), COMBINED[name]
    keys = [*_KEYS, "actor_config.bf16=true", "generate_config.dtype=bfloat16", "rl_config.log_probs_diff_limit=0.5"]
    keys += ["actor_config.lr=1e-12", "actor_config.min_lr=0", "megatron_training.train_iters=2", *both]
    plain, drafted = (finished(task, tmp_path / kind, *keys, *more) for kind, more in (("plain", []), ("drafted", drafts)))
    assert samples(drafted) == samples(plain) and "rollout/draft_acceptance" in drafted.metrics[0]


@pytest.mark.slow
def test_a_server_without_drafts_takes_the_policy_alone(task: Path, tmp_path: Path) -> None:
    plain = finished(task, tmp_path / "plain", *_KEYS, "megatron_training.train_iters=1")
    server = finished(
        task, tmp_path / "server", *_KEYS, *_SERVERS, "rl_config.rollout_resource.num_npus=1", "megatron_training.train_iters=1"
    )
    name = "rollout/proven_parameters"
    assert server.metrics[0][name] == plain.metrics[0][name]
    assert samples(server) == samples(plain)
