"""Teachers on servers with vLLM's completions: log-probs of prompt tokens, which are a student's prompt and response.

The driver sends one request for each sequence of a row, many at a time.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_rl.catalogue.objective import Distillation
from mindspeed_rl.config.keys.rl import DistillationKeys
from mindspeed_rl.data.prompts import TEACHER_PROMPT_IDS
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import objects
from mindspeed_rl.http_client import HttpClient, HttpError, HttpReply
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.run.objective import build_distillation
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.reports import WorkerReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: environment variable with the key that the servers require, if they do
_API_KEY_VARIABLE = "TEACHER_API_KEY"
_ATTEMPTS = 5
_MAX_REPLY_BYTES = 1 << 30
_MAX_REQUESTS = 64
_TIMEOUT_S = 600.0
_REPLACED = "\ufffd"
#: above 0 by what float32 rounds; see `serving/replies.py`
_MAX_LOG_PROB = 1e-3
#: errors of a reply that has other fields or types
_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


class TeacherServerError(RuntimeError):
    """A teacher's server gave no usable log-probs."""


@dataclass(frozen=True)
class _Judged:
    """Log-probs of one sequence: [tokens, k] each, of the tokens after the prompt."""

    log_probs: Tensor
    ids: Tensor


def _read_id(name: str) -> int:
    # as JSON has it; int would also take " 1_0"
    if not (name.isascii() and name.isdigit() and len(name) < 11 and int(name) < 1 << 31):
        raise ValueError(f"{name[:40]!r} is not a token id")
    return int(name)


def _read_log_prob(value: Any) -> float:
    """Return a log-prob; null, which JSON has for minus infinity, is that."""
    if value is None:
        return -math.inf
    # no comparison holds for NaN
    if type(value) not in (int, float) or not value <= _MAX_LOG_PROB:
        raise ValueError(f"{str(value)[:40]} is not a log-prob")
    return float(value)


def _read_entry(entry: Mapping[str, Mapping[str, Any]], token: int, top_k: int) -> list[tuple[float, int]]:
    """Return (log-prob, id) of a position: of its token, or of its `top_k` most probable ones.

    Raises:
        ValueError: an id or a log-prob is wrong.
    """
    read = {_read_id(name): _read_log_prob(record["logprob"]) for name, record in entry.items()}
    if not top_k:
        return [(read[token], token)]
    if not read:
        raise ValueError("a position has no tokens")
    best = sorted(((value, name) for name, value in read.items()), key=lambda pair: (-pair[0], pair[1]))[:top_k]
    return best + [(-math.inf, -1)] * (top_k - len(best))


def _read_model(reply: Mapping[str, Any], address: str) -> str:
    """Return the name of the first model that a server lists, "default" where it lists none."""
    try:
        name = reply["data"][0]["id"] if reply.get("data") else "default"
    except _MALFORMED:
        name = None
    if not isinstance(name, str):
        raise TeacherServerError(
            f"rl_config.distillation.teacher_models: {address}/models names no model: data[0].id is not a text"
        )
    return name


class TeacherServers:
    """The teachers of a run that are servers; `compute_teacher_log_probs` is the phase that workers have for other teachers."""

    def __init__(self, term: Distillation, keys: DistillationKeys, plane: DataPlane | None, timeout_s: float) -> None:
        """Connect to nothing yet.

        Args:
            plane: where rows come from; None for only `check`.
            timeout_s: longest wait for rows.
        """
        self._term, self._keys, self._plane, self._timeout_s = term, keys, plane, timeout_s
        self._top_k = 0 if term.estimator is not None else term.topk
        self._timers = Timers(worker="teacher servers")
        self._models: dict[str, str] = {}

    @classmethod
    def of_server(cls, address: str, top_k: int) -> TeacherServers:
        """Return a client of one server that requests so many tokens a position."""
        keys = DistillationKeys(enabled=True, teacher_models=[address], loss_mode="forward_kl_topk", topk=top_k)
        return cls(build_distillation(keys), keys, None, 0.0)

    def check(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        """Check that each server returns log-probs of a prompt, and has the tokenizer of the student.

        Raises:
            TeacherServerError: it does not.
        """
        ids = [*prompt, *prompt[:1]]
        for address in self._term.teachers:
            body = asyncio.run(self._request_all([(address, ids)]))[0]
            differing = []
            for token, entry in zip(ids[1:], body[1:]):
                try:
                    theirs, ours = entry[str(token)].get("decoded_token"), tokenizer.decode([token])
                except _MALFORMED as error:
                    raise TeacherServerError(
                        f"rl_config.distillation.teacher_models: {address} returned no log-prob of prompt token {token}"
                    ) from error
                # a part of a character has no text
                if isinstance(theirs, str) and isinstance(ours, str) and _REPLACED not in theirs + ours:
                    differing += [(token, ours, theirs)] if theirs.strip() != ours.strip() else []
            if len(differing) * 2 > len(ids) - 1:
                token, ours, theirs = differing[0]
                raise TeacherServerError(
                    f"rl_config.distillation.teacher_models: {address} has another tokenizer than the actor: token {token} is "
                    f"{theirs!r} there and {ours!r} here, and ids are not mapped"
                )

    def request(self, address: str, sequences: Sequence[tuple[list[int], int]]) -> list[tuple[Tensor, Tensor]]:
        """Return log-probs and ids, [size, k] each, of the last `size` tokens of each (token ids, size)."""
        replies = asyncio.run(self._request_all([(address, ids) for ids, _ in sequences]))
        judged = [self._read(ids, size, reply) for (ids, size), reply in zip(sequences, replies, strict=True)]
        return [(top.log_probs, top.ids) for top in judged]

    def compute_teacher_log_probs(self, count: int) -> list[WorkerReport]:
        """Put the teachers' log-probs of the first `count` rows into the data plane."""
        assert self._plane is not None
        keys, phase, rows = self._keys, Phases.TEACHER_LOG_PROBS, range(count)
        reads = ["input_ids", "sequence_lengths", *(["extra"] if keys.teacher_keys or keys.teacher_prompt else [])]
        batch, _ = self._plane.get(phase.consumer, reads, indexes=rows, timeout_s=self._timeout_s)
        requests: list[tuple[str, list[int]]] = []
        sizes, owners = list[int](), list[tuple[int, int]]()
        extras: list[Mapping[str, Any]] = objects(batch["extra"]) if "extra" in batch else [{}] * count
        for row, extra in enumerate(extras):
            ids: list[int] = batch["input_ids"][row].tolist()
            lengths: list[int] = batch["sequence_lengths"][row].tolist()
            chosen = (
                [keys.teacher_keys.index(str(extra[keys.teacher_key]))]
                if keys.teacher_keys
                else range(len(self._term.teachers))
            )
            start = 0
            for prompt, response in zip(lengths[::2], lengths[1::2], strict=True):
                whole = ids[start : start + prompt + response]
                start += prompt + response
                if keys.teacher_prompt:
                    whole = list(extra[TEACHER_PROMPT_IDS]) + whole[prompt:]
                requests += [(self._term.teachers[index], whole) for index in chosen]
                sizes += [response for _ in chosen]
                owners += [(row, position) for position, _ in enumerate(chosen)]
        with self._timers(phase.timer):
            replies = asyncio.run(self._request_all(requests))
        judged: dict[tuple[int, int], list[_Judged]] = {}
        for (_, whole), size, owner, reply in zip(requests, sizes, owners, replies, strict=True):
            judged.setdefault(owner, []).append(self._read(whole, size, reply))
        columns: dict[str, list[Tensor]] = {"teacher_log_probs": [], "teacher_ids": []}
        for row in rows:
            teachers = [judged[row, position] for position in range(len(self._term.weights))]
            for name, attribute in (("teacher_log_probs", "log_probs"), ("teacher_ids", "ids")):
                each = [torch.cat([getattr(part, attribute) for part in parts]) for parts in teachers]
                columns[name].append(torch.stack(each, 1).flatten())
        self._plane.put({name: columns[name] for name in self._term.columns}, rows)
        return [WorkerReport(intervals=self._timers.drain())]

    def _read(self, ids: Sequence[int], size: int, reply: Sequence[Any]) -> _Judged:
        """Return the log-probs of the last `size` tokens of a sequence from the entries of all its tokens."""
        try:
            first = len(ids) - size
            entries = [_read_entry(reply[index], ids[index], self._top_k) for index in range(first, len(ids))]
        except _MALFORMED as error:
            raise TeacherServerError(
                f"a teacher's server returned no log-prob of each prompt token: {type(error).__name__} {error}"
            ) from error
        shape = (size, max(1, self._top_k))
        log_probs = torch.tensor([value for entry in entries for value, _ in entry]).reshape(shape)
        return _Judged(
            log_probs, torch.tensor([token for entry in entries for _, token in entry], dtype=torch.int32).reshape(shape)
        )

    async def _request_all(self, requests: Sequence[tuple[str, list[int]]]) -> list[list[Any]]:
        """Return the prompt_logprobs of each (address, token ids)."""
        key = os.environ.get(_API_KEY_VARIABLE, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limit = asyncio.Semaphore(_MAX_REQUESTS)
        async with HttpClient(_MAX_REPLY_BYTES, attempts=_ATTEMPTS, headers=headers) as client:
            for address in dict.fromkeys(address for address, _ in requests):
                if address not in self._models:
                    reply = await self._call(client, address, "models", None)
                    self._models[address] = _read_model(reply, address)

            async def request(address: str, ids: list[int]) -> list[Any]:
                body = {"model": self._models[address], "prompt": ids, "max_tokens": 1, "temperature": 1.0}
                async with limit:
                    reply = await self._call(client, address, "completions", body | {"prompt_logprobs": self._top_k})
                choices = reply.get("choices")
                choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
                log_probs = choice.get("prompt_logprobs") or reply.get("prompt_logprobs")
                if not isinstance(log_probs, list) or len(log_probs) != len(ids):
                    raise TeacherServerError(
                        f"the teacher at {address} returned no prompt_logprobs of {len(ids)} tokens; it must be a server with "
                        f"vLLM's completions (--max-logprobs of at least {self._top_k})"
                    )
                return log_probs

            return await asyncio.gather(*(request(address, ids) for address, ids in requests))

    async def _call(self, client: HttpClient, address: str, path: str, body: object) -> dict[str, Any]:
        """Return the reply of a server as JSON.

        Raises:
            TeacherServerError: the server refuses the request, or does not reply.
        """
        url = f"{address.rstrip('/')}/{path}"

        def fail(status: object, text: str) -> TeacherServerError:
            subject = f"rl_config.distillation.teacher_models: the teacher at {url}"
            return TeacherServerError(f"{subject} answers {status}: {text[:300]}")

        def read(reply: HttpReply) -> dict[str, Any]:
            if reply.status != 200:
                raise fail(reply.status, reply.text)
            value = reply.read_json()
            return value if isinstance(value, dict) else {}

        try:
            return await client.request("GET" if body is None else "POST", url, read, json=body, timeout_s=_TIMEOUT_S)
        except HttpError as error:
            raise fail("nothing", str(error)) from error
