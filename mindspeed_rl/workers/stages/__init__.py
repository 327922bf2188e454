"""The supervised stages, each with its data and its loss; a stage is one class and one line here."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.indexed import DOCUMENTS, list_packed_columns

#: megatron_training.stage -> module:class
STAGES = {
    "pretrain": "mindspeed_rl.workers.stages.pretraining:Pretraining",
    "sft": "mindspeed_rl.workers.stages.instruction:Instruction",
    "dpo": "mindspeed_rl.workers.stages.preference:DirectPreference",
    "simpo": "mindspeed_rl.workers.stages.preference:SimplePreference",
    "cpo": "mindspeed_rl.workers.stages.preference:ContrastivePreference",
    "orpo": "mindspeed_rl.workers.stages.preference:OddsRatioPreference",
    "kto": "mindspeed_rl.workers.stages.preference:UnpairedPreference",
    "orm": "mindspeed_rl.workers.stages.reward_model:OutcomeReward",
    "prm": "mindspeed_rl.workers.stages.reward_model:ProcessReward",
}
#: stage pretrain of documents with images, which are rows of their own
_DOCUMENTS = "mindspeed_rl.workers.stages.instruction:Documents"


def choose_stage(config: MegatronConfig) -> str:
    """Return module:class of the stage that a run file names, for its prepared data."""
    assert config.stage is not None  # a run file that trains without rollouts names one
    is_packed = isinstance(config.data_path, str) and DOCUMENTS in list_packed_columns(Path(config.data_path).expanduser())
    return _DOCUMENTS if config.stage == "pretrain" and is_packed else STAGES[config.stage]
