"""The number of kernels of the policy loss: operators that a device would get."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sample_objectives import objective
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss

ROWS, WIDTH = 5, 7
#: of the loss with every metric and the KL; of its backward pass
MOST_FORWARD, MOST_BACKWARD = {"dapo": 65, "dr_grpo": 68, "grpo": 70, "gspo": 76}, 20


class _Operators(TorchDispatchMode):
    """Count the calls that a device would get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        # neither views nor questions about types
        if not func.is_view and name not in ("detach", "promote_types"):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss_type", MOST_FORWARD)
def test_a_micro_batch_has_few_operators(loss_type: str) -> None:
    settings = objective(loss_type, max_response_length=9, kl_coef=0.3, kl_clamp=True, log_rollout_metrics=True)
    random = np.random.default_rng(0)
    mask = torch.tensor(random.random((ROWS, WIDTH)) < 0.7)
    log_probs, *columns = (torch.tensor(random.random((ROWS, WIDTH)) - 2.0, dtype=torch.float32) for _ in range(6))
    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "entropy")
    batch = PolicyBatch(log_probs.requires_grad_(), response_mask=mask, **dict(zip(names, columns)))
    with _Operators() as forward:
        output = policy_loss(batch, settings)
    with _Operators() as backward:
        output.loss_sum.backward()
    assert sum(forward.calls.values()) <= MOST_FORWARD[loss_type], forward.calls
    assert sum(backward.calls.values()) <= MOST_BACKWARD, backward.calls
