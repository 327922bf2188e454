"""Outages of judges: a judge that does not reply costs a bounded wait, and is asked again after stated pauses."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from patience import patient

from mindspeed_rl.rewards import judge as judge_module
from mindspeed_rl.rewards import judge_outages
from mindspeed_rl.rewards.judge import Judge, JudgeError
from mindspeed_rl.rewards.judge_outages import Outage
from mindspeed_rl.rewards.judge_trial import try_judges
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings

REPLY = json.dumps({"choices": [{"message": {"content": "Score: 6"}}]}).encode()


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Host:
    """A server that takes connections and, while it hangs, never replies; or that closes them at once."""

    def __init__(self) -> None:
        self.connections, self.hangs, self.closes, self.status = 0, True, False, 200
        self._open: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            if self.closes:
                connection.close()
            elif not self.hangs:
                threading.Thread(target=self._reply, args=(connection,), daemon=True).start()

    def _reply(self, connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(
            f"HTTP/1.1 {self.status} -\r\nContent-Length: {len(REPLY)}\r\nConnection: close\r\n\r\n".encode() + REPLY
        )
        connection.close()

    def close(self) -> None:
        self._socket.close()
        for connection in self._open:
            connection.close()


@pytest.fixture
def host() -> Iterator[Host]:
    running = Host()
    yield running
    running.close()


def ask(judge: Judge, *responses: str) -> list[Any]:
    async def gather() -> list[Any]:
        samples = [RewardSample(prompt="how?", response=response) for response in responses]
        return await asyncio.gather(*map(judge, samples), return_exceptions=True)

    return asyncio.run(gather())


def test_a_judge_is_left_alone_after_three_requests_without_a_reply_for_pauses_that_double() -> None:
    clock = Clock()
    outage = Outage("j", clock)
    for _ in range(3):
        sent_at = outage.start(60)
        assert sent_at == clock.now and not outage.is_open
        clock.now += 4
        outage.record_failure(sent_at, "refused")
    pauses = []
    for _ in range(8):
        begin = clock.now
        while (sent_at := outage.start(60)) is None:
            assert "not asked: it has not replied to the last" in outage.describe() and "(refused)" in outage.describe()
            clock.now += 1
        pauses.append(clock.now - begin)
        assert outage.start(60) is None, "a single request finds out whether it replies again"
        outage.record_failure(sent_at, "refused")
    assert pauses == [60, 120, 240, 480, 960, 1920, 1920, 1920]
    clock.now += 1920
    assert outage.start(60) == clock.now
    outage.record_reply()
    assert not outage.is_open and outage.start(60) == outage.start(60) == clock.now


def test_a_busy_judge_that_replies_to_others_is_not_left_alone() -> None:
    clock = Clock()
    outage = Outage("j", clock)
    for _ in range(20):
        late = [outage.start(60) for _ in range(5)]
        clock.now += 30
        outage.record_reply()
        clock.now += 30
        for sent_at in late:
            assert sent_at is not None
            outage.record_failure(sent_at, "late")
    assert not outage.is_open and outage.start(60) is not None


def test_requests_that_were_under_way_when_it_was_left_alone_do_not_lengthen_the_pause() -> None:
    clock = Clock()
    outage = Outage("j", clock)
    sent = [outage.start(60) for _ in range(64)]
    clock.now += 60
    for sent_at in sent:
        assert sent_at is not None
        outage.record_failure(sent_at, "late")
    clock.now += 59
    assert outage.start(60) is None
    clock.now += 1
    assert outage.start(60) == clock.now


@pytest.mark.parametrize("quorum", [None, 1])
def test_a_judge_that_hangs_costs_its_limit_once_and_each_response_says_so(
    host: Host, quorum: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Host()
    other.hangs = False
    panel = () if quorum is None else (f"other@{other.url}",)
    limit_s = patient(0.4)  # the other judge replies within it on a busy machine too
    judge = Judge(
        RewardSettings(judge_url=host.url, judge_model="dead", judge_panel=panel, judge_quorum=quorum, judge_timeout_s=limit_s)
    )
    caplog.set_level(logging.WARNING)
    first = ask(judge, *map(str, range(5)))
    assert host.connections == 5
    later = ask(judge, *map(str, range(5, 40)))
    assert host.connections == 5, "35 more responses have sent nothing to it"
    assert sum("the judge dead has not replied to 3 requests in a row" in text for text in caplog.messages) == 1
    if quorum is None:
        assert all(isinstance(each, asyncio.TimeoutError) and f"no reply in {limit_s:g} s" in str(each) for each in first)
        assert all(isinstance(each, JudgeError) and "not asked: it has not replied" in str(each) for each in later)
    else:
        assert all(each["score"] == pytest.approx(0.6) and each["missing"] == 1.0 for each in [*first, *later])
    monkeypatch.setattr(judge._votes[0][1]._outage, "_again_at", 0.0)  # the pause has passed
    host.hangs = False
    (probe,) = ask(judge, "again")
    assert (probe if quorum is None else probe["missing"]) == (pytest.approx(0.6) if quorum is None else 0.0)
    assert any("the judge dead replies again, after" in text for text in caplog.messages)
    assert all(not isinstance(each, Exception) for each in ask(judge, "a", "b", "c"))
    other.close()


def test_a_closed_connection_is_tried_again_but_once_per_pause(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "_ATTEMPTS", 2)
    monkeypatch.setattr(judge_outages, "_FIRST_PAUSE_S", 0.0)
    host.closes = True
    judge = Judge(RewardSettings(judge_url=host.url))
    assert all("answers nothing" in str(each) for each in ask(judge, "1", "2", "3"))
    assert host.connections == 6
    assert "answers nothing" in str(ask(judge, "4")[0]) and host.connections == 7


def test_an_overloaded_server_is_left_alone_and_a_refusal_is_a_reply(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "_ATTEMPTS", 1)
    host.hangs, host.status = False, 403
    judge = Judge(RewardSettings(judge_url=host.url))
    assert all("answers 403" in str(each) for each in ask(judge, *"123456"))
    assert not judge._votes[0][1]._outage.is_open
    host.status = 503
    assert all("answers 503" in str(each) for each in ask(judge, *"abc"))
    assert "not asked" in str(ask(judge, "d")[0]) and host.connections == 9


def test_a_pool_whose_only_judge_hangs_stops_with_the_reason(host: Host) -> None:
    settings = RewardSettings(judge_url=host.url, judge_timeout_s=0.5, reward_failure_limit=1.0)
    with RewardPool(["judge"], settings=settings) as pool:
        first = pool.score([RewardSample(response=str(index)) for index in range(4)])
        second = pool.score([RewardSample(response=str(index)) for index in range(4, 8)])
    assert {result.state for result in first} == {"timeout"} and "no reply in 0.5 s" in first[0].error
    assert {result.state for result in second} == {"failed"} and "not asked" in second[0].error
    assert all(result.total is None for result in [*first, *second]) and host.connections == 4


def test_the_trial_of_a_judge_that_hangs_or_has_no_score_names_its_key(host: Host) -> None:
    other = Host()
    other.hangs = False
    keys = {"judge_timeout_s": 0.4, "judge_model": "dead"}
    sample = RewardSample(prompt="how?", response="so")
    with pytest.raises(ValueError, match=r"rl_config.judge_url: the judge dead gives no score .* no reply in 0.4 s"):
        try_judges(RewardSettings(judge_url=host.url, **keys), sample)
    panel = {"judge_panel": (f"other@{other.url}",), **keys}
    with pytest.raises(ValueError, match="the judge dead gives no score"):
        try_judges(RewardSettings(judge_url=host.url, **panel), sample)
    (warning,) = try_judges(RewardSettings(judge_url=host.url, judge_quorum=1, **panel), sample)
    assert "the judge dead gives no score" in warning and "the other judges decide (rl_config.judge_quorum)" in warning
    assert try_judges(RewardSettings(judge_url=other.url), sample) == []
    with pytest.raises(ValueError, match=r"judge_url: the judge cannot be asked about the first row: .*rubric"):
        try_judges(RewardSettings(judge_url=other.url, judge_rubric="rubric"), sample)
    other.close()
