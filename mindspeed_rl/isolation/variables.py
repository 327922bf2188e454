"""Environment variables for commands of models and programs: a list of names, and those that the user names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mindspeed_rl.redaction import find_secrets, remember_secrets

_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: programs are found and run with these; none of them holds a secret
_PASSED = frozenset(
    "PATH HOME USER LOGNAME SHELL TERM LANG LANGUAGE TZ TMPDIR PYTHONPATH PYTHONHOME PYTHONUTF8 PYTHONIOENCODING "
    "LD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE "
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS".split()
)
_PASSED_PREFIX = "LC_"


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every command gets: tokens, keys and proxies of the run are not among them."""
    return {name: value for name, value in environment.items() if name in _PASSED or name.startswith(_PASSED_PREFIX)}


def expand_variables(values: Mapping[str, str], where: str) -> dict[str, str]:
    """Replace ${NAME} by the environment variable of this name; values of variables that hold secrets appear in no log.

    Raises:
        ValueError: a variable is not set.
    """
    for key, value in values.items():
        for name in _VARIABLE.findall(value):
            if name not in os.environ:
                raise ValueError(f"{where}.{key}: the environment variable {name} is not set")
    expanded = {key: _VARIABLE.sub(lambda match: os.environ[match[1]], value) for key, value in values.items()}
    remember_secrets(find_secrets(expanded))
    return expanded
