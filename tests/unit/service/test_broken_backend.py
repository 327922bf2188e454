"""A backend that breaks while a server has requests: they stay open until the server is started again."""

import asyncio
import json

from test_service import opened

from mindspeed_rl.service.backend import BrokenBackendError
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
