"""Responses that take several rollouts of the engine on the training devices: nobody waits for a long one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed_rl.rollout.protocol import Generated, Piece
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.admission import Admission, InFlight
from mindspeed_rl.trainers.prompt_groups import PromptGroup
from mindspeed_rl.trainers.streaming import Requests

#: (responses that go on, tokens that each may grow by) -> reports, and the responses in the same order
Extend = Callable[[Sequence[Piece], int], tuple[list[WorkerReport], list[Generated]]]


class PartialSource:
    """Groups from the engine that shares its devices with training.

    Twice as many prompts as an iteration trains on are under way. In every iteration each of their responses grows by
    `slice_tokens`, and by as many again until enough groups are complete; the others go on in the next, with the weights of
    then. That is what MindSpeed-RL's partial rollout does, but for when it stops: here after whole slices, so that a run
    repeats exactly, and resumes exactly, at any number of replicas.
    """

    def __init__(self, extend: Extend, requests: Requests, admission: Admission, slice_tokens: int) -> None:
        self._extend, self._requests, self.admission, self._slice = extend, requests, admission, slice_tokens
        self._groups: list[PromptGroup] = []
        self._next = self._taken = 0
        self._taken_now = 0  # since the weights changed
        self._version = 0

    def take(self, iteration: int, count: int) -> tuple[list[PromptGroup], list[WorkerReport]]:
        reports: list[WorkerReport] = []
        # once in any case: the others grow on, also where enough groups are complete already
        if self._taken_now == 0:
            reports += self._grow()
        while (numbers := self.admission.chosen(iteration, count, self._in_flight())) is None:
            reports += self._grow()
        self._taken += count
        self._taken_now += count
        taken = [group for group in self._groups if group.number in numbers]
        self._groups = [group for group in self._groups if group.number not in numbers]
        return taken, reports

    def rejected(self, count: int) -> None:
        self._taken -= count
        self._taken_now -= count

    def before_push(self) -> None:
        pass  # between two rollouts nothing is being generated

    def after_push(self, version: int) -> None:
        self._version, self._taken_now = version, 0

    def snapshot(self) -> tuple[list[PromptGroup], int, int]:
        return list(self._groups), self._next, self._taken

    def restore(self, groups: list[PromptGroup], next_prompt: int, num_taken: int) -> None:
        self._groups, self._next, self._taken = groups, next_prompt, num_taken

    def _in_flight(self) -> list[InFlight]:
        return [InFlight(group.number, group.oldest_version, group.is_complete) for group in self._groups]

    def _grow(self) -> list[WorkerReport]:
        """As many prompts as may be are under way, and every response that has not ended is a slice longer."""
        for _ in range(2 * self.admission.batch_prompts - self._taken_now - len(self._groups)):
            samples: list[Trajectory | None] = [None] * self._requests.group_size
            self._groups.append(PromptGroup(self._next, self._requests.item(self._next), self._version, samples))
            self._next += 1
        places = [
            (group, number)
            for group in self._groups
            for number, sample in enumerate(group.samples)
            if sample is None or sample.finish == "aborted"
        ]
        pieces = [self._piece(group, number) for group, number in places]
        reports, found = self._extend(pieces, self._slice)
        for (group, number), response in zip(places, found, strict=True):
            group.samples[number] = Trajectory.single(group.item["prompt_ids"], response)
        return reports

    def _piece(self, group: PromptGroup, number: int) -> Piece:
        sample = group.samples[number]
        begun = None if sample is None else sample.response
        return Piece(tuple(group.item["prompt_ids"]), self._requests.seed(group.number, number), begun)
