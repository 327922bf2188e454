"""Addresses of judges, and the names of their votes: the one at `judge_url`, those of `judge_panel`, and those of `--judge`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from mindspeed_rl.redaction import hide_in_text

#: environment variable with the key of the first judge
API_KEY_VARIABLE = "JUDGE_API_KEY"


@dataclass(frozen=True)
class JudgeAddress:
    """A judge at an OpenAI-compatible server.

    Attributes:
        name: name of the judge in figures and messages, different from the others' of its panel.
        url: address of the server.
        model: name of the model there; None for the server's only one.
        where: key of the run file with the address.
        key_variables: environment variables that may have the key of the server; the first one that is set counts.
    """

    name: str
    url: str
    model: str | None
    where: str = "rl_config.judge_url"
    key_variables: tuple[str, ...] = (API_KEY_VARIABLE,)

    @property
    def server(self) -> str:
        """Host and port, without user and password."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def api_key(self) -> str:
        """Key of the server; empty without one."""
        return next((key for name in self.key_variables if (key := os.environ.get(name))), "")

    @property
    def part(self) -> str:
        """Name of the judge as a part of the name of a figure."""
        return re.sub(r"[^\w.-]+", "_", self.name)


def split_address(text: str) -> tuple[str, str | None]:
    """Return address and model of `[MODEL@]URL`; user and password in the address stay there."""
    model, _, url = text.rpartition("@http")
    return (f"http{url}", model) if model else (text, None)


def list_judges(
    url: str | None,
    model: str | None,
    panel: Sequence[str] = (),
    further: Sequence[str] = (),
    key_variables: tuple[str, ...] = (API_KEY_VARIABLE,),
) -> list[JudgeAddress]:
    """Return the judge at `judge_url`, those of `judge_panel`, and further ones of a command's option `--judge`.

    A judge has the name of its model, else its place among all; the key of the first is in JUDGE_API_KEY, and of the second in
    JUDGE_API_KEY_2: no server gets the key of another one.

    Args:
        key_variables: variables with the key of the first judge, where it is not that of `rl_config.judge_url`.

    Raises:
        ValueError: there is no address, one is no http(s) address, or a judge is there twice.
    """
    if not url and not further:
        raise ValueError("the reward function 'judge' needs rl_config.judge_url, the address of an OpenAI-compatible server")
    places = [("rl_config.judge_url", url, model)] if url else []
    places += [("rl_config.judge_panel", *split_address(text)) for text in panel]
    places += [("--judge", *split_address(text)) for text in further]
    judges = list[JudgeAddress]()
    for index, (where, address, name) in enumerate(places, 1):
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            form = "http://host:port/v1" + ("" if where == "rl_config.judge_url" else " or MODEL@http://host:port/v1")
            raise ValueError(f"{where} is '{hide_in_text(address)}'; it must look like {form}")
        if any((one.url, one.model) == (address, name) for one in judges):
            raise ValueError(
                f"{where} has {name or 'the model'} at {hide_in_text(address)} a second time; rl_config.judge_repeats asks a "
                "judge several times"
            )
        mine = key_variables if index == 1 else (f"{API_KEY_VARIABLE}_{index}",)
        if judges and parts.netloc == urlsplit(judges[0].url).netloc and parts.scheme == urlsplit(judges[0].url).scheme:
            mine = (*mine, *key_variables)
        judge = JudgeAddress(f"judge {index}" if name is None else name, address, name, where, mine)
        while judge.part in [one.part for one in judges]:
            judge = replace(judge, name=f"{judge.name} ({index})")
        judges.append(judge)
    return judges


@dataclass(frozen=True)
class JudgeVote:
    """A vote of a judge about each response.

    Attributes:
        name: name of the vote: the judge's, with a number where it has several.
        seed: seed of its replies; None for the server's choice.
    """

    judge: JudgeAddress
    name: str
    seed: int | None


def list_votes(judges: Sequence[JudgeAddress], repeats: int) -> list[JudgeVote]:
    """Return the votes of judges that are asked `repeats` times each; the votes of a judge have different seeds."""
    if repeats == 1:
        return [JudgeVote(judge, judge.name, None) for judge in judges]
    return [JudgeVote(judge, f"{judge.name}, vote {seed + 1}", seed) for judge in judges for seed in range(repeats)]
