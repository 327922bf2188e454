"""The program that plays environments of the verifiers library; a stand-in takes the library's place (see its docstring)."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import patient

from mindspeed_rl.tools import verifiers_host
from mindspeed_rl.tools.endpoint import ChatReply, RecordingEndpoint
from mindspeed_rl.tools.interface import ParsedTurn
from mindspeed_rl.tools.verifiers_program import ProgramExitError, VerifiersProgram, _EpisodeResult

STANDIN = str(Path(__file__).with_name("verifiers_standin"))
ROW = {"prompt": [{"role": "user", "content": "Guess."}], "example_id": 7, "labels": "not for the environment"}


@pytest.fixture
def with_library(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STANDIN)


class Counting:
    """A model that says 1, 2, 3."""

    def __init__(self):
        self.said = 0

    async def complete(self, request):
        self.said += 1
        assert len(request.messages) == 2 * self.said - 1
        return [ChatReply(ParsedTurn(str(self.said)), True, [1], [2], [-1.0])]


def test_episodes_are_played_beside_each_other_through_the_endpoint(with_library):
    async def run():
        endpoint, program = RecordingEndpoint(), VerifiersProgram("verifiers:guess", {"number": 2})
        await endpoint.start()
        await program.start()
        try:
            sessions = [Counting() for _ in range(4)]
            played = await asyncio.gather(
                *(program.run_episode(ROW, endpoint.open(session), endpoint.model, 30.0) for session in sessions),
                program.run_episode(ROW | {"prompt": "hang"}, "http://127.0.0.1:9/v1", "x", 0.5),
                program.run_episode(ROW, "http://127.0.0.1:9/v1", "x", 30.0),
            )
            cancelled = asyncio.create_task(program.run_episode(ROW | {"prompt": "hang"}, "x", "x", 30.0))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            with pytest.raises(ProgramExitError):
                await program.run_episode(ROW | {"prompt": "die"}, "x", "x", 30.0)
            # the next ones start it again, once
            again = await asyncio.gather(
                *(program.run_episode(ROW, endpoint.open(Counting()), endpoint.model, 30.0) for _ in range(2))
            )
            return [*again, *played], sessions
        finally:
            await program.close()
            await program.close()
            with pytest.raises(ProgramExitError):
                await program.run_episode(ROW, "x", "x", 30.0)
            await endpoint.close()

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    (*good, late, lost), sessions = asyncio.run(asyncio.wait_for(run(), 60))
    assert good == [_EpisodeResult(0.5, {"turns": 2.0}, None)] * 6 and [session.said for session in sessions] == [2] * 4
    assert late.reward is None and late.error == "the episode took longer than 0.5 s"
    assert lost.error is not None and lost.error.startswith("APIConnectionError")
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before


def test_an_environment_that_does_not_load_is_told(with_library):
    async def run():
        await VerifiersProgram("verifiers:nobody").start()

    with pytest.raises(ValueError, match="verifiers:nobody cannot be loaded by .*: ValueError: Could not import 'nobody'"):
        asyncio.run(run())


def test_a_missing_library_and_a_wrong_name_are_told():
    async def run():
        await VerifiersProgram("verifiers:guess").start()

    with pytest.raises(ValueError, match="No module named 'verifiers'"):
        asyncio.run(run())
    for target in ("verifiers:", "guess", "verifiers:--rows"):
        with pytest.raises(ValueError, match="must look like verifiers:NAME"):
            VerifiersProgram(target)
    with pytest.raises(ValueError, match="there is no interpreter 'python0'"):
        VerifiersProgram("verifiers:guess", python="python0")


@pytest.mark.slow
def test_the_rows_of_an_environment_are_written(tmp_path):
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, verifiers_host.__file__, "guess", "--arguments", '{"number": 1}', "--rows", str(file)]
    environment = {**os.environ, "PYTHONPATH": STANDIN}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(60), check=True)
    assert done.stdout == f"1 rows written to {file}\n"
    assert json.loads(file.read_text()) == {"prompt": [{"role": "user", "content": "Guess."}], "example_id": 7, "answer": "3"}
