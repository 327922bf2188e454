# ruff: noqa: E402  (Megatron must be imported after the adaptor)
"""One GRPO iteration with LoRA in one process: its own reference with the adapters off, its rollout engine fed merged weights.

usage: lora_rl_program.py PORT MODEL_FOLDER RESULT_FILE merged|adapter megatron|fsdp
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch

from mindspeed_rl import platform
from mindspeed_rl.config import build_run_config
from mindspeed_rl.config.keys.rl import OpponentKeys
from mindspeed_rl.dataplane.columns import pack
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.runtime.process import prepare_process
from mindspeed_rl.workers.update_plan import UpdatePlan

ROWS = 8
_COLUMNS = ("advantages", "rollout_log_probs", "scored_mask", "loss_mask", "old_log_probs", "ref_log_probs")


class LocalPlane:
    """Columns of one process, for a worker without Ray."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[int, Any]] = {}

    def put(self, data: Mapping[str, Sequence[Any]], indexes: Sequence[int], **options: Any) -> None:
        for name, values in data.items():
            self.columns.setdefault(name, {}).update(zip(indexes, values))

    def get(
        self, consumer: str, columns: Sequence[str], count: int | None = None, *, indexes: Sequence[int], **options: Any
    ) -> tuple[dict[str, Any], list[int]]:
        return {name: pack([self.columns[name][index] for index in indexes]) for name in columns}, list(indexes)

    def column(self, name: str) -> list[Any]:
        """All rows of a column."""
        return [self.columns[name][row] for row in range(ROWS)]


def run_config(folder: str, lora_push: str, engine: str) -> Any:
    return build_run_config(
        {
            "platform": "cpu",
            "megatron_training": {
                "stage": "ray_grpo",
                "engine": engine,
                "bf16": False,
                "global_batch_size": 4,
                "micro_batch_size": 4,
                "train_iters": 2,
                "lr": 1e-2,
                "lr_decay_style": "constant",
                "seq_length": 32,
                "load": folder,
                "tokenizer_name_or_path": folder,
                "finetune": True,
                "reset_attention_mask": True,
                "no_pad_to_seq_lengths": True,
                "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
                "lora_r": 4,
            },
            "rl_config": {
                "actor_resource": {"num_npus": 1},
                "share_backbone": True,
                "n_samples_per_prompt": 2,
                "mini_batch_size": 4,
                "max_prompt_length": 16,
                "use_remove_padding": True,
                "init_kl_coef": 0.1,
                "guarantee_order": True,
            },
            "generate_config": {
                "infer_tensor_parallel_size": 1,
                "dtype": "float32",
                "lora_push": lora_push,
                "max_num_seqs": 8,
                "max_model_len": 32,
                "max_num_batched_tokens": 256,
                "sampling_config": {"max_tokens": 12, "temperature": 1.0, "top_k": -1},
            },
        }
    )


def largest_gap(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs))


def read_base(role: Any) -> dict[str, torch.Tensor]:
    """The weights that do not train, by name."""
    if role.config.engine == "megatron":
        named = dict(role.model.models[0].named_parameters())
    else:
        named = {name: role.engine.model.read_shard(name) for name in role.engine.model.names}
    return {name: value.detach().clone() for name, value in named.items() if ".lora_" not in name}


def tampered(worker: Any) -> str:
    """What the proof says once a bit of an adapter in the engine's memory has changed."""
    from mindspeed_rl.resharding.proof import WeightDeliveryError

    replica = worker.rollout
    model = replica.engine.get_model()
    layer = next(module for module in model.modules() if hasattr(module, "lora_b_stacked"))
    layer.lora_b_stacked[0][0, 0, 0].view(torch.int32)[0] ^= 1
    try:
        replica._prove_adapters(model, worker._adapters[""].tensors, worker._adapters[""].scale)
    except WeightDeliveryError as error:
        return str(error)
    return "nothing"


def play_past(worker: Any, prompts: Sequence[torch.Tensor], versions: Sequence[int | None]) -> list[list[list[int]]]:
    """Responses of each snapshot, None for the present weights, to the prompts, all with the same seeds and in one batch."""
    from mindspeed_rl.rollout.opponents import name_snapshot

    engine, names = worker.rollout.engine, {}
    for version in versions:
        adapter = "" if version is None else name_snapshot(version)
        for index, prompt in enumerate(prompts):
            name = f"{version}/{index}"
            engine.add_request(name, prompt.tolist(), replace(engine.sampling, adapter=adapter), index)
            names[name] = (version, index)
    done: dict[tuple[int | None, int], list[int]] = {}
    while len(done) < len(names):
        done |= {names[name]: completion.token_ids for name, completion in engine.step()}
    return [[done[version, index] for index in range(len(prompts))] for version in versions]


def main(port: str, folder: str, result: Path, lora_push: str, engine: str) -> None:
    os.environ.update(platform.select("cpu").worker_env())
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    cfg, plane = run_config(folder, lora_push, engine), LocalPlane()
    prepare_process(("train", "rollout"), cfg.actor_config)
    from mindspeed_rl.run.models import plan_models
    from mindspeed_rl.workers.actor_worker import ActorWorker
    from mindspeed_rl.workers.opponent_pool import OpponentPool
    from mindspeed_rl.workers.rollout_replica import ENGINES, build_vllm

    keys, saved = OpponentKeys(roles=["any"], interval=1, size=2), str(result.parent / f"saved_{lora_push}")
    ENGINES["vllm"] = partial(build_vllm, num_adapters=1 + keys.num_snapshots)
    worker = ActorWorker(plan_models(resolve(cfg, platform="cpu")), plane, "lora", rank=0)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 90, (6,), generator=generator) for _ in range(ROWS // 2) for _ in range(2)]
    plane.put({"prompt_ids": prompts}, range(ROWS))
    base = read_base(worker.roles.actor)
    results: dict[str, Any] = {"has_reference": worker.roles.ref is not None}

    if lora_push == "adapter":
        worker.rollout.opponents = {"": OpponentPool(keys, saved, torch.device("cpu"))}
    results["proven"] = worker.push_weights(0).metrics["rollout/proven_parameters"].value
    if lora_push == "adapter":
        (results["at_start"],) = play_past(worker, prompts, [None])
    worker.generate(0)
    worker.compute_log_probs("actor", ROWS)
    worker.compute_log_probs("ref", ROWS)
    results["rollout_gap"] = largest_gap(plane.column("rollout_log_probs"), plane.column("old_log_probs"))
    results["reference_gap_at_start"] = largest_gap(plane.column("ref_log_probs"), plane.column("old_log_probs"))
    first_reference = plane.column("ref_log_probs")

    responses = plane.column("responses")
    plane.put(
        {
            "advantages": [torch.full((len(r),), 1.0 if row % 2 else -1.0) for row, r in enumerate(responses)],
            "scored_mask": [torch.ones(len(r), dtype=torch.bool) for r in responses],
            "loss_mask": [torch.ones(len(r), dtype=torch.bool) for r in responses],
        },
        range(ROWS),
    )
    worker.update_actor(UpdatePlan([list(range(ROWS))], 0.1, None, _COLUMNS))
    worker.compute_log_probs("ref", ROWS)
    results["reference_moved"] = largest_gap(first_reference, plane.column("ref_log_probs"))
    worker.compute_log_probs("actor", ROWS)
    results["actor_moved"] = largest_gap(first_reference, plane.column("old_log_probs"))

    worker.push_weights(1)
    worker.generate(1)
    worker.compute_log_probs("actor", ROWS)
    results["rollout_gap_after_update"] = largest_gap(plane.column("rollout_log_probs"), plane.column("old_log_probs"))
    if lora_push == "adapter":
        results["proven_with_past"] = worker.push_weights(1).metrics["rollout/proven_parameters"].value
        results["past"] = play_past(worker, prompts, [0, 1, None])
        restored = OpponentPool(keys, None, torch.device("cpu"))
        restored.restore(Path(saved), 1)
        results["restored"] = [
            (folder / name).read_bytes() == (worker.rollout.opponents[""].folders[version] / name).read_bytes()
            for version, folder in restored.folders.items()
            for name in ("adapter_config.json", "adapter_model.safetensors")
        ]
    results["tampered"] = tampered(worker) if lora_push == "adapter" else ""
    after = read_base(worker.roles.actor)
    results["base_unchanged"] = after.keys() == base.keys() and all(torch.equal(after[name], base[name]) for name in base)
    result.write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine does not end cleanly inside a training process


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5])
