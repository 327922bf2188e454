"""The API over HTTP, with a backend in closed form: order, retries, restarts, tenants, and what is refused."""

import asyncio
import contextlib
import json
from pathlib import Path

import bigram_backend
import httpx
import numpy as np
import pytest
from bigram_backend import VOCAB, BigramBackend, log_softmax
from service_requests import ALICE, BOB, read_pass, write_pass

from mindspeed_rl.service import messages, protobuf
from mindspeed_rl.service.app import TinkerApp
from mindspeed_rl.service.backend import AdamParams, CallError, Capabilities, Datum, LossCall, SampleCall, check_data
from mindspeed_rl.service.doors import Keys, decompress, read_keys
from mindspeed_rl.service.ledger import Limits
from mindspeed_rl.service.replies import RefusedError
from mindspeed_rl.service.service import Service

OWNERS = {ALICE: "alice", BOB: "bob"}
JSON = {"content-type": "application/json"}
BINARY = {"content-type": "application/x-protobuf"}


class Server:
    """A server in this process, and calls to it."""

    def __init__(self, folder, *, limits=None, **backend):
        self.folder, self.failures, self.now_s = folder, [], 1_800_000_000.0
        self.backend = BigramBackend(folder, **backend)
        settings = {"price": 36.0, "now_s": lambda: self.now_s}
        self.service = Service(self.backend, folder, limits or Limits(), self.failures.append, **settings)
        self.app = TinkerApp(self.service, Keys(OWNERS, b"s" * 32, only_local=True), compresses=False)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1")

    async def send(self, method, path, body=None, key=ALICE, headers=None, content=None):
        data = content if content is not None else b"" if body is None else json.dumps(body).encode()
        headers = {"x-api-key": key, **(JSON if data else {}), **(headers or {})}
        return await self.client.request(method, f"/api/v1/{path}", content=data, headers=headers)

    async def post(self, path, body, **options):
        reply = await self.send("POST", path, body, **options)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def fetch(self, future, key=ALICE):
        """Return the result of a future: JSON, or the bytes of a message."""
        while True:
            reply = await self.send("POST", "retrieve_future", {"request_id": future["request_id"]}, key)
            assert reply.status_code == 200, reply.text
            if reply.headers["content-type"] == "application/x-protobuf":
                return reply.content
            if reply.json().get("type") != "try_again":
                return reply.json()

    async def do(self, path, body, key=ALICE):
        """Return the result of an operation."""
        return await self.fetch(await self.post(path, body, key=key), key)

    async def open_model(self, key=ALICE, number=0, rank=2, session=None):
        session = session or (await self.post("create_session", {"sdk_version": "0.38.0"}, key=key))["session_id"]
        body = {"session_id": session, "model_seq_id": number, "base_model": "bigram", "lora_config": {"rank": rank}}
        return (await self.do("create_model", body, key))["model_id"]

    async def run_pass(self, model_id, seq, tokens, targets, key=ALICE, **options):
        content = write_pass(model_id, seq, tokens, targets, **options)
        return await self.send("POST", "forward_backward", key=key, headers=BINARY, content=content)

    async def step(self, model_id, seq, key=ALICE, **params):
        body = {"model_id": model_id, "seq_id": seq, "adam_params": {"learning_rate": 0.1, **params}}
        return await self.post("optim_step", body, key=key)


@contextlib.asynccontextmanager
async def opened(folder, **options):
    server = Server(folder, **options)
    server.service.start()
    try:
        yield server
    finally:
        await server.service.close()


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


def train_alone(batches, rate=0.1):
    """Return the table after a step for each batch of (token, target), by the closed form."""
    model = bigram_backend.Bigram.new(None)
    for batch in batches:
        table = log_softmax(model.weights)
        for source, target in batch:
            model.grad[source] += np.exp(table[source])
            model.grad[source, target] -= 1.0
        model.step(AdamParams(learning_rate=rate))
    return model.weights


def test_a_step_gives_the_closed_form(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            first = await server.run_pass(model, 1, [2, 3], [3, 4])
            step = await server.step(model, 2)
            metrics, log_probs = read_pass(await server.fetch(first.json()))
            assert metrics == {"loss:sum": pytest.approx(2 * np.log(VOCAB))}
            assert log_probs == pytest.approx([-np.log(VOCAB)] * 2)
            # each row's gradient is softmax - onehot: 15 cells of 1/16, one of -15/16
            norm = np.sqrt(2 * (15 / 16**2 + (15 / 16) ** 2))
            assert (await server.fetch(step))["metrics"]["grad_norm:mean"] == pytest.approx(norm)
            forward = await server.run_pass(model, 3, [2, 3], [3, 4], forward_only=True)
            expected = log_softmax(train_alone([[(2, 3), (3, 4)]]))
            assert read_pass(await server.fetch(forward.json()))[1] == pytest.approx([expected[2, 3], expected[3, 4]])

    run(work())


def test_requests_that_arrive_out_of_order_run_in_the_order_of_their_numbers(tmp_path, monkeypatch):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            step = await server.step(model, 3)
            second = (await server.run_pass(model, 2, [3], [4])).json()
            reply = await server.send("POST", "retrieve_future", {"request_id": second["request_id"]})
            first = (await server.run_pass(model, 1, [2], [3])).json()
            for future in (first, second, step):
                await server.fetch(future)
            assert server.backend.calls == [f"{model} pass 1", f"{model} pass 1", f"{model} step"]
            assert server.backend.models[model].weights == pytest.approx(train_alone([[(2, 3), (3, 4)]]))
            assert reply.json()["type"] == "try_again" and "request 1" in reply.json()["queue_state_reason"]

    monkeypatch.setattr("mindspeed_rl.service.service._LONG_POLL_S", 0.05)
    run(work())


def test_a_request_that_is_sent_again_is_not_applied_again(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            replies = await asyncio.gather(*(server.run_pass(model, 1, [2], [3]) for _ in range(5)))
            futures = [reply.json() for reply in replies] + [await server.step(model, 2) for _ in range(3)]
            assert len({future["request_id"] for future in futures}) == 2
            for future in futures:
                await server.fetch(future)
            again = await server.run_pass(model, 1, [2], [3])
            assert again.json() == futures[0]
            await server.fetch(again.json())
            assert server.backend.models[model].weights == pytest.approx(train_alone([[(2, 3)]]))
            other = await server.run_pass(model, 1, [2], [4])
            assert other.status_code == 400 and "was another request" in other.json()["detail"]

    run(work())


def test_weights_for_a_sampler_are_saved_once_though_the_sdk_numbers_its_retry_anew(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            save = {"model_id": model, "seq_id": 1, "kind": "snapshot"}
            first = await server.post("save_weights_for_sampler", {**save, "sampling_session_seq_id": 0})
            again = await server.post("save_weights_for_sampler", {**save, "sampling_session_seq_id": 1})
            assert first == again
            assert (await server.fetch(again))["sampling_session_id"] == f"{model.partition(':')[0]}:sample:0"

    run(work())


async def _train(server, model, first_seq, count):
    for index in range(count):
        seq = first_seq + 2 * index
        await server.run_pass(model, seq, [2 + index % 5], [3 + index % 7])
        future = await server.step(model, seq + 1)
    return future


def _batches(first, count):
    return [[(2 + index % 5, 3 + index % 7)] for index in range(first, first + count)]


@pytest.mark.parametrize("count", [3, 23])
def test_a_killed_server_continues_with_everything_that_it_promised(tmp_path, count):
    """23 steps are two snapshots and three steps after them."""

    async def before():
        server = Server(tmp_path)
        server.service.start()
        model = await server.open_model()
        last = await _train(server, model, 1, count)
        await server.fetch(last)
        await server.fetch((await server.run_pass(model, 2 * count + 1, [4], [5])).json())
        # taken, and not begun: its predecessor is missing
        await server.step(model, 2 * count + 3)
        sampler = await server.post("create_sampling_session", _sampler(model, 0))
        sample = await server.post("asample", _sample(sampler, 1))
        await server.fetch(sample)
        return model, last, sample, server.backend.models[model].weights.copy()
        # no close: the process ends here

    async def after(model, last, sample, weights):
        async with opened(tmp_path) as server:
            assert (await server.fetch(last))["metrics"]["step:max"] == count, "a finished request keeps its result"
            assert await server.fetch(sample)
            pending = {"request_id": f"{model}:{2 * count + 3}"}
            again = await server.run_pass(model, 2 * count + 1, [4], [5])
            await server.fetch(again.json())
            await server.fetch((await server.run_pass(model, 2 * count + 2, [5], [6], forward_only=True)).json())
            assert (await server.fetch(pending))["metrics"]["step:max"] == count + 1
            assert server.backend.models[model].weights == pytest.approx(train_alone(_batches(0, count) + [[(4, 5)]]))
            assert (await server.step(model, 4))["request_id"] == f"{model}:4", "an old request is not done again"
            assert f"{model} step" in server.backend.calls and len(server.backend.calls) <= 2 * 10 + 3

    found = run(before())
    assert found[3] == pytest.approx(train_alone(_batches(0, count)))
    run(after(*found))


def _sampler(model, number, **options):
    return {"session_id": model.partition(":")[0], "sampling_session_seq_id": number, "base_model": "bigram"} | options


def _sample(sampler, seq, tokens=(2, 3), **options):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
    params = {"max_tokens": 3, "seed": 1, **options.pop("params", {})}
    body = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": seq}
    return body | {"prompt": prompt, "sampling_params": params} | options


def test_a_record_that_a_kill_has_cut_off_was_never_promised(tmp_path):
    async def work():
        server = Server(tmp_path)
        server.service.start()
        model = await server.open_model()
        await server.fetch(await _train(server, model, 1, 1))

    run(work())
    file = tmp_path / "journal.bin"
    whole = file.read_bytes()
    for cut in (1, 7, 40):
        file.write_bytes(whole[:-cut])

        async def again():
            async with opened(tmp_path) as server:
                model = next(iter(server.service.store.models))
                await server.fetch(await server.step(model, 2))
                assert server.backend.models[model].steps == 1

        run(again())
    file.write_bytes(whole[:100] + b"x" + whole[101:])
    with pytest.raises(ValueError, match="damaged at byte"):
        run(_open(tmp_path))


async def _open(folder):
    async with opened(folder):
        pass


def test_a_journal_that_is_written_anew_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_rl.service.journal._GROWTH_BYTES", 1000)

    async def work():
        server = Server(tmp_path)
        server.service.start()
        model = await server.open_model()
        await _train(server, model, 1, 12)
        for seq in range(1, 25):
            await server.fetch({"request_id": f"{model}:{seq}"})
        before = (tmp_path / "journal.bin").stat().st_size
        server.now_s += 700
        server.service._heartbeats[model.partition(":")[0]] = server.now_s
        await server.service.sweep()
        await server.fetch(await _train(server, model, 25, 1))
        return model, before

    model, before = run(work())
    assert (tmp_path / "journal.bin").stat().st_size < before / 2

    async def after():
        async with opened(tmp_path) as server:
            await server.fetch((await server.run_pass(model, 27, [2], [2], forward_only=True)).json())
            assert server.backend.models[model].weights == pytest.approx(train_alone(_batches(0, 12) + _batches(0, 1)))
            gone = await server.send("POST", "retrieve_future", {"request_id": f"{model}:2"})
            assert gone.status_code == 410

    run(after())


def test_samples_follow_the_weights_of_their_session(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            await _train(server, model, 1, 3)
            save = {"model_id": model, "seq_id": 7, "path": "s"}
            path = (await server.do("save_weights_for_sampler", save))["path"]
            assert path == f"tinker://{model}/sampler_weights/s"
            save = {"model_id": model, "seq_id": 8, "sampling_session_seq_id": 5, "kind": "inflight"}
            inflight = await server.do("save_weights_for_sampler", save)
            await _train(server, model, 9, 3)
            save = {"model_id": model, "seq_id": 15, "sampling_session_seq_id": 6, "kind": "inflight"}
            await server.do("save_weights_for_sampler", save)
            fixed = await server.post("create_sampling_session", _sampler(model, 0, model_path=path))
            base = await server.post("create_sampling_session", _sampler(model, 1))
            tables = []
            for sampler in (fixed, inflight, base):
                body = _sample(sampler, 0, prompt_logprobs=True, topk_sample_logprobs=2, num_samples=2)
                message = protobuf.decode(messages._SAMPLE_RESULT, memoryview(await server.do("asample", body)))
                assert len(message["sequences"]) == 2
                tables.append(float(np.frombuffer(message["prompt_logprobs"], np.float32)[1]))
            three = log_softmax(train_alone(_batches(0, 3)))
            six = log_softmax(train_alone(_batches(0, 3) + _batches(0, 3)))
            assert tables == pytest.approx([three[2, 3], six[2, 3], -np.log(VOCAB)], rel=1e-6)

    run(work())


def test_finished_samples_are_told_once_and_in_order(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            sampler = await server.post("create_sampling_session", _sampler(model, 0))
            id = sampler["sampling_session_id"]
            assert (await server.post("join_sampling_session", {"sampling_session_id": id}))["client_counter"] == 1
            target = {"type": "sampling_session", "sampling_session_id": id, "cloned_sampler_id": 0}
            sent = [await server.post("asample", _sample(sampler, seq)) for seq in range(5)]
            await server.post("asample", _sample(sampler, 1_000_000_000))
            bad = await server.post("asample", _sample(sampler, 5, params={"temperature": -1}))
            found, cursor = [], 0
            while len(found) < 6:
                reply = await server.post("retrieve_futures", {"target": target, "prev_cursor": cursor})
                found, cursor = found + reply["completions"], reply["cursor"]
            assert sorted(row["request_id"] for row in found) == sorted(row["request_id"] for row in [*sent, bad])
            assert [row["request_id"] for row in found if row["state"] == "failed"] == [bad["request_id"]]
            reply = await server.post("retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 0})
            assert reply == {"completions": [], "cursor": cursor}
            failure = await server.fetch(bad)
            assert failure["category"] == "user" and "temperature" in failure["error"]

    run(work())


def test_a_cancelled_sample_ends_and_a_session_that_ends_frees_its_slots(tmp_path):
    async def work():
        async with opened(tmp_path, pause_s=30, num_slots=1) as server:
            model = await server.open_model()
            session = model.partition(":")[0]
            sampler = await server.post("create_sampling_session", _sampler(model, 0))
            sample = await server.post("asample", _sample(sampler, 0))
            await server.post("cancel_future", {"request_id": sample["request_id"]})
            assert "cancelled" in (await server.fetch(sample))["error"]
            # it waits for the slot of the first
            waiting = asyncio.create_task(server.open_model(BOB))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await server.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
            assert (await waiting).endswith(":train:0")
            create = {"session_id": session, "model_seq_id": 1, "base_model": "bigram", "lora_config": {"rank": 1}}
            for path, body in (
                ("session_heartbeat", {"session_id": session}),
                ("asample", _sample(sampler, 1)),
                ("create_model", create),
            ):
                reply = await server.send("POST", path, body)
                assert reply.status_code == 410 and "has ended" in reply.json()["detail"]

    run(work())


def test_a_model_without_work_makes_room_and_comes_back_as_it_was(tmp_path, monkeypatch):
    """One slot, two models: each loses it when it has nothing to do, also with a gradient that waits for its step."""
    monkeypatch.setattr("mindspeed_rl.service.lanes._IDLE_S", 0.0)
    monkeypatch.setattr("mindspeed_rl.service.lanes._LOOK_S", 0.01)

    async def work():
        async with opened(tmp_path, num_slots=1) as server:
            models = [await server.open_model(), await server.open_model(BOB)]
            for step in range(3):
                for model, key in zip(models, (ALICE, BOB)):
                    future = await server.run_pass(model, 2 * step + 1, [2 + step], [3], key=key)
                    await server.fetch(future.json(), key)
                    assert list(server.backend.models) == [model]
                for model, key in zip(models, (ALICE, BOB)):
                    await server.fetch(await server.step(model, 2 * step + 2, key=key), key)
                    expected = train_alone([[(2 + index, 3)] for index in range(step + 1)])
                    assert server.backend.models[model].weights == pytest.approx(expected)

    run(work())


def test_models_that_wait_for_a_slot_hold_up_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_rl.service.service._LONG_POLL_S", 0.05)

    async def work():
        async with opened(tmp_path, num_slots=1) as server:
            model = await server.open_model()
            waiting = [asyncio.create_task(server.open_model(BOB, number)) for number in range(6)]
            await asyncio.sleep(0.1)
            future = {"request_id": (await server.post("create_model", _create(model, 1)))["request_id"]}
            reply = (await server.send("POST", "retrieve_future", future)).json()
            assert reply["queue_state"] == "paused_capacity" and "all 1 models" in reply["queue_state_reason"]
            await server.fetch(await _train(server, model, 1, 3))
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    run(work())


def _create(model, number):
    session = model.partition(":")[0]
    return {"session_id": session, "model_seq_id": number, "base_model": "bigram", "lora_config": {"rank": 1}}


def test_a_session_without_heartbeats_ends(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            session = model.partition(":")[0]
            for _ in range(3):
                server.now_s += 500
                await server.post("session_heartbeat", {"session_id": session})
                await server.service.sweep()
            assert model in server.backend.models
            waits = await server.step(model, 2)
            server.now_s += 601
            await server.service.sweep()
            assert model not in server.backend.models
            assert "no heartbeat" in (await server.fetch(waits))["error"]
            assert (await server.send("POST", "session_heartbeat", {"session_id": session})).status_code == 410

    run(work())


def test_a_model_of_a_checkpoint_continues_as_the_first_would(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            session = model.partition(":")[0]
            await _train(server, model, 1, 3)
            path = (await server.do("save_weights", {"model_id": model, "seq_id": 7, "path": "a"}))["path"]
            load = {"session_id": session, "model_seq_id": 4, "path": path, "optimizer": True}
            second = (await server.do("load_weights", load))["model_id"]
            assert second == f"{session}:train:4"
            for id, seq in ((model, 8), (second, 1)):
                await server.fetch(await _train(server, id, seq, 2))
            assert (server.backend.models[model].weights == server.backend.models[second].weights).all()
            back = {"model_id": second, "seq_id": 5, "path": path, "optimizer": False}
            await server.do("load_weights", back)
            assert server.backend.models[second].steps == 0
        return second

    second = run(work())

    async def after():
        async with opened(tmp_path) as server:
            await server.fetch((await server.run_pass(second, 6, [2], [2], forward_only=True)).json())
            assert server.backend.models[second].weights == pytest.approx(train_alone(_batches(0, 3)))

    run(after())


# ---- tenants


def test_a_tenant_finds_nothing_of_another(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            session = model.partition(":")[0]
            await _train(server, model, 1, 1)
            path = (await server.do("save_weights", {"model_id": model, "seq_id": 3, "path": "a"}))["path"]
            export = {"model_id": model, "seq_id": 4, "path": "e"}
            await server.do("save_weights_external", export)
            sampler = await server.post("create_sampling_session", _sampler(model, 0))
            sample = await server.post("asample", _sample(sampler, 0))
            await server.fetch(sample)
            mine = (await server.post("create_session", {}, key=BOB))["session_id"]
            calls, named = server.backend.calls.copy(), {"sampling_session_id": sampler["sampling_session_id"]}
            attacks = [
                ("POST", "get_info", {"model_id": model}),
                ("POST", "unload_model", {"model_id": model}),
                ("POST", "optim_step", {"model_id": model, "seq_id": 5, "adam_params": {}}),
                ("POST", "save_weights", {"model_id": model, "seq_id": 5}),
                ("POST", "retrieve_future", {"request_id": f"{model}:1"}),
                ("POST", "retrieve_future", sample),
                ("POST", "cancel_future", {"request_id": sample["request_id"]}),
                ("POST", "session_heartbeat", {"session_id": session}),
                ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}),
                ("POST", "create_sampling_session", _sampler(mine, 0, model_path=path)),
                ("POST", "create_sampling_session", _sampler(model, 3)),
                ("POST", "join_sampling_session", named),
                ("POST", "asample", _sample(sampler, 1)),
                ("POST", "load_weights", {"session_id": mine, "model_seq_id": 0, "path": path, "optimizer": False}),
                ("POST", "weights_info", {"tinker_path": path}),
                ("POST", "retrieve_futures", {"target": named}),
                ("GET", f"training_runs/{model}", None),
                ("GET", f"training_runs/{model}/checkpoints", None),
                ("GET", f"training_runs/{model}/checkpoints/external_weights/e/external_weights_urls", None),
                ("DELETE", f"training_runs/{model}/checkpoints/weights/a", None),
                ("PUT", f"training_runs/{model}/checkpoints/weights/a/ttl", {"ttl_seconds": 3600}),
                ("GET", f"sessions/{session}", None),
                ("GET", f"samplers/{sampler['sampling_session_id']}", None),
            ]
            for method, name, body in attacks:
                if body is not None:
                    body = {key: value for key, value in body.items() if key != "sample_sequence_ids"}
                reply = await server.send(method, name, body, BOB)
                assert reply.status_code == 404, (name, reply.text)
                assert "of this API key" in reply.json()["detail"]
            assert (await server.run_pass(model, 5, [2], [3], key=BOB)).status_code == 404
            for name in ("training_runs", "checkpoints", "usage"):
                assert path not in (await server.send("GET", name, key=BOB)).text
            assert (await server.send("GET", "sessions", key=BOB)).json() == {"sessions": [mine]}
            assert server.backend.calls == calls

    run(work())


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/a",
        "tinker://{model}/weights/../../secret",
        "tinker://{model}/weights/..%2fa",
        "tinker://{model}/ephemeral/000003",
        "tinker://{model}/weights/",
        "{folder}/checkpoints",
        "/etc",
        "",
        "tinker://{model}/weights/a/../a",
    ],
)
def test_no_path_leads_out_of_the_table_of_checkpoints(tmp_path, path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 9}
            await server.do("save_weights_for_sampler", save)
            asked = path.format(model=model, folder=tmp_path)
            reply = await server.send("POST", "create_sampling_session", _sampler(model, 0, model_path=asked))
            assert reply.status_code == 404, reply.text
            load = {"session_id": model.partition(":")[0], "model_seq_id": 2, "path": asked, "optimizer": False}
            assert (await server.send("POST", "load_weights", load)).status_code == 404

    run(work())


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "", "a\x00b", "a" * 200, "-rf", "ä"])
def test_a_checkpoint_has_a_plain_name(tmp_path, name):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            save = {"model_id": model, "seq_id": 1, "path": name}
            failure = await server.do("save_weights_external", save)
            assert failure["category"] == "user" and "is no name" in failure["error"]
            assert not any((tmp_path / "checkpoints").iterdir())

    run(work())


def test_an_exported_folder_is_downloaded_by_signed_addresses(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            await server.do("save_weights_external", {"model_id": model, "seq_id": 1, "path": "e"})
            name = f"training_runs/{model}/checkpoints/external_weights/e/external_weights_urls"
            urls = (await server.send("GET", name)).json()["urls"]
            assert set(urls) == {"adapter_config.json", "weights.npy"}
            await server.do("save_weights_external", {"model_id": model, "seq_id": 2, "path": "e.merged"})
            merged = (await server.send("GET", name.replace("/e/", "/e.merged/"))).json()["urls"]
            assert set(merged) == {"merged.npy"}
            assert (await server.client.get(urls["adapter_config.json"])).json() == {"peft_type": "LORA"}
            head, _, signature = urls["weights.npy"].rpartition(".")
            forged = (f"{head}.{signature[:-2]}AA", f"{head[:-3]}AAA.{signature}", head, f"{head}.")
            for url in forged:
                assert (await server.client.get(url)).status_code == 404
            await server.send("DELETE", f"training_runs/{model}/checkpoints/external_weights/e")
            assert (await server.client.get(urls["weights.npy"])).status_code == 404

    run(work())


def test_a_key_has_limits_and_hits_nobody_else(tmp_path):
    limits = Limits(max_sessions=3, max_tokens_in_flight=20, max_checkpoints=2, max_checkpoint_bytes=1 << 20)

    async def work():
        async with opened(tmp_path, limits=limits) as server:
            model = await server.open_model()
            other = await server.open_model(BOB)
            # the first one is missing: nothing of it can run
            assert (await server.run_pass(model, 2, [2] * 15, [3] * 15)).status_code == 200
            over = await server.run_pass(model, 3, [2] * 15, [3] * 15)
            assert over.status_code == 429 and "its limit is 20" in over.json()["detail"]
            assert (await server.run_pass(other, 1, [2] * 15, [3] * 15, key=BOB)).status_code == 200
            first = await server.run_pass(model, 1, [2] * 15, [3] * 15)
            assert first.status_code == 200, "others wait for it"
            await server.fetch({"request_id": f"{model}:2"})
            for seq in (3, 4, 5):
                saved = await server.do("save_weights", {"model_id": model, "seq_id": seq})
            assert "2 checkpoints, its limit" in saved["error"]
            save = {"model_id": other, "seq_id": 2}
            assert "path" in await server.do("save_weights", save, BOB)
            await server.post("create_session", {})
            reply = await server.send("POST", "create_session", {})
            assert reply.status_code == 429 and "3 sessions are open" in reply.json()["detail"]

    run(work())


def test_checkpoints_expire(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            save = {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": 3600}
            path = (await server.do("save_weights", save))["path"]
            await server.do("save_weights", {"model_id": model, "seq_id": 2, "path": "b"})
            bad = {"model_id": model, "seq_id": 3, "path": "c", "ttl_seconds": 60}
            assert "ttl_seconds" in (await server.do("save_weights", bad))["error"]
            again = {"model_id": model, "seq_id": 4, "path": "b"}
            assert "exists" in (await server.do("save_weights", again))["error"]
            again = {"model_id": model, "seq_id": 5, "path": "b", "overwrite": True}
            assert "path" in await server.do("save_weights", again)
            server.now_s += 3601
            server.service._heartbeats[model.partition(":")[0]] = server.now_s
            await server.service.sweep()
            names = [row["tinker_path"] for row in (await server.send("GET", "checkpoints")).json()["checkpoints"]]
            assert names == [f"tinker://{model}/weights/b"] and path not in names
            server.service.checkpoints.remove_orphans()
            assert len(list((tmp_path / "checkpoints").iterdir())) == 1

    run(work())


# ---- doors


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ({"x-api-key": ""}, 401, "asks for an API key"),
        ({"x-api-key": "tml-other-1234"}, 401, "not known"),
        ({"x-api-key": "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbGljZSIsImV4cCI6OTk5OTk5OTk5OX0."}, 401, "not made here"),
        ({"host": "evil.example"}, 403, "127.0.0.1 or localhost"),
        ({"content-type": "text/plain"}, 400, "takes application/json"),
        ({"content-encoding": "gzip"}, 400, "zstd is"),
        ({"content-encoding": "zstd"}, 400, "no zstd"),
        ({"content-length": "99999999999"}, 413, "at most 1048576 bytes"),
        ({"content-length": "-1"}, 411, "needs its length"),
    ],
)
def test_a_request_at_the_door_is_refused_in_the_form_of_the_api(tmp_path, headers, status, text):
    async def work():
        async with opened(tmp_path) as server:
            reply = await server.send("POST", "create_session", {}, headers=headers)
            assert reply.status_code == status, reply.text
            assert text in reply.json()["detail"]

    run(work())


@pytest.mark.parametrize(
    ("name", "value"),
    [("x-api-key", BOB), ("x-api-key", ALICE), ("host", "localhost"), ("content-type", "text/x"), ("content-encoding", "zstd")],
)
def test_a_header_that_decides_is_refused_where_it_is_given_twice(tmp_path, name, value):
    async def work():
        async with opened(tmp_path) as server:
            headers = [("x-api-key", ALICE), ("host", "127.0.0.1"), *JSON.items(), ("content-encoding", ""), (name, value)]
            reply = await server.client.post("/api/v1/create_session", content=b"{}", headers=headers)
            assert (reply.status_code, reply.json()["detail"]) == (400, f"the header {name} is given twice")

    run(work())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "no JSON|is none"),
        (b"[]", "not list"),
        (b"\xff", "UTF-8"),
        (b'{"a":1,"a":2}', "stands twice"),
        (b'{"tags": NaN}', "not a JSON number"),
        (b"[" * 100_000, "nested too deeply|is none"),
        (b'{"tags": ["x"], "tag": []}', "did you mean 'tags'"),
        (b'{"tags": "x"}', "expected a list"),
        (b'{"tags": [1]}', "expected a text"),
        (b'{"user_metadata": 3}', "expected an object"),
        (b'{"type": "create_model"}', "it should be 'create_session'"),
        (b'{"sdk_version": "' + b"x" * 5000 + b'"}', "4096 characters"),
    ],
)
def test_a_body_that_is_wrong_is_refused_with_its_key(tmp_path, content, text):
    import re

    async def work():
        async with opened(tmp_path) as server:
            reply = await server.send("POST", "create_session", content=content)
            assert reply.status_code == 400, reply.text
            assert re.search(text, reply.json()["detail"]), reply.text
            assert not server.service.store.sessions

    run(work())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokens": [2, VOCAB], "targets": [3, 4]}, "token id 16 is not in the vocabulary"),
        ({"tokens": [2] * 65, "targets": [3] * 65}, "must have 1 to 64"),
        ({"tokens": [2], "targets": [3, 4]}, "shape"),
        ({"tokens": [2], "targets": [3], "weights": [float("nan")]}, "not a finite number"),
        ({"tokens": [2], "targets": [3], "loss": "dpo"}, "'dpo' is not offered; it can be cross_entropy"),
        ({"tokens": [2], "targets": [3], "loss": "custom"}, "'custom' is not offered"),
        ({"tokens": [2], "targets": [3], "loss": "importance_sampling"}, "'logprobs' is missing"),
        ({"tokens": [2], "targets": [3], "config": [("beta", 1.0)]}, "has no 'beta'"),
        ({"tokens": [2], "targets": [3], "inputs": [("mask", np.ones(1, np.float32))]}, "has no 'mask'"),
        ({"tokens": [2], "targets": np.zeros((1, 0)), "weights": np.zeros((1, 0))}, "a token has 1 to 16 targets"),
        ({"tokens": [2], "targets": np.zeros((1, 17)), "weights": np.zeros((1, 17))}, "a token has 1 to 16 targets"),
    ],
)
def test_wrong_data_fails_in_its_turn_and_later_requests_go_on(tmp_path, options, text):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            wrong = (await server.run_pass(model, 1, **options)).json()
            right = (await server.run_pass(model, 2, [2], [3])).json()
            step = await server.step(model, 3)
            failure = await server.fetch(wrong)
            assert failure["category"] == "user" and text in failure["error"]
            await server.fetch(right)
            await server.fetch(step)
            assert server.backend.models[model].weights == pytest.approx(train_alone([[(2, 3)]]))

    run(work())


def test_a_few_targets_too_many_for_all_tokens_of_a_pass_are_refused():
    """Each token of a pass has as many columns as the one with the most targets."""
    offered = Capabilities("base", Path(), 1 << 17, 1 << 15, 8, 1, unembed=True, full_weights=False)

    def make(size, shape):
        inputs = {"target_tokens": np.zeros(shape, np.int64), "weights": np.zeros(shape, np.float32)}
        return Datum([1] * size, inputs)

    wide, long = make(1, (1, 1 << 17)), make(1 << 12, (1 << 12,))
    check_data([wide], LossCall("cross_entropy"), offered)
    check_data([long], LossCall("cross_entropy"), offered)
    with pytest.raises(CallError, match="4097 tokens with room for 131072 targets each"):
        check_data([long, wide], LossCall("cross_entropy"), offered)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (SampleCall([1, 2], temperature=2.1), "temperature: 2.1 must be 0 .greedy. or from 0.01 to 2"),
        (SampleCall([1, 2], target_log_probs=np.full((1, 1 << 18), -1)), "K at most 131072"),
        (SampleCall([1, 2], stop_tokens=(5,) * 1025), "1,025 stops; at most 1,024 stops of 4,096 characters are allowed"),
        (SampleCall([1, 2], stop_strings=("ab", "a" * 4097)), "2 stops, the longest of 4,097 characters; at most"),
        (SampleCall([1, 2], stop_strings=("a" * 5000,)), "stop has 1 stop, the longest of 5,000 characters; at most 1,024"),
        # 33 x 2**17 of the whole vocabulary are more than 2**22
        (
            SampleCall([1] * 33, target_log_probs=np.full((32, 1), -1)),
            "named tokens cost the whole vocabulary per prompt token: prompts of at most 32 tokens, and this one has 33",
        ),
        (
            SampleCall([1] * 32, max_tokens=10, top_log_probs=1, target_log_probs=np.full((31, 1), -1)),
            "ask for fewer .topk_sample_logprobs; named tokens cost",
        ),
        (SampleCall([1] * 50, max_tokens=10, num_samples=100, top_log_probs=4300), "and 4300000 for the samples"),
    ],
)
def test_a_call_that_the_rollout_engine_could_not_do_is_refused_before(call, text):
    offered = Capabilities("base", Path(), 1 << 17, 64, 8, 1, unembed=True, full_weights=False)
    SampleCall([1] * 32, max_tokens=10, num_samples=100, top_log_probs=4000).check(offered)
    SampleCall([1] * 31, max_tokens=0, target_log_probs=np.full((30, 1), -1)).check(offered)
    with pytest.raises(CallError, match=text):
        call.check(offered)


def test_an_integer_that_no_float_holds_fails_as_the_clients_and_the_model_stays(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            await server.fetch((await server.run_pass(model, 1, [2], [3])).json())
            failure = await server.fetch(await server.step(model, 2, learning_rate=10**400))
            assert failure["category"] == "user" and "learning_rate" in failure["error"]
            asked = {"target": {"sampling_session_id": "x"}, "timeout": 10**400}
            assert (await server.send("POST", "retrieve_futures", asked)).status_code == 400
            await server.fetch(await server.step(model, 3))
            assert server.backend.models[model].weights == pytest.approx(train_alone([[(2, 3)]]))

    run(work())


def test_an_operation_that_breaks_off_in_the_middle_leaves_nothing_behind(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            await server.fetch(await _train(server, model, 1, 2))
            failure = {"error": "RuntimeError: the device has lost its power", "category": "server"}
            server.backend.breaks = True
            assert await server.fetch((await server.run_pass(model, 5, [4], [9])).json()) == failure
            await server.fetch((await server.run_pass(model, 6, [4], [9], forward_only=True)).json())
            server.backend.breaks = True
            assert await server.fetch(await server.step(model, 7)) == failure
            server.backend.breaks = True  # in the middle of the restore
            await server.fetch(await _train(server, model, 8, 2))
            assert server.backend.models[model].weights == pytest.approx(train_alone(_batches(0, 2) + _batches(0, 2)))

    run(work())


def test_a_gradient_that_a_refused_step_has_dropped_stays_dropped_after_a_restart(tmp_path):
    """The model was lost: the passes before such a step ran again, and the step that dropped their gradient did not."""

    async def before():
        server = Server(tmp_path)
        server.service.start()
        model = await server.open_model()
        await server.fetch(await _train(server, model, 1, 1))
        for seq in (3, 4):
            await server.fetch((await server.run_pass(model, seq, [2], [3], weights=[3e38])).json())
        assert "not finite" in (await server.fetch(await server.step(model, 5)))["error"]
        await server.fetch((await server.run_pass(model, 6, [3], [4])).json())
        refused = await server.fetch(await server.step(model, 7, learning_rate=-1.0))
        assert "learning_rate" in refused["error"], "which drops nothing"
        await server.fetch((await server.run_pass(model, 8, [4], [5])).json())
        return model

    model = run(before())

    async def after():
        async with opened(tmp_path) as server:
            await server.fetch(await server.step(model, 9))
            expected = train_alone([*_batches(0, 1), [(3, 4), (4, 5)]])
            assert server.backend.models[model].weights == pytest.approx(expected)

    run(after())


def test_no_folder_is_left_of_snapshots_that_nothing_names(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            await server.fetch(await _train(server, model, 1, 11))
            path = (await server.do("save_weights", {"model_id": model, "seq_id": 23, "path": "a"}))["path"]
            for seq in (24, 25, 26):
                load = {"model_id": model, "seq_id": seq, "path": path, "optimizer": True}
                assert (await server.do("load_weights", load))["path"] == path
            await server.fetch((await server.run_pass(model, 27, [2], [3], forward_only=True)).json())
            folders = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
            assert len(folders) == 2, "the checkpoint and the newest snapshot"
            await server.do("unload_model", {"model_id": model})
            assert len(list((tmp_path / "checkpoints").iterdir())) == 1

    run(work())


def test_weights_of_another_seed_are_loaded_and_of_another_form_are_not(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            session = (await server.post("create_session", {}))["session_id"]
            made = {"session_id": session, "base_model": "bigram"}
            models = [
                (await server.do("create_model", made | {"model_seq_id": number, "lora_config": config}))["model_id"]
                for number, config in enumerate(({"rank": 2, "seed": 1}, {"rank": 2, "seed": 2}, {"rank": 3, "seed": 1}))
            ]
            await server.fetch(await _train(server, models[0], 1, 2))
            path = (await server.do("save_weights", {"model_id": models[0], "seq_id": 5, "path": "a"}))["path"]
            load = {"seq_id": 1, "path": path, "optimizer": True}
            assert (await server.do("load_weights", load | {"model_id": models[1]}))["model_id"] == models[1]
            assert (server.backend.models[models[1]].weights == server.backend.models[models[0]].weights).all()
            assert "has the adapter" in (await server.do("load_weights", load | {"model_id": models[2]}))["error"]

    run(work())


def test_a_session_that_ends_before_its_model_has_its_turn_keeps_no_slot(tmp_path):
    async def work():
        async with opened(tmp_path, num_slots=6, pause_s=0.3) as server:
            models = [await server.open_model() for _ in range(4)]
            passes = [(await server.run_pass(model, 1, [2], [3])).json() for model in models]  # the turns are taken
            session = (await server.post("create_session", {}, key=BOB))["session_id"]
            late = await server.post("create_model", _create(session, 0), key=BOB)
            await asyncio.sleep(0.05)
            await server.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, key=BOB)
            assert "has ended" in (await server.fetch(late, BOB))["error"]
            for future in passes:
                await server.fetch(future)
            others = [await server.open_model() for _ in range(2)]
            assert len(server.backend.models) == 6 and set(others) < set(server.backend.models)

    run(work())


def test_full_weights_are_made_without_an_adapter_and_come_back_after_a_restart(tmp_path):
    options = {"num_slots": 1, "full_weights": True}

    async def before():
        server = Server(tmp_path, **options)
        server.service.start()
        session = (await server.post("create_session", {}))["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "bigram"}
        reply = await server.send("POST", "create_model", asked | {"lora_config": {"rank": 2}})
        assert reply.status_code == 400 and "it trains full weights" in reply.json()["detail"]
        model = (await server.do("create_model", asked))["model_id"]
        info = await server.post("get_info", {"model_id": model})
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
        await server.fetch(await _train(server, model, 1, 12))
        path = (await server.do("save_weights", {"model_id": model, "seq_id": 25, "path": "a"}))["path"]
        return model, path

    model, path = run(before())

    async def after():
        async with opened(tmp_path, **options) as server:
            assert (await server.post("weights_info", {"tinker_path": path}))["is_lora"] is False
            await server.fetch(await _train(server, model, 26, 1))
            weights = server.backend.models[model].weights
            assert weights == pytest.approx(train_alone(_batches(0, 12) + _batches(0, 1)))

    run(after())


def test_passes_that_never_make_a_step_have_a_limit(tmp_path, monkeypatch):
    """Their bodies are kept for a restart: one key could fill the memory of the server."""

    async def work():
        async with opened(tmp_path) as server:
            model, other = await server.open_model(), await server.open_model(BOB)
            for seq in range(1, 40):
                reply = await server.fetch((await server.run_pass(model, seq, [2], [3])).json())
                if isinstance(reply, dict):
                    break
            assert 2 < seq < 39 and "wait for an optim_step" in reply["error"] and reply["category"] == "user"
            read_pass(await server.fetch((await server.run_pass(other, 1, [2], [3], key=BOB)).json(), BOB))
            await server.fetch(await server.step(model, seq + 1))
            # ten steps, a snapshot, and a sweep that forgets what it replaces
            for index in range(10):
                await server.fetch(await server.step(model, seq + 2 + index))
            await server.fetch((await server.run_pass(model, seq + 12, [2], [3], forward_only=True)).json())
            await server.service.sweep()
            read_pass(await server.fetch((await server.run_pass(model, seq + 13, [2], [3])).json()))

    monkeypatch.setattr("mindspeed_rl.service.lanes._MAX_KEPT_BYTES", 1500)
    run(work())


def test_a_key_that_keeps_all_slots_busy_makes_room_for_another_key(tmp_path, monkeypatch):
    async def work():
        async with opened(tmp_path, num_slots=2, pause_s=0.05) as server:
            models = [await server.open_model() for _ in range(2)]
            last = [await _train(server, model, 1, 14) for model in models]  # 28 operations wait for each of them
            other = await server.open_model(BOB)
            reply = await server.send("POST", "retrieve_future", {"request_id": last[0]["request_id"]})
            assert reply.json()["type"] == "try_again", "the first key is still busy"
            read_pass(await server.fetch((await server.run_pass(other, 1, [2], [3], key=BOB)).json(), BOB))
            await server.do("unload_model", {"model_id": other}, BOB)
            for model, future in zip(models, last):
                assert (await server.fetch(future))["metrics"]["step:max"] == 14
                forward = await server.fetch((await server.run_pass(model, 29, [2], [3], forward_only=True)).json())
                expected = log_softmax(train_alone(_batches(0, 14)))[2, 3]
                assert read_pass(forward)[1] == pytest.approx([expected]), "it came back as it was"

    monkeypatch.setattr("mindspeed_rl.service.lanes._IDLE_S", 0.1)
    monkeypatch.setattr("mindspeed_rl.service.lanes._LOOK_S", 0.02)
    monkeypatch.setattr("mindspeed_rl.service.service._LONG_POLL_S", 0.05)
    run(work())


@pytest.mark.parametrize("keys", [(ALICE, BOB), (ALICE, ALICE)], ids=["another key", "the same key"])
def test_with_one_slot_a_busy_model_makes_room_once_its_turn_is_over(tmp_path, monkeypatch, keys):
    async def work():
        async with opened(tmp_path, num_slots=1, pause_s=0.02) as server:
            busy = await server.open_model(keys[0])
            last = await _train(server, busy, 1, 20)  # 40 operations
            other = await server.open_model(keys[1], session=None)
            reply = await server.send("POST", "retrieve_future", {"request_id": last["request_id"]})
            assert reply.json()["type"] == "try_again", "the first one is still busy"
            read_pass(await server.fetch((await server.run_pass(other, 1, [2], [3], key=keys[1])).json(), keys[1]))
            assert (await server.fetch(last))["metrics"]["step:max"] == 20
            forward = await server.fetch((await server.run_pass(busy, 41, [2], [3], forward_only=True)).json())
            expected = log_softmax(train_alone(_batches(0, 20)))[2, 3]
            assert read_pass(forward)[1] == pytest.approx([expected]), "it came back as it was"

    monkeypatch.setattr("mindspeed_rl.service.lanes._IDLE_S", 0.05)
    monkeypatch.setattr("mindspeed_rl.service.lanes._TURN_S", 0.1)
    monkeypatch.setattr("mindspeed_rl.service.lanes._LOOK_S", 0.02)
    monkeypatch.setattr("mindspeed_rl.service.service._LONG_POLL_S", 0.05)
    run(work())


def test_requests_after_the_end_of_a_model_are_answered(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            waiting = (await server.run_pass(model, 3, [2], [3])).json()  # 1 and 2 never come
            await server.do("unload_model", {"model_id": model})
            assert "unloaded" in (await server.fetch(waiting))["error"]
            assert "unloaded" in (await server.fetch((await server.run_pass(model, 4, [2], [3])).json()))["error"]

    run(work())


def test_requests_without_tokens_have_a_limit_of_bytes(tmp_path, monkeypatch):
    async def work():
        async with opened(tmp_path) as server:
            model, other = await server.open_model(), await server.open_model(BOB)
            replies = [await server.send("POST", "optim_step", _step(model, seq)) for seq in range(2, 8)]
            assert [reply.status_code for reply in replies] == [200, 200, 200, 200, 429, 429]
            assert "the limit is 20000" in replies[-1].json()["detail"]
            assert (await server.send("POST", "optim_step", _step(other, 2), BOB)).status_code == 200
            assert (await server.send("POST", "optim_step", _step(model, 1))).status_code == 200, "others wait for it"
            await server.fetch({"request_id": f"{model}:5"})
            assert (await server.send("POST", "optim_step", _step(model, 6))).status_code == 200

    monkeypatch.setattr("mindspeed_rl.service.ledger._MAX_BODY_BYTES", 20000)
    run(work())


def _step(model, seq):
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("copy_weights", "load_weights makes a model"),
        ("create_custom_loss", "at the client"),
        ("sessions/search", "GET sessions"),
        ("save_checkpoint", "training, sampling, checkpoints"),
        ("training_runs/x/checkpoints/weights/a/publish", "belong to one API key"),
    ],
)
def test_what_is_not_offered_names_what_is(tmp_path, name, text):
    async def work():
        async with opened(tmp_path) as server:
            reply = await server.send("POST", name, {})
            assert 400 <= reply.status_code < 408, "the SDK would send it again"
            assert text in reply.json()["detail"]

    run(work())


def test_a_key_cannot_take_all_sessions_of_a_server(tmp_path):
    async def work():
        async with opened(tmp_path, limits=Limits(max_sessions=5, max_sessions_per_key=3)) as server:
            own = [await server.post("create_session", {}) for _ in range(3)]
            refused = await server.send("POST", "create_session", {})
            assert refused.status_code == 429 and "3 sessions of this API key are open, its limit" in refused.json()["detail"]
            await server.post("create_session", {}, key=BOB)
            await server.post(f"sessions/{own[0]['session_id']}/finish", {"reason": {"type": "success"}})
            await server.post("create_session", {})

    run(work())


def test_a_thousand_sessions_open_and_their_requests_are_answered(tmp_path):
    async def work():
        async with opened(tmp_path, limits=Limits(max_sessions_per_key=1000)) as server:
            sessions = await asyncio.gather(*(server.post("create_session", {}) for _ in range(1000)))
            assert len({session["session_id"] for session in sessions}) == 1000
            refused = await server.send("POST", "create_session", {}, BOB)
            assert refused.status_code == 429
            beats = await asyncio.gather(*(server.post("session_heartbeat", session_only(row)) for row in sessions[:200]))
            assert len(beats) == 200

    def session_only(row):
        return {"session_id": row["session_id"]}

    run(work())


def test_a_compressed_body_is_read_only_as_far_as_it_may_go():
    pyarrow = pytest.importorskip("pyarrow")
    bomb = pyarrow.Codec("zstd").compress(bytes(50_000_000), asbytes=True)
    assert len(bomb) < 10_000
    with pytest.raises(RefusedError, match="when it is decompressed"):
        decompress(bomb, "zstd", 1 << 20)
    assert decompress(pyarrow.Codec("zstd").compress(b"abc", asbytes=True), "zstd", 10) == b"abc"


def test_a_tenant_that_sends_slowly_leaves_room_for_others(monkeypatch):
    from mindspeed_rl.service import doors

    monkeypatch.setattr(doors, "_MAX_BYTES_OF_TENANT", 100)
    monkeypatch.setattr(doors, "_DROP_S", 0.01)

    async def work():
        reader, headers = doors.BodyReader(), {b"content-length": b"60"}

        async def never():
            await asyncio.sleep(100)

        async def at_once():
            return {"type": "http.request", "body": b"x" * 60}

        slow = asyncio.create_task(reader.read("slow", headers, never, 1000))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="too many bodies"):
            await reader.read("slow", headers, never, 1000)
        assert len(await reader.read("other", headers, at_once, 1000)) == 60
        slow.cancel()
        await asyncio.wait([slow])
        assert len(await reader.read("slow", headers, at_once, 1000)) == 60

    run(work())


def test_a_token_stands_for_its_key(tmp_path):
    async def work():
        async with opened(tmp_path) as server:
            session = await server.post("create_session", {})
            token = (await server.post("auth/token", {}))["jwt"]
            assert (await server.send("GET", "sessions", key=token)).json() == {"sessions": [session["session_id"]]}
            head, claims, signature = token.split(".")
            for forged in (f"{head}.{claims[:-2]}AA.{signature}", f"{head}.{claims}.{signature[:-2]}AA"):
                assert (await server.send("GET", "sessions", key=forged)).status_code == 401
            # a server that was started again without Alice's key; one token would otherwise make the next for ever
            server.app._keys = Keys({BOB: "bob"}, b"s" * 32, only_local=True)
            assert "no longer known" in (await server.send("POST", "auth/token", {}, key=token)).json()["detail"]

    run(work())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("tml-abcdefghij\n", "line 1 has 1 words"),
        ("sk-abcdefghij bob\n", "begins with 'tml-'"),
        ("tml-abcdefghij ../bob\n", "is no name"),
        ("tml-abcdefghij a\n# x\ntml-abcdefghij b\n", "line 3: this key stands twice"),
    ],
)
def test_a_file_of_keys_is_refused_with_its_line(tmp_path, text, message):
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ValueError, match=message) as raised:
        read_keys(file)
    assert "abcdefghij" not in str(raised.value)


def test_a_file_of_keys_that_everybody_can_read_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text("tml-abcdefghij bob # laptop\n")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_keys(file)
    file.chmod(0o640)
    assert read_keys(file) == {"tml-abcdefghij": "bob"}


def test_what_a_tenant_has_used_is_counted_and_written_as_a_run(tmp_path):
    from mindspeed_rl.observability.run_files import read_run

    async def work():
        async with opened(tmp_path) as server:
            model = await server.open_model()
            await _train(server, model, 1, 2)
            sampler = await server.post("create_sampling_session", _sampler(model, 0))
            await server.do("asample", _sample(sampler, 0, params={"stop": []}, num_samples=2))
            await server.fetch({"request_id": f"{model}:4"})
            used = (await server.send("GET", "usage")).json()
            assert (used["train_tokens"], used["prompt_tokens"], used["sample_tokens"]) == (2, 2, 6)
            assert used["num_requests"] == 6 and used["device_s"] > 0
            assert used["price"] == pytest.approx(used["device_s"] / 100), "36 for an hour"
            return model

    model = run(work())
    steps = read_run(tmp_path / "metrics" / "models" / model.replace(":", "_"))
    assert steps.history.series["train/loss_sum"].y[0] == pytest.approx(np.log(VOCAB))
    account = read_run(tmp_path / "metrics" / "tenants" / "alice")
    assert account.history.series["train/sample_tokens"].y[-1] == 6


_JUNK = (None, True, -1, 1 << 70, 1e300, "x", "\x00", [], [None], {}, {"type": 3}, {"chunks": [{"tokens": [1 << 40]}]})


@pytest.mark.slow
def test_no_value_of_any_key_ends_a_request_in_an_error_of_the_server(tmp_path, monkeypatch):
    """Each key of each body in turn has a value that is wrong; futures that were given end too, and nobody else is hit."""
    monkeypatch.setattr("mindspeed_rl.service.service._LONG_POLL_S", 0.01)

    async def work():
        async with opened(tmp_path, num_slots=64) as server:
            model = await server.open_model()
            session = model.partition(":")[0]
            sampler = await server.post("create_sampling_session", _sampler(model, 0))
            sample = {**_sample(sampler, 0), "target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}
            bodies = {
                "create_session": {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "1", "display_name": "d"},
                "session_heartbeat": {"session_id": session},
                "create_model": _create(model, 1),
                "get_info": {"model_id": model},
                "optim_step": {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}},
                "save_weights": {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": 3600, "overwrite": True},
                "save_weights_for_sampler": {"model_id": model, "seq_id": 1, "path": "a", "kind": "snapshot"},
                "save_weights_external": {"model_id": model, "seq_id": 1, "path": "a"},
                "load_weights": {"session_id": session, "model_seq_id": 1, "path": "tinker://a", "optimizer": True},
                "create_sampling_session": _sampler(model, 1),
                "join_sampling_session": {"sampling_session_id": sampler["sampling_session_id"]},
                "asample": sample,
                "retrieve_future": {"request_id": f"{model}:0", "allow_metadata_only": True},
                "retrieve_futures": {"target": {"sampling_session_id": sampler["sampling_session_id"]}, "timeout": 0},
                "cancel_future": {"request_id": "x"},
                "weights_info": {"tinker_path": "tinker://a"},
                f"sessions/{session}x/finish": {"reason": {"type": "success"}, "detail": "d"},
            }
            seen, number = {}, 0
            for name, body in bodies.items():
                nested = [(key, inner) for key, value in body.items() if isinstance(value, dict) for inner in value]
                for path in [(key,) for key in body] + nested:
                    for junk in _JUNK:
                        spoilt = json.loads(json.dumps(body))
                        inner = spoilt if len(path) == 1 else spoilt[path[0]]
                        inner[path[-1]] = junk
                        number += 1
                        for key in ("seq_id", "model_seq_id", "sampling_session_seq_id"):
                            if key in spoilt and path != (key,):  # each is a request of its own
                                spoilt[key] = number
                        reply = await server.send("POST", name, spoilt)
                        seen.setdefault(reply.status_code, []).append((name, path, junk, reply.text))
            assert set(seen) <= {200, 400, 404, 410}, {code: seen[code][:3] for code in seen if code >= 500 or code == 429}
            unfinished = [row for row in server.service.store.requests.values() if row.kind == "asample" and not row.finished_s]
            for request in unfinished:
                await server.service.ledger.wait(request, 10)
            failures = [row for row in server.service.store.requests.values() if row.payload and b'"server"' in row.payload]
            assert not failures, [(row.kind, row.body, row.payload) for row in failures[:3]]
            other = await server.open_model(BOB)
            await server.fetch(await server.step(other, 1, key=BOB), BOB)

    run(work())
