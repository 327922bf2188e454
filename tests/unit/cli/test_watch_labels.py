"""Marks of people by `watch --label`: taken from the page alone, on the disk first, and written as rows that stages read."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import patient

from mindspeed_rl.cli.label_door import ITEMS, MARKS, PAGE
from mindspeed_rl.cli.watch import _RunServer, main, open_server
from mindspeed_rl.data.forms import FORMS
from mindspeed_rl.observability.labels import DPO, JOURNAL, KTO, MARKED, ConflictError, Item, LabelFolder


def write_run(folder: Path) -> Path:
    """A run with two prompts and two responses to each."""
    folder.mkdir()
    rows = [
        {"iteration": 1, "prompt": prompt, "response": response, "reward": 1.0, "extra": {"label": label}}
        for prompt, label, responses in (("3 + 4?", "7", ("7", "8</script>")), ("汉字\n?", "是", ("是\u2028", "\ud83d 否")))
        for response in responses
    ]
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@contextmanager
def serving(run: Path, marks: Path) -> Iterator[_RunServer]:
    with open_server([run], 0, LabelFolder(marks)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.is_closing = True
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_RunServer]:
    with serving(write_run(tmp_path / "run"), tmp_path / "marks") as opened:
        yield opened


def ask(server: _RunServer, method: str, path: str, body: object = None, **headers: str | None) -> tuple[int, Any]:
    """Send a request as the page does, but for these headers; None leaves one out."""
    assert server.door is not None
    sent = {"Host": f"127.0.0.1:{server.server_port}", "Authorization": f"Bearer {server.door.token}"}
    content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent |= {} if content is None else {"Content-Type": "application/json", "Content-Length": str(len(content))}
    changed = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {name: value for name, value in (sent | changed).items() if value is not None}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=patient(20))
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        connection.putheader(name, value)
    connection.endheaders(content)
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, json.loads(text) if reply.headers.get_content_type() == "application/json" else text


def items_of(server: _RunServer) -> list[dict[str, Any]]:
    status, data = ask(server, "GET", ITEMS)
    assert status == 200
    items: list[dict[str, Any]] = data["items"]
    return items


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_marks_become_rows_for_kto_dpo_and_audits(server: _RunServer, tmp_path: Path) -> None:
    items = {item["response"]: item["id"] for item in items_of(server)}
    seven, eight = items["7"], items["8</script>"]
    assert ask(server, "POST", MARKS, {"items": [seven], "verdict": "right", "version": 0})[1]["version"] == 1
    assert ask(server, "POST", MARKS, {"items": [eight], "verdict": "wrong", "version": 0})[0] == 200
    status, reply = ask(server, "POST", MARKS, {"items": [eight, seven], "verdict": seven, "version": 0})
    assert (status, reply["counts"]) == (200, {"responses": 2, "pairs": 1})
    marks = tmp_path / "marks"
    assert read(marks / KTO) == [
        {"prompt": "3 + 4?", "completion": "7", "label": True},
        {"prompt": "3 + 4?", "completion": "8</script>", "label": False},
    ]
    assert read(marks / DPO) == [{"prompt": "3 + 4?", "chosen": "7", "rejected": "8</script>"}]
    assert [(row["response"], row["label"], row["human"]) for row in read(marks / MARKED)] == [
        ("7", "7", True), ("8</script>", "7", False),
    ]  # fmt: skip
    # rows of the forms that the stages recognize
    for name, kind in ((KTO, "judged answers"), (DPO, "pairs")):
        (row, *_) = read(marks / name)
        assert any(
            all(test(row.get(form.columns.get(key, key), "")) for key, test in form.values.items()) for form in FORMS[kind]
        )
    # taken back, and remembered by the next command
    assert ask(server, "POST", MARKS, {"items": [seven], "verdict": None, "version": 1})[0] == 200
    assert [row["label"] for row in read(marks / KTO)] == [False]
    assert LabelFolder(marks).describe(eight) == ("wrong", 1)


def test_texts_of_any_kind_are_marked(server: _RunServer, tmp_path: Path) -> None:
    for item in items_of(server):
        assert ask(server, "POST", MARKS, {"items": [item["id"]], "verdict": "right", "version": 0})[0] == 200
    lines = (tmp_path / "marks" / KTO).read_bytes().decode("utf-8").split("\n")
    assert {json.loads(line)["completion"] for line in lines[:-1]} == {"7", "8</script>", "是\u2028", "\ud83d 否"}


def test_the_page_has_nothing_of_the_run_and_all_else_needs_the_token(server: _RunServer) -> None:
    status, page = ask(server, "GET", PAGE, Authorization=None)
    assert status == 200 and b"3 + 4" not in page and server.door is not None and server.door.token.encode() not in page
    token = server.door.token
    wrong = [None, "", token, f"Bearer {token[:-1]}", f"Bearer {token}x", f"bearer {token}", "Bearer \xff", f"Basic {token}"]
    assert {ask(server, "GET", ITEMS, Authorization=each)[0] for each in wrong} == {401}
    mark = {"items": [items_of(server)[0]["id"]], "verdict": "right", "version": 0}
    assert {ask(server, "POST", MARKS, mark, Authorization=each)[0] for each in wrong} == {401}
    assert ask(server, "GET", f"{ITEMS}?token={token}", Authorization=None)[0] == 404


def test_other_origins_and_hosts_are_refused_even_with_the_token(server: _RunServer) -> None:
    port = server.server_port
    mark = {"items": [items_of(server)[0]["id"]], "verdict": "right", "version": 0}
    for origin in ("null", "http://evil", f"http://127.0.0.1:{port + 1}", f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port}.evil"):
        assert ask(server, "POST", MARKS, mark, Origin=origin)[0] == 403
    assert {ask(server, "POST", MARKS, mark, Sec_Fetch_Site=site)[0] for site in ("cross-site", "same-site", "")} == {403}
    assert {ask(server, "POST", MARKS, mark, Host=host)[0] for host in ("evil", f"evil:{port}", None)} == {403}
    assert ask(server, "OPTIONS", MARKS, Origin="http://evil")[0] == 501
    # a form of another page has none of the types that a browser sends without asking
    kinds = ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", None]
    assert {ask(server, "POST", MARKS, mark, Content_Type=kind)[0] for kind in kinds} == {415}
    assert ask(server, "POST", MARKS, mark, Origin=f"http://localhost:{port}", Sec_Fetch_Site="same-origin")[0] == 200


def test_bodies_are_bounded_and_checked(server: _RunServer) -> None:
    one, other, *rest = [item["id"] for item in items_of(server)]
    mark = {"items": [one], "verdict": "right", "version": 0}
    assert ask(server, "POST", MARKS, b"x" * 5000)[0] == 413
    assert ask(server, "POST", MARKS, b"", Content_Length="999999999")[0] == 413
    for length in ("-1", "1e3", "٣", "", "9" * 30, None):
        assert ask(server, "POST", MARKS, b"{}", Content_Length=length and length.encode().decode("latin-1"))[0] in (411, 400)
    assert ask(server, "POST", MARKS, b"{}", Transfer_Encoding="chunked")[0] == 411
    wrong = [
        b"{", b"[" * 4000, b"\xff", [], {}, {**mark, "text": "more"}, {**mark, "items": []}, {**mark, "items": one},
        {**mark, "items": [one, one]}, {**mark, "items": [one, other, *rest]}, {**mark, "items": ["../../etc"]},
        {**mark, "items": [None]},
        {**mark, "verdict": "maybe"}, {**mark, "verdict": True}, {**mark, "verdict": other}, {**mark, "version": "0"},
        {**mark, "version": True}, {**mark, "version": None}, {**mark, "items": [one, other], "verdict": "right"},
    ]  # fmt: skip
    assert [body for body in wrong if ask(server, "POST", MARKS, body)[0] != 400] == []
    # prompts differ
    by_prompt = {item["prompt"]: item["id"] for item in items_of(server)}
    pair = list(by_prompt.values())
    assert ask(server, "POST", MARKS, {"items": pair, "verdict": pair[0], "version": 0})[0] == 400
    assert ask(server, "POST", MARKS, {**mark, "items": ["0" * 24]})[0] == 404
    assert ask(server, "POST", MARKS, {**mark, "version": -1})[0] in (400, 409)
    assert ask(server, "POST", MARKS, mark)[0] == 200


def test_what_is_left_of_a_refused_body_is_no_request(server: _RunServer) -> None:
    inner = f"GET {PAGE} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=patient(20)) as client:
        client.sendall(b"POST /label/marks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner)
        assert client.makefile("rb").read().count(b"HTTP/1.1 ") == 1


def test_a_request_that_is_sent_again_and_a_page_that_is_old_change_nothing(server: _RunServer) -> None:
    one = items_of(server)[0]["id"]
    right = {"items": [one], "verdict": "right", "version": 0}
    assert ask(server, "POST", MARKS, right)[0] == 200
    assert ask(server, "POST", MARKS, {**right, "verdict": "wrong", "version": 1})[0] == 200
    status, reply = ask(server, "POST", MARKS, right)
    assert status == 409 and "reload" in reply["error"] and items_of(server)[0]["verdict"] == "wrong"


def test_of_many_writers_at_once_one_wins_each_version(server: _RunServer, tmp_path: Path) -> None:
    items = [item["id"] for item in items_of(server)]

    def mark(seed: int) -> int:
        draws = random.Random(seed)
        body = {"items": [draws.choice(items)], "verdict": draws.choice(["right", "wrong"]), "version": draws.randrange(3)}
        return ask(server, "POST", MARKS, body)[0]

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(mark, range(60)))
    journal = read(tmp_path / "marks" / JOURNAL)
    assert set(statuses) <= {200, 409} and len(journal) == statuses.count(200)
    for one in items:
        versions = [line["version"] for line in journal if line["key"] == one]
        assert versions == list(range(1, len(versions) + 1))
    again = LabelFolder(tmp_path / "marks")
    assert all(again.describe(item["id"]) == (item["verdict"], item["version"]) for item in items_of(server))


ITEM = Item.make({"prompt": "a", "response": "b"})


def test_a_line_that_is_half_written_is_removed_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    folder = LabelFolder(tmp_path)
    folder.mark([ITEM], "right", 0)
    whole = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(whole + whole[: len(whole) // 2])
    assert LabelFolder(tmp_path).describe(ITEM.id) == ("right", 1) and (tmp_path / JOURNAL).read_bytes() == whole
    damaged = [
        whole.replace(b'"b"', b'"c"'), whole.replace(b'"right"', b'"fine"'), whole.replace(b'"version": 1', b'"version": 0'),
        whole + whole, b"[]\n", b"{}\n", whole[1:], b"\x00\n", whole.replace(b'"items": [', b'"items": [{}, '),
    ]  # fmt: skip
    for content in damaged:
        (tmp_path / JOURNAL).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{JOURNAL}, line \d"):
            LabelFolder(tmp_path)
        assert (tmp_path / JOURNAL).read_bytes() == content


def test_a_mark_that_the_disk_does_not_take_is_not_made(tmp_path: Path) -> None:
    folder = LabelFolder(tmp_path)
    (tmp_path / JOURNAL).mkdir()
    with pytest.raises(OSError, match="directory"):
        folder.mark([ITEM], "right", 0)
    assert folder.describe(ITEM.id) == (None, 0)
    with pytest.raises(ConflictError):
        folder.mark([ITEM], "right", 1)


def test_a_server_without_the_option_takes_no_mark(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with open_server([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=patient(20))
        connection.request("POST", MARKS, b"{}", {"Host": "127.0.0.1"})
        assert connection.getresponse().status == 404
        server.shutdown()
        thread.join()


def test_a_folder_that_another_command_holds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mindspeed_rl.observability.folder_locks import hold_folders

    with hold_folders({"--label": tmp_path / "marks"}):
        assert main([str(write_run(tmp_path / "run")), "--label", str(tmp_path / "marks"), "--port", "0"]) == 2
    assert "is in use by" in capsys.readouterr().err
    (tmp_path / "marks").mkdir(exist_ok=True)
    (tmp_path / "marks" / JOURNAL).write_text("[]\n")
    assert main([str(tmp_path / "run"), "--label", str(tmp_path / "marks"), "--port", "0"]) == 2
    assert "line 1" in capsys.readouterr().err
