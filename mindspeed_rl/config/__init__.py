"""The configuration layer: typed groups, strict loading, the batch plan, cross-field rules, `explain`.

Importing it needs neither torch nor Ray nor Hydra.
"""

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys.deadlines import DeadlineKeys, Deadlines, FaultTolerance
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig, ProfilerConfig, ProfilerGroups
from mindspeed_rl.config.keys.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.keys.megatron import RL_STAGES, SUPERVISED_STAGES, MegatronConfig
from mindspeed_rl.config.keys.rl import IntegratedModeConfig, Resource, RLConfig, RouterReplay
from mindspeed_rl.config.loader import build_run_config, load_run_config
from mindspeed_rl.config.objective import Objective, formula
from mindspeed_rl.config.resolve import Run, build_batch_plan, resolve
from mindspeed_rl.config.rules.validation import missing_for_training, unavailable, validate
from mindspeed_rl.config.rules.violation import Violation
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import BatchPlan

__all__ = [
    "RL_STAGES",
    "SUPERVISED_STAGES",
    "BatchPlan",
    "ConfigError",
    "DeadlineKeys",
    "Deadlines",
    "FaultTolerance",
    "GenerateConfig",
    "IntegratedModeConfig",
    "MegatronConfig",
    "MsprobeConfig",
    "Objective",
    "ProfilerConfig",
    "ProfilerGroups",
    "RLConfig",
    "Resource",
    "RouterReplay",
    "Run",
    "RunConfig",
    "SamplingConfig",
    "Violation",
    "build_batch_plan",
    "build_run_config",
    "formula",
    "load_run_config",
    "missing_for_training",
    "resolve",
    "unavailable",
    "validate",
]
