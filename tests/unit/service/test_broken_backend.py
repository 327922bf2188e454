"""A backend that breaks while a server has requests: they stay open until the server is started again."""

import asyncio
import contextlib
import json
import threading

from patience import patient
from test_service import opened

from mindspeed_rl.service.api_server import _End
from mindspeed_rl.service.backend import REQUESTS, BrokenBackendError
from mindspeed_rl.service.hangs import HANG_FILE, note_hang
from mindspeed_rl.service.ledger import Limits
from mindspeed_rl.service.local_backend import LocalBackend
from mindspeed_rl.service.service import Service


def test_requests_that_reach_a_broken_backend_are_done_after_the_restart(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            session = model.partition(":")[0]
            await server.fetch((await server.run_pass(model, 1, [2], [3])).json())
            await server.fetch(await server.step(model, 2))
            expected, offered = server.backend.models[model].weights, server.backend.capabilities()
        backend, told = LocalBackend(), []
        backend._capabilities = offered
        backend.watch(told.append)
        backend._break(BrokenBackendError("service worker 1 died"), [])
        service = Service(backend, tmp_path, Limits(), told.append)
        service.start()
        made = {"session_id": session, "model_seq_id": 1, "base_model": "bigram", "lora_config": {"rank": 2}}
        create = await service.create_model("alice", made, json.dumps(made).encode())
        stepped = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.0}}
        step = await service.submit("optim_step", "alice", stepped, json.dumps(stepped).encode())
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "bigram"}
        sampler_id = (await service.create_sampling_session("alice", sampler))["sampling_session_id"]
        asked = {
            "prompt": {"chunks": [{"tokens": [2]}]},
            "sampling_params": {"max_tokens": 3},
            "sampling_session_id": sampler_id,
            "seq_id": 0,
        }
        sample = await service.sample("alice", asked, json.dumps(asked).encode())
        await asyncio.sleep(0.3)
        for future in (create, step, sample):
            assert service.store.requests[future["request_id"]].finished_s is None
        await asyncio.wait_for(service.close(), 10)
        assert [str(error) for error in told] == ["service worker 1 died"]
        async with opened(tmp_path) as server:
            assert (await server.fetch(create))["model_id"] == create["model_id"]
            assert (await server.fetch(step))["metrics"]["step:max"] == 2
            assert isinstance(await server.fetch(sample), bytes)
            assert (server.backend.models[model].weights == expected).all()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_request_that_has_ended_the_server_twice_fails_and_later_ones_are_done(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            await server.fetch((await server.run_pass(model, 1, [2], [3])).json())
            offered = server.backend.capabilities()
        futures, told = [], []

        @contextlib.asynccontextmanager
        async def breaking():
            backend = LocalBackend()
            backend._capabilities = offered
            backend.watch(told.append)
            backend._break(BrokenBackendError("it hangs"), [])
            service = Service(backend, tmp_path, Limits(), told.append)
            service.start()
            yield service
            await asyncio.sleep(0.3)
            await asyncio.wait_for(service.close(), 10)

        async with breaking() as service:
            for seq in (2, 3):
                body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}
                futures.append(await service.submit("optim_step", "alice", body, json.dumps(body).encode()))
        first = futures[0]["request_id"]
        note_hang(tmp_path, [first, "gone:1"], "it has not ended")
        async with breaking() as service:
            await asyncio.sleep(0.3)
            assert not (tmp_path / HANG_FILE).exists()
            request = service.store.requests[first]
            assert request.num_hangs == 1 and request.finished_s is None
        (tmp_path / HANG_FILE).write_text('{"requests": 3}')  # damaged: it counts for nobody
        async with breaking() as service:
            assert service.store.requests[first].num_hangs == 1
        note_hang(tmp_path, [first], "it has not ended")
        async with opened(tmp_path) as server:
            failed = await server.fetch(futures[0])
            assert failed["category"] == "user" and first in failed["error"]
            assert "optim_step" in failed["error"] and "ended the server 2 times" in failed["error"]
            # the gradient waits as before
            assert (await server.fetch(futures[1]))["metrics"]["step:max"] == 1
            weights = server.backend.models[model].weights.copy()
            session = model.partition(":")[0]
        async with opened(tmp_path) as server:  # a restore does not do it again either
            await server.fetch((await server.run_pass(model, 4, [2], [3], forward_only=True)).json())
            assert session and (server.backend.models[model].weights == weights).all()

    asyncio.run(asyncio.wait_for(work(), patient(60)))


class Engines:
    """Engines without samples."""

    is_sampling = False


def _hang():
    """Return a backend whose thread hangs in a call, its end, and what it has called."""
    backend, called = LocalBackend(), []
    begun, ends = threading.Event(), threading.Event()

    def wait(_):
        called.append(REQUESTS.get())
        begun.set()
        ends.wait(patient(60))
        return "done"

    REQUESTS.set(("m:1",))
    futures = [backend.submit(wait)]
    REQUESTS.set(("m:2",))
    futures.append(backend.submit(lambda _: called.append("second")))
    REQUESTS.set(())
    backend._opened.set_result(None)
    backend._thread = threading.Thread(target=lambda: backend._work(Engines(), []), daemon=True)
    backend._thread.start()
    assert begun.wait(patient(10))
    return backend, futures, ends, called


def test_the_thread_of_a_backend_that_was_given_up_makes_no_further_call():
    backend, futures, ends, called = _hang()
    told = []
    backend.watch(told.append)
    backend._give_up(BrokenBackendError("it hangs", ["m:1"]))
    ends.set()
    backend._thread.join(patient(10))
    assert not backend._thread.is_alive() and called == [("m:1",)] and len(told) == 1
    # what a call has done counts, also late
    assert futures[0].result(0) == "done" and not futures[1].done()


def test_a_hang_at_the_end_of_a_server_does_not_hold_it():
    backend, _, ends, _ = _hang()
    backend.watch(lambda error: None)
    stopping = threading.Thread(target=backend.stop, daemon=True)
    stopping.start()
    stopping.join(0.5)
    assert stopping.is_alive()
    backend._give_up(BrokenBackendError("it hangs"))
    stopping.join(patient(10))
    assert not stopping.is_alive()
    ends.set()


def test_a_server_that_does_not_take_signals_is_not_killed_by_its_own():
    end = _End()
    end.end("it hangs while it ends")  # a signal would end the tests
    end.end("again")
    end.close()
    assert end.reason == "it hangs while it ends"
