"""The configuration layer: typed groups, strict loading, the batch plan, cross-field rules, `explain`.

Importing it needs neither torch nor Ray nor Hydra.
"""

from mindspeed_rl.config.diagnostics import MsprobeConfig, ProfilerConfig, ProfilerGroups
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.loader import build_run_config, load_run_config
from mindspeed_rl.config.megatron import RL_STAGES, SUPERVISED_STAGES, MegatronConfig
from mindspeed_rl.config.rl import IntegratedModeConfig, Resource, RLConfig
from mindspeed_rl.config.run import RunConfig

__all__ = [
    "RL_STAGES",
    "SUPERVISED_STAGES",
    "ConfigError",
    "GenerateConfig",
    "IntegratedModeConfig",
    "MegatronConfig",
    "MsprobeConfig",
    "ProfilerConfig",
    "ProfilerGroups",
    "RLConfig",
    "Resource",
    "RunConfig",
    "SamplingConfig",
    "build_run_config",
    "load_run_config",
]
