"""One device's worker of a supervised stage: reads its data by memory map and trains with Megatron."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.workers.worker import Worker, WorkerReport


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
        return self.phases.resumed or {}

    def describe(self) -> str:
        """One line about the data, for the console."""
        return self.phases.describe()

    def train(self) -> WorkerReport:
        """One optimizer step on the next global batch is made."""
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
