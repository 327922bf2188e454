"""A run file as one object, and the records that follow from it."""

from __future__ import annotations

import glob
import os
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from mindspeed_rl.config.keys.audit import AuditKeys
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig, ProfilerGroups
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import SUPERVISED_STAGES, MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.serve import ServeConfig
from mindspeed_rl.config.model_metadata import ModelMetadata
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.files import read_json
from mindspeed_rl.hub import find_cached, find_folder

#: values of `platform` in a run file: auto, or a device kind of `mindspeed_rl.platform`
PlatformName = Literal["auto", "npu", "cpu", "cuda"]
PLATFORMS: tuple[PlatformName, ...] = get_args(PlatformName)


#: longest request of a judge where neither key nor model says less and the rollout's sequences are short; in tokens
_JUDGE_LEN = 8192
#: the key that gets another value where actor and critic would save into one folder
CRITIC_FOLDER = "critic_config.save"


@dataclass(frozen=True)
class Derivation:
    """A value that the run file leaves out or that cannot be used, and what it was derived from."""

    value: Any
    source: str


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All values of a run file, typed and merged.

    Attributes:
        megatron_training: keys that all roles share, with the model block it names.
        actor_config: shared keys, model block and the role's keys merged; so are the other roles.
        ref_config: the actor's merged keys when the run file has no such group.
        reward_config, critic_config, teacher_config, vit_config: None when the run file has no such group.
        rl_config, generate_config: None in supervised stages.
        serve_config: None but for a server.
        aliased: the values, as the run file has them, of keys that have an alias, by dotted name.
        model_metadata: shape from the model's files, by group of a role; without roles whose files are not on this machine.
        deprecated: a sentence for each key that is written by a deprecated name, by that dotted name.
        derived: the values of keys that the run file leaves out and that follow from it, by dotted name.
        ignored: the values of keys that are accepted without effect, by dotted name.
        set_keys: the keys that the run file or an override set, by group (model blocks not included).
    """

    config_name: str
    config_dir: str
    platform: PlatformName = "auto"
    run_dir: str | None = None
    megatron_training: MegatronConfig
    actor_config: MegatronConfig
    ref_config: MegatronConfig
    reward_config: MegatronConfig | None = None
    critic_config: MegatronConfig | None = None
    teacher_config: MegatronConfig | None = None
    vit_config: MegatronConfig | None = None
    rl_config: RLConfig | None = None
    generate_config: GenerateConfig | None = None
    profiler_config: ProfilerGroups = field(default_factory=ProfilerGroups)
    msprobe_config: MsprobeConfig = field(default_factory=MsprobeConfig)
    audit: AuditKeys = field(default_factory=AuditKeys)
    serve_config: ServeConfig | None = None
    model_metadata: dict[str, ModelMetadata] = field(default_factory=dict)
    derived: dict[str, Derivation] = field(default_factory=dict)
    set_keys: dict[str, frozenset[str]] = field(default_factory=dict)
    aliased: dict[str, object] = field(default_factory=dict)
    deprecated: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, object] = field(default_factory=dict)

    @property
    def stage(self) -> str | None:
        """The stage that is trained; ray_grpo when the run file has rl_config and names no stage."""
        has_loop = self.rl_config is not None or self.serve_config is not None
        return self.megatron_training.stage or ("ray_grpo" if has_loop else None)

    @property
    def is_supervised(self) -> bool:
        """True for the stages that learn only from a dataset."""
        return self.stage in SUPERVISED_STAGES

    @cached_property
    def reward_model_keys(self) -> MegatronConfig | None:
        """Keys of the reward model: the keys of reward_config, or the actor's with the weights of `rl_config.reward_model`.

        None where only functions score.
        """
        rl = self.rl_config
        if rl is None or (self.reward_config is None and rl.reward_model is None):
            return None
        keys = replace(self.reward_config or self.actor_config, finetune=True, save=None, lora_target_modules=None)
        if rl.reward_model is None:
            return keys
        tokenizer = None if self.reward_config is None else keys.tokenizer_name_or_path
        # the model keys describe the weights of the group, not these
        return replace(
            keys.without_model_keys(),
            load=rl.reward_model,
            pretrained_checkpoint=None,
            tokenizer_name_or_path=tokenizer,
            load_iteration=None,
        )

    def read_judge_keys(self) -> GenerateConfig:
        """Return the engine's keys of the judge that the run serves: the rollout's, with lengths and layout of its own."""
        rl, generate = self.rl_config, self.generate_config
        assert rl is not None and generate is not None and rl.served_judge is not None
        path = find_folder(rl.served_judge) / "config.json"
        config = read_json(path) if path.is_file() else {}
        limit = max(_JUDGE_LEN, 2 * generate.max_model_len + rl.judge_max_tokens)
        longest = (config.get("text_config") or config).get("max_position_embeddings") or limit
        return replace(
            generate,
            infer_tensor_parallel_size=rl.judge_tensor_parallel_size,
            infer_expert_parallel_size=1,
            enable_expert_parallel=False,
            max_model_len=rl.judge_max_model_len or min(limit, longest),
            # only of the rollout's model
            speculative_config=None,
            quantization=None,
            fp32_lm_head=None,
            lora_push="merged",
            expert_map_path=None,
            engine_kwargs=None,
            sampling_config=replace(generate.sampling_config, stop=[], stop_token_ids=[], structured_output=None),
        )

    def read_teacher_keys(self, folder: str) -> MegatronConfig:
        """Return the keys of the teacher with weights in a folder: teacher_config's, or the actor's, with its own shape."""
        return replace(
            (self.teacher_config or self.actor_config).without_model_keys(),
            load=folder,
            pretrained_checkpoint=None,
            load_iteration=None,
            tokenizer_name_or_path=None,
            finetune=True,
            save=None,
            save_hf=False,
            no_save_optim=True,
            no_save_rng=True,
            lora_target_modules=None,
            freeze_vit=True,
            freeze_aligner=True,
        )

    @property
    def reads_images(self) -> bool:
        """True where the actor's files have a model of images, which is built with its tower."""
        metadata = self.model_metadata.get("actor_config")
        return metadata is not None and metadata.reads_images and not self.actor_config.language_model_only

    @property
    def is_text_only(self) -> bool:
        """True where the actor sees no images; False also where its files are not known."""
        is_known = "actor_config" in self.model_metadata or self.actor_config.language_model_only
        return is_known and not self.reads_images

    def with_shape(self, group: str) -> MegatronConfig:
        """Return the keys of a role with the shape of its config.json, where the run file leaves it to that and it is here.

        `num_attention_heads` is None where the shape is not known.
        """
        role: MegatronConfig = getattr(self, group)
        metadata = self.model_metadata.get(group)
        if role.num_layers is not None or metadata is None:
            return role
        shape = metadata.shape
        return replace(
            role,
            num_attention_heads=shape.num_heads,
            group_query_attention=shape.num_kv_heads is not None,
            num_query_groups=shape.num_kv_heads or 1,
            multi_latent_attention=shape.is_latent,
            # layers with experts have widths of their own
            ffn_hidden_size=None if shape.num_experts else shape.ffn_hidden_size,
            num_experts=shape.num_experts,
        )

    @property
    def plugin_folders(self) -> tuple[Path, ...]:
        """Folders with modules of the user: the working directory and the folder of the run file."""
        here, folder = Path.cwd(), Path(self.config_dir).resolve()
        return (here,) if folder == find_project_configs() else (here, folder)

    @property
    def response_limit(self) -> int:
        """Maximum tokens after a prompt, over all turns."""
        assert self.rl_config is not None and self.generate_config is not None
        rl, generate = self.rl_config, self.generate_config
        per_turn, total = generate.sampling_config.max_tokens, rl.max_total_response_length
        if rl.agent_loop_name == "single_turn":
            return per_turn
        if not total:
            is_set = "max_model_len" in self.set_keys.get("generate_config", ())
            total = (generate.max_model_len if is_set else self.actor_config.seq_length or 0) - rl.max_prompt_length
        return max(per_turn, total)

    @property
    def response_limit_key(self) -> str:
        """Dotted name of the key that sets the maximum."""
        assert self.rl_config is not None
        several = self.rl_config.agent_loop_name != "single_turn"
        return "rl_config.max_total_response_length" if several else "generate_config.sampling_config.max_tokens"

    @property
    def exact_slices(self) -> int:
        """Slices of a sum over tensor-parallel ranks where log-probs are exact: the larger layout's ranks; else 0."""
        if self.rl_config is None or self.generate_config is None or self.is_supervised or not self.rl_config.exact_log_probs:
            return 0
        return max(self.actor_config.tensor_model_parallel_size, self.generate_config.infer_tensor_parallel_size)

    @property
    def has_files_here(self) -> bool:
        """True where a model, a tokenizer or data that the run file names is on this machine, as a path."""
        paths = self._list_paths()
        # files of a data set begin with its prefix
        return any(os.path.exists(path) or glob.glob(f"{glob.escape(path)}_*") for path in paths)

    @property
    def has_cached_models(self) -> bool:
        """True where a model or a tokenizer that the run file names as on a hub is in its cache, with weights or without."""
        return any(find_cached(path) is not None for path in self._list_paths())

    def _list_paths(self) -> list[str]:
        """Return models, tokenizers and data that the run file names."""
        roles = [role for role in (self.actor_config, self.critic_config, self.reward_config) if role is not None]
        names: list[object] = []
        for role in roles:
            names += [role.load, role.pretrained_checkpoint, role.tokenizer_name_or_path, role.eval_data_path]
            names += list((role.eval_sets or {}).values())
            names += role.data_path if isinstance(role.data_path, list) else [role.data_path]
        return [os.path.expanduser(name) for name in names if isinstance(name, str) and name]

    def as_written(self) -> dict[str, dict[str, object]]:
        """Return the keys that the run file or an override sets, with their values, by group."""
        sampling = None if self.generate_config is None else self.generate_config.sampling_config
        holders = {"sampling_config": sampling, "run": self}
        written = {}
        for group, names in self.set_keys.items():
            holder = holders[group] if group in holders else getattr(self, group)
            known = {field.name for field in fields(holder)} if holder is not None else set()
            values = {name: getattr(holder, name) for name in sorted(names & known)}
            if values:
                written[group] = {name: asdict(value) if is_dataclass(value) else value for name, value in values.items()}
        return written
