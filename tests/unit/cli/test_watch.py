"""`watch` serves the report of runs on loopback, follows them, and refuses requests for other hosts."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import patient

from mindspeed_rl.cli.watch import _RunServer, main, open_server


def write(folder: Path, iteration: int, reward: float) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": iteration, "grpo/score/mean": reward, "timing/all": 1.0}) + "\n")


@contextmanager
def serving(*folders: Path) -> Iterator[_RunServer]:
    with open_server(folders, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.is_closing = True
            server.shutdown()
            thread.join()


def get(server: _RunServer, path: str, host: str = "127.0.0.1") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=patient(20))
    connection.request("GET", path, headers={"Host": host})
    return connection.getresponse()


def next_event(response: http.client.HTTPResponse) -> dict[str, Any]:
    line = b""
    while not line.startswith(b"data: "):
        line = response.readline()
        assert line, "the stream has ended"
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return event


def rewards(event: dict[str, Any]) -> list[list[float]]:
    (chart,) = (chart for chart in event["charts"] if chart["title"] == "Reward")
    return [line["y"] for line in chart["lines"]]


def test_the_page_loads_nothing_from_elsewhere_and_a_host_that_is_none_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", 1, 0.25)
    with serving(tmp_path / "run") as server:
        policy = get(server, "/").headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "http" not in policy
        hosts = ["[::1", "[", "]", "[::1]:x", "127.0.0.1.evil", "", "\\", "a@b", "127.0.0.1:99999999", "evil:8787"]
        assert [host for host in hosts if get(server, "/", host).status != 403] == ["127.0.0.1:99999999"]
        assert get(server, "/", "localhost:1").status == 200


#: parts of Host headers
_PARTS = (
    *("127.0.0.1", "localhost", "[::1]", "::1", ":", ":8787", ".", "@", "a", "evil", "/", "\\", "[", "]", "%00", " "),
    *("x" * 300, "\xff"),
)


def test_of_random_hosts_only_names_of_this_machine_are_served(tmp_path: Path) -> None:
    rng = random.Random(1)
    hosts = ["".join(rng.choices(_PARTS, k=rng.randrange(1, 5))) for _ in range(280)]
    names = ("127.0.0.1", "LOCALHOST", "localhost")
    hosts += [rng.choice(names) + rng.choice(("", f":{rng.randrange(65536)}")) for _ in range(20)]
    own = re.compile(r"(127\.0\.0\.1|localhost)(:\d*)?", re.IGNORECASE)
    with serving(tmp_path) as server:
        for host in hosts:
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=patient(20)) as client:
                client.sendall(b"GET /nothing HTTP/1.1\r\nHost: " + host.encode("latin-1") + b"\r\nConnection: close\r\n\r\n")
                status = int(client.makefile("rb").readline().split()[1])
            assert status == (404 if own.fullmatch(host.strip()) else 403), host


def test_the_page_is_the_report_and_its_events_are_the_new_iterations(tmp_path: Path) -> None:
    result, two = tmp_path / "first", tmp_path / "second"
    write(result, 1, 0.25)
    write(two, 1, 0.5)
    with serving(result, two) as server:
        page = get(server, "/")
        assert page.status == 200 and b"first \xc2\xb7 second" in page.read()
        events = get(server, "/events")
        assert events.headers["Content-Type"] == "text/event-stream"
        assert rewards(next_event(events)) == [[0.25], [0.5]]
        write(result, 2, 0.75)
        start_s = time.monotonic()
        assert rewards(next_event(events)) == [[0.25, 0.75], [0.5]] and time.monotonic() - start_s < 15


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with serving(tmp_path / "run") as server:
        assert get(server, "/").status == 200
        events = get(server, "/events")
        assert next_event(events)["charts"] == []
        write(tmp_path / "run", 1, 0.5)
        assert rewards(next_event(events)) == [[0.5]]


def test_other_machines_and_other_names_of_this_one_get_nothing(tmp_path: Path) -> None:
    write(tmp_path / "run", 1, 0.5)
    with serving(tmp_path / "run") as server:
        assert server.server_address[0] == "127.0.0.1"
        # a page of the internet whose name leads here
        assert [get(server, "/", host).status for host in ("evil.example", "evil.example:80", "")] == [403, 403, 403]
        assert [get(server, path).status for path in ("/metrics.jsonl", "/../run", "/report.html")] == [404, 404, 404]
        assert get(server, "/", f"localhost:{server.server_port}").status == 200


def test_a_busy_port_gives_way_unless_it_was_requested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with serving(tmp_path / "run") as server:
        assert main([str(tmp_path / "run"), "--port", str(server.server_port)]) == 2
        assert f"--port {server.server_port}: " in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2 and "nowhere' does not exist" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), "--port", "99999999"]) == 2
