"""A stand-in for the library of this name, with the part of its interface (0.1.11 to 0.3) that the host uses.

The library itself cannot be installed beside vLLM 0.32: what is tested is the host's protocol and the endpoint.
"""

import asyncio
import os

import openai

from verifiers.types import ClientConfig


class Guess:
    """Asks for a number until the model says it."""

    def __init__(self, number):
        self.number = number

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": "Guess."}], "example_id": 7, "answer": "3", "other": 1}]

    async def run_rollout(self, input, client, model, sampling_args, max_retries=0, state_columns=None, env_client=None):
        assert isinstance(client, ClientConfig)
        if input["prompt"] == "die":
            os._exit(3)
        if input["prompt"] == "hang":
            await asyncio.sleep(600)
        messages, turns = list(input["prompt"]), 0
        print("what an environment prints is not an answer")
        async with openai.AsyncOpenAI(base_url=client.api_base_url, api_key=os.environ[client.api_key_var]) as asked:
            while turns < 3:
                reply = await asked.chat.completions.create(model=model, messages=messages, **sampling_args)
                turns += 1
                if reply.choices[0].message.content == str(self.number):
                    break
                messages += [
                    {"role": "assistant", "content": reply.choices[0].message.content},
                    {"role": "user", "content": "No."},
                ]
        return {"reward": 1.0 / turns, "metrics": {"turns": turns, "kind": "x"}, "error": None}


def load_environment(env_id, **arguments):
    if env_id != "guess":
        raise ValueError(f"Could not import '{env_id}' environment.")
    return Guess(**arguments)
