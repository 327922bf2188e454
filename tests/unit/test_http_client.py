"""The HTTP client: what is requested again, what is not, and the limits of time and size."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from patience import patient

from mindspeed_rl.http_client import HttpClient, HttpError, HttpReply

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def _serve(handler: _Handler) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _status(reply: HttpReply) -> int:
    return reply.status


def _json(reply: HttpReply) -> object:
    return reply.read_json()


@pytest.mark.parametrize(
    ("statuses", "attempts", "last"),
    [
        ([503, 429, 200], 3, 200),
        ([503, 503, 503], 2, 503),  # the last reply is read, whatever it is
        ([404, 200], 3, 404),
        ([501, 200], 3, 501),
    ],
)
def test_statuses_that_pass_are_requested_again(statuses: list[int], attempts: int, last: int) -> None:
    sent = iter(statuses)

    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=next(sent))

    async def use() -> int:
        async with _serve(handle) as url, HttpClient(100, attempts=attempts) as client:
            return await client.request("POST", url, _status, json={})

    assert asyncio.run(use()) == last
    assert len(list(sent)) == len(statuses) - (attempts if statuses[0] == 503 else 1)


def test_a_server_decides_how_long_to_wait_and_a_reply_that_is_not_usable_is_requested_again() -> None:
    replies = iter(
        [web.Response(status=429, headers={"Retry-After": "1"}), web.Response(text="<html>"), web.json_response([1])]
    )
    times: list[float] = []

    async def handle(request: web.Request) -> web.Response:
        times.append(time.monotonic())
        return next(replies)

    async def use() -> object:
        async with _serve(handle) as url, HttpClient(100, attempts=3) as client:
            return await client.request("GET", url, _json)

    assert asyncio.run(use()) == [1]
    assert times[1] - times[0] >= 1.0
    assert 0.5 <= times[2] - times[1]


def test_what_a_reader_raises_itself_is_not_requested_again() -> None:
    num_requests = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal num_requests
        num_requests += 1
        return web.Response(text="no")

    def read(reply: HttpReply) -> None:
        raise KeyError(reply.text)

    async def use() -> None:
        async with _serve(handle) as url, HttpClient(100, attempts=3) as client:
            await client.request("GET", url, read)

    with pytest.raises(KeyError, match="no"):
        asyncio.run(use())
    assert num_requests == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_reply_above_the_limit_is_not_read_to_its_end(chunked: bool) -> None:
    num_requests, written = 0, 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal num_requests, written
        num_requests += 1
        response = web.StreamResponse()
        if not chunked:
            response.content_length = 1 << 30
        await response.prepare(request)
        for _ in range(1 << 14):
            await response.write(b"x" * (1 << 16))
            written += 1 << 16
        return response

    async def use() -> None:
        async with _serve(handle) as url, HttpClient(1 << 20, attempts=3) as client:
            await client.request("GET", url, _status)

    with pytest.raises(HttpError, match="more than 1,048,576 bytes"):
        asyncio.run(use())
    assert num_requests == 1 and written < 64 << 20


def test_a_late_reply_is_distinguished_from_a_missing_server() -> None:
    async def handle(request: web.Request) -> web.Response:
        await asyncio.sleep(patient(60))
        return web.Response()

    async def use() -> tuple[HttpError, HttpError]:
        errors = []
        async with HttpClient(100) as client:
            async with _serve(handle) as url:
                for timeout_s in (0.3, None):
                    if timeout_s is None:
                        url = "http://127.0.0.1:9"
                    with pytest.raises(HttpError) as raised:
                        await client.request("GET", url, _status, timeout_s=timeout_s)
                    errors.append(raised.value)
        return errors[0], errors[1]

    late, absent = asyncio.run(use())
    assert late.late and not absent.late
    assert str(absent).startswith("ClientConnectorError: ")


def test_redirects_are_followed_only_where_a_service_may_have_moved() -> None:
    async def handle(request: web.Request) -> web.Response:
        if request.path == "/new":
            return web.Response(status=200)
        return web.Response(status=307, headers={"Location": "/new"})

    async def use(follows: bool) -> int:
        async with _serve(handle) as url, HttpClient(100, follows_redirects=follows) as client:
            return await client.request("POST", url, _status, json={})

    assert asyncio.run(use(False)) == 307 and asyncio.run(use(True)) == 200


def test_lists_nested_too_deeply_are_no_json() -> None:
    with pytest.raises(ValueError):
        HttpReply(200, b"[" * 200_000).read_json()
