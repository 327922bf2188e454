"""From the options of `mindspeed-rl convert` to an opened source, a destination and the plan between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.checkpoint import lora
from mindspeed_rl.checkpoint.conversion_plan import WRITTEN_BELOW, Destination, Plan, make_plan
from mindspeed_rl.checkpoint.mcore import TRACKER_NAME, MegatronFolder
from mindspeed_rl.checkpoint.megatron_args import parse_layers
from mindspeed_rl.checkpoint.options import ConvertOptions, ParamsDtype, SourceForm
from mindspeed_rl.checkpoint.source import ModelOptions, Source, open_hf, open_megatron
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig

DTYPES: dict[ParamsDtype, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def open_source(options: ConvertOptions) -> Source:
    """Open the checkpoint at `load_dir`, checked; no weights are read yet.

    Raises:
        ValueError: it is not what the options say, or the conversion would only copy it.
    """
    form = options.load_model_type or _detect_form(options.load_dir)
    _check_folders(options)
    if form == options.save_model_type == "hf" and options.lora_load is None and options.params_dtype is None:
        raise ValueError(
            "--save-model-type hf of an HF source would only copy it; give --lora-load to merge an adapter, or --params-dtype"
        )
    model = ModelOptions(
        model_type=options.model_type_hf,
        add_qkv_bias=options.add_qkv_bias,
        post_norm=options.post_norm,
        reward_head=options.orm,
        mtp_num_layers=options.mtp_num_layers,
        num_layers=options.num_layers,
        first_k_dense_replace=options.first_k_dense_replace,
        loosely=options.load_checkpoint_loosely,
        hf_folder=options.hf_cfg_dir,
        iteration=options.load_iteration,
    )
    if form == "hf":
        if options.load_iteration is not None:
            raise ValueError(
                f"--load-iteration {options.load_iteration} needs a Megatron source; {options.load_dir} is read as an HF folder"
            )
        return open_hf(options.load_dir, model)
    if options.num_layers is not None or options.first_k_dense_replace is not None:
        raise ValueError("--num-layers and --first-k-dense-replace need an HF source")
    # the original HF folder may be given as --save-dir (see `_destination`), and has the config.json
    source = open_megatron(options.load_dir, model, options.save_dir if options.save_model_type == "hf" else None)
    if options.load_from_legacy and source.kind != "legacy":
        raise ValueError(f"--load-from-legacy contradicts {options.load_dir}, which has the {source.kind} layout")
    return source


def _check_folders(options: ConvertOptions) -> None:
    """Raise ValueError if the result would be written into what is read, or in its place."""
    for flag, path in (("--load-dir", options.load_dir), ("--lora-load", options.lora_load)):
        if path is None:
            continue
        read, written = path.resolve(), options.save_dir.resolve()
        if read == written or read in written.parents:
            raise ValueError(f"--save-dir {options.save_dir} lies in {flag} {path}, which is read; choose another folder")
        # the folder of one iteration stands for the checkpoint that it belongs to
        root = read.parent if read.name == "release" or read.name.startswith("iter_") else read
        # an HF folder replaces what is at its place, a Megatron checkpoint a few names below it
        replaced = [written] if options.save_model_type == "hf" else [written / name for name in WRITTEN_BELOW]
        if written == root or any(place in (read, *read.parents) for place in replaced):
            raise ValueError(f"--save-dir {options.save_dir} would replace {flag} {path}, which is read; choose another folder")


def _detect_form(folder: Path) -> SourceForm:
    """Detect the form of a folder; "hf" in doubt."""
    if (folder / "config.json").is_file():
        return "hf"
    names = (TRACKER_NAME, "metadata.json", "iter_*", "release", "mp_rank_*")
    return "mg" if any(next(folder.glob(name), None) for name in names) else "hf"


def plan_conversion(options: ConvertOptions, source: Source) -> Plan:
    """Plan everything that is to be written, with adapters merged as they are read.

    Raises:
        ValueError: the split does not fit the model, or an adapter is not as the options say.
    """
    merged, peft = _merge_adapter(options, source)
    config = None if options.hf_cfg_dir is None else options.hf_cfg_dir / "config.json"
    beside = tuple(path for path in (options.lora_load, config) if path is not None)
    adapter = None if peft is None else peft.path
    return replace(make_plan(merged, _destination(options, merged), peft), beside=beside, adapter=adapter)


def adapter_of(options: ConvertOptions, source: Source) -> tuple[Source, float]:
    """Return the source with the adapters that `--save-lora-to-hf` exports, and their scale.

    Raises:
        ValueError: there are none, or they are not as the options say.
    """
    source = _with_loaded_adapters(options, source)
    if not source.adapters:
        raise ValueError("--save-lora-to-hf: neither --load-dir nor --lora-load holds LoRA weights")
    check_target_modules(options.lora_target_modules, source.adapters)
    return source, lora.check_scale(options.lora_r, options.lora_alpha, source.adapters, source.lora)


def _merge_adapter(options: ConvertOptions, source: Source) -> tuple[Source, lora.PeftMerge | None]:
    """Return the source with its adapter merged as it is read, and the PEFT adapter to merge in HF's terms."""
    path, r, alpha = options.lora_load, options.lora_r, options.lora_alpha
    if path is not None and lora.is_peft_folder(path):
        return source, lora.open_peft(path, source.architecture.weight_ops(source.model_config), r, alpha)
    source = _with_loaded_adapters(options, source)
    if not source.adapters:
        if r is not None or alpha is not None:
            raise ValueError(
                f"--lora-r and --lora-alpha need an adapter; {options.load_dir} holds none and --lora-load is not given"
            )
        return source, None
    check_target_modules(options.lora_target_modules, source.adapters)
    return source.merge_adapters(lora.check_scale(r, alpha, source.adapters, source.lora)), None


def _with_loaded_adapters(options: ConvertOptions, source: Source) -> Source:
    if options.lora_load is None:
        return source
    if source.layout is None or source.kind != "mcore":
        raise ValueError(
            f"--lora-load {options.lora_load}: a Megatron adapter needs a per-rank mcore base; PEFT folders fit any base"
        )
    folder = MegatronFolder(options.lora_load)
    adapters = folder.adapters(source.architecture, source.model_config, source.layout)
    return replace(source, adapters=adapters, lora=(folder.args.lora_r, folder.args.lora_alpha))


def check_target_modules(modules: Sequence[str], adapters: Iterable[str]) -> None:
    """Raise ValueError unless these are the adapted modules; none at all is right for any adapter.

    Args:
        adapters: names of the adapted parameters.
    """
    actual = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in adapters})
    if modules and sorted(modules) != actual:
        raise ValueError(f"--lora-target-modules {' '.join(modules)} does not match the adapter, which has {' '.join(actual)}")


def _destination(options: ConvertOptions, source: Source) -> Destination:
    common: dict[str, Any] = {
        "dtype": None if options.params_dtype is None else DTYPES[options.params_dtype],
        "overwrite": options.overwrite,
    }
    # a folder cannot be renamed onto a link, and belongs on the disk that the link points to
    save_dir = options.save_dir.resolve() if options.save_dir.is_symlink() else options.save_dir
    if options.save_model_type == "hf":
        path = save_dir
        if (path / "config.json").is_file() and not options.overwrite:
            # upstream's first converter takes the original HF folder as --save-dir and writes below it
            path = path / "mg2hf"
        if options.max_shard_size is not None:
            common["max_shard_bytes"] = parse_size(options.max_shard_size)
        return Destination("hf", path, **common)
    if options.max_shard_size is not None:
        raise ValueError(
            f"--max-shard-size {options.max_shard_size} needs --save-model-type hf; other results have no such size"
        )
    if options.make_vocab_size_divisible_by < 1:
        raise ValueError(f"--make-vocab-size-divisible-by is {options.make_vocab_size_divisible_by}; it must be at least 1")
    legacy = options.save_to_legacy or options.save_model_type == "legacy"
    return Destination(
        "legacy" if legacy else "torch_dist" if options.ckpt_format == "torch_dist" else "mcore",
        save_dir,
        layout=_layout(options, source.model_config),
        grouped_gemm=options.moe_grouped_gemm,
        transformer_engine=options.transformer_impl == "transformer_engine",
        mindspeed_mla=options.mla_layout == "mindspeed",
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
        **common,
    )


def _layout(options: ConvertOptions, model_config: ModelConfig) -> Layout:
    """Build the target split.

    Raises:
        ValueError: it does not fit the model.
    """
    pp = options.target_pipeline_parallel_size
    layer_list = parse_layers(",".join(options.num_layer_list), "--num-layer-list") if options.num_layer_list else None
    noop = parse_layers(options.noop_layers, "--noop-layers")
    per_chunk = options.num_layers_per_virtual_pipeline_stage
    vpp = 2 if options.schedules_method == "dualpipev" else 1
    if per_chunk is not None:
        slots = model_config.num_layers + len(noop)
        if per_chunk < 1 or pp < 1 or slots % (pp * per_chunk):
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {per_chunk}: {slots} layers cannot be divided "
                f"over {pp} stages in chunks of {per_chunk}"
            )
        vpp = slots // pp // per_chunk
        if vpp == 1:
            raise ValueError(f"--num-layers-per-virtual-pipeline-stage {per_chunk} is the whole stage; use a smaller number")
    return Layout(
        num_layers=model_config.num_layers,
        tp=options.target_tensor_parallel_size,
        pp=pp,
        vpp=vpp,
        ep=options.target_expert_parallel_size,
        etp=options.expert_tensor_parallel_size,
        num_layer_list=layer_list,
        noop_layers=noop,
        num_experts=model_config.num_moe_experts or 0,
        moe_tp_extend_ep=options.moe_tp_extend_ep,
        schedule=options.schedules_method,
    )


def parse_size(text: str) -> int:
    # no more digits than a float keeps
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)([KMG]I?B)", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"--max-shard-size {text}: expected a number with KB, MB, GB, KiB, MiB or GiB, such as 5GB")
    return max(1, int(float(match[1]) * _SIZE_UNITS[match[2]]))
