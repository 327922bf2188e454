"""Arguments of the trainers: typed, with the names and defaults that TRL has for them.

A field that is None has TRL's default. A field with an `option` in its metadata is an option of TRL's command, which the table
of `importers.trl` translates; the others are this project's own, and `keys` sets any key of a run file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from mindspeed_rl.catalogue import CRITIC_ESTIMATOR

_Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr"]


def _option(default: Any = None) -> Any:
    """Return a field that is an option of TRL's command, under the same name."""
    return field(default=default, metadata={"option": True})


@dataclass(kw_only=True)
class TrainerConfig:
    """Arguments that all trainers have.

    Attributes:
        output_dir: folder of the run: report.html, metrics.jsonl, run.yaml, data, checkpoints.
        keys: any key of a run file by its dotted name, such as {"rl_config.clip_ratio_c": 3.0}; wins over the arguments.
        platform: kind of the devices; auto takes the one of this machine.
        num_devices: devices that train.
        num_nodes: machines that they are on.
        learning_rate: peak of the learning rate.
        lr_scheduler_type: form of the learning rate over the run.
        warmup_steps: optimizer steps of the warm-up; below 1 a fraction of the run.
        max_steps: optimizer steps of the run; num_train_epochs decides where it is not set.
        num_train_epochs: passes over the rows; 3 in TRL.
        per_device_train_batch_size: rows of one forward pass of a device: samples, pairs or completions.
        gradient_accumulation_steps: forward passes of an optimizer step.
        gradient_checkpointing: compute layers again in the backward pass, which needs less memory.
        bf16: compute in bfloat16; None: where this machine has it.
        weight_decay, adam_beta1, adam_beta2, adam_epsilon, max_grad_norm: numbers of AdamW.
        seed: seed of data order and samples.
        save_steps: optimizer steps between two checkpoints; the last one is always written.
        save_total_limit: checkpoints that are kept.
        eval_steps: iterations between two evaluations of eval_dataset; None: before the first one and after the last.
        report_to: trackers, such as ["tensorboard", "wandb"].
        run_name: name of the run in the trackers.
        use_peft: train adapters; LoraConfig as peft_config does the same.
        lora_r, lora_alpha, lora_dropout, lora_target_modules: numbers and layers of the adapters.
    """

    program: ClassVar[str]

    output_dir: str = "trainer_output"
    keys: Mapping[str, object] = field(default_factory=dict)
    platform: Literal["auto", "npu", "cpu", "cuda"] = "auto"
    num_devices: int = 1
    num_nodes: int = 1
    learning_rate: float | None = _option()
    lr_scheduler_type: _Schedule | None = _option()
    warmup_steps: float | None = _option()
    max_steps: int | None = _option()
    num_train_epochs: float | None = _option()
    per_device_train_batch_size: int | None = _option()
    gradient_accumulation_steps: int | None = _option()
    gradient_checkpointing: bool | None = _option()
    bf16: bool | None = None
    weight_decay: float | None = _option()
    adam_beta1: float | None = _option()
    adam_beta2: float | None = _option()
    adam_epsilon: float | None = _option()
    max_grad_norm: float | None = _option()
    seed: int | None = _option()
    save_steps: int | None = _option()
    save_total_limit: int | None = _option()
    eval_steps: int | None = None
    report_to: Sequence[str] | None = _option()
    run_name: str | None = _option()
    use_peft: bool | None = _option()
    lora_r: int | None = _option()
    lora_alpha: int | None = _option()
    lora_dropout: float | None = _option()
    lora_target_modules: Sequence[str] | None = _option()

    def list_options(self) -> dict[str, object]:
        """Return the options of TRL's command that are set, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.metadata.get("option")}
        return {name: _as_plain(value) for name, value in values.items() if value is not None}

    def list_keys(self) -> dict[str, object]:
        """Return keys of a run file that follow from arguments that TRL's command does not have."""
        return {}


def _as_plain(value: object) -> object:
    """Return a sequence as a list, as a command has it."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@dataclass(kw_only=True)
class SFTConfig(TrainerConfig):
    """Arguments of supervised fine-tuning; only answers train.

    Attributes:
        max_length: tokens of a row; longer ones are cut.
        loss_type: nll is the cross entropy, dft weighs it by the probability of the token (arXiv:2508.05629).
        logging_steps: optimizer steps between two lines on the console.
    """

    program = "sft"

    max_length: int | None = _option()
    loss_type: Literal["nll", "dft"] | None = _option()
    logging_steps: int | None = _option()


@dataclass(kw_only=True)
class DPOConfig(TrainerConfig):
    """Arguments of preference training.

    Attributes:
        beta: strength of the reference; 0.1 in TRL.
        loss_type: form of the loss.
        label_smoothing: fraction of pairs whose order is taken to be wrong.
        max_length: tokens of prompt and answer.
        logging_steps: optimizer steps between two lines on the console.
    """

    program = "dpo"

    beta: float | None = _option()
    loss_type: Literal["sigmoid", "hinge", "ipo"] | None = _option()
    label_smoothing: float | None = _option()
    max_length: int | None = _option()
    logging_steps: int | None = _option()


@dataclass(kw_only=True)
class GRPOConfig(TrainerConfig):
    """Arguments of GRPO and related algorithms.

    Attributes:
        num_generations: responses to a prompt, which are compared with each other; 8 in TRL.
        generation_batch_size: completions that are sampled between two optimizer steps of fresh data.
        steps_per_generation: the same as forward passes of a device; not together with generation_batch_size.
        num_iterations: passes over the completions of a rollout.
        max_prompt_length: longest prompt, in tokens; longer ones are left out. None: the longest of the data.
        max_completion_length: longest response, in tokens; 512 in TRL.
        temperature, top_p, top_k, min_p, repetition_penalty: sampling of the responses.
        beta: weight of the KL to the reference; 0 in TRL, which needs no reference.
        epsilon, epsilon_high: bounds of the ratio; 0.2 in TRL.
        loss_type: average and form of the loss; dapo in TRL.
        importance_sampling_level: ratio of each token, or of the sequence (GSPO).
        scale_rewards: standard deviation that divides the rewards.
        reward_weights: weight of each reward function; 1 each when not set.
        mask_truncated_completions: responses that were cut do not train.
        log_completions: show responses on the console and write completions.jsonl.
        vllm_tensor_parallel_size: devices of a rollout engine.
        vllm_gpu_memory_utilization: part of the memory of a device for the engine; 0.3 in TRL.
        vllm_max_model_length: longest prompt with its response.
    """

    program = "grpo"

    num_generations: int | None = _option()
    generation_batch_size: int | None = _option()
    steps_per_generation: int | None = _option()
    num_iterations: int | None = _option()
    max_prompt_length: int | None = None
    max_completion_length: int | None = _option()
    temperature: float | None = _option()
    top_p: float | None = _option()
    top_k: int | None = _option()
    min_p: float | None = _option()
    repetition_penalty: float | None = _option()
    beta: float | None = _option()
    epsilon: float | None = _option()
    epsilon_high: float | None = _option()
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "luspo", "sapo", "vespo", "cispo"] | None = _option()
    importance_sampling_level: Literal["token", "sequence"] | None = _option()
    scale_rewards: Literal["group", "batch", "none"] | None = _option()
    reward_weights: Sequence[float] | None = None
    mask_truncated_completions: bool | None = _option()
    log_completions: bool | None = _option()
    vllm_tensor_parallel_size: int | None = _option()
    vllm_gpu_memory_utilization: float | None = _option()
    vllm_max_model_length: int | None = _option()


@dataclass(kw_only=True)
class PPOConfig(GRPOConfig):
    """Arguments of PPO: GRPO's arguments and the critic's.

    Attributes:
        num_generations: responses to a prompt; 1, because the critic is the baseline.
        gamma, lam: numbers of the generalized advantage estimate.
        cliprange_value: bound of the change of a value.
        value_learning_rate: learning rate of the critic; None: the actor's.
        critic_warmup: iterations in which only the critic learns.
    """

    num_generations: int | None = _option(1)
    gamma: float = 1.0
    lam: float = 0.95
    cliprange_value: float = 0.2
    value_learning_rate: float | None = None
    critic_warmup: int = 0

    def list_keys(self) -> dict[str, object]:
        """Return stage, estimator and numbers of the critic."""
        values = {"gamma": self.gamma, "lam": self.lam, "cliprange_value": self.cliprange_value}
        values |= {"critic_warmup": self.critic_warmup, "adv_estimator": CRITIC_ESTIMATOR}
        values |= {"scale_rewards": None, "adv_epsilon": None}
        # the KL is a part of the reward, as in the paper and in TRL
        values |= {"use_kl_in_reward": True, "kl_penalty": "kl"} if self.beta else {}
        return {"megatron_training.stage": "ray_ppo", **{f"rl_config.{name}": value for name, value in values.items()}}


@dataclass(kw_only=True)
class DistillationConfig(GRPOConfig):
    """Arguments of on-policy distillation: the student samples, the teacher judges its tokens.

    Attributes:
        num_generations: responses to a prompt.
        loss_mode: divergence of student and teacher.
        topk: tokens of the teacher's distribution that the divergences of distributions read.
        distillation_loss_coef: weight of the divergence next to reward functions, where there are any.
    """

    num_generations: int | None = _option(2)
    loss_mode: Literal["k1", "k2", "k3", "forward_kl_topk", "reverse_kl_topk", "jsd_topk"] = "reverse_kl_topk"
    topk: int = 64
    distillation_loss_coef: float = 1.0

    def list_keys(self) -> dict[str, object]:
        """Return the keys of the divergence."""
        values: dict[str, object] = {"enabled": True, "loss_mode": self.loss_mode}
        values |= {"topk": self.topk} if self.loss_mode.endswith("_topk") else {}
        return {f"rl_config.distillation.{name}": value for name, value in values.items()}
