"""Tools that behave, and tools that do not, for the tests of this folder."""

import asyncio
import os
import time


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def add_later(a: int, b: int) -> str:
    """Adds two numbers without blocking.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0)
    return f"sum {a + b}"


def undescribed(a: int) -> int:
    return a


def misbehave(how: str, detail: str = "") -> object:
    """Does what a tool should not do.

    Args:
        how: Which.
        detail: A path, for some.
    """
    if how == "hang":
        time.sleep(600)
    if how == "hang with a child":
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        with open(detail, "w") as file:
            file.write(str(child))
        time.sleep(600)
    if how == "crash":
        os._exit(7)
    if how == "raise":
        raise KeyError("no such thing")
    if how == "exit":
        raise SystemExit("bye")
    if how == "print much":
        for _ in range(1000):
            print("x" * (1 << 20))
    if how == "return much":
        return "begin" + "x" * (64 << 20) + "end"
    if how == "eat memory":
        return len(bytearray(8 << 30))
    if how == "return an object":
        return object
    if how == "return rows":
        return {"rows": [1, 2.5, None, "ü"]}
    if how == "return nothing":
        return None
    return "fine"


async def never_stop(stubborn: bool) -> str:
    """Does not end, and if stubborn not even when cancelled.

    Args:
        stubborn: Whether.
    """
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            if not stubborn:
                raise


FLAKY = {"left": 0}


async def flaky() -> str:
    """Fails as often as it was told to."""
    FLAKY["left"] -= 1
    if FLAKY["left"] >= 0:
        raise ConnectionError("try again")
    return "at last"


class Counter:
    """As MindSpeed-RL has its tools: plain methods, an instance a trajectory."""

    made: list[str] = []
    released: list[str] = []

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.counts = {}

    def get_openai_tool_schema(self):
        return self.tool_schema

    def create(self, instance_id=None, **kwargs):
        name = instance_id or f"counter-{len(self.made)}"
        self.made.append(name)
        self.counts[name] = kwargs.get("create_kwargs", {}).get("start", 0)
        return name

    def execute(self, instance_id, parameters, **kwargs):
        if parameters.get("hang"):
            time.sleep(600)
        self.counts[instance_id] += parameters["by"] * self.config["times"]
        return str(self.counts[instance_id]), 0.5, {"by": parameters["by"], "status": "ok"}

    def calc_reward(self, instance_id, **kwargs):
        return float(self.counts[instance_id]) * kwargs.get("calc_reward_kwargs", {}).get("weight", kwargs.get("weight", 1))

    def release(self, instance_id, **kwargs):
        self.released.append(instance_id)
        del self.counts[instance_id]


class Response:
    """As verl has its tools' texts."""

    def __init__(self, text):
        self.text = text


class Greeter:
    """As verl has its tools: coroutines, `create` with a response beside the id, no schema in the file needed."""

    def __init__(self, config, tool_schema):
        self.tool_schema = tool_schema

    def get_openai_tool_schema(self):
        parameters = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        return {"type": "function", "function": {"name": "greet", "description": "Greets.", "parameters": parameters}}

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        self.word = (create_kwargs or {}).get("word", "hello")
        return "one", Response("")

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(0)
        return Response(f"{self.word} {parameters['name']}"), 0.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.0

    async def release(self, instance_id, **kwargs):
        pass
