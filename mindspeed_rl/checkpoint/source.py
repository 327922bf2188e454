"""Opens what is to be converted: an HF folder, or a Megatron checkpoint of either form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mindspeed_rl.checkpoint.hf import HfFolder, read_json
from mindspeed_rl.checkpoint.jobs import FreshGroup, Group, HfGroup
from mindspeed_rl.checkpoint.mcore import Adapters, MegatronFolder, iteration_folder, with_adapters
from mindspeed_rl.models import all_architectures, architecture_for
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.network import Network

if TYPE_CHECKING:
    from mindspeed_rl.checkpoint.dist import DistFolder

#: Folder inside a Megatron checkpoint that keeps config, generation config and tokenizer of the HF model.
HF_FILES = "huggingface"

_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.bias$|masked_bias$")
_HF_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelOptions:
    """What the user says about the model itself.

    Args:
        model_type: an upstream ``--model-type-hf`` name, checked against the checkpoint; None infers it.
        add_qkv_bias, post_norm: upstream switches; True is checked against the checkpoint.
        reward_head: the model ends in one score (``--orm``).
        mtp_num_layers: prediction layers to keep; None keeps what a Megatron source has and none of an HF source.
        num_layers, first_k_dense_replace: convert a truncated model (for debugging).
        loosely: skip tensors that the model does not have.
        hf_folder: where a Megatron source finds config.json and tokenizer, if not in the checkpoint.
        iteration: which iteration of a Megatron source.
    """

    model_type: str | None = None
    add_qkv_bias: bool = False
    post_norm: bool = False
    reward_head: bool = False
    mtp_num_layers: int | None = None
    num_layers: int | None = None
    first_k_dense_replace: int | None = None
    loosely: bool = False
    hf_folder: Path | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Args:
        kind: what it is.
        path: where it is.
        hf_config: config.json of the model, changed by the options.
        groups: its tensors in HF's terms.
        companions: folder with config and tokenizer files, if there is one.
        equal: HF tensors that repeat another one: {copy: owner}.
        layout: how a Megatron source is cut.
        adapters: LoRA weights in it.
        notices: what the user should know.
        lora: (r, alpha) that the checkpoint states.
    """

    kind: Literal["hf", "mcore", "legacy", "torch_dist"]
    path: Path
    architecture: Architecture
    network: Network
    hf_config: Mapping[str, Any]
    groups: Sequence[Group]
    companions: Path | None
    equal: Mapping[str, str] = field(default_factory=dict)
    layout: Layout | None = None
    adapters: Adapters = field(default_factory=dict)
    notices: Sequence[str] = ()
    lora: tuple[int | None, float | None] = (None, None)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the largest part of the weights."""
        sizes: dict[torch.dtype, int] = {}
        for group in self.groups:
            sizes[group.dtype] = sizes.get(group.dtype, 0) + group.num_bytes
        return max(sizes, key=sizes.__getitem__)

    def merged(self, scale: float, adapters: Adapters | None = None) -> Source:
        """The same checkpoint with adapters (its own by default) added to their weights."""
        return replace(self, groups=with_adapters(self.groups, self.adapters if adapters is None else adapters, scale))


def check_model_type(options: ModelOptions, architecture: Architecture, network: Network) -> None:
    """Raise ValueError if what the user says about the model contradicts the checkpoint; the error names what is right."""
    right = " or ".join(dict.fromkeys((*architecture.upstream_names, architecture.name)))
    name = options.model_type
    if (
        name is not None
        and name not in architecture.upstream_names
        and name not in (architecture.name, *architecture.model_types)
    ):
        known = {upstream for other in all_architectures() for upstream in (*other.upstream_names, other.name)}
        what = "is another family" if name in known else "is not supported"
        raise ValueError(f"--model-type-hf {name} {what}: the checkpoint is {architecture.name}; use {right}, or leave it out")
    if options.add_qkv_bias and not network.add_qkv_bias:
        raise ValueError(
            f"--add-qkv-bias contradicts the checkpoint: this {architecture.name} has no bias on query, key and value"
        )
    if options.post_norm and not network.post_norm:
        raise ValueError(f"--post-norm contradicts the checkpoint: {architecture.name} has no norm behind attention and MLP")


def _changed_config(config: Mapping[str, Any], options: ModelOptions) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if options.num_layers is not None:
        if not 0 < options.num_layers <= int(config.get("num_hidden_layers", 0)):
            raise ValueError(f"--num-layers {options.num_layers} must be between 1 and {config.get('num_hidden_layers')}")
        changes["num_hidden_layers"] = options.num_layers
        if config.get("layer_types"):
            changes["layer_types"] = list(config["layer_types"])[: options.num_layers]
    if options.first_k_dense_replace is not None:
        if "first_k_dense_replace" not in config:
            raise ValueError("--first-k-dense-replace needs a model whose config.json has first_k_dense_replace")
        changes["first_k_dense_replace"] = options.first_k_dense_replace
    return {**config, **changes}


def as_reward_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with one score in place of the vocabulary head.

    Raises:
        ValueError: the config is of a classifier with several labels.
    """
    names = [re.sub(r"ForCausalLM$", "ForSequenceClassification", name) for name in config.get("architectures") or []]
    classifier = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or [])
    labels = config.get("id2label") or {}
    if classifier and len(labels) != 1:
        raise ValueError(f"config.json describes a classifier with {len(labels) or 2} labels; a reward model has 1")
    return {**config, "architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _network(architecture: Architecture, config: Mapping[str, Any], options: ModelOptions) -> Network:
    network = architecture.network(config)
    if options.reward_head:
        network = network.with_head("reward")
    elif network.head == "reward":
        raise ValueError("config.json describes a classifier (a reward model); pass --orm to convert it as one")
    return network


def open_hf(path: Path, options: ModelOptions) -> Source:
    """Open an HF folder.

    Raises:
        ValueError: the folder is incomplete, of an unknown architecture, contradicts the options, or holds tensors that
            the architecture does not have.
    """
    folder = HfFolder(path)
    config = _changed_config(folder.config, options)
    architecture = architecture_for(config)
    network = replace(_network(architecture, config, options), mtp_num_layers=options.mtp_num_layers or 0)
    check_model_type(options, architecture, network)
    notices = []
    groups: list[Group] = []
    expected: set[str] = set()
    for op in architecture.weight_ops(network):
        for name, shape in zip(op.hf, op.shapes):
            if name in expected:
                continue
            expected.add(name)
            if name == "score.weight" and name not in folder.records:
                notices.append("the checkpoint has no score.weight: the reward head starts from normal(0, 0.02), seed 0")
                groups.append(FreshGroup(name, shape, folder.record("model.embed_tokens.weight").dtype))
                continue
            record = folder.record(name)
            if record.shape != shape:
                raise ValueError(f"{path}: {name} has shape {list(record.shape)}; config.json means {list(shape)}")
            groups.append(HfGroup(name, record))
    copies = architecture.hf_copies(network)
    if not network.untie_embeddings_and_output_weights and network.head == "lm":
        copies = {**copies, "lm_head.weight": "model.embed_tokens.weight"}
    copies = {copy: owner for copy, owner in copies.items() if copy in folder.records}
    groups += [HfGroup(copy, folder.records[copy]) for copy in copies]
    dropped = _dropped(folder, expected | set(copies), network, config, folder.config, options)
    notices += dropped
    if options.reward_head:
        config = as_reward_config(config)
    return Source("hf", path, architecture, network, config, groups, path, equal=copies, notices=notices)


def _dropped(
    folder: HfFolder,
    expected: set[str],
    network: Network,
    config: Mapping[str, Any],
    original: Mapping[str, Any],
    options: ModelOptions,
) -> list[str]:
    """Notices for tensors that are left behind on purpose; ValueError for those nobody knows."""
    layers, real = int(config["num_hidden_layers"]), int(original["num_hidden_layers"])
    predictions, truncated, unknown = set(), set(), []
    for name in folder.stored_names:
        if name in expected or name in folder.renamed or _HARMLESS.search(name):
            continue
        layer = int(match[1]) if (match := _HF_LAYER.match(name)) else None
        if layer is not None and layer >= real:
            predictions.add(layer)
        elif layer is not None and layer >= layers:
            truncated.add(layer)
        elif options.reward_head and name == "lm_head.weight":
            continue
        else:
            unknown.append(name)
    if unknown and not options.loosely:
        raise ValueError(
            f"{folder.path} holds {unknown[0]!r}"
            + (f" and {len(unknown) - 1} more tensors" if len(unknown) > 1 else "")
            + f" unknown to {network.architecture}; --load-checkpoint-loosely skips them"
        )
    notices = [f"skipped {len(unknown)} tensors unknown to {network.architecture}"] if unknown else []
    if predictions:
        notices.append(f"dropped {len(predictions)} multi-token-prediction layer(s); --mtp-num-layers keeps them")
    if truncated:
        notices.append(f"dropped {len(truncated)} decoder layers beyond --num-layers {layers}")
    return notices


def open_megatron(path: Path, options: ModelOptions, fallback_hf: Path | None = None) -> Source:
    """Open a Megatron checkpoint, per-rank or ``torch_dist``, mcore or legacy.

    Its config.json comes from ``options.hf_folder``, from the checkpoint itself (ours carry it), or from ``fallback_hf``.

    Raises:
        ValueError: the checkpoint is incomplete or damaged, no config.json is found, or it contradicts the options.
    """
    folder = iteration_folder(path, options.iteration)
    distributed = (folder / "metadata.json").is_file()
    opened: MegatronFolder | DistFolder
    if distributed:
        # torch.distributed.checkpoint takes a second to load, which per-rank checkpoints do not need
        from mindspeed_rl.checkpoint.dist import DistFolder

        opened = DistFolder(path, options.iteration)
    else:
        opened = MegatronFolder(path, options.iteration)
    companions = next(
        (place for place in (options.hf_folder, path / HF_FILES, fallback_hf) if place and (place / "config.json").is_file()),
        None,
    )
    if options.hf_folder is not None and companions != options.hf_folder:
        raise ValueError(f"--hf-cfg-dir {options.hf_folder} has no config.json")
    if companions is not None:
        config: Mapping[str, Any] = read_json(companions / "config.json")
    elif opened.args.hf_config is not None:
        config = opened.args.hf_config
    else:
        raise ValueError(f"{path} does not say which model it holds; pass --hf-cfg-dir with the HF folder it was made from")
    if options.reward_head:
        config = as_reward_config(config)
    config = _changed_config(config, options)
    architecture = architecture_for(config)
    network = _network(architecture, config, options)
    check_model_type(options, architecture, network)
    checkpoint = opened.open(architecture, network, options.loosely)
    network = checkpoint.network
    if options.mtp_num_layers is not None and options.mtp_num_layers < network.mtp_num_layers:
        network = replace(network, mtp_num_layers=options.mtp_num_layers)
    return Source(
        "torch_dist" if distributed else "legacy" if opened.legacy else "mcore",
        path,
        architecture,
        network,
        config,
        checkpoint.groups,
        companions,
        layout=checkpoint.layout,
        adapters=checkpoint.adapters,
        lora=(opened.args.lora_r, opened.args.lora_alpha),
    )
