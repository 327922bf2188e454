"""One model role on this rank: engine, where its weights are, what it saves."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from mindspeed_rl.checkpoint import mcore
from mindspeed_rl.checkpoint.block_fp8 import open_weights, without_quantization
from mindspeed_rl.checkpoint.hf import HfFolderWriter, copy_companions, dtype_keys, read_json
from mindspeed_rl.checkpoint.megatron_source import open_megatron
from mindspeed_rl.checkpoint.model_source import ModelSource, base_of, lacks_score_head
from mindspeed_rl.checkpoint.source import as_reward_config, check_hf_tensors
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.model_facts import HF_FILES
from mindspeed_rl.engine.build import BuiltModel, batch_shape, build_model
from mindspeed_rl.engine.checkpoint import CheckpointSaver, holds_base, iteration_folder, load_checkpoint, settle, verify_files
from mindspeed_rl.engine.lora import save_peft
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import WithFreshHead, load_weights
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.weights import TensorSource
from mindspeed_rl.resharding.transfer import WeightStream


@dataclass(frozen=True)
class PassSettings:
    """How a role computes its rows.

    Attributes:
        packed: rows lie one after the other instead of being padded.
        pad_id: token of the padding.
        temperature: logits are divided by it.
        fixed_width: tokens to which padded rows are padded; 0 for the longest of their micro-batch.
        shares_prefixes: see `BatchShape`.
    """

    packed: bool
    pad_id: int
    temperature: float
    fixed_width: int = 0
    shares_prefixes: bool = False


class Role:
    """Actor, reference, critic or reward model. Methods are collective over the training world.

    Attributes:
        resumed: what `load_checkpoint` returned when training state was restored, else None.
    """

    def __init__(
        self,
        name: str,
        config: MegatronConfig,
        plan: ModelPlan,
        source: ModelSource,
        passes: PassSettings,
        *,
        steps_per_iteration: int | None,
        iteration: int | None = None,
    ) -> None:
        """Builds the model, loads its weights and, where it trains, its optimizer.

        Args:
            steps_per_iteration: optimizer steps of one iteration; None for a role that does not train.
            iteration: which of the source's checkpoints is loaded; None for the newest.
        """
        self.name = name
        self.config = config
        self.source = source
        self.resumed: dict[str, Any] | None = None
        iteration = source.iteration if iteration is None else iteration
        self.model: BuiltModel = build_model(config, plan, trainable=steps_per_iteration is not None)
        self.engine = TrainEngine(
            config,
            self.model,
            batch_shape(
                config,
                packed=passes.packed,
                pad_id=passes.pad_id,
                fixed_width=passes.fixed_width,
                shares_prefixes=passes.shares_prefixes,
            ),
            temperature=passes.temperature,
        )
        self._load(steps_per_iteration, iteration)
        self.offloader = self.engine.offloader
        self.stream = WeightStream(self.model)
        self._saver = CheckpointSaver(self.engine, config.save) if config.save else None

    def _load(self, steps_per_iteration: int | None, iteration: int | None) -> None:
        if self.source.kind == "training":
            # before anything is read of it: this machine may have taken the place of another one
            iteration, _ = settle(self.source.weights, iteration)
        if self.source.kind == "training" and not holds_base(self.source.weights, iteration):
            self._load_start(base_of(self.config, self.name))
        else:
            self._load_start(self.source, iteration)
        if steps_per_iteration is not None:
            # before the checkpoint: its optimizer state needs an optimizer to go into
            self.engine.start_training(steps_per_iteration)
        if self.source.kind == "training":
            loaded = load_checkpoint(self.engine, self.source.weights, iteration)
            if steps_per_iteration is not None and not self.config.finetune:
                self.resumed = loaded

    def _load_start(self, source: ModelSource, iteration: int | None = None) -> None:
        """Weights of a source that holds nothing but weights."""
        if source.kind == "training":
            return
        plan = self.model.plan
        fresh_head = plan.model_config.head == "reward" and lacks_score_head(source, iteration)
        if source.kind == "hf":
            loosely = self.config.load_checkpoint_loosely
            check_hf_tensors(source.weights, plan.architecture, plan.model_config, loosely=loosely)
            tensors: TensorSource = open_weights(source.weights)
        else:
            stored = plan.model_config.with_head("lm") if fresh_head else plan.model_config
            loosely = self.config.load_checkpoint_loosely
            verify_files(mcore.iteration_folder(source.weights, iteration), "convert it again")
            tensors = open_megatron(source.weights, plan.architecture, stored, iteration, loosely=loosely, verified=True)
        load_weights(self.model, WithFreshHead(tensors, plan.model_config.hidden_size) if fresh_head else tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that the model computes with."""
        return torch.bfloat16 if self.config.bf16 else torch.float32

    def save(self, iteration: int, run_state: dict[str, Any]) -> None:
        """Writes a training checkpoint and, with `save_hf`, a Hugging Face folder (`<save>/hf/latest` is the newest)."""
        if self._saver is None:
            return
        if self._saver.disks.leads:
            self._save_companions(self._saver.folder / HF_FILES)
        self._saver.save(iteration, run_state)
        if self.config.save_hf:
            self._export(iteration_folder(self._saver.folder / "hf", iteration))

    def _export(self, folder: Path) -> None:
        """The folder holds the weights, and `latest` beside it names it; half of it is never there.

        Raises:
            ValueError: the disk does not take it.
        """
        partial = folder.with_name(f"{folder.name}.partial")
        try:
            self.save_hf(partial)
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(partial, folder)
                link = folder.with_name("latest.partial")
                link.unlink(missing_ok=True)
                link.symlink_to(folder.name)
                # in one step: who reads `latest` finds the folder before or this one
                os.replace(link, folder.with_name("latest"))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ValueError(f"save: {folder} could not be written: {error}") from error

    def _save_companions(self, folder: Path) -> None:
        """Puts config.json and tokenizer beside the checkpoints, once, so that they say which model they hold."""
        if (folder / "config.json").is_file():
            return
        config = read_json(self.source.hf_folder / "config.json")
        changes = {**without_quantization(config), **dtype_keys(config, self.dtype)}
        if self.model.plan.model_config.head == "reward":
            changes = {**as_reward_config(config), **changes}
        copy_companions(self.source.hf_folder, folder, changes)

    def poll_save(self) -> None:
        """Completes a background save that is through."""
        if self._saver is not None:
            self._saver.poll()

    def finish_saves(self) -> None:
        """Returns when all checkpoints are complete."""
        if self._saver is not None:
            self._saver.finish()

    def save_hf(self, folder: Path) -> None:
        """Writes the weights as a folder that transformers and vLLM load.

        Adapters are merged; with `lora_ckpt_filter` those of a language model are written alone, as a folder that `peft` loads.
        """
        # what a save that was killed has left
        if dist.get_rank() == 0 and folder.exists():
            shutil.rmtree(folder)
        lora = LoraSettings.from_config(self.config)
        if lora is not None and self.config.lora_ckpt_filter and self.model.plan.model_config.head == "lm":
            save_peft(self.model, lora, folder, str(self.source.hf_folder))
            return
        if dist.get_rank() == 0:
            config = read_json(self.source.hf_folder / "config.json")
            changes = {**without_quantization(config), **dtype_keys(config, self.dtype)}
            if self.model.plan.model_config.head == "reward":  # transformers finds the scored token by the padding behind it
                changes = {**as_reward_config(config), **changes, "pad_token_id": self.engine.shape.pad_id}
            with HfFolderWriter(folder, self.source.hf_folder, changes) as writer:
                writer.add_all(self.stream.named_tensors(ranks=[0]))
        else:
            # gathering is collective, so it is gone through to the end on every rank
            for _ in self.stream.named_tensors(ranks=[0]):
                pass
        dist.barrier()
