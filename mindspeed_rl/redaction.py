"""Configuration and environment as they may be written into files: what could hold a secret is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LEFT_OUT = "(left out)"
#: user and password of an address
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
#: a value of a query that may be a secret
_QUERY = re.compile(r"([?&][^=&#\s]*(?:token|key|secret|passw|auth|sig|cred)[^=&#\s]*=)[^&#\s]+", re.IGNORECASE)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|DSN|CONNECTION", re.IGNORECASE)
#: variables that decide how a run computes
_SHOWN = frozenset(
    "PATH HOME USER LOGNAME SHELL TERM LANG LANGUAGE TZ TMPDIR PWD HOSTNAME LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV "
    "CONDA_PREFIX CONDA_DEFAULT_ENV RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT NO_PROXY no_proxy".split()
)
_SHOWN_PREFIXES = tuple(
    "LC_ PYTHON OMP_ MKL_ OPENBLAS_ KMP_ GOMP_ ONEDNN_ ASCEND_ HCCL_ ACL_ ACLNN_ ATB_ NPU_ TASK_QUEUE_ COMBINED_ CUDA_ NCCL_ "
    "CUBLAS_ GLOO_ TORCH PYTORCH_ TRITON_ VLLM_ RAY_ HF_ TRANSFORMERS_ MINDSPEED_ MEGATRON_ NVTE_".split()
)
#: groups of the run file whose values are free, and may be secrets
_PRIVATE_GROUPS = frozenset({"env"})


def hide_in_text(text: str) -> str:
    """Return a text without users, passwords and keys in its addresses."""
    return _QUERY.sub(rf"\1{LEFT_OUT}", _USER.sub(f"{LEFT_OUT}@", text))


def hide_in_configuration(value: Any) -> Any:
    """Return a configuration without environment variables of programs and without users and passwords in addresses."""
    if isinstance(value, str):
        return hide_in_text(value)
    if isinstance(value, Mapping):
        return {
            name: dict.fromkeys(inner, LEFT_OUT)
            if name in _PRIVATE_GROUPS and isinstance(inner, Mapping)
            else hide_in_configuration(inner)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(map(hide_in_configuration, value)) if type(value) in (list, tuple) else value
    return value


def hide_in_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return all names of an environment, with the values of those that are known to hold no secret."""
    return {name: hide_in_text(value) if _is_shown(name) else LEFT_OUT for name, value in sorted(variables.items())}


def _is_shown(name: str) -> bool:
    return (name in _SHOWN or name.startswith(_SHOWN_PREFIXES)) and not _SECRET.search(name)
