"""One device's worker of a supervised stage: reads its data by memory map and trains with Megatron."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.workers.model_source import ModelSource, find_model
from mindspeed_rl.workers.worker import Worker, WorkerReport


@dataclass(frozen=True)
class DataSummary:
    """What a run learns from.

    Attributes:
        unit: what is counted: samples, pairs, solutions.
        num_train, num_held_out: items to train and to evaluate on.
        num_too_long: items of the data left out because they exceed seq_length.
    """

    unit: str
    num_train: int
    num_held_out: int
    num_too_long: int

    def __str__(self) -> str:
        text = f"{self.num_train:,} {self.unit} to train on"
        text += f", {self.num_held_out:,} to evaluate on" if self.num_held_out else ""
        return text + (f" ({self.num_too_long:,} longer than seq_length left out)" if self.num_too_long else "")


def has_own_reference(config: MegatronConfig) -> bool:
    """False when the reference of stage dpo is the policy without its adapters."""
    return bool(config.ref_model) or not config.lora_target_modules


def reference_of(config: MegatronConfig, start: ModelSource) -> tuple[MegatronConfig, ModelSource]:
    """Keys and weights of the reference model: `ref_model`, else what the policy started from before any resume.

    Args:
        config: the policy's keys.
        start: the policy's weights.

    Raises:
        ValueError: the weights do not exist, or nothing says what the policy of a resumed run started from.
    """
    reference = copy.copy(config)
    path = config.ref_model or config.pretrained_checkpoint or config.load
    reference.load, reference.pretrained_checkpoint, reference.finetune = path, None, True
    reference.save, reference.lora_target_modules = None, None
    if not config.ref_model and start.kind == "training" and not config.finetune and path == str(start.weights):
        raise ValueError(
            f"ref_model: not set, and load ({path}) is a checkpoint that the run goes on from; name the weights of the "
            "reference in ref_model, or what the policy started from in pretrained_checkpoint."
        )
    return reference, find_model(reference, "ref_model" if config.ref_model else "reference")


class SupervisedWorker(Worker):
    """The trained model (and the reference, where the stage has one) of one rank."""

    def set_up(self, master: tuple[str, int], local_rank: int) -> dict[str, Any]:
        """Joins the training world, opens the data and builds the models; collective over all workers.

        Returns:
            {"iteration": ..., "run_state": ...} of a resumed run, else an empty dict.
        """
        self._take_place(master, local_rank)
        from mindspeed_rl.workers.supervised_phases import SupervisedPhases

        self.phases = SupervisedPhases(self.cfg, self.plan, self.timers)
        self._settle()
        return self.phases.resumed or {}

    def data(self) -> DataSummary:
        """What the run learns from."""
        return self.phases.data()

    def train(self) -> WorkerReport:
        """One optimizer step on the next global batch is made."""
        with self.profiler("actor_update"):
            return self._report(self.phases.train())

    def evaluate(self) -> WorkerReport:
        """The loss on the held-out items."""
        return self._report(self.phases.evaluate())

    def save(self, iteration: int) -> WorkerReport:
        """A checkpoint is written or on its way."""
        return self._report(self.phases.save(iteration))

    def finish(self) -> WorkerReport:
        """All checkpoints are complete."""
        return self._report(self.phases.finish())
