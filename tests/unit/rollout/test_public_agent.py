"""A public agent program plays samples unchanged: mini-swe-agent, with its own loop, prompts, tool and client."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from test_agent_loops import PROMPT, SAMPLING, TOKENIZER, settings
from test_requested_turns import ALONE, Writer, check_exact

from mindspeed_rl.config.keys.rl import AgentKeys
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentRunner, Task
from mindspeed_rl.rollout.trajectory import Trajectory

MINI = Path(sys.prefix, "agents", "bin", "mini")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MINI.exists(), reason="there is no Python with mini-swe-agent here: bash envs/cpu/extras.sh"),
]


def call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def test_mini_swe_agent_repairs_a_file_and_its_turns_are_exact() -> None:
    """A scripted model plays the public agent program unchanged; the test grades its files."""
    command = [
        str(MINI),
        "-m",
        "openai/policy",
        "-t",
        "{task}",
        "-y",
        "-l",
        "0",
        "--exit-immediately",
        "-o",
        "{folder}/log.json",
    ]
    env = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": "{folder}",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of prices
    }
    texts = [
        f"I write the file. {call('echo return a - b > calc.txt; cat calc.txt')}",
        f"Now the repair. {call('sed -i s/-/+/ calc.txt')}",
        f"Done. {call('echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT')}",
    ]
    engine = Writer(texts)
    agent = AgentKeys(command=command, env=env, grader=["grep", "-qx", "return a + b", "calc.txt"], timeout_s=400)
    limits = TrajectoryLimits(100_000, 50_000, 200_000)

    async def run() -> Trajectory:
        runner = AgentRunner(load_agent_loop("program")(settings(turns=ALONE, agent=agent, limits=limits)))
        await runner.start()
        try:
            return await runner.sample(engine, Task(PROMPT, SAMPLING, 5, None, {"task": "Repair calc.txt."}))
        finally:
            await runner.close()

    result = asyncio.run(asyncio.wait_for(run(), 500))
    assert not result.failure and result.final_reward == 1.0 and result.metrics["turns"] == 3
    check_exact(result, engine)
    (sequence,) = result.sequences
    whole = TOKENIZER.decode([*sequence.prompt_ids, *result.token_ids])
    assert "Repair calc.txt." in TOKENIZER.decode(list(sequence.prompt_ids)) and "return a - b" in whole
    assert all(text in whole for text in texts)
