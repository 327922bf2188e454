"""YAML of other people: read without running anything, and no larger in memory than its text says."""

from __future__ import annotations

import yaml

#: values of a file once its aliases are written out, and levels of nesting; options of no project come near
_MAX_VALUES, _MAX_LEVELS = 100_000, 60


def load_yaml_text(text: str) -> object:
    """Return what a YAML text holds.

    Raises:
        yaml.YAMLError: it is not YAML, refers to itself, is nested too deeply or grows too large by its aliases.
    """
    try:
        content = yaml.safe_load(text)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        # the problem goes on with a sentence of the context
        begins = f"{error.context}, " if str(error.problem).startswith("but ") else ""
        raise yaml.YAMLError(f"{place}{begins}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # characters that a text has not, dates that there are not
        raise yaml.YAMLError(str(error).partition("\n")[0]) from None
    level, count = [content], 0
    for _ in range(_MAX_LEVELS):
        inner: list[object] = []
        for value in level:
            inner += [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
            if count + len(inner) > _MAX_VALUES:
                raise yaml.YAMLError(f"it has more than {_MAX_VALUES:,} values once its aliases are written out")
        if not inner:
            return content
        level, count = inner, count + len(inner)
    raise yaml.YAMLError(f"it is nested more than {_MAX_LEVELS} levels deep, or refers to itself")
