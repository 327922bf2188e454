"""Games of the TextArena package as episodes of several roles: `environment` of `agent_loop: roles`, one role per player.

    environment: mindspeed_rl.tools.textarena:TwoPlayers
    args: {game: TicTacToe-v0-raw}

A game's name with `-raw` is best: its players read only what is new, and the conversation of a role keeps the rest. The package
is optional (`pip install textarena`); releases from 0.7 on.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from mindspeed_rl.tools.interface import JsonObject

#: games draw from Python's global generator, which is the process's too; one game draws at a time
_RANDOM = threading.Lock()


def _load() -> ModuleType:
    """Return the package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise ValueError(f"rl_config.environment: TextArena needs its package: pip install textarena ({error})") from error


class TwoPlayers:
    """A game of two players; a row of the data set is a game: its column `seed`, else all its columns, decide what is random.

    Rewards are the game's at its end, such as 1 for the winner and -1 for the loser, or the smaller one for an invalid move.
    """

    roles: ClassVar[tuple[str, ...]] = ("player_0", "player_1")

    def __init__(self, game: str, **options: Any) -> None:
        """Make a game.

        Args:
            game: its name in TextArena.
            options: options of the game.

        Raises:
            ValueError: there is no such game.
        """
        package = _load()
        try:
            self._game = package.make(game, **options)
        except (ValueError, TypeError, ImportError) as error:
            raise ValueError(f"rl_config.environment: game {game!r} of TextArena {package.__version__}: {error}") from error
        self._own_words = package.ObservationType.PLAYER_ACTION
        self._drawn: Any = None

    def reset(self, task: Mapping[str, object]) -> tuple[str, list[JsonObject]]:
        """See `RolesEnvironment`."""
        seed = task.get("seed")
        if not isinstance(seed, int):
            text = json.dumps(dict(task), sort_keys=True, default=str)
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
        self._drawn = random.Random(seed).getstate()
        self._play("reset", num_players=len(self.roles), seed=seed)
        return self._read()

    def step(self, role: str, text: str) -> tuple[dict[str, float], str | None, list[JsonObject]]:
        """See `RolesEnvironment`."""
        done, _ = self._play("step", action=text)
        if not done:
            return {}, *self._read()
        rewards = self._play("close")
        # some releases return the rewards alone
        rewards = rewards[0] if isinstance(rewards, tuple) else rewards
        return {self.roles[player]: float(value) for player, value in (rewards or {}).items()}, None, []

    def _read(self) -> tuple[str, list[JsonObject]]:
        """Return the role that is next, and what it reads; its own words are in its conversation already."""
        player, observed = self._play("get_observation")
        if not isinstance(observed, str):
            observed = "\n".join(text for sender, text, kind in observed if sender != player or kind != self._own_words)
        return self.roles[player], [{"role": "user", "content": observed}]

    def _play(self, method: str, **arguments: object) -> Any:
        """Call the game, whose numbers come from its own seed; the process's generator stays as it is."""
        with _RANDOM:
            before = random.getstate()
            random.setstate(self._drawn)
            try:
                return getattr(self._game, method)(**arguments)
            finally:
                self._drawn = random.getstate()
                random.setstate(before)


class ThreePlayers(TwoPlayers):
    """A game of three players."""

    roles: ClassVar[tuple[str, ...]] = ("player_0", "player_1", "player_2")
