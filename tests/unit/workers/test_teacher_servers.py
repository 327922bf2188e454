"""Teachers on servers: a server with the replies of vLLM's completions, whose distribution is arithmetic."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
import torch
from spoilt_values import change_field
from teachers import TERM, TeacherHandler

from mindspeed_rl.catalogue import KL_ESTIMATORS
from mindspeed_rl.catalogue.objective import Distillation
from mindspeed_rl.config.keys.rl import DistillationKeys
from mindspeed_rl.workers import teacher_servers
from mindspeed_rl.workers.teacher_servers import TeacherServerError, TeacherServers

VOCAB = 7


def log_prob(previous: int, token: int, shift: int) -> float:
    """The log-prob of a token after another: a softmax over (previous + token * 2 + shift) % VOCAB."""
    logits = [(previous + item * 2 + shift) % VOCAB / 2 for item in range(VOCAB)]
    return logits[token] - math.log(sum(math.exp(value) for value in logits))


class _Handler(TeacherHandler):
    shift, failures = 0, 0

    def complete(self, ids: list[int], count: int) -> list[dict[str, Any] | None] | None:
        if type(self).failures:
            type(self).failures -= 1
            return None
        entries: list[dict[str, Any] | None] = [None]
        for previous, token in zip(ids, ids[1:]):
            every = sorted(range(VOCAB), key=lambda item: -log_prob(previous, item, self.shift))
            chosen = dict.fromkeys([*every[:count], token])
            entries.append(
                {
                    str(item): {"logprob": log_prob(previous, item, self.shift), "decoded_token": chr(97 + item)}
                    for item in chosen
                }
            )
        return entries


@pytest.fixture
def servers() -> Iterator[list[str]]:
    started = []
    for shift in (0, 3):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"shift": shift}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
    yield [f"http://127.0.0.1:{server.server_address[1]}/v1" for server in started]
    for server in started:
        server.shutdown()


def term_of(teachers: list[str], **changes: Any) -> Distillation:
    sampled = {"loss_mode": "k1", "estimator": KL_ESTIMATORS["k1"], "use_policy_gradient": True, "teachers": tuple(teachers)}
    return replace(TERM, **sampled | changes)


#: prompt, response, prompt, response of each row; the second has two sequences
ROWS = [([[1, 2], [3, 4, 5]], "x"), ([[6, 1], [2], [0, 3], [3, 1]], "y")]


class _Plane:
    """Rows of one rollout, and the columns that are put."""

    def __init__(self) -> None:
        self.columns: dict[str, list[torch.Tensor]] = {}

    def get(self, consumer: str, columns: list[str], **options: object) -> tuple[dict[str, list[Any]], None]:
        ids = [torch.tensor(sum(parts, [])) for parts, _ in ROWS]
        lengths = [torch.tensor([len(part) for part in parts]) for parts, _ in ROWS]
        extra = [{"data_source": source} for _, source in ROWS]
        return {"input_ids": ids, "sequence_lengths": lengths, "extra": extra}, None

    def put(self, columns: dict[str, list[torch.Tensor]], rows: object) -> None:
        self.columns |= columns


def pairs(parts: list[list[int]]) -> list[tuple[int, int]]:
    """(token before, token) of every response token."""
    results = []
    for prompt, response in zip(parts[::2], parts[1::2]):
        whole = prompt + response
        results += list(zip(whole[len(prompt) - 1 :], response))
    return results


def judged(term: Distillation, keys: DistillationKeys) -> dict[str, list[torch.Tensor]]:
    plane = _Plane()
    TeacherServers(term, keys, plane, 10.0).compute_teacher_log_probs(len(ROWS))  # type: ignore[arg-type]
    return plane.columns


def test_sampled_tokens_get_the_log_probs_of_all_teachers(servers: list[str]) -> None:
    columns = judged(term_of(servers, weights=(0.5, 0.5)), DistillationKeys(teacher_models=servers))
    assert columns.keys() == {"teacher_log_probs"}
    for (parts, _), row in zip(ROWS, columns["teacher_log_probs"]):
        expected = [[log_prob(*pair, shift) for shift in (0, 3)] for pair in pairs(parts)]
        torch.testing.assert_close(row.reshape(-1, 2), torch.tensor(expected))


def test_a_column_chooses_the_teacher_and_the_top_tokens_are_in_order(servers: list[str]) -> None:
    keys = DistillationKeys(teacher_models=servers, teacher_keys=["x", "y"])
    columns = judged(term_of(servers, loss_mode="reverse_kl_topk", estimator=None), keys)
    for (parts, _), shift, log_probs, ids in zip(ROWS, (0, 3), columns["teacher_log_probs"], columns["teacher_ids"]):
        for (previous, _), values, tokens in zip(pairs(parts), log_probs.reshape(-1, 3), ids.reshape(-1, 3)):
            every = sorted(range(VOCAB), key=lambda item: -log_prob(previous, item, shift))[:3]
            assert tokens.tolist() == every
            torch.testing.assert_close(values, torch.tensor([log_prob(previous, item, shift) for item in every]))


def test_more_tokens_than_the_vocabulary_are_filled_with_none(servers: list[str]) -> None:
    term = term_of(servers[:1], loss_mode="forward_kl_topk", estimator=None, topk=9)
    columns = judged(term, DistillationKeys(teacher_models=servers[:1]))
    ids, log_probs = columns["teacher_ids"][0].reshape(-1, 9), columns["teacher_log_probs"][0].reshape(-1, 9)
    assert (ids[:, VOCAB:] == -1).all() and (log_probs[:, VOCAB:] == -math.inf).all()
    torch.testing.assert_close(log_probs[:, :VOCAB].exp().sum(-1), torch.ones(len(ids)))


class _Letters:
    def decode(self, ids: list[int]) -> str:
        return chr(97 + ids[0])


class _Digits:
    def decode(self, ids: list[int]) -> str:
        return str(ids[0])


def test_a_server_with_another_tokenizer_is_refused_before_the_run(servers: list[str]) -> None:
    checked = TeacherServers(term_of(servers), DistillationKeys(teacher_models=servers), None, 10.0)
    checked.check(_Letters(), [1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(TeacherServerError, match="another tokenizer than the actor: token 2 is 'c' there and '2' here"):
        checked.check(_Digits(), [1, 2, 3])  # type: ignore[arg-type]


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(TeacherServerError, match=r"the teacher at http://127.0.0.1:9/v1/models answers nothing"):
        TeacherServers(term_of(["http://127.0.0.1:9/v1"]), DistillationKeys(), None, 1.0).check(_Letters(), [1])  # type: ignore[arg-type]


#: each is put for a part of a right reply
ODD: list[Any] = [None, True, 0, -1, 5.0, "x", "", [], {}, [None], math.nan, math.inf, 10**400]


def _odd_replies() -> Iterator[Any]:
    entry = {"3": {"logprob": -0.5, "decoded_token": "d"}}
    for value in ODD:
        yield value
        yield {"choices": value}
        yield {"choices": [value]}
        yield {"choices": [{"prompt_logprobs": value}]}
        yield {"choices": [{"prompt_logprobs": [None, value]}]}
        yield {"choices": [{"prompt_logprobs": [None, {"3": value}]}]}
        if value is not None and not (type(value) in (int, float) and value <= 0):
            yield {"choices": [{"prompt_logprobs": [None, {"3": {"logprob": value}}]}]}
    for name in ("", "x", "-3", " 3", "3_0", "99999999999", "1.0"):
        yield {"choices": [{"prompt_logprobs": [None, entry | {name: {"logprob": -9.0}}]}]}


def test_a_malformed_reply_of_a_teacher_is_one_sentence() -> None:
    replies = list(_odd_replies())
    for reply, result in zip(replies, _request_replies(replies), strict=True):
        assert isinstance(result, TeacherServerError), (reply, result)
    for models in ODD:
        if models not in (None, 0, "", [], {}):
            with pytest.raises(TeacherServerError, match="names no model"):
                teacher_servers._read_model({"data": models}, "http://teacher")


def test_a_changed_reply_of_a_teacher_has_log_probs_or_is_one_sentence() -> None:
    at = random.Random(1)
    entry = {"logprob": -0.5, "rank": 1, "decoded_token": "d"}
    tokens = [None, {"3": entry, "1": entry | {"rank": 2}}]
    sound = {"id": "x", "choices": [{"index": 0, "text": "", "prompt_logprobs": tokens}]}
    replies = [change_field(sound, at) for _ in range(400)]
    results = _request_replies(replies)
    errors = [result for result in results if isinstance(result, TeacherServerError)]
    assert 50 < len(errors) < 350
    for error in errors:
        assert len(str(error)) < 1000 and "\n" not in str(error) and "Traceback" not in str(error)
    for result in results:
        assert result in errors or not re.search("nan|inf", str(result)), result


def _request_replies(replies: list[Any]) -> list[Any]:
    """The results, or errors, of a client to whom a server sends these replies."""

    class Odd(_Handler):
        replies: Iterator[Any] = iter(())

        def do_POST(self) -> None:  # noqa: N802 - the name of http.server
            content = json.dumps(next(type(self).replies)).encode()
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Odd.replies = iter(replies)
    client = TeacherServers.of_server(f"http://127.0.0.1:{server.server_address[1]}/v1", 1)
    results: list[Any] = []
    try:
        for _ in replies:
            try:
                results.append(client.request(client._term.teachers[0], [([1, 3], 1)]))
            except TeacherServerError as error:
                results.append(error)
    finally:
        server.shutdown()
    return results
