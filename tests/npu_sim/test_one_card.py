"""The shipped run files of one card, with fewer and smaller layers of the same structure, as a user starts them.

Everything that these files turn on stays on: a swapped optimizer, full recomputation, the offload of all training state and a
start of one model at a time. Each run is compared with one in which those are off, also after a restart from its checkpoint,
and the bytes that it measures in each phase with the planner's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from grpo_command import Command, records
from measured_figures import select_computed
from tiny_task import make_tokenizer

from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.planner.devices import DEVICES, GIB
from mindspeed_rl.planner.memory import Phase, plan_memory
from mindspeed_rl.run.draft import draft

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0"),
]

LIMIT_S = 900.0
MEMORY_GIB = 4
SAVED, ITERATIONS = 2, 3
#: mask of fused attention, 2048 x 2048 bytes whatever the model
MASK_GIB = 2048 * 2048 / GIB
#: rewards that differ between the samples of a prompt of a model with random weights
REWARD = '''
def is_even(prompt, response, label, **columns):
    """1 for characters whose codes have an even sum."""
    return float(sum(map(ord, response)) % 2 == 0)
'''
VOCAB = 4096
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A shipped run file and the small model in place of the published one.

    Attributes:
        block: name of its model block.
        shape: keys of the block that are smaller.
        devices: of the run.
    """

    file: str
    block: str
    config: PretrainedConfig
    devices: int

    @property
    def shape(self) -> dict[str, int]:
        """The keys of the model block with the small model's values."""
        config: Any = self.config
        keys = {
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "ffn_hidden_size": config.intermediate_size,
            "num_attention_heads": config.num_attention_heads,
            "kv_channels": config.head_dim,
            "num_query_groups": config.num_key_value_heads,
            "padded_vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
        }
        if isinstance(config, Qwen3MoeConfig):
            keys |= {"num_experts": config.num_experts, "moe_ffn_hidden_size": config.moe_intermediate_size}
        return keys


RUNS = {
    "8B on one die": Published("grpo_qwen3_8b_A2_1die", "qwen3_8b", Qwen3Config(**SHAPE, num_key_value_heads=2), 1),
    "30B-A3B on four dies": Published(
        "grpo_qwen3_30b_a3b_A2_4dies",
        "qwen3_30b_a3b",
        Qwen3MoeConfig(
            **SHAPE,
            num_key_value_heads=1,
            num_experts=16,
            num_experts_per_tok=8,
            moe_intermediate_size=192,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            router_aux_loss_coef=0.001,
        ),
        4,
    ),
}
#: without what saves memory in the shipped files
PLAIN = (
    "actor_config.swap_optimizer=false",
    "actor_config.recompute_granularity=null",
    "actor_config.recompute_method=null",
    "actor_config.recompute_num_layers=null",
    "generate_config.offload_train_optimizer=false",
    "generate_config.offload_train_grad=false",
    "generate_config.offload_train_param=false",
)


def overrides(published: Published, task: Path, folder: Path) -> list[str]:
    """What is smaller, and where data and weights are; nothing that saves memory is changed."""
    model = task / "model"
    return [
        f"run_dir={folder / 'run'}",
        *(f"model.{published.block}.{name}={value}" for name, value in published.shape.items()),
        f"actor_config.load={folder / 'save'}",
        f"actor_config.save={folder / 'save'}",
        f"actor_config.pretrained_checkpoint={model}",
        "actor_config.finetune=false",
        "actor_config.no_load_optim=false",
        "actor_config.no_load_rng=false",
        "actor_config.lr=1e-4",
        "actor_config.loss_chunk_size=32",
        f"megatron_training.tokenizer_name_or_path={model}",
        f"megatron_training.data_path={task / 'train.jsonl'}",
        "megatron_training.global_batch_size=8",
        f"megatron_training.train_iters={ITERATIONS}",
        f"megatron_training.save_interval={SAVED}",
        "rl_config.mini_batch_size=8",
        "rl_config.max_prompt_length=16",
        "rl_config.max_packing_token_size=64",
        "rl_config.verifier_function=[parity:is_even]",
        f"rl_config.runtime_env_path={Path(__file__).parent / 'runtime_env.yaml'}",
        "rl_config.wait_timeout_s=600",
        "generate_config.max_num_seqs=32",
        "generate_config.max_model_len=32",
        "generate_config.max_num_batched_tokens=128",
        "generate_config.gpu_memory_utilization=0.3",
        "+generate_config.enforce_eager=true",
        "generate_config.sampling_config.max_tokens=16",
    ]


class OneCard(Command):
    """A command of a shipped run file on simulated dies."""

    shares = False  # workers on the NPU are not forks

    def __init__(self, published: Published, task: Path, folder: Path, *changes: str) -> None:
        self.published, self.config = published, published.file
        super().__init__(task, folder, *changes)

    def keys(self, task: Path) -> list[str]:
        return overrides(self.published, task, self.folder)


@pytest.fixture(scope="module", params=list(RUNS))
def published(request: pytest.FixtureRequest) -> Published:
    return RUNS[request.param]


@pytest.fixture(scope="module", autouse=True)
def a_small_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_MEMORY_GIB", str(MEMORY_GIB))
        patch.setenv("NPU_SIM_RUN_DIR", str(tmp_path_factory.mktemp("hccl")))
        yield


@pytest.fixture(scope="module")
def task(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(published, tmp_path_factory.mktemp("task"))


def write_task(published: Published, folder: Path) -> Path:
    """model/ and train.jsonl."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(published.config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    make_tokenizer(VOCAB).save_pretrained(folder / "model")
    rows = (json.dumps({"prompt": f"{number}=", "labels": str(number)}) for number in range(10, 90))
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def run(published: Published, task: Path, folder: Path, *changes: str) -> Command:
    """A run that has ended well; a later one in its folder resumes."""
    folder.mkdir(exist_ok=True)
    (folder / "parity.py").write_text(REWARD)
    command = OneCard(published, task, folder, *changes)
    try:
        assert command.wait(LIMIT_S) == 0, command.output[-6000:]
        left = command.leftovers()
        assert not left, left
    finally:
        command.close()
    return command


@pytest.fixture(scope="module")
def ran(published: Published, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The shipped run, with what saves memory."""
    return run(published, task, tmp_path_factory.mktemp("ran"))


def test_it_trains_saves_and_resumes_with_the_numbers_of_the_run_without_what_saves_memory(
    published: Published, task: Path, ran: Command, tmp_path: Path
) -> None:
    longer = f"megatron_training.train_iters={ITERATIONS + 1}"
    plain = run(published, task, tmp_path, *PLAIN, longer, "actor_config.save=null")
    assert [record["iteration"] for record in plain.metrics] == list(range(1, ITERATIONS + 2))
    assert all(record["actor/grad_norm"] > 0 for record in plain.metrics)
    again = run(published, task, ran.folder, longer, f"run_dir={ran.folder / 'again'}")
    assert f"resumes after iteration {ITERATIONS}" in again.output
    resumed = records(ran.folder / "again")
    ours, theirs = ([select_computed(record) for record in steps] for steps in ([*ran.metrics, *resumed], plain.metrics))
    assert ours == theirs


def test_bytes_of_each_phase_are_the_planners(published: Published, task: Path, ran: Command) -> None:
    cfg = load_run_config(published.file, overrides=overrides(published, task, ran.folder))
    device = dataclasses.replace(DEVICES["A2"], memory=MEMORY_GIB * GIB, driver=0, runtime=0)
    plan = plan_memory(draft(cfg), device)
    record = ran.metrics[-1]
    measured = {phase.name: measure(record, phase.name) for phase in plan.fullest.phases if phase.name != "start"}
    measured["start"] = ran.metrics[0]["memory/start_gib"]
    planned = {phase.name: count(phase) for phase in plan.fullest.phases}
    assert measured == pytest.approx(planned, rel=0.05, abs=MASK_GIB)
    # what a start has at most is not more than what an update has
    assert measured["start"] <= 1.05 * measured["update"]


def count(phase: Phase) -> float:
    """GiB of a phase that torch's allocator counts."""
    return sum(bytes_ for owner, bytes_ in phase.owners.items() if owner not in Phase.FIXED) / GIB


def measure(record: dict[str, Any], phase: str) -> float:
    """GiB of the owners of a phase in a record of metrics."""
    prefix = f"memory/{phase.replace(' ', '_')}/"
    return sum(value for name, value in record.items() if name.startswith(prefix))


#: the run file of eight devices on two, with a model whose tensor parallel matrices have whole blocks
OF_A_950 = Published("grpo_qwen3_8b_950DT", "qwen3_8b", Qwen3Config(**SHAPE, num_key_value_heads=2), 2)


#: format of the rollout -> least and largest mean of |log-prob of the trainer - that of the rollout|; measured: 0.004, 0.05
DIFFERENCES = {"null": (0.0, 0.012), "mxfp8": (0.02, 0.2)}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", DIFFERENCES)
def test_a_950_trains_saves_and_resumes(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    task = write_task(OF_A_950, tmp_path / "task")
    smaller = ("megatron_training.seq_length=32", "rl_config.actor_resource.num_npus=2")
    changes = (*smaller, f"+generate_config.quantization={quantization}")
    first = run(OF_A_950, task, tmp_path / "run", *changes)
    assert [record["iteration"] for record in first.metrics] == list(range(1, ITERATIONS + 1))
    assert all(record["actor/grad_norm"] > 0 for record in first.metrics)
    least, largest = DIFFERENCES[quantization]
    assert all(least < record["rollout/log_probs_diff_mean"] < largest for record in first.metrics)
    longer = (f"megatron_training.train_iters={ITERATIONS + 1}", f"run_dir={tmp_path / 'again'}")
    again = run(OF_A_950, task, tmp_path / "run", *changes, *longer)
    assert f"resumes after iteration {ITERATIONS}" in again.output
    assert [record["iteration"] for record in records(tmp_path / "again")] == [ITERATIONS + 1]
