"""Games of TextArena as episodes of roles, where it is installed (envs/cpu/extras.sh)."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import pytest

from mindspeed_rl.tools import textarena
from mindspeed_rl.tools.environments import is_for_roles, make_roles_factory

TARGET = "mindspeed_rl.tools.textarena:TwoPlayers"


def play(moves: list[str], game: str = "TicTacToe-v0-raw", row: dict[str, Any] | None = None) -> tuple[list[str], Any]:
    """Whose turn it was and what it read, and the last result."""

    async def run() -> tuple[list[str], Any]:
        _, make = make_roles_factory(TARGET, {"game": game})
        environment, read = make(), []
        role, messages = await environment.reset(row or {"label": "x"})
        result: Any = None
        for move in moves:
            read.append(f"{role}: {messages[0]['content']}")
            result = await environment.step(role, move)
            _, role, messages = result
            if role is None:
                break
        await environment.close()
        return read, result

    return asyncio.run(run())


def test_it_is_an_environment_of_roles_and_says_how_to_install_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_for_roles(TARGET) and textarena.ThreePlayers.roles == ("player_0", "player_1", "player_2")
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ValueError, match="TextArena needs its package: pip install textarena"):
        textarena.TwoPlayers("TicTacToe-v0-raw")


def test_a_game_is_played_by_its_roles_to_the_rewards_at_its_end() -> None:
    pytest.importorskip("textarena")
    read, result = play(["[0]", "[4]", "[1]", "[8]", "[2]"])
    assert [text.split(":")[0] for text in read] == ["player_0", "player_1", "player_0", "player_1", "player_0"]
    assert "You are Player 1" in read[1] and "placed their symbol (O) in cell 0" in read[1]
    # a later turn has what is new: no prompt, no words of its own
    assert "You are Player" not in read[2] and "(X) in cell 4" in read[2] and "[0]\n" not in read[2]
    assert result == ({"player_0": 1.0, "player_1": -1.0}, None, [])


def test_two_invalid_moves_lose() -> None:
    pytest.importorskip("textarena")
    read, result = play(["what?", "again?"])
    assert "attempted an invalid move" in read[1] and result[0] == {"player_0": -1.0, "player_1": 1.0}


def test_a_row_is_a_game_and_the_generator_of_the_process_is_not_touched() -> None:
    pytest.importorskip("textarena")
    before = random.getstate()
    first, again, other = (play(["[x]"], "KuhnPoker-v0-raw", {"seed": seed})[0] for seed in (7, 7, 8))
    assert random.getstate() == before
    assert first == again
    games = {play(["[x]"], "KuhnPoker-v0-raw", {"label": str(index)})[0][0] for index in range(20)}
    assert len(games) > 1 and other
    with pytest.raises(ValueError, match="game 'Nothing-v9' of TextArena .*: Environment Nothing-v9 not found"):
        textarena.TwoPlayers("Nothing-v9")
