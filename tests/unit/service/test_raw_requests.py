"""Requests of a client without the SDK to a server process: sockets and http.client, what is wrong among them, and a kill."""

import http.client
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bigram_backend import VOCAB, log_softmax
from patience import patient
from service_requests import ALICE, BOB, Requests, read_pass, write_pass
from test_service import train_alone

PROGRAM = Path(__file__).parents[2] / "bigram_server.py"

pytestmark = pytest.mark.slow


class Raw(Requests):
    """A server process, and requests to it."""

    def __init__(self, folder):
        self.folder = folder
        self.start()

    def start(self):
        self.process = subprocess.Popen([sys.executable, str(PROGRAM), str(self.folder)], stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        end_s = time.monotonic() + patient(60)
        while time.monotonic() < end_s:
            try:
                if self.send("GET", "healthz")[0] == 200:
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the server does not answer")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patient(30))

    def talk(self, data, *, dies=False):
        """Return what comes back for bytes of any kind; a client that dies sends nothing more."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=patient(30)) as raw:
            raw.sendall(data)
            if dies:
                raw.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: raw.recv(65536), b""))


@pytest.fixture
def raw(tmp_path):
    server = Raw(tmp_path)
    try:
        yield server
    finally:
        server.kill()


_JSON, _BINARY = {"content-type": "application/json"}, {"content-type": "application/x-protobuf"}


def test_bodies_that_are_none_are_refused_in_the_form_of_the_api_and_disturb_nobody(raw):
    model, other = raw.open_model(), raw.open_model(BOB)
    wrong = [
        ("create_session", b"{", _JSON),
        ("create_session", b"\xff\xfe\x00", _JSON),
        ("create_session", b"[1, 2]", _JSON),
        ("create_session", b"[" * 100_000, _JSON),
        ("create_session", b'{"tags": 5}', _JSON),
        ("create_model", {"session_id": 7}, {}),
        ("asample", {"prompt": {"chunks": "x"}}, {}),
        ("optim_step", {"model_id": model, "seq_id": "one"}, {}),
        ("forward_backward", b"\x00" * 64, _BINARY),
        ("forward_backward", b"\x0a\xff\xff\xff\xff\x7f", _BINARY),
        ("forward_backward", write_pass(model, 1, [2], [3])[:-3], _BINARY),
        ("forward_backward", b"no zstd", {**_BINARY, "content-encoding": "zstd"}),
        ("retrieve_future", {"request_id": "nobody:1"}, {}),
        ("no_such_call", {}, {}),
    ]
    for path, body, headers in wrong:
        status, reply = raw.send("POST", path, body, headers=headers)
        assert 400 <= status < 500 and reply["detail"], (path, status, reply)
    head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {ALICE}\r\nConnection: close\r\n".encode()
    assert b" 411 " in raw.talk(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n").split(b"\r\n")[0]
    for data in (head + b"Content-Length: 50\r\n\r\n{", b"\x16\x03\x01" * 40, b"GET\r\n\r\n", head[:30]):
        raw.talk(data, dies=True)  # a client that dies, or speaks something else
    # the models are as they were
    for seq_model, key in ((model, ALICE), (other, BOB)):
        status, future = raw.run_pass(seq_model, 1, [2, 3], [3, 4], key=key)
        assert status == 200 and read_pass(raw.fetch(future, key))[1] == pytest.approx([-np.log(VOCAB)] * 2)
    assert raw.end() == 0


@pytest.mark.parametrize(
    ("key", "status"), [("", 401), ("tml-mallory-123", 401), ("eyJ0eXAi.eyJzdWIiOiJhbGljZSJ9.c2ln", 401), ("alice", 401)]
)
def test_a_wrong_key_or_token_opens_nothing(raw, key, status):
    model = raw.open_model()
    for method, path, body in (
        ("POST", "create_session", {}),
        ("POST", "get_info", {"model_id": model}),
        ("GET", "training_runs", None),
        ("GET", "sessions", None),
    ):
        assert raw.send(method, path, body, key)[0] == status
    assert raw.send("POST", "get_info", {"model_id": model}, BOB)[0] == 404


def test_wrong_data_fail_in_their_turn_and_replays_are_applied_once_also_after_a_kill(raw):
    model, other = raw.open_model(), raw.open_model(BOB)
    nan = {"logprobs": np.zeros(1, np.float32), "advantages": np.array([np.nan], np.float32)}
    wrong = [
        (([2], [3]), {"loss": "importance_sampling", "inputs": nan}, "not a finite number"),
        (([2], [VOCAB]), {}, "not in the vocabulary"),
        (([-1], [3]), {}, "not in the vocabulary"),
        (([2] * 65, [3] * 65), {}, "it must have 1 to 64"),
        (([2], [3]), {"loss": "stable_reinforce"}, "not offered"),
        (([2], [3]), {"loss": "ppo", "inputs": {"logprobs": np.zeros(1, np.float32)}}, "advantages"),
    ]
    for seq, (tokens, options, text) in enumerate(wrong, 1):
        status, future = raw.run_pass(model, seq, *tokens, **options)
        assert status == 200, future
        reply = raw.fetch(future)
        assert reply["category"] == "user" and text in reply["error"], reply
    first = len(wrong) + 1
    for _ in range(3):  # the client did not see the answer
        passes = raw.run_pass(model, first, [2], [3])[1]
        steps = raw.step(model, first + 1)
    assert raw.fetch(steps)["metrics"]["step:max"] == 1
    status, reply = raw.run_pass(model, first, [2], [4])
    assert status == 400 and "another request" in reply["detail"]
    raw.kill()
    raw.start()
    assert raw.run_pass(model, first, [2], [3])[1]["request_id"] == passes["request_id"]
    assert raw.fetch(raw.step(model, first + 1))["metrics"]["step:max"] == 1
    raw.fetch(raw.run_pass(model, first + 2, [2], [3])[1])
    assert raw.fetch(raw.step(model, first + 3))["metrics"]["step:max"] == 2
    forward = raw.run_pass(model, first + 4, [2], [3], forward_only=True)[1]
    expected = log_softmax(train_alone([[(2, 3)], [(2, 3)]]))[2, 3]
    assert read_pass(raw.fetch(forward))[1] == pytest.approx([expected])
    untouched = raw.run_pass(other, 1, [2], [3], key=BOB, forward_only=True)[1]
    assert read_pass(raw.fetch(untouched, BOB))[1] == pytest.approx([-np.log(VOCAB)])


def test_a_thousand_sessions_open_over_one_connection_and_another_key_still_works(raw):
    connection = http.client.HTTPConnection("127.0.0.1", raw.port, timeout=patient(60))
    sessions = [raw.post("create_session", {}, connection=connection)["session_id"] for _ in range(1000)]
    assert len(set(sessions)) == 1000
    status, reply = raw.send("POST", "create_session", {})
    assert status == 429 and "1000 sessions of this API key" in reply["detail"]
    for session in sessions[::100]:
        raw.post("session_heartbeat", {"session_id": session}, connection=connection)
    model = raw.open_model(BOB)
    result = raw.fetch(raw.run_pass(model, 1, [2], [3], key=BOB)[1], BOB)
    assert read_pass(result)[0]["loss:sum"] == pytest.approx(np.log(VOCAB))


def test_a_wait_for_a_result_is_answered_in_the_form_of_the_api_when_the_server_ends(raw, capfd):
    model = raw.open_model()
    waiting = raw.run_pass(model, 2, [2], [3])[1]  # number 1 does not arrive
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(raw.send, "POST", "retrieve_future", {"request_id": waiting["request_id"]})
        time.sleep(0.5)
        assert raw.end() == 0
        status, body = reply.result()
    assert status == 503 and "the server ends" in body["detail"]
    assert "Traceback" not in capfd.readouterr().err
    raw.start()
    raw.run_pass(model, 1, [2], [3])
    assert read_pass(raw.fetch(waiting))[0]["loss:sum"] == pytest.approx(np.log(VOCAB))
