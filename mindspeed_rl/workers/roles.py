"""The models of a run on this rank: how each is built, loaded and saved."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from mindspeed_rl.adaptors.vllm_stacked_experts import join_experts
from mindspeed_rl.checkpoint import mcore
from mindspeed_rl.checkpoint.adapter_folders import find_adapter_folders
from mindspeed_rl.checkpoint.block_fp8 import open_weights, without_quantization
from mindspeed_rl.checkpoint.hf import HfFolderWriter, copy_companions, dtype_keys, mtp_keys
from mindspeed_rl.checkpoint.lora import MergedSource, open_peft
from mindspeed_rl.checkpoint.megatron_source import open_megatron
from mindspeed_rl.checkpoint.model_source import (
    base_of,
    lacks_score_head,
)
from mindspeed_rl.checkpoint.newest import ADAPTERS, AVERAGES, EXPORTS, lacks_export, list_old
from mindspeed_rl.checkpoint.published_tower import read_tower
from mindspeed_rl.checkpoint.source import check_hf_tensors, make_reward_config
from mindspeed_rl.checkpoint.trained_template import TrainedTemplate
from mindspeed_rl.config import RLConfig
from mindspeed_rl.config.model_metadata import HF_FILES
from mindspeed_rl.engine.adapter_turns import AdapterTurns
from mindspeed_rl.engine.batching import MicroBatching
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.checkpoint import (
    CheckpointSaver,
    choose_checkpoint,
    has_base_weights,
    iteration_folder,
    load_checkpoint,
    verify_files,
)
from mindspeed_rl.engine.disks import gather_objects
from mindspeed_rl.engine.interface import Adapters
from mindspeed_rl.engine.parallel import capture_rng_state, restore_rng_state
from mindspeed_rl.engine.saved_states import FreshHead
from mindspeed_rl.engine.streamed_weights import StreamedWeights
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weight_average import WeightAverage
from mindspeed_rl.engine.weights import Float32Weights
from mindspeed_rl.files import read_json
from mindspeed_rl.models.plan import ModelSource, RoleModel
from mindspeed_rl.models.weights import TensorSource
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.resharding.transfer import WeightSource, WeightStream
from mindspeed_rl.run import Run
from mindspeed_rl.workers.engines import PassSettings, build_engine
from mindspeed_rl.workers.scoring import OutcomeScoring, ProcessScoring

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: name of the output layer in checkpoints of transformers
OUTPUT_LAYER = "lm_head.weight"


def build_micro_batching(rl: RLConfig, use: Literal["update", "actor", "ref"], size: int) -> MicroBatching:
    """Return the limits of a micro-batch of updates, or of forward passes of the actor or the reference.

    Args:
        rl: the group of the run file.
        use: the passes that are limited.
        size: rows of a micro-batch without a token budget.
    """
    if not rl.use_dynamic_bsz:
        return MicroBatching(size)
    budgets = {
        "update": (rl.update_max_packing_token_size, rl.update_dynamic_max_batch_size),
        "actor": (rl.actor_max_packing_token_size, rl.actor_dynamic_max_batch_size),
        "ref": (rl.ref_max_packing_token_size, rl.ref_dynamic_max_batch_size),
    }
    return MicroBatching(size, *budgets[use])


class Role:
    """Actor, reference, critic or reward model. Methods are collective over the training world.

    Attributes:
        trains: False for a model whose weights no optimizer changes.
        adapters: low-rank adapters of the model; None without.
        replay_experts: see `engines.BuiltEngine`.
        turns: its adapters of several names, which take turns in the model; None where it has one or none.
        resumed: the result of `load_checkpoint` when training state was restored, else None.
    """

    def __init__(
        self,
        name: str,
        model: RoleModel,
        passes: PassSettings,
        *,
        steps_per_iteration: int | None,
        moves_slowly: bool = False,
        ema_decay: float = 0.0,
        has_gradients: bool = False,
        adapter_names: Sequence[str] = (),
    ) -> None:
        """Build the model, load its weights and, where it trains, its optimizer.

        Args:
            name: name of the role, for messages.
            model: its keys, plan and weights.
            passes: how rows are computed.
            steps_per_iteration: optimizer steps of one iteration; None for a role that does not train.
            moves_slowly: no optimizer changes the model, but an average does.
            ema_decay: decay of a moving average of the weights that train; 0 for none.
            has_gradients: it has gradients for optimizers that are not its own.
            adapter_names: it has an adapter of each name; empty for one or none.
        """
        config = model.config
        self.name, self.config, self.source = name, config, model.source
        self._template = TrainedTemplate.from_config(config, model.source.hf_folder)
        self.trains = steps_per_iteration is not None
        self.resumed: dict[str, Any] | None = None
        self._random: dict[str, Tensor] | None = None
        built = build_engine(config, model.plan, model.source.hf_folder, passes, trains=self.trains or has_gradients)
        self.engine, self._files, self.adapters = built.engine, built.files, built.adapters
        self.replay_experts = built.replay_experts
        self._moves_slowly, self._ema_decay, self._adapter_names = moves_slowly, ema_decay, tuple(adapter_names)
        self.turns: AdapterTurns | None = None
        self._load(steps_per_iteration, model.source.iteration if model.iteration is None else model.iteration)
        self.offloader = self.engine.offloader
        self.stream: WeightSource = built.build_stream()
        names, others = self._adapter_names, self._adapter_names[1:]
        self._saver = CheckpointSaver(self.engine, config.save, self._files, adapters=names) if config.save else None
        self._adapter_savers: dict[str, CheckpointSaver] = {}
        if config.save:
            folder = Path(config.save, ADAPTERS)
            self._adapter_savers = {
                name: CheckpointSaver(self.engine, folder / name, self._files, adapters=(name,)) for name in others
            }

    def require_adapters(self) -> Adapters:
        """Return the adapters of a role that a rule requires to have some."""
        assert self.adapters is not None, self.name
        return self.adapters

    @property
    def megatron(self) -> TrainEngine:
        """Megatron's engine, for features that only it has; rules refuse them for a role with another one."""
        assert isinstance(self.engine, TrainEngine), type(self.engine)
        return self.engine

    @property
    def model(self) -> BuiltModel:
        """The modules of Megatron's engine."""
        return self.megatron.model

    @property
    def megatron_stream(self) -> WeightStream:
        """The weights of Megatron's engine, for features that only it has."""
        assert isinstance(self.stream, WeightStream), type(self.stream)
        return self.stream

    def stream_weights(self) -> None:
        """Keep the weights, which do not train, in host memory from now on: each pass brings them layer by layer."""
        self.offloader = self.megatron.offloader = StreamedWeights(self.model)

    def _load(self, steps_per_iteration: int | None, iteration: int | None) -> None:
        source = self.source
        if source.kind == "training":
            # before anything is read of it: this machine may have replaced another one
            iteration, _ = choose_checkpoint(source.weights, iteration)
        if source.kind == "training" and not has_base_weights(source.weights, iteration):
            self.load_base(base_of(self.config, self.name))
        elif source.kind != "training":
            self.load_base(source, iteration)
        if steps_per_iteration is not None:
            # before the checkpoint: its optimizer state needs an optimizer that takes it
            self.engine.start_training(steps_per_iteration)
            if self._ema_decay:
                self.engine.average = WeightAverage(self.engine.list_trained, self._ema_decay)
            if self._adapter_names:
                self.turns = AdapterTurns(self.megatron, self._adapter_names)
        if source.kind == "training":
            if self._moves_slowly:
                self.megatron.stored_weights = Float32Weights(self.model)
            assert iteration is not None  # chosen above
            folders = self._find_adapters(source.weights, iteration)
            own = folders[self.turns.names[0]] if self.turns is not None else source.weights
            loaded = load_checkpoint(self.engine, own, iteration, self._files)
            if steps_per_iteration is not None and not self.config.finetune:
                self.resumed = loaded
                self._random = capture_rng_state() if loaded["random_restored"] else None
            if self.turns is not None:
                for name in self.turns.names[1:]:
                    self.turns.train(name)
                    load_checkpoint(self.engine, folders[name], iteration, self._files)
                self.turns.train(self.turns.names[0])

    def _find_adapters(self, folder: Path, iteration: int) -> dict[str, Path]:
        """Return the folder of each adapter's checkpoints; empty for a role without several adapters."""
        if self.turns is None:
            return {}
        record = read_json(iteration_folder(folder, iteration) / "run_state.json")
        return find_adapter_folders(folder, record, self.turns.names, is_resumed=not self.config.finetune)

    def restore_random(self) -> None:
        """Restore the random generators of the checkpoint once all that the process has is built: building draws from them."""
        if self._random is not None:
            restore_rng_state(self._random)

    def write_lost_export(self) -> None:
        """Write the Hugging Face folder of the checkpoint that the run resumes from, if a kill came between the two."""
        saver, resumed = self._saver, self.resumed
        if saver is None or resumed is None or not self.config.save_hf or saver.folder != self.source.weights:
            return
        for name, average in self._list_exports().items():
            if gather_objects(lacks_export(saver.folder, resumed["iteration"], name))[0]:
                self.offloader.onload(params=True)
                with average:
                    self._export(iteration_folder(saver.folder / name, resumed["iteration"]))

    def load_base(self, source: ModelSource, iteration: int | None = None) -> None:
        """Load weights from a source without training state.

        Args:
            source: source of the model, of kind "hf" or "megatron".
            iteration: which of its checkpoints; None for the newest.
        """
        plan, loosely = self.engine.plan, self.config.load_checkpoint_loosely
        fresh_head = plan.model_config.head == "reward" and lacks_score_head(source, iteration)
        if source.kind == "hf":
            check_hf_tensors(source.weights, plan.architecture, plan.model_config, loosely=loosely)
            tensors: TensorSource = open_weights(source.weights)
        else:
            stored = replace(plan.model_config, head="lm") if fresh_head else plan.model_config
            verify_files(mcore.iteration_folder(source.weights, iteration), "convert it again")
            tensors = open_megatron(source.weights, plan.architecture, stored, iteration, loosely=loosely, verified=True)
        adapter = None
        if source.adapter is not None:
            adapter = open_peft(source.adapter, plan.architecture.weight_ops(plan.model_config))
        if adapter is not None and self.adapters is None:
            tensors = MergedSource(tensors, adapter)
        self.engine.load(FreshHead(tensors, plan.model_config.hidden_size) if fresh_head else tensors)
        if adapter is not None and self.adapters is not None:
            self.adapters.load(adapter)
        if self._moves_slowly:
            self.megatron.stored_weights = Float32Weights(self.model)

    def save(self, iteration: int, run_state: dict[str, object], *, companions: Sequence[Role] | None = ()) -> None:
        """Write a training checkpoint and, with `save_hf`, a Hugging Face folder (`<save>/hf/latest` is the newest).

        Args:
            iteration: after which a run resumes from it.
            run_state: see `CheckpointSaver.save`.
            companions: roles whose checkpoints of this iteration a run needs to resume from this one; None for one of them.
        """
        if self._saver is None:
            return
        files = self._saver.folder / HF_FILES
        if self._saver.disks.leads and not (files / "config.json").is_file():
            # next to the checkpoints, so that they show which model they are of
            partial = files.with_name(f"{files.name}.partial")
            copy_companions(self.source.hf_folder, partial, self._hf_changes())
            self._template.write(partial)
            shutil.rmtree(files, ignore_errors=True)
            os.replace(partial, files)
        savers = None if companions is None else [role._saver for role in companions if role._saver is not None]
        if self.turns is not None:
            for name, saver in self._adapter_savers.items():
                self.turns.train(name)
                saver.save(iteration, run_state, companions=None)
            savers = [*(savers or ()), *self._adapter_savers.values()]
            self.turns.train(self.turns.names[0])
        self._saver.save(iteration, run_state, companions=savers)
        if self.config.save_hf:
            for name, average in self._list_exports().items():
                with average:
                    self._export(iteration_folder(self._saver.folder / name, iteration))

    def averaged(self) -> AbstractContextManager[None]:
        """Return a block in which the model has the moving average in place of its weights, which stay on the device."""
        assert self.engine.average is not None
        return self.engine.average.in_place()

    def _list_exports(self) -> dict[str, AbstractContextManager[None]]:
        """Return the folders of exports, each with the block in which the model has the weights for it."""
        averages = {} if self.engine.average is None else {AVERAGES: self.averaged()}
        return {EXPORTS: nullcontext(), **averages}

    def remove_old(self, iteration: int, *, spare: int = 0) -> None:
        """Remove the checkpoints that `keep_last` leaves out, where no checkpoint of another role does it; see the saver's."""
        if self._saver is not None:
            self._saver.remove_old(iteration, spare=spare)

    def _export(self, folder: Path) -> None:
        """Write the weights to a folder, and the link `latest` next to it; the folder never has a part of them.

        Raises:
            ValueError: the disk does not take it.
        """
        assert self._saver is not None  # folders are next to its checkpoints
        partial = folder.with_name(f"{folder.name}.partial")
        try:
            self.save_hf(partial)
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(partial, folder)
                link = folder.with_name("latest.partial")
                link.unlink(missing_ok=True)
                link.symlink_to(folder.name)
                # in one step: a reader of `latest` finds the previous folder or this one
                os.replace(link, folder.with_name("latest"))
                iteration, best = int(folder.name.removeprefix("iter_")), self._saver.best
                for old in list_old(folder.parent, iteration, self.config.keep_last, best=best):
                    shutil.rmtree(old)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ValueError(f"save: {folder} could not be written: {error}") from error

    def _hf_changes(self) -> dict[str, object]:
        """Return the entries of the exported config.json that differ from the source's."""
        config = read_json(self.source.hf_folder / "config.json")
        dtype = torch.bfloat16 if self.config.bf16 else torch.float32
        # only prediction layers that train are loaded
        predicts = mtp_keys(config, self.engine.plan.model_config.mtp_num_layers)
        changes = {**without_quantization(config), **dtype_keys(config, dtype), **predicts}
        return {**make_reward_config(config), **changes} if self.engine.plan.model_config.head == "reward" else changes

    def finish_saves(self, *, wait: bool = True) -> None:
        """Wait until all checkpoints are complete; without `wait`, complete one that has been written in the background."""
        if self._saver is not None:
            self._saver.finish(wait=wait)

    def save_hf(self, folder: Path, *, output_layer: Tensor | None = None) -> None:
        """Write the weights as a folder that transformers and vLLM load.

        Adapters are merged; with `lora_ckpt_filter` only a language model's are written, as a folder that `peft` loads, or a
        folder of such folders where it has several.

        Args:
            output_layer: output layer in place of the model's, which is then not tied to the embedding; on the first rank.
        """
        head = self.engine.plan.model_config.head
        # the remains of a save that was killed
        if dist.get_rank() == 0 and folder.exists():
            shutil.rmtree(folder)
        if self.adapters is not None and self.config.lora_ckpt_filter and head == "lm":
            for name in (None,) if self.turns is None else self.turns.names:
                if self.turns is not None and name is not None:
                    self.turns.use(name)
                own = folder if name is None else folder / name
                self.adapters.save(own, str(self.source.hf_folder))
                if dist.get_rank() == 0:
                    self._template.write_beside_adapter(own)
            dist.barrier()
            return
        if dist.get_rank() == 0:
            # transformers finds the scored token by the padding after it
            padding = {"pad_token_id": self.engine.shape.pad_id} if head == "reward" else {}
            changes = self._hf_changes() | padding | ({} if output_layer is None else {"tie_word_embeddings": False})
            with HfFolderWriter(folder, self.source.hf_folder, changes, finish=self._template.write) as writer:
                plan, named = self.engine.plan, self.stream.named_tensors(ranks=[0])
                experts = plan.architecture.expert_names
                if experts.stacked or experts.may_be_transposed:
                    named = join_experts(named, plan.model_config.num_moe_experts or 0, alternate=experts.stacked)
                for name, tensor in itertools.chain(read_tower(self.config, self.source, plan), named):
                    if output_layer is None or name != OUTPUT_LAYER:
                        writer.add(name, tensor)
                if output_layer is not None:
                    writer.add(OUTPUT_LAYER, output_layer)
        else:
            # gathering is collective: every rank takes part to the end
            for _ in self.stream.named_tensors(ranks=[0]):
                pass
        dist.barrier()


@dataclass
class Roles:
    """The models of one worker; None for those that are not needed or are on other devices.

    Attributes:
        teachers: by their entries in `teacher_models`; without roles of the run, which may be teachers too.
    """

    actor: Role | None = None
    ref: Role | None = None
    critic: Role | None = None
    reward: Role | None = None
    scoring: OutcomeScoring | None = None
    teachers: dict[str, Role] = field(default_factory=dict)

    def all(self) -> list[Role]:
        """Return the models of this worker."""
        roles = (self.actor, self.critic, self.ref, self.reward, *self.teachers.values())
        return [role for role in roles if role is not None]

    def time_copies(self, timers: Timers) -> None:
        """Record the seconds in which this worker waits for copies of training state."""
        for role in self.all():
            role.offloader.timed = timers


def build_pass_settings(run: Run, tokenizer: PreTrainedTokenizerBase) -> PassSettings:
    """Return the settings that all roles of a run have in common."""
    pad_id = tokenizer.pad_token_id
    assert isinstance(pad_id, int), pad_id
    return PassSettings(
        packed=bool(run.rl.use_remove_padding),
        pad_id=pad_id,
        # greedy sampling has 0, by which no logits can be divided
        temperature=run.generate.sampling_config.temperature or 1.0,
        shares_prefixes=bool(run.rl.use_prefix_grouper),
    )


def build_role(run: Run, name: str, passes: PassSettings) -> Role:
    """Build the model of one role of the run; actor and critic train."""
    if name == "ref":
        return build_ref(run, passes)
    steps = run.plan.num_optimizer_steps if name in ("actor", "critic") else None
    ema_decay = run.rl.ema_decay if name == "actor" else 0.0
    names = run.rl.adapter_names if name == "actor" else ()
    return Role(name, run.models[name], passes, steps_per_iteration=steps, ema_decay=ema_decay, adapter_names=names)


def build_ref(run: Run, passes: PassSettings) -> Role:
    """Build the reference of a run with rollouts, or of a supervised stage."""
    model = run.models["ref"]
    moves = run.objective is not None and run.rl.sync_ref_model and run.rl.ref_model_mixup_alpha < 1.0
    role = Role("ref", model, passes, steps_per_iteration=None, moves_slowly=moves)
    if StreamedWeights.is_configured(model.config):
        role.stream_weights()
    return role


def build_teachers(run: Run, shared: PassSettings, release: Callable[[Role], None]) -> dict[str, Role]:
    """Build the teachers with weights of their own; collective over their training world.

    Args:
        run: with its models.
        shared: see `build_pass_settings`.
        release: is called with each before the next is built.
    """
    assert run.objective is not None and run.objective.distillation is not None
    settings, vocab_size = run.objective.distillation, run.models["actor"].plan.model_config.vocab_size
    built = {}
    for folder, name in settings.models.items():
        role = Role(name, run.models[name], shared, steps_per_iteration=None)
        # rows beyond the student's vocabulary are padding that was stored
        role.engine.limit_vocab(vocab_size)
        built[folder] = role
        release(role)
    return built


def build_reward_model(run: Run, tokenizer: PreTrainedTokenizerBase, shared: PassSettings) -> tuple[Role, OutcomeScoring]:
    """Build the reward model and the reader of its outputs; collective over its training world.

    Args:
        run: with its models.
        tokenizer: the actor's, whose ids the model reads.
        shared: see `build_pass_settings`.
    """
    config = run.models["reward"].config
    # `reward_tokens` are the judgements of a process reward model
    scoring = ProcessScoring(config, tokenizer, run.rl.process_reward_aggregation) if config.reward_tokens else OutcomeScoring()
    # its outputs were not sampled with the actor's temperature
    role = build_role(run, "reward", replace(shared, temperature=1.0))
    role.engine.outputs = scoring.outputs
    return role, scoring
