"""Both data planes behind the one client, on a real Ray cluster: the same calls, the same answers."""

import os
import signal
import threading

import psutil
import pytest
import ray
import torch
from patience import patient

from mindspeed_rl.dataplane.client import DataPlane, DataPlaneError, TransferDockClient, make_data_plane
from mindspeed_rl.dataplane.transfer_dock import DataPlaneAbortedError, Request

USERS = {"trainer": ("prompts",), "rollout": ("responses", "texts", "halves"), "scorer": ("rewards",), "train": (), "score": ()}
N = 2


@pytest.fixture(scope="module")
def cluster():
    environment = {"OMP_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "CRITICAL"}
    os.environ.update(environment)
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


# These come first: they need a cluster in which no TransferQueue runs yet.


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="data_strategy 'tdd'. Did you mean 'td'"):
        make_data_plane("tdd", 1, 1, USERS)


def test_too_few_logical_cpus_are_refused_at_once(cluster):
    with pytest.raises(ValueError, match="needs 41 logical CPUs.*has 16"):
        make_data_plane("tq", 1, 1, USERS, num_storage_units=40)


def test_actors_that_find_no_free_cpu_run_into_the_deadline(cluster):
    @ray.remote(num_cpus=16)
    class Hog:
        def here(self) -> bool:
            return True

    hog = Hog.remote()
    ray.get(hog.here.remote())
    with pytest.raises(TimeoutError, match="did not start within 0.5 s.*3 free logical CPUs; of 16 in the cluster 0 are free"):
        make_data_plane("tq", 1, 1, USERS, init_timeout_s=0.5)
    ray.kill(hog)


@pytest.fixture(scope="module", params=["td", "tq"])
def engine(request, cluster):
    plane = make_data_plane(request.param, 4, N, USERS)
    yield plane
    plane.close()


@pytest.fixture
def plane(engine) -> DataPlane:
    engine.clear(num_prompts=4)
    return engine


def responses(rows: list[int]) -> list[torch.Tensor]:
    return [torch.full((row,), 100 + row) for row in rows]


def put_responses(plane: DataPlane, rows: list[int]) -> None:
    plane.put({"responses": responses(rows)}, rows)


def lists(column) -> list[list]:
    return [row.tolist() for row in column]


def test_every_kind_of_row_comes_back_as_it_was_put(plane):
    halves = [torch.linspace(0, 1, 3).to(torch.bfloat16) for _ in range(8)]
    put_responses(plane, list(range(8)))  # row 0 is empty
    texts = ["a", {"b": [1, 2]}, None, "d", "e", "f", "g", "h"]
    plane.put({"rewards": torch.arange(8) / 4, "texts": texts, "halves": halves}, range(8))
    batch, rows = plane.get("train", ["responses", "rewards", "texts", "halves"], 8)
    assert rows == list(range(8))
    assert lists(batch["responses"]) == lists(responses(list(range(8))))
    assert batch["responses"][3].dtype == torch.int64
    assert batch["rewards"].tensor().tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    assert batch["texts"] == texts
    assert all(torch.equal(row, half) for row, half in zip(batch["halves"], halves))


def test_objects_keep_their_types(plane):
    spec = Request("a dataclass", ())
    plane.put({"texts": [spec, (1, "tuple"), b"bytes", {"a": 0.1}]}, range(4))
    assert plane.get("train", ["texts"], 4)[0]["texts"] == [spec, (1, "tuple"), b"bytes", {"a": 0.1}]


def test_numbers_beyond_32_bits_survive(plane):
    plane.put({"responses": [torch.tensor([2**40, -1]), torch.tensor([3])]}, [0, 1])
    assert lists(plane.get("train", ["responses"], 2)[0]["responses"]) == [[2**40, -1], [3]]


def test_rows_put_in_parts_are_served_lowest_first_as_whole_groups(plane):
    put_responses(plane, [7, 6, 0])
    put_responses(plane, [3, 2])
    batch, rows = plane.get("train", ["responses"], 4)
    assert rows == [2, 3, 6, 7] and lists(batch["responses"]) == lists(responses([2, 3, 6, 7]))
    assert plane.get("train", ["responses"], 4) == (None, None)


def test_a_row_waits_for_all_its_columns_and_each_consumer_gets_it_once(plane):
    put_responses(plane, list(range(8)))
    assert plane.get("train", ["responses", "rewards"], 8) == (None, None)
    plane.put({"rewards": [0.5] * 8}, range(8))
    assert plane.get("train", ["responses", "rewards"], 8)[1] == list(range(8))
    assert plane.get("train", ["responses"], 8) == (None, None)
    assert plane.get("score", ["responses"], 8)[1] == list(range(8))


def test_indexes_are_served_in_their_order_again_and_again(plane):
    put_responses(plane, [0, 1, 5])
    for _ in range(2):
        batch, rows = plane.get("train", ["responses"], indexes=[5, 1])
        assert rows == [5, 1] and lists(batch["responses"]) == lists(responses([5, 1]))
    assert plane.get("train", ["responses"], indexes=[5, 4]) == (None, None)


def test_clear_empties_resizes_and_lifts_an_abort(plane):
    put_responses(plane, [0, 1])
    plane.abort("worker 1 died")
    plane.clear(num_prompts=2)
    assert plane.get("train", ["responses"], 4) == (None, None)
    put_responses(plane, [0, 1, 2, 3])
    assert plane.get("train", ["responses"], 4)[1] == [0, 1, 2, 3]
    assert plane.get("train", ["responses"], 2) == (None, None)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda p: p.put({"response": [1]}, [0]), ["'response'", "'responses'"]),
        (lambda p: p.put({"responses": responses([1])}, [8]), ["Index 8", "8 rows"]),
        (lambda p: p.put({"responses": responses([1])}, [0, 1]), ["1 entries for 2 indexes"]),
        (lambda p: p.put({"responses": responses([1, 1])}, [1, 1]), ["differ"]),
        (lambda p: p.get("training", ["responses"], 2), ["'training'", "'train'"]),
        (lambda p: p.get("train", ["reward"], 2), ["'reward'", "'rewards'"]),
        (lambda p: p.get("train", ["rewards"], 6), ["8 rows", "count=6"]),
        (lambda p: p.get("train", ["rewards"], indexes=[9]), ["Index 9"]),
    ],
)
def test_a_wrong_call_is_refused_with_the_right_names(plane, call, words):
    with pytest.raises(ValueError) as error:
        call(plane)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_cell_is_written_twice_only_on_request_and_keeps_its_kind(plane):
    put_responses(plane, [1, 2])
    with pytest.raises(ValueError, match="'responses' of row 2 was put before"):
        put_responses(plane, [2, 3])
    plane.put({"responses": [torch.tensor([9])]}, [2], overwrite=True)
    assert lists(plane.get("train", ["responses"], indexes=[2])[0]["responses"]) == [[9]]
    with pytest.raises(ValueError, match="'responses' holds rows of torch.int64; rows of torch.float32"):
        plane.put({"responses": [torch.ones(2)]}, [4])


def test_a_deadline_says_who_waits_for_what_and_who_was_to_produce_it(plane):
    put_responses(plane, [0, 1, 2, 5])
    with pytest.raises(TimeoutError) as error:
        plane.get("train", ["responses", "rewards"], 8, timeout_s=0.02)
    assert str(error.value) == (
        "'train' waited 0.02 s in vain. "
        "Column 'responses', to be put by 'rollout', is missing in rows 3-4, 6-7 (4 of 8). "
        "Column 'rewards', to be put by 'scorer', is missing in rows 0-7 (8 of 8)."
    )


def test_another_process_waits_until_the_rows_are_put(plane):
    @ray.remote(num_cpus=0)
    def wait_in_another_process(plane: DataPlane, timeout_s: float) -> list[list[int]]:
        batch, _ = plane.get("train", ["responses"], 2, timeout_s=timeout_s)
        return [row.tolist() for row in batch["responses"]]

    waiting = wait_in_another_process.remote(plane, patient(30))
    put_responses(plane, [2, 3])
    assert ray.get(waiting) == lists(responses([2, 3]))


def test_abort_ends_a_wait(plane):
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            plane.get("train", ["responses"], 2, timeout_s=patient(30))
        except DataPlaneAbortedError as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    plane.abort("worker 1 died")
    waiting.join(timeout=patient(20))
    assert [str(error) for error in outcome] == ["worker 1 died"]
    with pytest.raises(DataPlaneAbortedError, match="worker 1 died"):
        plane.get("train", ["responses"], 2)


def test_a_dock_that_is_stopped_and_one_that_is_dead_are_lost_and_nobody_waits_for_them(cluster):
    started = make_data_plane("td", 4, N, USERS)
    started.clear(4)  # its process is there: on a busy machine this may take longer
    plane = TransferDockClient(started._actor, result_timeout_s=5.0)

    mine = psutil.Process().children(recursive=True)
    pid = max(child.pid for child in mine if "TransferDock" in " ".join(child.cmdline()))  # other tests have docks too
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(
        DataPlaneError, match=r"the data plane has not answered a clear for 5 s \(rl_config.deadlines.data_plane\)"
    ):
        plane.clear(4)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataPlaneError, match="the data plane's process died"):
        for _ in range(30):  # Ray takes seconds to notice
            try:
                plane.clear(4)
            except DataPlaneError as error:
                if "died" in str(error):
                    raise
