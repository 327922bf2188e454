"""Every file that is not where the run file says is named at once: one wrong path hides no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mindspeed_rl.config import ConfigError


def check_all(looks: Iterable[Callable[[], object]]) -> None:
    """Nothing happens where at most one of the looks fails: whoever reads that file next says it better.

    Args:
        looks: each raises ValueError for what is wrong with one of the files.

    Raises:
        ConfigError: several of them fail; a sentence each.
    """
    mistakes: dict[str, None] = {}
    for look in looks:
        try:
            look()
        except ConfigError as error:
            mistakes |= dict.fromkeys(error.errors)
        except ValueError as error:
            mistakes[str(error)] = None
    if len(mistakes) > 1:
        raise ConfigError(mistakes)
