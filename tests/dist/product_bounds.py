"""How far gradients and weights of a run may be from its reference.

A run in float32 is next to it. Of one in bfloat16 a second reference, which rounds as the run does, shows how far rounding
moves each gradient; where that is so far that a missing part of it would not show, the run shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from slow_reference import Step

#: relative difference of a gradient or of an update, by norm
TOLERANCE = 5e-4
#: the same of a run in bfloat16, and of all its gradients together
ROUGH_TOLERANCE, _ROUGH_TOTAL = 0.15, 0.1
#: part of the norm of all gradients that is added to the norm of one: what cancels in it has the others' size
_CANCELLED, _ROUGH_CANCELLED = 0.01, 0.0025
#: the tolerance of Muon's updates: Muon makes small singular values of a gradient, with their rounding, as large as the others
MUON_TOLERANCE = 1e-2
#: a run whose values are rounded may be so many times as far from the reference as the rounded reference, by norm: as long as
#: both are rounded alike the factor is about 1 and, of errors that are independent, seldom above 2
ROUNDINGS = 4.0
#: what rounding may take, at most, of a value's norm, or of the norm of all where that is more: with the tolerance it is less
#: than the half of a gradient
_MOST, _MOST_OF_ALL = 0.3, 0.01
#: part of the norm of all gradients that an expert's has, at most, of which a token more or less is much
_FEW_TOKENS = 0.05


class InconclusiveError(Exception):
    """The run shows nothing: a choice in it is close to a tie, or nothing trains; another draw does."""


def allow_rounding(far: float, norm: float, total: float, where: str) -> float:
    """By how much rounding may move a value of this norm; `far` is by how much it moves the reference.

    Raises:
        InconclusiveError: by so much that a part of the value could be missing.
    """
    allowed, most = ROUNDINGS * far, max(_MOST * norm, _MOST_OF_ALL * total)
    if allowed > most:
        raise InconclusiveError(f"rounding moves {where} by {far:.2e} of {norm:.2e}, and of {total:.2e} in all")
    return allowed


def check_gradients(
    found: Mapping[str, np.ndarray], step: Step, moved: Step, *, is_rough: bool, where: str, routes_freely: bool = False
) -> None:
    """Compare the gradients of a step, each by itself and all together.

    Args:
        moved: the step of the rounded reference; the same where the run has no rounding.
        routes_freely: the run's rounding may have given a token to other experts than the reference's.

    Raises:
        AssertionError: a gradient is another one.
        InconclusiveError: none is, and rounding moves one too far to tell.
    """
    tolerance, cancelled = (ROUGH_TOLERANCE, _ROUGH_CANCELLED) if is_rough else (TOLERANCE, _CANCELLED)
    unknown = None
    names = [name for name in found if name in step.gradients]
    total = float(np.sqrt(sum(np.square(value).sum() for value in step.gradients.values())))
    distances = {name: float(np.linalg.norm(found[name] - step.gradients[name])) for name in names}
    fars = {name: float(np.linalg.norm(moved.gradients[name] - step.gradients[name])) for name in names}
    for name in names:
        norm = float(np.linalg.norm(step.gradients[name]))
        try:
            allowed = allow_rounding(fars[name], norm, total, f"gradient {name}")
        except InconclusiveError as error:
            unknown = error
            continue
        limit = tolerance * (norm + cancelled * total) + allowed + 1e-8
        text = (
            f"gradient {name} of {where}: {distances[name]} of {norm}, and of {total} in all; rounding moves it by {fars[name]}"
        )
        if distances[name] > limit and routes_freely and ".mlp." in name and norm <= _FEW_TOKENS * total:
            unknown = InconclusiveError(f"{text}; a token may have other experts")
            continue
        assert distances[name] <= limit, text
    if unknown is not None:
        raise unknown
    distance, far = (float(np.linalg.norm(list(values.values()))) for values in (distances, fars))
    limit = (_ROUGH_TOTAL if is_rough else TOLERANCE) * total + min(ROUNDINGS * far, _MOST * total) + 1e-8
    assert distance <= limit, f"all gradients of {where}: {distance} of {total}; rounding moves them by {far}"
