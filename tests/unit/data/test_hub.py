"""Models and data sets by name, from a local server by the real clients of the hubs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hub_server import Hub, serving

from mindspeed_rl.cli.main import main
from mindspeed_rl.hub import HubName, NotFetchedError, fetch, find_cached, find_network_problem, parse_hub_name

MODEL = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}", "pytorch_model.bin": b"no"}
MODEL["model.safetensors"] = bytes(range(256)) * 3000
ROWS = {name: [{"q": f"{name} {i}", "a": str(i)} for i in range(count)] for name, count in (("train", 20), ("test", 5))}
DATA = {f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode() for name, rows in ROWS.items()}
HUBS = ("hf://", "ms://")


def needs(hub: str) -> None:
    if hub == "ms://":
        pytest.importorskip("modelscope_hub", reason="the client of ModelScope is an extra: envs/cpu/extras.sh installs it")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, with empty caches."""
    with serving({"models/own/tiny": MODEL, "datasets/own/sums": DATA}) as server:
        point_to(server.url, tmp_path, monkeypatch)
        yield server


def point_to(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    values = {"HF_ENDPOINT": url, "MODELSCOPE_ENDPOINT": url, "MODELSCOPE_CACHE": str(folder / "ms"), "NO_PROXY": "*"}
    for name, value in {**values, "MODELSCOPE_HOME": str(folder / "home")}.items():
        monkeypatch.setenv(name, value)
    if find_spec("modelscope_hub") is not None:
        import modelscope_hub

        # it keeps the settings of its first use
        modelscope_hub.set_default_config(modelscope_hub.HubConfig())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B", HubName("hf://", "Qwen/Qwen2.5-0.5B")),
        ("hf://gpt2", HubName("hf://", "gpt2")),
        ("ms://Qwen/Qwen3-8B@v1.0", HubName("ms://", "Qwen/Qwen3-8B", "v1.0")),
        ("here/model", None),
        ("./a/b", None),
        ("../b", None),
        ("/a/b", None),
        ("~/b", None),
        ("a/b/c", None),
        ("model", None),
        (None, None),
    ],
)
def test_a_name_is_told_from_a_path(
    text: str | None, expected: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()  # here/model may be written later
    assert parse_hub_name(text) == expected


@pytest.mark.parametrize("prefix", HUBS)
def test_a_model_is_fetched_once_without_files_that_are_not_used(prefix: str, hub: Hub) -> None:
    needs(prefix)
    folder = fetch(HubName(prefix, "own/tiny"), "load")
    expected = {name: content for name, content in MODEL.items() if name != "pytorch_model.bin"}
    assert {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")} == expected
    hub.requests.clear()
    assert fetch(HubName(prefix, "own/tiny"), "load", downloads=False) == folder == find_cached(f"{prefix}own/tiny")
    assert fetch(HubName(prefix, "own/tiny"), "load").samefile(folder)
    assert not [request for request in hub.requests if "GET" in request and "safetensors" in request]


@pytest.mark.parametrize("prefix", HUBS)
def test_a_broken_download_goes_on_and_is_complete(prefix: str, hub: Hub) -> None:
    needs(prefix)
    hub.cut["model.safetensors"] = 100_000
    name = HubName(prefix, "own/tiny")
    try:
        folder = fetch(name, "load")
    except ValueError as error:
        assert "is not complete in the cache" in str(error)
        folder = fetch(name, "load")
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


@pytest.mark.parametrize("prefix", HUBS)
def test_what_is_misspelt_is_a_sentence(prefix: str, hub: Hub) -> None:
    needs(prefix)
    with pytest.raises(ValueError, match=rf"^load: '.*own/tyni' .*{hub.url} has no model of this name; check the spelling"):
        fetch(HubName(prefix, "own/tyni"), "load")
    with pytest.raises(NotFetchedError, match="load: '.*own/tiny' is not in the cache; train fetches it, or mindspeed-rl"):
        fetch(HubName(prefix, "own/tiny"), "load", downloads=False)
    with pytest.raises(ValueError, match="'hf://a/b/c' is not a name on a hub; write hf://owner/name"):
        parse_hub_name("hf://a/b/c")


def test_without_a_network_the_cache_serves_and_else_a_sentence_says_what_to_do(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(HubName("hf://", "own/tiny"), "load")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens there
        point_to(f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path, monkeypatch)
        assert fetch(HubName("hf://", "own/tiny"), "load") == folder
        with pytest.raises(ValueError, match=r"'own/other' is not complete in the cache, and http://\S+ cannot be reached"):
            fetch(HubName("hf://", "own/other"), "load")


@pytest.mark.parametrize("prefix", HUBS)
def test_a_model_without_weights_that_are_read_is_refused(
    prefix: str, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(prefix)
    files = {name: content for name, content in MODEL.items() if name != "model.safetensors"}
    monkeypatch.setattr(hub, "repos", {"models/own/old": files})
    assert main(["download", f"{prefix}own/old"]) == 2
    expected = rf"{hub.url} has no \*\.safetensors of '(ms://)?own/old'"
    assert re.search(rf"error: download: {expected}", capsys.readouterr().err)
    assert (fetch(HubName(prefix, "own/old"), "load", "tokenizer") / "config.json").is_file()
    with pytest.raises(NotFetchedError) as caught:
        fetch(HubName(prefix, "own/old"), "load", downloads=False)
    if prefix == "hf://":  # explain --validate asks the hub
        with pytest.raises(ValueError, match=f"^load: {expected}"):
            caught.value.check_hub()
    shards = {"model.safetensors.index.json": b'{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'}
    monkeypatch.setattr(hub, "repos", {"models/own/half": files | shards | {"1.safetensors": b""}})
    with pytest.raises(ValueError, match="has no 1 of 2 weight files, such as 2.safetensors of"):
        fetch(HubName(prefix, "own/half"), "load")


def test_a_look_into_an_empty_cache_of_modelscope_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    needs("ms://")
    assert find_cached("ms://own/tiny") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://hub", 80), ("https://hub", 443), ("http://hub:8080", 8080), ("https://hub:8443/mirror", 8443)],
)
def test_the_port_of_a_hub_is_that_of_its_address(endpoint: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    asked = []

    def refuse(address: tuple[str, int], **_: object) -> None:
        asked.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert find_network_problem(endpoint) == "Connection refused" and asked == [("hub", port)]


def test_offline_is_what_the_client_says(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    fetch(HubName("hf://", "own/tiny"), "load", "tokenizer")
    hub.requests.clear()
    with monkeypatch.context() as offline:  # HF_HUB_OFFLINE=1 or TRANSFORMERS_OFFLINE=1 at its import
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match="is not complete in the cache, .* cannot be reached .*HF_HUB_OFFLINE"):
            fetch(HubName("hf://", "own/tiny"), "load")
    assert not hub.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "false")
    assert (fetch(HubName("hf://", "own/tiny"), "load") / "model.safetensors").is_file()


def test_a_run_asks_a_hub_once_for_each_name(hub: Hub) -> None:
    from mindspeed_rl.config import load_run_config
    from mindspeed_rl.run.hub_models import Hubs, fetch_configs, fetch_models

    keys = ("load", "tokenizer_name_or_path")
    cfg, hubs = load_run_config("grpo_tiny_cpu", None, [f"actor_config.{key}=own/tiny" for key in keys]), Hubs()
    fetch_configs(cfg, hubs)
    hub.requests.clear()
    fetch_configs(cfg, hubs)
    assert not hub.requests
    fetch_models(cfg, hubs)
    assert len([request for request in hub.requests if "revision" in request]) == 1


def test_the_command_prints_the_folder(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "own/tiny"]) == 0
    printed = capsys.readouterr()
    assert (Path(printed.out.strip()) / "config.json").read_bytes() == MODEL["config.json"]
    assert main(["download", "own/tyni"]) == 2
    assert "check the spelling" in capsys.readouterr().err
    assert main(["download", "./tiny"]) == 2


def test_the_command_leaves_weights_out(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "own/tiny", "--without-weights"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    with pytest.raises(NotFetchedError, match="load: .*'own/tiny' (is|are) not in the cache; train fetches"):
        fetch(HubName("hf://", "own/tiny"), "load", downloads=False)
    assert main(["download", "own/sums", "--dataset", "--without-weights"]) == 2
    assert "--without-weights is for models" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", HUBS)
def test_a_data_set_has_splits(prefix: str, hub: Hub, tmp_path: Path) -> None:
    needs(prefix)
    # the library of data sets reads its addresses when it is imported
    program = (
        "import sys; from mindspeed_rl.data.sources import open_source, read_chunk\n"
        "import json; from datasets.utils.logging import disable_progress_bar; disable_progress_bar()\n"
        "for text in sys.argv[1:]:\n"
        "    rows = [dict(row) for chunk in open_source(text).chunks() for _, row in read_chunk(chunk)]\n"
        "    print('rows', json.dumps(rows))\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    names = [f"{prefix}own/sums", f"{prefix}own/sums:test"]
    done = subprocess.run([sys.executable, "-c", program, *names], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("rows ")]
    assert found == [ROWS["train"], ROWS["test"]]


def test_a_new_task_starts_from_a_name(hub: Hub, tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "task"), "--model", "own/tiny"]) == 0
    assert "  pretrained_checkpoint: own/tiny\n" in (tmp_path / "task/run.yaml").read_text()
    assert not [request for request in hub.requests if "safetensors" in request]
    # the tokenizer of the run is of the same name, and needs no weights
    from mindspeed_rl.config import load_run_config
    from mindspeed_rl.run.hub_models import Hubs, fetch_models

    folder = fetch_models(load_run_config(str(tmp_path / "task/run.yaml")), Hubs()).actor_config.pretrained_checkpoint
    assert folder is not None and (Path(folder) / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


def test_the_keys_of_a_run_are_replaced_by_folders(hub: Hub) -> None:
    from mindspeed_rl.config import load_run_config
    from mindspeed_rl.run.hub_models import Hubs, fetch_models

    overrides = [f"actor_config.{key}=own/tiny" for key in ("load", "tokenizer_name_or_path")]
    with pytest.raises(NotFetchedError, match="^actor_config.load: 'own/tiny' is not in the cache"):
        fetch_models(load_run_config("grpo_tiny_cpu", None, overrides), Hubs(downloads=False))
    cfg = fetch_models(load_run_config("grpo_tiny_cpu", None, overrides), Hubs())
    folder = str(fetch(HubName("hf://", "own/tiny"), "load"))
    assert (cfg.actor_config.load, cfg.actor_config.tokenizer_name_or_path) == (folder, folder)
    # a folder that the run will write is not a name
    written = {"load": "own/run1", "save": "own/run1", "pretrained_checkpoint": "own/tiny"}
    kept = [overrides[1], *(f"actor_config.{key}={value}" for key, value in written.items())]
    cfg = fetch_models(load_run_config("grpo_tiny_cpu", None, kept), Hubs())
    assert (cfg.actor_config.load, cfg.actor_config.pretrained_checkpoint) == ("own/run1", folder)
