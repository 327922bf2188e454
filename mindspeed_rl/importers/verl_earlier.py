"""The supervised trainer of verl before 0.9, `fsdp_sft_trainer`: its options as options of `sft_trainer`, and what differs.

Its loss is a mean over the tokens of a device's micro-batch, and the means are averaged; a row of two columns ends with the
tokenizer's eos token, whatever the chat template has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import Option, no_effect, refused, with_others
from mindspeed_rl.importers.recipe import Recipe

TRAINER = "fsdp_sft_trainer"
#: option -> option of sft_trainer
_RENAMED = {
    "model.partial_pretrain": "model.path",
    "model.strategy": "engine.strategy",
    "model.fsdp_config.model_dtype": "engine.model_dtype",
    "model.fsdp_config.wrap_policy.min_num_params": "engine.wrap_policy.min_num_params",
    "model.fsdp_config.offload_params": "engine.param_offload",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    "use_remove_padding": "model.use_remove_padding",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "data.multiturn.enable_thinking_key": "data.enable_thinking_key",
    "trainer.checkpoint.save_contents": "checkpoint.save_contents",
    "trainer.checkpoint.load_contents": "checkpoint.load_contents",
}
#: options of a row of two columns, which is not a conversation
PROMPT, RESPONSE = "data.prompt_key", "data.response_key"
_COLUMNS = with_others("preprocessing", off="columns of that preprocessing", by_nature=True)
_NESTED = refused("columns inside of a column; write them as columns of their own")
#: options that sft_trainer has not
TABLE: dict[str, Option] = {
    PROMPT: _COLUMNS,
    RESPONSE: _COLUMNS,
    "data.prompt_dict_keys": _NESTED,
    "data.response_dict_keys": _NESTED,
    "data.chat_template": refused("another chat template than the tokenizer's"),
    "data.micro_batch_size": no_effect("micro_batch_size_per_gpu is read"),
    "model.fsdp_config.cpu_offload": no_effect("memory of the engine"),
    "trainer.default_hdfs_dir": no_effect("checkpoints are on this machine"),
    "trainer.device": no_effect("the platform chooses the device"),
    "model.use_liger": no_effect("the platform chooses the kernels"),
}
#: options without a group, as Hydra has groups of files otherwise
PLAIN = ("ulysses_sequence_parallel_size", "use_remove_padding")
#: defaults that sft_trainer has otherwise
_DEFAULTS: dict[str, object] = {
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine",
    "data.use_dynamic_bsz": False,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
}


def rename_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of sft_trainer, with the defaults of the earlier trainer.

    Raises:
        ConfigError: a row has several columns of one kind, the schedule is another one, or the run ends before it.
    """
    taken = dict(options)
    is_conversation = taken.pop("data.multiturn.enable", False) in (True, "true", "True")
    names = {PROMPT: taken.pop(PROMPT, "question"), RESPONSE: taken.pop(RESPONSE, "answer")}
    for name, value in names.items():
        if isinstance(value, list) and len(value) != 1:
            raise ConfigError([f"{name}: not available here: several columns, {', '.join(map(str, value))}"])
        names[name] = value[0] if isinstance(value, list) else value
    taken = {_RENAMED.get(name, name): value for name, value in taken.items()}
    taken = {**_DEFAULTS, **taken, **({} if is_conversation else names)}
    if taken["optim.lr_scheduler_type"] != "cosine":
        raise ConfigError([f"optim.lr_scheduler={taken['optim.lr_scheduler_type']}: not available here; cosine is"])
    if taken.get("trainer.total_training_steps") is not None:
        raise ConfigError(["trainer.total_training_steps: not available here: a run that ends before its cosine, which is over "
                           "the steps of trainer.total_epochs"])  # fmt: skip
    return taken


def name_differences(recipe: Recipe, *, has_columns: bool) -> Recipe:
    """Return the plan with what the earlier trainer has otherwise.

    Args:
        has_columns: rows are a prompt and a response.
    """
    return replace(
        recipe,
        aggregation="means of the micro-batches of each device",
        sample_borders="the tokenizer's eos token after a response" if has_columns else None,
    )
