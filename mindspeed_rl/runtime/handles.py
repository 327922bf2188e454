"""The types of Ray's actors, which its own signatures leave open."""

from __future__ import annotations

from typing import TypeVar, cast

from ray.actor import ActorHandle

Actor = TypeVar("Actor")


def actor_handle(created: ActorHandle[Actor] | type[Actor]) -> ActorHandle[Actor]:
    """What `remote` of an actor class returned; Ray declares the class too, for editors that complete names of methods."""
    return cast("ActorHandle[Actor]", created)
