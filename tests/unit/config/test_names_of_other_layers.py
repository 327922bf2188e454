"""The configuration layer spells out names that layers above and below it own; both sides know the same ones."""

from __future__ import annotations

from mindspeed_rl import platform
from mindspeed_rl.catalogue import STAGES
from mindspeed_rl.config import RL_STAGES, SUPERVISED_STAGES
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.schema import list_keys
from mindspeed_rl.config.run import PLATFORMS
from mindspeed_rl.workers import stages


def test_a_run_file_may_name_every_platform_and_no_other() -> None:
    assert set(PLATFORMS) == {"auto", *platform.PLATFORMS}


def test_a_run_file_may_name_every_stage_and_no_other() -> None:
    assert set(RL_STAGES) == set(STAGES)
    assert set(SUPERVISED_STAGES) == set(stages.STAGES)
    (stage,) = (member for member in list_keys(MegatronConfig)["stage"].kind.__args__ if member is not type(None))
    assert stage.__args__ == (*RL_STAGES, *SUPERVISED_STAGES)
