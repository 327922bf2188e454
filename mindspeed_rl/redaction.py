"""Secrets are left out of what a run writes: configuration, environment, logs, console, reports and samples.

Two things are left out of texts: what has the form of a secret (a password in an address, an authorization header, a key of a
known service), and the values of this process's environment variables that hold one (`remember_secrets`), wherever they are.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

LEFT_OUT = "(left out)"
#: user and password of an address
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
#: a value of a query that may be a secret
_QUERY = re.compile(r"([?&][^=&#\s]*(?:token|key|secret|passw|auth|sig|cred)[^=&#\s]*=)[^&#\s]+", re.IGNORECASE)
#: value of a header
_HEADER = re.compile(
    r"((?:authorization|(?:x-)?api-key|x-access-token)['\"]?\s*[:=]\s*(?:b?['\"])?(?:(?:bearer|basic|token)\s+)?)[^\s'\",;]+",
    re.IGNORECASE,
)
#: keys and tokens of known services, and private keys
_FORMS = re.compile(
    r"\b(?:sk-[\w-]{20,}|hf_\w{30,}|gh[opsu]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16})\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
#: user and password, or token, of an address
_LOGIN = re.compile(r"(\w+)://([^/?#\s:@]*)(?::([^/?#\s]*))?@")
#: shorter values could be words
_MIN_SECRET = 8
_SECRET = re.compile(
    "TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|DSN|CONNECTION|(?:^|_)PAT$", re.IGNORECASE
)
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

#: values that this process knows to be secrets, and the pattern of all of them
_known: set[str] = set()
_pattern: list[re.Pattern[str]] = []


def find_secrets(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of variables that hold secrets: by their names, or by the password of an address."""
    for name, value in variables.items():
        logins = _LOGIN.findall(value)
        for scheme, user, password in logins:
            if password or scheme.startswith("http"):
                yield password or user
        # a path to a file with the secret is none
        if _SECRET.search(name) and not logins and not (value.startswith("/") and os.path.lexists(value)):
            yield value


def find_in_configuration(value: Any) -> Iterator[str]:
    """Yield the secrets of a configuration: passwords of addresses, and variables of programs that hold secrets."""
    if isinstance(value, str):
        yield from find_secrets({"": value})
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if _is_private(name) and isinstance(inner, Mapping):
                yield from find_secrets({str(variable): str(item) for variable, item in inner.items()})
            else:
                yield from find_in_configuration(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from find_in_configuration(inner)


def remember_secrets(values: Iterable[str]) -> None:
    """Leave these values out of all texts of this process from now on; those with fewer than 8 characters may be words."""
    added = {value for value in map(str.strip, values) if len(value) >= _MIN_SECRET}
    if added <= _known:
        return
    _known.update(added)
    forms = {form for value in _known for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe=""))}
    _pattern[:] = [re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))]


def hide_known(text: str) -> str:
    """Return a text without the values of this process that are secrets; all else, such as a response, stays."""
    return _pattern[0].sub(LEFT_OUT, text) if _pattern else text


def hide_in_record(value: Any) -> Any:
    """Return a value of JSON whose texts have no values that are secrets; names and numbers stay."""
    if not _pattern:
        return value
    if isinstance(value, str):
        return hide_known(value)
    if isinstance(value, Mapping):
        return {name: hide_in_record(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)) and not set(map(type, value)) <= {int, float, bool}:
        return list(map(hide_in_record, value))
    return value


def hide_in_text(text: str) -> str:
    """Return a text without users, passwords and keys in its addresses, without headers and values that are secrets."""
    text = _QUERY.sub(rf"\1{LEFT_OUT}", _USER.sub(f"{LEFT_OUT}@", hide_known(text)))
    return _FORMS.sub(LEFT_OUT, _HEADER.sub(rf"\1{LEFT_OUT}", text))


class RedactedOutput(io.TextIOWrapper):
    """Output of a process without secrets; each `write` is looked at by itself. Native code writes past it."""

    def write(self, text: str, /) -> int:
        """Write a text without secrets."""
        super().write(hide_in_text(text))
        return len(text)


def redact_streams() -> None:
    """Leave secrets out of what Python code of this process, and of its forks, prints."""
    remember_secrets(find_secrets(os.environ))
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        lasting = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
        setattr(sys, name, RedactedOutput(lasting, "utf-8", "backslashreplace", line_buffering=True))


def hide_in_configuration(value: Any) -> Any:
    """Return a configuration without environment variables of programs and without users and passwords in addresses."""
    if isinstance(value, str):
        return hide_in_text(value)
    if isinstance(value, Mapping):
        return {
            name: dict.fromkeys(inner, LEFT_OUT)
            if _is_private(name) and isinstance(inner, Mapping)
            else hide_in_configuration(inner)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(map(hide_in_configuration, value)) if type(value) in (list, tuple) else value
    return value


def hide_in_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return all names of an environment, with the values of those that are known to hold no secret."""
    return {name: hide_in_text(value) if _is_shown(name) else LEFT_OUT for name, value in sorted(variables.items())}


def _is_private(name: object) -> bool:
    return str(name).rpartition(".")[2] in _PRIVATE_GROUPS


def _is_shown(name: str) -> bool:
    return (name in _SHOWN or name.startswith(_SHOWN_PREFIXES)) and not _SECRET.search(name)
