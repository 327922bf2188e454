"""The configuration layer: typed groups, strict loading, names of other projects.

Importing it needs neither torch nor Ray nor Hydra.
"""

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys.deadlines import DeadlineKeys, Deadlines, FaultTolerance
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig, ProfilerConfig, ProfilerGroups
from mindspeed_rl.config.keys.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.keys.megatron import RL_STAGES, SUPERVISED_STAGES, MegatronConfig
from mindspeed_rl.config.keys.rl import IntegratedModeConfig, Resource, RLConfig, RouterReplay
from mindspeed_rl.config.keys.serve import ServeConfig
from mindspeed_rl.config.loader import build_run_config, load_run_config
from mindspeed_rl.config.run import RunConfig

__all__ = [
    "RL_STAGES",
    "SUPERVISED_STAGES",
    "ConfigError",
    "DeadlineKeys",
    "Deadlines",
    "FaultTolerance",
    "GenerateConfig",
    "IntegratedModeConfig",
    "MegatronConfig",
    "MsprobeConfig",
    "ProfilerConfig",
    "ProfilerGroups",
    "RLConfig",
    "Resource",
    "RouterReplay",
    "RunConfig",
    "SamplingConfig",
    "ServeConfig",
    "build_run_config",
    "load_run_config",
]
