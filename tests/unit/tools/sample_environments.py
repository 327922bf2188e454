"""Environments that behave, and some that do not, for the tests of this folder."""

import asyncio
import time


class Countdown:
    """Plain methods: asks for numbers down to zero."""

    def reset(self, task):
        self.left = task["from"]
        return [{"role": "system", "content": "Count."}, {"role": "user", "content": str(self.left)}]

    def step(self, messages):
        right = messages[-1]["content"] == str(self.left - 1)
        self.left -= 1
        return ([{"role": "user", "content": "go on"}] if self.left else []), float(right), self.left == 0


class Later:
    """Coroutines, with one message for short."""

    closed = 0

    async def reset(self, task):
        await asyncio.sleep(0)
        return "begin"

    async def step(self, messages):
        what = messages[-1]["content"]
        if what == "hang":
            await asyncio.sleep(600)
        if what == "raise":
            raise KeyError("no key")
        return {
            "nothing": None,
            "pair": ([], 1.0),
            "reward": ([], "1", True),
            "done": ([], 1.0, 1),
            "idle": ([], None, False),
        }.get(what, (what if what == "text" else [{"role": "robot", "content": ""}], None, False))

    async def close(self):
        Later.closed += 1


class Sleepy:
    """A plain method that blocks."""

    def reset(self, task):
        time.sleep(0.5)
        return "late"

    def step(self, messages):
        return [], None, True


class Stepless:
    """No step."""

    def reset(self, task):
        return []
