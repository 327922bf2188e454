"""Trainers that take objects of a program (model, functions, rows), over the run files, code and folders of the commands.

    trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=my_function, train_dataset=rows, args=GRPOConfig())
    trainer.train()

Names and defaults of arguments are TRL's, and the table that imports TRL's commands translates them into keys.
"""

from __future__ import annotations

from mindspeed_rl.objects.arguments import DistillationConfig, DPOConfig, GRPOConfig, PPOConfig, SFTConfig, TrainerConfig
from mindspeed_rl.objects.callbacks import NotebookProgress, TrainerCallback, TrainerControl, TrainerState
from mindspeed_rl.objects.trainers import DistillationTrainer, DPOTrainer, GRPOTrainer, PPOTrainer, SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "NotebookProgress",
    "PPOConfig",
    "PPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "TrainerCallback",
    "TrainerConfig",
    "TrainerControl",
    "TrainerState",
]
