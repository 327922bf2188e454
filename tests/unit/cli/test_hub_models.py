"""Commands on a model that is named as on a hub: its files are in the cache of the hub, or they are not."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_rl.cli import rollout
from mindspeed_rl.cli.main import main
from mindspeed_rl.cli.new.tiny_model import save_tiny_model
from mindspeed_rl.config import load_run_config
from mindspeed_rl.hub import find_cached
from mindspeed_rl.run.hub_models import Hubs, fetch_models
from mindspeed_rl.run.models import resolve_run

SIZES = "--npus 1 --prompt 32 --response 32 --prompts 4 --samples 2 --top 1".split()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of Hugging Face, on a machine without network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens there
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "*")
        yield tmp_path / "hub"


def put(cache: Path, name: str, *, weights: bool, **changes: object) -> Path:
    """Puts a tiny model into the cache as a download leaves it; returns its folder."""
    root = cache / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / COMMIT
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text(COMMIT)
    save_tiny_model(folder, "dense")
    for file in () if weights else folder.glob("*.safetensors*"):
        file.unlink()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_model_of_a_hub_is_planned_by_its_config_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put(cache, "own/tiny", weights=False)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> str:
        assert main([*words]) == 0, words
        return capsys.readouterr().out

    assert find_cached("own/tiny") == find_cached("hf://own/tiny@main") == folder
    assert "own/tiny on 1 x A3" in call("plan", "fit", "--model", "own/tiny", *SIZES, "-o", "fit.yaml")
    written = Path("fit.yaml").read_text()
    assert written.startswith("# GRPO of own/tiny on 1 devices") and COMMIT not in written
    assert written.count('  load: "own/tiny"\n') == written.count('  tokenizer_name_or_path: "own/tiny"\n') == 1
    call("new", "task", "--model", "own/tiny")
    monkeypatch.chdir(tmp_path / "task")
    assert "  pretrained_checkpoint: own/tiny\n" in Path("run.yaml").read_text()
    by_name = json.loads(call("plan", "memory", "--config", "run.yaml", "--chip", "A3", "--json"))
    keys = ("actor_config.pretrained_checkpoint", "megatron_training.tokenizer_name_or_path")
    by_folder = [f"{key}={folder}" for key in keys]
    assert json.loads(call("plan", "memory", "--config", "run.yaml", "--chip", "A3", "--json", *by_folder)) == by_name
    call("promise", "run.yaml", "--chip", "A3")
    missing = "actor_config.pretrained_checkpoint: the weights of 'own/tiny' are not in the cache; train fetches them, or "
    assert missing in call("explain", "--config", "run.yaml")


def test_a_judge_of_a_hub_is_planned_as_its_folder_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, "own/tiny", weights=True)
    folder = put(cache, "own/judge", weights=True)
    monkeypatch.chdir(tmp_path)
    assert main(["new", "task", "--model", "own/tiny"]) == 0
    monkeypatch.chdir(tmp_path / "task")

    def call(command: str, judge: object) -> str:
        capsys.readouterr()
        words = f"{command} --config run.yaml rl_config.judge_model={judge}"
        assert main(words.split()) == 0, capsys.readouterr()
        return capsys.readouterr().out

    by_name = json.loads(call("plan memory --chip A3 --json", "own/judge"))
    assert by_name == json.loads(call("plan memory --chip A3 --json", folder)) and "judge weights" in json.dumps(by_name)
    by_name = call("plan time --chip A3", "own/judge")
    assert by_name == call("plan time --chip A3", folder) and "a judge's replies of" in by_name
    (folder / "model.safetensors").unlink()
    assert "judge no bytes: own/judge is not on this machine, or not all of it" in call("plan memory --chip A3", "own/judge")


def enter_new_run(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a run of a model of which the cache has no weights, and goes into its folder."""
    put(cache, "own/tiny", weights=False)
    monkeypatch.chdir(folder)
    assert main(["new", "task", "--model", "own/tiny"]) == 0
    monkeypatch.chdir(folder / "task")


def test_a_model_that_is_not_in_the_cache_is_a_command_that_fetches_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter_new_run(cache, tmp_path, monkeypatch)
    capsys.readouterr()

    def fails(*words: str) -> str:
        assert main([*words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    # the weights alone are missing
    assert "'own/tiny' is not complete in the cache" in fails("generate", "--load", "own/tiny", "--prompt", "1")
    assert "'own/tiny' is not complete in the cache" in fails("train", "--config", "run.yaml")
    shutil.rmtree(cache)
    assert find_cached("own/tiny") is None
    fetching = "mindspeed-rl download own/tiny --without-weights"
    assert fails("plan", "fit", "--model", "own/tiny", *SIZES).endswith(fetching)
    for words in (["plan", "memory", "--config", "run.yaml"], ["promise", "run.yaml"]):
        assert (line := fails(*words)).endswith(f"; {fetching} fetches its config.json.")
        assert "the model keys num_layers, hidden_size, ffn_hidden_size, num_attention_heads" in line
    # the folder of the checkpoints is none of a hub, though nothing is there yet
    folders = [f"actor_config.{key}=out/ckpt" for key in ("load", "save")]
    assert fails("plan", "memory", "--config", "run.yaml", *folders).endswith(f"; {fetching} fetches its config.json.")
    for words in (["new", "other", "--model", "own/tiny"], ["train", "--config", "run.yaml"]):
        assert "mindspeed-rl download own/tiny) and copy the folder" in fails(*words)
    assert main(["explain", "--config", "run.yaml"]) == 0
    assert f"'own/tiny' is not in the cache; train fetches it, or {fetching}\n" in capsys.readouterr().out
    # a tokenizer alone, as other commands leave it
    (put(cache, "own/tiny", weights=False) / "config.json").unlink()
    assert fails("plan", "fit", "--model", "own/tiny", *SIZES).endswith(fetching)


def test_weight_files_that_the_index_names_are_missed(cache: Path) -> None:
    folder = put(cache, "own/tiny", weights=True)
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / names["a"]).touch()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    cfg = load_run_config("grpo_tiny_cpu", None, ["actor_config.load=own/tiny"])
    expected = "1 of 2 weight files, such as model-00002-of-00002.safetensors, of 'own/tiny' are not in the cache"
    with pytest.raises(ValueError, match=expected):
        fetch_models(cfg, Hubs(downloads=False))


def test_the_files_of_a_hub_decide_what_the_run_file_leaves_open(cache: Path, tmp_path: Path) -> None:
    folder = put(cache, "own/seeing", weights=True, vision_config={}, image_token_id=5)
    put(cache, "own/other", weights=True)
    names = {
        "actor_config.load": "own/seeing", "actor_config.tokenizer_name_or_path": "own/seeing",
        "rl_config.reward_model": "own/other", "rl_config.judge_model": "own/other",
        "rl_config.distillation.teacher_models": "[own/other,actor,http://localhost/v1]",
        "rl_config.integrated_mode_config.ref_model_load_path": "own/other",
    }  # fmt: skip
    cfg = load_run_config("grpo_tiny_cpu", None, [f"{key}={name}" for key, name in names.items()])
    assert cfg.reads_images and cfg.model_metadata["actor_config"].hf_folder == str(folder)  # by the cache
    fetched, other = fetch_models(cfg, Hubs(downloads=False)), str(find_cached("own/other"))
    assert fetched.reads_images and (fetched.actor_config.load, fetched.ref_config.load) == (str(folder), str(folder))
    rl = fetched.rl_config
    assert rl is not None and (rl.reward_model, rl.judge_model) == (other, other)
    assert rl.distillation.teacher_models == [other, "actor", "http://localhost/v1"]
    assert rl.integrated_mode_config is not None and rl.integrated_mode_config.ref_model_load_path == other


def test_a_model_that_comes_with_the_run_says_as_much_as_one_that_was_there(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load_run_config("grpo_tiny_cpu", None, ["actor_config.load=own/seeing"])
    known = {group: metadata for group, metadata in cfg.model_metadata.items() if metadata.folder == "own/seeing"}
    assert not known and not cfg.reads_images
    put(cache, "own/seeing", weights=True, vision_config={}, image_token_id=5)
    assert fetch_models(cfg, Hubs()).reads_images


def test_a_model_that_nothing_computes_is_refused_before_its_weights_are_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter_new_run(cache, tmp_path, monkeypatch)
    shutil.rmtree(cache)
    put(cache, "own/tiny", weights=False, architectures=["DeepseekV41ForCausalLM"], model_type="deepseek_v41")
    for words in ("explain --config run.yaml", "train --config run.yaml", "new other --model own/tiny"):
        assert main(words.split()) == 2
        printed = capsys.readouterr()
        assert "CSA2" in printed.out + printed.err and "not in the cache" not in printed.out + printed.err
    # also where the cache has all that a run file names and that is here
    roles = [f"actor_config.{key}=own/tiny" for key in ("load", "tokenizer_name_or_path")]
    assert main(["explain", "--config", "grpo_tiny_cpu", *roles, "actor_config.data_path=nowhere/data"]) == 2
    assert "CSA2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "stage"),
    [
        ("rl_config.reward_model", "grpo"),
        ("rl_config.judge_model", "grpo"),
        ("rl_config.distillation.teacher_models", "grpo"),
        ("rl_config.integrated_mode_config.ref_model_load_path", "grpo"),
        ("actor_config.ref_model", "dpo"),
    ],
)
def test_no_weights_of_a_model_that_nothing_computes_are_asked_for(key: str, stage: str, cache: Path) -> None:
    put(cache, "own/good", weights=True)
    changes = {"quantization_config": {}} if "judge" in key else {"model_type": "deepseek_v41"}
    put(cache, "own/v41", weights=False, architectures=["DeepseekV41ForCausalLM"], **changes)
    value = "[own/v41]" if key.endswith("models") else "own/v41"
    overrides = ["actor_config.load=own/good", "actor_config.tokenizer_name_or_path=own/good", f"{key}={value}"]
    cfg = load_run_config(f"{stage}_tiny_cpu", None, overrides)
    with pytest.raises(ValueError, match=key.removeprefix("actor_config.")) as caught:
        resolve_run(cfg, 1, hubs=Hubs(downloads=False))
    assert ("are quantized" if "judge" in key else "CSA2") in str(caught.value)


def test_a_rollout_server_takes_a_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(cache, "own/tiny", weights=False)
    assert main(["rollout", "--model", "own/tiny", "--platform", "cpu", "--port", "0"]) == 2
    assert "--model: 'own/tiny' does not exist" in (text := capsys.readouterr().err) and "is not complete in the cache" in text
    assert main(["rollout", "--model", "own/tiny/no", "--platform", "cpu", "--port", "0"]) == 2
    assert "--model own/tiny/no: no folder with config.json" in capsys.readouterr().err
    by_file = "rollout --config-name grpo_tiny_cpu actor_config.tokenizer_name_or_path=own/tiny"
    assert main(by_file.split()) == 2
    assert "actor_config.tokenizer_name_or_path: 'own/tiny' does not exist" in capsys.readouterr().err

    def find(*words: str) -> Path:
        return rollout._engine_keys(rollout.make_parser().parse_intermixed_args(list(words)))[1]

    # weights that are quantized come from the run
    assert find("--model", "own/tiny", "--quantization", "int8") == folder
    shutil.rmtree(cache)
    folder = put(cache, "own/tiny", weights=True)
    assert find("--model", "own/tiny") == find(*by_file.split()[1:]) == folder
