"""Models and samplers of many clients on one base: the training engine and the rollout engine of this rank.

Samplers of adapters share the steps of the rollout engine. Those of full weights are folders of weights, which take turns.

Importing this imports Megatron and vLLM: `service.opening` prepares the process first.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.run import Run
from mindspeed_rl.scratch import make_owned_folder
from mindspeed_rl.service.backend import (
    CallError,
    Capabilities,
    SampleCall,
    SampleResult,
)
from mindspeed_rl.service.client_models import HEAD_A, HEAD_B, ClientModel, ClientModels
from mindspeed_rl.service.model_folder import ADAPTER, TENSORS, building
from mindspeed_rl.service.sampler_turns import SamplerTurns
from mindspeed_rl.service.sampling import SamplingEngine
from mindspeed_rl.workers.roles import Role, build_micro_batching, build_pass_settings
from mindspeed_rl.workers.rollout_replica import RolloutReplica, build_vllm

#: name of the base's weights in the rollout engine
_BASE = "base"


@dataclass(frozen=True)
class _Sampler:
    """What a sampler has in the rollout engine: an adapter there, None without one, and the name of the weights below it."""

    adapter: int | None
    weights: str


class Tenants(ClientModels):
    """Models and samplers on one base; every method runs to its end, one at a time. `Backend` describes the calls."""

    def __init__(self, run: Run, run_id: str) -> None:
        """Load the base, and build both engines.

        Args:
            run: a run file's run with `serve_config`, with its models planned.
            run_id: unique to the server and equal on all its ranks.
        """
        serve = run.config.serve_config
        assert serve is not None
        model = run.models["actor"]
        init_distributed(model.config, model.plan.layout.vpp)
        self._tokenizer = load_tokenizer_of(model.config, model.source)
        # greedy or not: clients compute with the log-probs of the model itself
        passes = replace(build_pass_settings(run, self._tokenizer), temperature=1.0, shares_prefixes=False)
        trains_all = not model.config.lora_target_modules
        # gradients of adapters are those of their models' matrices
        self._role = Role("actor", model, passes, steps_per_iteration=None, has_gradients=trains_all)
        folder = model.source.hf_folder
        offered = Capabilities(
            base_model=serve.model_name or folder.name,
            base_model_folder=folder,
            vocab_size=model.plan.model_config.vocab_size,
            max_tokens=run.generate.max_model_len,
            max_rank=0,
            num_slots=serve.num_models,
            unembed=True,
            full_weights=trains_all,
        )
        batching = build_micro_batching(run.rl, "update", 1)
        super().__init__(self._role.megatron, model.config, batching, offered, ema_decay=serve.sampler_ema_decay)
        self._replica = RolloutReplica(
            run,
            None,
            self._tokenizer,
            run_id,
            build=partial(
                build_vllm, engine_class=SamplingEngine, num_adapters=serve.num_engine_adapters or serve.num_models
            ),
        )
        assert isinstance(self._replica.engine, SamplingEngine)
        self._sampling: SamplingEngine = self._replica.engine
        self._versions = itertools.count()
        self._replica.load(self._role.stream, next(self._versions), base_only=not self._trains_all)
        ends = self._sampling.sampling.stop_token_ids
        self._turns = SamplerTurns(self._sampling, _BASE, self._load_into_engine, ends)
        self._remove_folder: Callable[[], object] = lambda: None
        if self._ranks.size == 1:
            self._folder, self._remove_folder = make_owned_folder(self, "mindspeed-rl-samplers-")
        else:  # where all machines see it; an earlier server's samplers are no one's
            self._folder = Path(serve.folder).expanduser().absolute() / "samplers"
            self._ranks.run_on_first(lambda: shutil.rmtree(self._folder, ignore_errors=True))
        self._samplers: dict[str, _Sampler] = {}
        self._sampler_names = (f"sampler-{index}" for index in itertools.count())
        self._call_names = (f"call-{index}" for index in itertools.count())

    # ------------------------------------------------------------------ folders

    def export_adapter(self, source: str | Path, folder: Path) -> None:
        """See `Backend.export_adapter`."""
        if self._trains_all:
            with building(folder) as partial_folder:
                self._write_full(self._read_weights(source), partial_folder)
        elif isinstance(source, Path):
            self._read_record(source)
            self._ranks.run_on_first(lambda: _copy_adapter(source, folder))
        else:
            model = self._find(source)
            self._ranks.run_on_first(lambda: self._write_adapter(model, folder))

    def _write_adapter(self, model: ClientModel, folder: Path) -> None:
        with building(folder) as partial_folder:
            self._write_peft(model, partial_folder)

    def _read_weights(self, source: str | Path) -> Mapping[str, Tensor]:
        """Return the full weights that a model, or a folder of one, is sampled with."""
        if isinstance(source, str):
            model = self._find(source)
            return model.averages or model.matrices
        self._read_record(source)
        tensors = load_file(source / TENSORS)
        weights = {name: tensor for name, tensor in tensors.items() if "/" not in name}
        return {name: tensors.get(f"average/{name}", tensor) for name, tensor in weights.items()}

    def _write_full(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write full weights as a folder that transformers and vLLM load."""
        self._filled = None
        self._slot.fill(weights, None)
        self._role.save_hf(folder)

    def _load_into_engine(self, name: str) -> None:
        """Give the rollout engine the full weights of a sampler, or of the base."""
        weights = self._slot.init(None, 0) if name == _BASE else load_file(self._folder / name / TENSORS)
        self._filled = None
        self._slot.fill(weights, None)
        self._replica.load(self._role.stream, next(self._versions))

    def export_merged(self, model_id: str, folder: Path) -> None:
        """Write a model as a folder that transformers and vLLM load without an adapter: the base with its matrices added."""
        if self._trains_all:
            self.export_adapter(model_id, folder)
            return
        model = self._find(model_id)
        matrices: Mapping[str, Tensor] = model.averages or model.matrices
        self._slot.fill(matrices, model.settings)
        with self._ranks.building(folder) as partial_folder:
            self._role.save_hf(partial_folder, output_layer=self._merge_head(model, matrices))

    @torch.no_grad()
    def _merge_head(self, model: ClientModel, matrices: Mapping[str, Tensor]) -> Tensor | None:
        """Return the output layer with its adapter added; None without one."""
        if HEAD_A not in matrices:
            return None
        assert model.settings is not None
        chunk = self._role.model.models[-1]
        tied = chunk.share_embeddings_and_output_weights
        weight = cast(Tensor, chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight)
        weight = self._ranks.join_vocabulary(weight.detach())[: self.capabilities.vocab_size]
        merged = weight.float() + model.settings.scale * (matrices[HEAD_B] @ matrices[HEAD_A])
        return merged.to(weight.dtype).cpu()

    # ------------------------------------------------------------------ samplers

    def make_sampler(self, source: str | Path | None) -> str:
        """See `Backend.make_sampler`."""
        name = next(self._sampler_names)
        if source is None:
            self._samplers[name] = _Sampler(None, _BASE)
            return name
        folder = self._folder / name
        if self._trains_all:
            weights = self._read_weights(source)
            with building(folder) as partial_folder:
                tensors = {key: weight.detach().cpu().contiguous() for key, weight in weights.items()}
                save_file(tensors, partial_folder / TENSORS)
            self._samplers[name] = _Sampler(None, name)
        else:
            self.export_adapter(source, folder)
            self._samplers[name] = _Sampler(self._sampling.add_adapter(folder), _BASE)
        return name

    def drop_sampler(self, sampler: str) -> None:
        """See `Backend.drop_sampler`; none of its calls is running."""
        adapter = self._find_sampler(sampler).adapter
        del self._samplers[sampler]
        if adapter is not None:
            self._sampling.drop_adapter(adapter)
        shutil.rmtree(self._folder / sampler, ignore_errors=True)

    def _find_sampler(self, sampler: str) -> _Sampler:
        if sampler not in self._samplers:
            raise CallError(f"sampler {sampler} does not exist.")
        return self._samplers[sampler]

    def start_sampling(self, sampler: str, call: SampleCall, replica: int = 0) -> str:
        """Add a call to the engine; its result comes from a `step_sampling` under the name that is returned.

        Args:
            replica: index of the engine that computes it.
        """
        found = self._find_sampler(sampler)
        call.check(self.capabilities)
        name = next(self._call_names)
        if replica == self._replica.replica:
            self._turns.start(name, call, found.adapter, found.weights)
        return name

    @property
    def num_replicas(self) -> int:
        """Return the number of rollout engines."""
        return self._replica.num_replicas

    @property
    def is_output(self) -> bool:
        """Return True on the rank that returns the results of its rollout engine."""
        return self._replica.is_output

    @property
    def is_sampling(self) -> bool:
        """Return whether calls are in the engine."""
        return self._turns.has_calls

    def step_sampling(self) -> list[tuple[str, SampleResult | Exception]]:
        """Compute a step of all calls; return those that have ended, or that the engine refuses."""
        return self._turns.step()

    def abort_sampling(self, name: str) -> None:
        """Abort a call."""
        self._turns.abort(name)

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the base."""
        return self._tokenizer

    def close(self) -> None:
        """Remove the files of samplers; engines end with the process. Not collective."""
        self._remove_folder()
        if self._ranks.size > 1:
            shutil.rmtree(self._folder, ignore_errors=True)


def _copy_adapter(source: Path, folder: Path) -> None:
    with building(folder) as partial_folder:
        shutil.copytree(source / ADAPTER, partial_folder, dirs_exist_ok=True)
