"""What trainer and rollout engine computed on the same tokens; light, because it travels from the workers to the driver."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mindspeed_rl.dumps.record import Cut


@dataclass(frozen=True)
class EngineSide:
    """What the engine did for one prompt.

    Attributes:
        response: the tokens that it drew.
        log_probs: of them, as it reported them.
        read: what its model read, by position; -1 where it read nothing (behind the last token, or a cached prefix).
        activations: by place, at the positions that predict the response: [R, hidden].
        logits: [R, vocabulary].
    """

    response: tuple[int, ...]
    log_probs: tuple[float, ...]
    read: tuple[int, ...]
    activations: dict[str, Tensor]
    logits: Tensor


@dataclass(frozen=True)
class TrainerSide:
    """What the trainer computed for one row on one rank.

    Attributes:
        log_probs: of the response; None off the last pipeline stage.
        activations: by place, [tokens, 1, hidden], with which part of the tokens the rank has.
    """

    log_probs: Tensor | None
    activations: dict[str, tuple[Tensor, Cut | None]]
