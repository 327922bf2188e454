"""The supervised stages, each with its data and its loss; a stage is one class and one line here."""

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
