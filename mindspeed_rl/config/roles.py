"""Groups of a run file that have the keys of megatron_training, one a role."""

from __future__ import annotations

ROLE_GROUPS = ("actor_config", "ref_config", "reward_config", "critic_config", "teacher_config")
