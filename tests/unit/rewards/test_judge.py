"""The judge: a real HTTP server on this machine, replies good and bad."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.rewards import judge
from mindspeed_rl.rewards.judge import Judge, JudgeError, _parse_score, mean_of_parts
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings


class Server(ThreadingHTTPServer):
    """Scores an answer by its length; misbehaves where the answer says so."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.refusals = 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, **body})
        self.server.keys.append(self.headers.get("Authorization"))
        text = body["messages"][0]["content"]
        if "BUSY" in text and self.server.refusals > 0:
            self.server.refusals -= 1
            self._reply(503, b"later")
        elif "FORBIDDEN" in text:
            self._reply(403, b"no")
        elif "NONSENSE" in text:
            self._reply(200, b"<html>")
        elif "NO SCORE" in text:
            self._complete("I would rather not say.")
        elif "CHUNKED" in text:
            self._complete("Score: 9", chunked=True)
        else:
            self._complete("Good.\nScore: 7")

    def _complete(self, content: str, chunked: bool = False) -> None:
        self._reply(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode(), chunked)

    def _reply(self, status: int, body: bytes, chunked: bool = False) -> None:
        self.send_response(status)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (body[:5], body[5:]):
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_every_response_gets_the_judges_score_and_bad_replies_fail_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k-1")
    settings = RewardSettings(judge_url=server.url, judge_model="m", reward_failure_limit=1.0, judge_timeout_s=patient(20))
    responses = ["fine", "CHUNKED", "BUSY", "FORBIDDEN", "NONSENSE", "NO SCORE"]
    with RewardPool(["judge"], [2.0], settings=settings) as pool:
        results = pool.score([RewardSample(prompt="how?", response=text, label="so") for text in responses])
    assert [result.total for result in results] == [1.4, 1.8, 1.4, None, None, None]
    assert "answers 403" in results[3].error and "not a chat completion" in results[4].error and "Score: N" in results[5].error
    assert {request["path"] for request in server.requests} == {"/v1/chat/completions"}
    assert {request["model"] for request in server.requests} == {"m"} and set(server.keys) == {"Bearer k-1"}
    assert len(server.requests) == 7  # one was asked again


def test_equal_requests_are_sent_once(server: Server) -> None:
    settings = RewardSettings(judge_url=server.url, reward_failure_limit=1.0, judge_timeout_s=patient(20))
    samples = [RewardSample(prompt="how?", response=text) for text in ("fine", "fine", "FORBIDDEN", "fine", "other", "fine")]
    with RewardPool(["judge"], settings=settings) as pool:
        for _ in range(2):
            assert [result.total for result in pool.score(samples)] == [0.7, 0.7, None, 0.7, 0.7, 0.7]
    texts = [request["messages"][0]["content"] for request in server.requests]
    # what was refused is asked again with the next batch
    assert [sum(word in text for text in texts) for word in ("fine", "other", "FORBIDDEN")] == [1, 1, 2]


def test_the_template_shows_prompt_response_label_and_columns_and_leaves_other_braces(tmp_path: Path) -> None:
    template = tmp_path / "judge.txt"
    template.write_text('{prompt}|{response}|{label}|{topic}|{unknown}|{"json": 1}')
    settings = RewardSettings(judge_url="http://127.0.0.1:1/v1", judge_prompt=str(template))
    sample = RewardSample(prompt="问", response="{label}", label=3, columns={"topic": "art"})
    assert Judge(settings).form.write_request(sample).text == '问|{label}|3|art|{unknown}|{"json": 1}'


def test_the_parser_may_be_the_users_and_return_parts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_parser.py").write_text("def parse(reply):\n    return {'score': 0.25, 'words': len(reply.split())}\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = RewardSettings(judge_url=server.url, judge_parser="my_parser:parse")
    with RewardPool(["judge"], settings=settings) as pool:
        assert pool.score([RewardSample(response="x")])[0].parts == {"judge": 0.25, "judge/words": 3.0}


def test_a_judge_that_is_not_there_fails_the_sample() -> None:
    with Server() as server:
        url = server.url
    settings = RewardSettings(judge_url=url, judge_timeout_s=0.5, reward_failure_limit=1.0)
    with RewardPool(["judge"], settings=settings) as pool:
        result = pool.score([RewardSample(response="x")])[0]
    assert result.failed and result.error.startswith("judge: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge_url": None}, "needs rl_config.judge_url"),
        ({"judge_url": "localhost:8000"}, "must look like http://host:port/v1"),
        ({"judge_prompt": "/no/such/file"}, "no file '/no/such/file'"),
        ({"judge_parser": "parse"}, "not of the form module:function"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_at_start(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Judge(RewardSettings(**{"judge_url": "http://127.0.0.1:1/v1", **changes}))


def test_a_template_without_the_response_is_refused(tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text("{prompt}")
    with pytest.raises(ValueError, match="does not mention {response}"):
        Judge(RewardSettings(judge_url="http://127.0.0.1:1/v1", judge_prompt=str(tmp_path / "judge.txt")))


@pytest.mark.parametrize(("reply", "score"), [("Score: 10", 1.0), ("score: 3\n**Score:** 4.5", 0.45), ("评分 Score：0", 0.0)])
def test_the_last_score_of_a_reply_counts_out_of_ten(reply: str, score: float) -> None:
    assert _parse_score(reply) == pytest.approx(score)


@pytest.mark.parametrize("reply", ["", "11/10", "Score: 11", "Score: high"])
def test_a_reply_without_a_score_is_an_error(reply: str) -> None:
    with pytest.raises(JudgeError):
        _parse_score(reply)


_GOOD = b'{"choices": [{"message": {"content": "Score: 7"}}]}'


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_GOOD), _GOOD), 0.7),
        (b"HTTP/1.1 200 OK\r\n\r\n" + _GOOD, 0.7),  # ends with the connection
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n<html>\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n" + _GOOD, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9%s\r\n\r\n" % (b"9" * 10), None),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * (9 << 20), None),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000, None),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 200_000, None),
        (b"a" * (1 << 20), None),
        (b"", None),
    ],
)
def test_whatever_the_server_sends_is_a_score_or_an_error_of_the_judge(
    reply: bytes, found: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "_ATTEMPTS", 1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(reply)
            await writer.drain()
        writer.close()

    async def ask() -> object:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await Judge(RewardSettings(judge_url=f"http://127.0.0.1:{port}/v1"))(RewardSample(response="1", label="1"))

    if found is not None:
        assert asyncio.run(ask()) == found
    else:
        with pytest.raises(JudgeError, match="the judge"):
            asyncio.run(ask())


def test_json_scores_become_parts_with_their_mean() -> None:
    assert mean_of_parts('ok {"clear": 5, "true": 10}') == pytest.approx({"clear": 0.5, "true": 1.0, "score": 0.75})
    with pytest.raises(JudgeError):
        mean_of_parts('{"clear": 50}')
