"""The log-probs that the policy loss saw, row by row: what the update's ratios are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs

Result = TypeVar("Result")


class KeptLogProbs:
    """Of the last optimizer step in which each row took part.

    Attributes:
        rows: number of the row -> [tokens of its response] float32, on the host.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def inputs(self, function: Callable[[LossInputs], Result]) -> Callable[[LossInputs], Result]:
        """The function, which also keeps the log-probs that it is given; rows are told apart by their column `row`."""

        def kept(given: LossInputs) -> Result:
            log_probs, lengths = given.outputs[0].detach().cpu(), given.mask.sum(1).tolist()
            for number, row, length in zip(given.columns["row"].tolist(), log_probs, lengths):
                # a view would keep the whole padded micro-batch
                self.rows[int(number)] = row[:length].clone()
            return function(given)

        return kept
