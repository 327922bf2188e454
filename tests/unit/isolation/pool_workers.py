"""Code of worker processes for the tests of the pool."""

from __future__ import annotations

import os
import time

from mindspeed_rl.isolation.channel import Channel, Message, pack


def run_worker(channel: Channel, setup: Message) -> None:
    """Do what each message says."""
    while (message := channel.receive()) is not None:
        deed = message["deed"]
        if deed == "reply":
            channel.send({"healthy": True, "pid": os.getpid(), "word": setup["word"], "size": len(message.get("data", b""))})
        elif deed == "fail":
            channel.send({"error": "no luck", "problem": "failed"})
        elif deed == "leave":
            channel.send({"healthy": False})
        elif deed == "nonsense":
            channel.send({"something": "else"})
        elif deed == "flood":
            frame = pack({"healthy": True, "pid": os.getpid()})
            os.set_blocking(channel.fileno(), True)
            while True:
                os.write(channel.fileno(), frame * 1000)
        elif deed == "twice":
            channel.send({"healthy": True, "turn": 1})
            channel.send({"healthy": True, "turn": 2})
        elif deed == "count":
            for index in range(message["count"]):
                channel.send({"index": index})
            os._exit(5)
        elif deed == "exit":
            os._exit(3)
        else:
            time.sleep(1000)
