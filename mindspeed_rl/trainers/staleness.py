"""The age of the tokens that an iteration trains on: checked, measured, and masked beyond a limit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mindspeed_rl.rollout.trajectory import NO_VERSION


def check_versions(versions: Sequence[Tensor], version: int, bound: int, iteration: int) -> None:
    """Check that every sampled token comes from weights that are at most `bound` versions older than these.

    Args:
        versions: version of the weights that sampled each token, by row; NO_VERSION where the actor did not sample it.
        version: version of the weights that train.

    Raises:
        RuntimeError: a token is older, or newer than the weights that train.
    """
    sampled = {int(token) for row in versions for token in row[row != NO_VERSION].unique()}
    allowed = range(version - bound, version + 1)
    if wrong := sorted(sampled - set(allowed)):
        expected = f"{version}" if bound == 0 else f"{max(0, allowed[0])} to {version}"
        raise RuntimeError(
            f"iteration {iteration + 1}: responses come from weights {wrong}, not {expected}: a push was lost, or the rollout "
            "ran further ahead than it may."
        )
