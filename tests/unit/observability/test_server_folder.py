"""A run that goes takes offers of servers, and one that has ended takes none."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.cli.rollout import main
from mindspeed_rl.observability.run_files import ServerFolder, ServerOffer


def test_an_offer_is_seen_until_it_is_withdrawn_and_only_its_owner_reads_the_token(tmp_path: Path) -> None:
    run, server = ServerFolder(tmp_path), ServerFolder(tmp_path)
    with pytest.raises(ValueError, match="no run goes in .* that takes servers"):
        server.read_settings()
    run.open({"hf_folder": "/models/tiny", "generate": {"max_num_seqs": 4}})
    assert server.read_settings()["generate"] == {"max_num_seqs": 4} and run.list_offers() == []
    offers = [ServerOffer("10.0.0.5", 8000, "a"), ServerOffer("fe80::1", 8001, "b")]
    paths = [server.offer(offer) for offer in offers]
    assert run.list_offers() == offers
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    # started again at the same address
    again = ServerOffer("10.0.0.5", 8000, "c")
    assert server.offer(again) == paths[0] and run.list_offers() == [again, offers[1]]
    paths[1].unlink()
    assert run.list_offers() == [again]
    run.close()
    assert not server.is_open
    run.open({})
    assert run.list_offers() == []  # offers to the run before


OFFER = {"host": "10.0.0.5", "port": 8000, "token": "a-b_c"}
#: values of a field that no offer has; of the host, "[::1]" is the form of an address in a URL
WRONG: dict[str, list[Any]] = {
    "host": [None, 5, "", "evil.com/x?", "a b", "a\nb", "user@host", "host:80", "[::1]", "-x", "x" * 300, "ü.de", [], {}],
    "port": [None, "x", "8000", 0, -1, 65536, 8000.0, True, 10**400, [], {}],
    "token": [None, 5, "", " ", "a b", "a\r\nX: y", "a\n", "\x00", "é", "x" * 4097, [], {}],
}


def damaged() -> dict[str, bytes]:
    """Name of a damage -> what the file then holds."""
    whole = json.dumps(OFFER).encode()
    files = {f"cut at {end}": whole[:end] for end in range(len(whole))}
    files |= {"twice": whole * 2, "null": b"null", "list": b"[]", "number": b"5", "text": b'"x"', "binary": b"\xff\xfe\x00"}
    files |= {
        "deep": b"[" * 50_000,
        "deep object": b'{"host":' * 5_000,
        "large": whole + b" " * (1 << 17),
        "digits": b"9" * 5000,
    }
    files |= {"another field": json.dumps({**OFFER, "version": 2}).encode()}
    for name, values in WRONG.items():
        files[f"no {name}"] = json.dumps({key: value for key, value in OFFER.items() if key != name}).encode()
        files |= {f"{name} {value!r:.20}": json.dumps({**OFFER, name: value}).encode() for value in values if value != 10**400}
    return files


def test_a_damaged_offer_is_passed_over_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = ServerFolder(tmp_path)
    run.open({})
    right = ServerOffer("node-7.cluster.local", 1, "t" * 4096)
    run.offer(right)
    path = tmp_path / "servers" / "1.2.3.4_5.json"
    for name, content in damaged().items():
        path.write_bytes(content)
        caplog.clear()
        assert [run.list_offers(), run.list_offers()] == [[right]] * 2, name
        path.unlink()
        assert run.list_offers() == [right]
        [text] = [record.getMessage() for record in caplog.records]
        assert "1.2.3.4_5.json is not an offer of a server, and is passed over: " in text and len(text) < 500, name
        assert "a b" not in text or not name.startswith("token")  # a secret, however damaged


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "link to nothing", "unreadable"])
def test_an_offer_that_is_no_readable_file_is_passed_over_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run = ServerFolder(tmp_path)
    run.open({})
    path = tmp_path / "servers" / "1.2.3.4_5.json"
    with contextlib.ExitStack() as held:
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            held.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        else:
            path.symlink_to("/dev/zero" if kind == "unreadable" else tmp_path / "nothing")
        assert run.list_offers() == []
    # a link to nothing is an offer that has just been withdrawn
    assert len(caplog.records) == (0 if kind == "link to nothing" else 1)


def test_every_address_that_a_server_listens_on_is_an_offer(tmp_path: Path) -> None:
    run = ServerFolder(tmp_path)
    run.open({})
    hosts = ["127.0.0.1", "::1", "fe80::1%eth0", "localhost", "a", "node_7", "n1.example.com", "n1.example.com."]
    for host in hosts:
        run.offer(ServerOffer(host, 65535, "~!"))
    assert sorted(offer.host for offer in run.list_offers()) == sorted(hosts)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 50_000])
def test_damaged_settings_of_a_run_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    run = ServerFolder(tmp_path)
    run.open({})
    (tmp_path / "servers" / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"servers/run\.json"):
        ServerFolder(tmp_path).read_settings()


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"generate": None}, {"limits": {}, "exact_slices": 0, "generate": 5}),
        {"limits": {"pixels": 1}, "exact_slices": 0, "generate": {}},
    ],
)
def test_a_server_that_joins_a_run_of_another_release_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    ServerFolder(tmp_path).open(settings)
    assert main(["--join", str(tmp_path)]) == 2
    assert "servers/run.json is not of a run of this release" in capsys.readouterr().err
