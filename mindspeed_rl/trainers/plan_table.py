"""The plan of a run as the rows of one table on the console; `mindspeed-rl explain` says all of it."""

from __future__ import annotations

from mindspeed_rl.config import MegatronConfig, Run


def plan_rows(run: Run, num_devices: int) -> dict[str, str]:
    """What is trained, on what, in which sizes, and where it goes.

    Args:
        num_devices: of the actors, and of a reward model that has its own.
    """
    cfg, plan, actor = run.config, run.plan, run.config.actor_config
    rows = {
        "stage": run.stage,
        "model": str(actor.pretrained_checkpoint or actor.load or actor.model or "fresh weights"),
        "devices": f"{num_devices} x {run.platform} on {run.num_nodes} node(s), {_layout(actor)}",
        "length": f"{plan.train_iters} iterations",
    }
    steps = f"{plan.num_optimizer_steps} optimizer step(s)"
    if cfg.is_supervised:
        rows["batch"] = f"{plan.num_samples} samples a step, micro-batches of {plan.micro_batch_size}"
    else:
        sampling = run.generate.sampling_config
        drawn = f"at most {sampling.max_tokens} tokens, temperature {sampling.temperature:g}"
        rows["rollout"] = f"{plan.num_prompts} prompts x {plan.n_samples_per_prompt} responses, {drawn}"
        rows["update"] = f"{steps} of {plan.mini_batch_size} responses, micro-batches of {plan.micro_batch_size}"
        rows["rewards"] = ", ".join(
            [*(run.rl.verifier_function if run.rl.rule_reward else []), *(["reward model"] if run.rl.reward_model else [])]
        )
    rows["learning rate"] = f"{actor.lr:g}, {actor.lr_decay_style}" if actor.lr is not None else ""
    rows["adapters"] = f"{', '.join(actor.lora_target_modules)}, rank {actor.lora_r}" if actor.lora_target_modules else ""
    if run.prediction is not None:
        rows["planned"] = run.prediction.summary or f"nothing: {run.prediction.missing}"
    rows["data"] = _data(actor)
    rows["saves to"] = f"{actor.save}, every {actor.save_interval or plan.train_iters} iterations" if actor.save else "nowhere"
    return rows


def _layout(actor: MegatronConfig) -> str:
    sizes = {
        "TP": actor.tensor_model_parallel_size,
        "PP": actor.pipeline_model_parallel_size,
        "CP": actor.context_parallel_size,
        "EP": actor.expert_model_parallel_size,
    }
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return f"{', '.join(parts)}, {'bf16' if actor.bf16 else 'fp32'}" if parts else "bf16" if actor.bf16 else "fp32"


def _data(actor: MegatronConfig) -> str:
    path = actor.data_path
    return ", ".join(map(str, path)) if isinstance(path, list) else path or ""
