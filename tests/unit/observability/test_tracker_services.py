"""Each service's own library, offline: what it was given can be read back. Skipped where a library is not installed."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import patient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability import trackers
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.observability.trackers import make_trackers

ROWS = [
    Completion("1+1=", " 2\n", 1.0, {"exact_match": 1.0}, 0.5, group=0, sample=0),
    Completion("1+1=", " 三", None, {}, -0.5, group=0, sample=1),
]
#: offline, and out of the way of what the user of this machine has set up
PROGRAM = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.WARNING)
from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.observability.trackers import make_trackers
import json
folder, keys = Path(sys.argv[1]), json.loads(sys.argv[2])
last = int(sys.argv[3])
trackers = make_trackers(RLConfig(**keys), folder, {"lr": 1.0}, last_iteration=last)
if last:
    trackers.log(last + 1, {"actor/pg_loss": 0.0625})
    trackers.close()
    sys.exit()
trackers.log(1, {"actor/pg_loss": 0.5, "eval/accuracy": 0.25})
trackers.completions(1, [Completion("1+1=", " 2", 1.0, {"exact_match": 1.0}, 0.5, group=0, sample=0)])
trackers.log(2, {"actor/pg_loss": 0.125})
trackers.close()
"""


def needs(package: str):
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"{package} is not installed; docs/observability.md says how to run this test"
    )


def run_tracker(folder: Path, last_iteration: int = 0, **keys: object) -> str:
    """What a process of its own says that tracks two iterations; a library may patch its process, or keep threads."""
    environment = os.environ | {"HOME": str(folder / "home"), "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), json.dumps(keys), str(last_iteration)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert done.returncode == 0, done.stderr
    assert "the run goes on" not in done.stderr and "left behind" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def test_tensorboard_shows_completions_as_a_table_of_texts(tmp_path):
    made = make_trackers(RLConfig(use_tensorboard=True), tmp_path, {})
    made.completions(7, ROWS)
    made.log(7, {"loss": math.inf})
    made.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["tensors"] == ["completions"]
    (event,) = events.Tensors("completions")
    head, first, second = [[cell.decode() for cell in row] for row in make_ndarray(event.tensor_proto)]
    assert event.step == 7
    assert head == ["iteration", "group", "sample", "prompt", "response", "reward", "parts", "advantage"]
    assert first == ["7", "0", "0", "1+1=", " 2\n", "1", "exact_match 1", "0.5"]
    assert second[4:7] == [" 三", "", ""]


@needs("wandb")
@pytest.mark.timeout(300)
def test_wandb_writes_an_offline_run_with_figures_and_a_table(tmp_path):
    run_tracker(tmp_path, use_wandb=True, wandb_mode="offline", wandb_project="mine")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (record,) = folder.glob("run-*.wandb")
    result = record.read_bytes()
    assert b"train/actor/pg_loss" in result and b"eval/accuracy" in result and b"mine" in result
    (table,) = (folder / "files" / "media" / "table").glob("completions_*.table.json")
    rows = json.loads(table.read_text())
    assert rows["columns"][:5] == ["iteration", "group", "sample", "prompt", "response"]
    assert rows["data"] == [[1, 0, 0, "1+1=", " 2", 1.0, "exact_match 1", 0.5]]


@needs("swanlab")
@pytest.mark.timeout(300)
def test_swanlab_writes_a_local_run_with_figures_and_texts(tmp_path):
    run_tracker(tmp_path, use_swanlab=True, swanlab_mode="offline", swanlab_project="mine")
    files = [path for path in (tmp_path / "swanlab").rglob("*") if path.is_file()]
    result = b"".join(path.read_bytes() for path in files)
    assert b"train/actor/pg_loss" in result and b"completions" in result and b"mine" in result


@needs("mlflow")
@pytest.mark.timeout(300)
def test_mlflow_writes_a_local_run_with_figures_and_a_table(tmp_path):
    run_tracker(tmp_path, use_mlflow=True, mlflow_experiment="mine", mlflow_run_name="first")
    folder = tmp_path / "mlflow"
    (losses,) = folder.rglob("pg_loss")
    assert [line.split()[1:] for line in losses.read_text().splitlines()] == [["0.5", "1"], ["0.125", "2"]]
    (table,) = folder.rglob("completions.json")
    rows = json.loads(table.read_text())
    assert rows["columns"][3:5] == ["prompt", "response"] and rows["data"][0][3:5] == ["1+1=", " 2"]
    (config,) = folder.rglob("config.json")
    assert json.loads(config.read_text()) == {"lr": 1.0}


@pytest.mark.slow
@needs("wandb")
@pytest.mark.timeout(300)
def test_wandb_goes_on_with_the_run_of_a_run_that_resumes_and_begins_another_for_a_new_one(tmp_path):
    keys = {"use_wandb": True, "wandb_mode": "offline", "wandb_project": "mine"}
    for last_iteration, count in ((0, 1), (2, 1), (0, 2)):
        run_tracker(tmp_path, last_iteration, **keys)
        ids = {path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")}
        assert len(ids) == count


@needs("mlflow")
@pytest.mark.timeout(300)
def test_mlflow_goes_on_with_the_run_of_a_run_that_resumes(tmp_path):
    keys = {"use_mlflow": True, "mlflow_experiment": "mine", "mlflow_run_name": "first"}
    for last_iteration in (0, 2):
        run_tracker(tmp_path, last_iteration, **keys)
    (losses,) = (tmp_path / "mlflow").rglob("pg_loss")
    assert [line.split()[1:] for line in losses.read_text().splitlines()] == [["0.5", "1"], ["0.125", "2"], ["0.0625", "3"]]


def test_damaged_ids_begin_another_run_with_a_warning(tmp_path, caplog):
    assert trackers._read_run_ids(tmp_path) == {}
    trackers._keep_run_id(tmp_path, "wandb", "a")
    trackers._keep_run_id(tmp_path, "mlflow", 5)
    assert trackers._read_run_ids(tmp_path) == {"wandb": "a", "mlflow": "5"}
    (tmp_path / "trackers.json").write_text("{")
    assert trackers._read_run_ids(tmp_path) == {} and "services show a new run" in caplog.text


@needs("trackio")
def test_trackio_shows_a_resumed_run_as_one(tmp_path):
    environment = str(tmp_path / "trackio")
    os.environ["TRACKIO_DIR"] = environment
    try:
        run_tracker(tmp_path, use_trackio=True, trackio_project="project")
        run_tracker(tmp_path, 2, use_trackio=True, trackio_project="project")
        program = (
            "import json, trackio; from trackio.sqlite_storage import SQLiteStorage as Storage\n"
            "runs = trackio.Api().runs('project')\n"
            "logs = [[run.name, Storage.get_logs('project', run.name, run_id=run.id)] for run in runs]\n"
            "print(json.dumps(logs, default=str))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    finally:
        del os.environ["TRACKIO_DIR"]
    ((name, history),) = json.loads(done.stdout.splitlines()[-1])
    values = {row["step"]: row["train/actor/pg_loss"] for row in history if "train/actor/pg_loss" in row}
    assert name == tmp_path.name and values == {1: 0.5, 2: 0.125, 3: 0.0625}
