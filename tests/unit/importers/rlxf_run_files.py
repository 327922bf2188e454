"""A run file of MindSpeed-LLM's ray_gpt.py."""

from __future__ import annotations

from pathlib import Path

import yaml


def write_rlxf_run_file(folder: Path, name: str) -> Path:
    """Write a run file with the groups of its GRPO, and the model block that it names."""
    (folder / "model").mkdir(parents=True)
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "swiglu": True, "bf16": True, "hidden_dropout": 0.0}
    shape |= {"attention_dropout": 0.0, "position_embedding_type": "rope", "normalization": "RMSNorm"}
    (folder / "model" / "small.yaml").write_text(yaml.safe_dump({"small": shape}))
    actor = {"model": "small", "do_sample": True, "temperature": 1.0, "micro_batch_size": 1, "ppo_mini_batch_size": 8}
    actor |= {"max_prompt_length": 256, "n_samples_per_prompt": 4, "lr": 1e-6, "lr_decay_style": "constant", "load": "./sft"}
    actor |= {"num_gpus_for_train": 2, "num_gpus_for_infer": 4, "data_path": "./prompts", "lr_warmup_fraction": 0.0}
    tree = {
        "training": {
            "stage": "ray_grpo",
            "global_batch_size": 8,
            "seq_length": 512,
            "train_iters": 10,
            "tokenizer_name_or_path": "./m",
        },
        "actor_rollout_ref": {"actor_rollout": actor, "ref": {"model": "small", "load": "./sft", "micro_batch_size": 2}},
        "reward": {"model": "small", "load": "./rm", "micro_batch_size": 2},
        "algorithm": {"kl_ctrl": {"type": "fixed", "kl_coef": 0.05}, "advantage_whiten": False, "missing_eos_penalty": 1.0},
        "resource_pool": {"actor_rollout": [6], "ref": [2], "reward": [1]},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
