"""Requests that come to an engine while others are at work; for programs that compare drafts with none."""

from __future__ import annotations

from typing import Any


def sample_all(engine: Any, requests: list[tuple[list[int], Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probs of responses by name; a few requests (a prompt, its sampling) are added in every second step."""
    results, waiting, turns = {}, list(enumerate(requests)), 0
    while waiting or engine._ids:
        for number, (prompt, sampling) in waiting[:5] if turns % 2 == 0 else ():
            engine.add_request(str(number), prompt, sampling, seed=number + 100)
        waiting = waiting[5:] if turns % 2 == 0 else waiting
        results.update((name, (output.token_ids, output.log_probs)) for name, output in engine.step())
        turns += 1
    return results
