"""`mindspeed-rl convert`: checkpoints between HF, Megatron (mcore and legacy) and torch_dist, under any split.

Accepts the flags of both converters of MindSpeed-LLM; docs/checkpoint_conversion.md lists them all.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from mindspeed_rl import registry
from mindspeed_rl.checkpoint.options import (
    CheckpointFormat,
    ConvertOptions,
    MlaLayout,
    ParamsDtype,
    Progress,
    ResultForm,
    SourceForm,
    TransformerImpl,
)
from mindspeed_rl.cli.options import (
    Parser,
    add_silent,
    build_options,
    get_flag,
    note_without_effect,
    print_status,
    refuse_first,
    run_resumable,
    take_adapter,
)
from mindspeed_rl.config.model_metadata import HF_FILES

if TYPE_CHECKING:
    from mindspeed_rl.checkpoint.conversion_plan import Plan

#: Flags of upstream's converters that change nothing here, and why.
_WITHOUT_EFFECT = {
    "--max-queue-size": "there is no queue: tensors are written directly",
    "--no-checking": "checks cost nothing here and stay on",
    "--spec": "the layer spec follows from config.json",
    "--vocab-file": "the vocabulary size is the one of config.json",
    "--true-vocab-size": "the vocabulary size is the one of config.json; padding is removed",
    "--ckpt-cfg-path": "model types are read from config.json",
    "--load-hf-from-config": "weights of the target HF folder are never read",
    "--loader": "--load-model-type determines it",
    "--saver": "--save-model-type determines it",
    "--context-parallel-size": "context parallelism never changes a checkpoint: any CP size loads it",
    "--target-context-parallel-size": "context parallelism never changes a checkpoint: any CP size loads it",
    "--sequence-parallel": "sequence parallelism never changes a checkpoint",
}
#: The same, for flags without a value.
_WITHOUT_EFFECT_SWITCHES = {
    "--trust-remote-code": "no code of a checkpoint is run; its Python files are copied",
    "--save-layer-by-layer": "every conversion streams",
}
_SEE = "see Unsupported options in docs/checkpoint_conversion.md"
#: Flags of features that no supported model has.
_REFUSED_SWITCHES = {
    "--add-dense-bias": f"no supported model has biases in its dense layers; {_SEE}",
    "--add-output-layer-bias": f"no supported model has a bias in its head; {_SEE}",
    "--embed-layernorm": f"no supported model has a norm after the embedding; {_SEE}",
    "--w-pack": f"Baichuan, whose query, key and value are one tensor W_pack, is not among the models; {_SEE}",
    "--qlora-nf4": f"NF4 weights need a kernel of the NPU's bitsandbytes; {_SEE}",
    "--mla-mm-split": f"Megatron's latent attention does not split its up-projections; use --mla-layout; {_SEE}",
}


def make_parser() -> Parser:
    """Build the argument parser."""
    parser = Parser(prog="convert_ckpt.py", description=__doc__, allow_abbrev=False)
    for add_group in (_add_ends, _add_model, _add_split, _add_lora, _add_running):
        add_group(parser)
    add_silent(parser, flags=_WITHOUT_EFFECT, switches={**_WITHOUT_EFFECT_SWITCHES, **_REFUSED_SWITCHES}, nargs="*")
    return parser


def _add_ends(parser: Parser) -> None:
    add = parser.add_argument_group("from and to").add_argument
    add("--load-model-type", choices=(*get_args(SourceForm), "gguf", "optim"), help="form of --load-dir; default: detected")
    add("--save-model-type", choices=get_args(ResultForm), default="mg", help="form of the result")
    add("--load-dir", type=Path, required=True, help="HF folder, Megatron checkpoint folder, or GGUF file")
    add("--save-dir", type=Path, required=True, help="destination; for mg to hf also the original HF folder")
    add("--hf-cfg-dir", type=Path, help="mg source: HF folder with config.json and tokenizer")
    add("--load-iteration", type=int, help="mg source: iteration to read; default the latest")
    add("--load-from-legacy", action="store_true", help="the mg source has the legacy layout (checked)")
    add("--save-to-legacy", action="store_true", help="write Megatron's legacy layout")
    add("--use-mcore-models", action="store_true", help="write the mcore layout (the default)")
    add("--ckpt-format", choices=get_args(CheckpointFormat), default="torch", help="mcore: one file a rank, or torch_dist")
    add("--tokenizer-model", help="checked to exist; tokenizer files are copied from the HF folder")


def _add_model(parser: Parser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model-type", choices=("GPT",), help="upstream's model class")
    add("--model-type-hf", help="checked against config.json, from which the model type is read")
    add("--add-qkv-bias", action="store_true", help="checked against config.json")
    add("--post-norm", action="store_true", help="checked against config.json")
    add("--params-dtype", choices=get_args(ParamsDtype), help="cast the weights; default: keep their dtype")
    add("--orm", action="store_true", help="reward model: one score in place of the vocabulary head")
    add("--mtp-num-layers", type=int, help="multi-token-prediction layers to keep (HF source: default none)")
    add("--num-layers", type=int, help="convert the first layers only (debugging)")
    add("--first-k-dense-replace", type=int, help="override of config.json (debugging)")
    add("--make-vocab-size-divisible-by", type=int, default=1, help="pad the vocabulary to a multiple of this x TP")
    add("--load-checkpoint-loosely", action="store_true", help="skip tensors that the model does not have")


def _add_split(parser: Parser) -> None:
    add = parser.add_argument_group("split of the result").add_argument
    add("--target-tensor-parallel-size", type=int, default=1)
    add("--target-pipeline-parallel-size", type=int, default=1)
    add("--target-expert-parallel-size", "--target-expert-model-parallel-size", type=int, default=1)
    add("--expert-tensor-parallel-size", type=int, help="TP inside an expert; default: TP")
    add("--target-data-parallel-size", type=int, default=1, help="must be 1: weights do not depend on it")
    add("--num-layer-list", nargs="+", help="layers per pipeline stage, e.g. 11,13")
    add("--num-layers-per-virtual-pipeline-stage", type=int)
    add("--noop-layers", help="positions of empty layers, e.g. 0,63")
    add("--schedules-method", choices=("dualpipev",))
    add("--moe-grouped-gemm", action="store_true", help="stack the experts of a rank")
    add("--moe-tp-extend-ep", action="store_true", help="divide experts over EP x TP, not inside")
    add("--transformer-impl", choices=get_args(TransformerImpl), default="local", help="parameter names")
    add("--mla-layout", choices=get_args(MlaLayout), default="megatron", help="packing of latent attention")


def _add_lora(parser: Parser) -> None:
    add = parser.add_argument_group("LoRA").add_argument
    add("--lora-load", type=Path, help="adapter to merge: a PEFT folder, or a mg checkpoint cut like the base")
    add("--lora-r", type=int, help="checked against the adapter")
    add("--lora-alpha", type=float, help="checked against the adapter; needed if it does not state its alpha")
    add("--lora-target-modules", nargs="*", default=[], help="checked: the adapted Megatron modules")
    add("--save-lora-to-hf", action="store_true", help="write only the adapter, as a PEFT folder")


def _add_running(parser: Parser) -> None:
    add = parser.add_argument_group("running").add_argument
    add("--workers", type=int, default=1, help="processes that write")
    add("--dry-run", action="store_true", help="print the plan and write nothing")
    add("--verify", action="store_true", help="read the result back and compare every tensor bit for bit")
    add("--overwrite", action="store_true", help="replace a checkpoint that is at the destination")
    add("--max-shard-size", help="HF result: size of a weight file; default 5GB")


def _check_flags(args: argparse.Namespace) -> None:
    for flag, reason in _REFUSED_SWITCHES.items():
        if get_flag(args, flag):
            raise ValueError(f"{flag}: {reason}")
    note_without_effect(args, {**_WITHOUT_EFFECT, **_WITHOUT_EFFECT_SWITCHES})
    if args.load_model_type == "optim":
        raise ValueError(
            "--load-model-type optim: optimizer state is not converted; torch_dist checkpoints of training load under any "
            f"layout with theirs; {_SEE}"
        )
    if args.save_model_type == "hf" or args.save_lora_to_hf:
        _check_hf_result(args)
    refuse_first(
        (
            args.target_data_parallel_size != 1,
            "--target-data-parallel-size: weights do not depend on data parallelism; leave it out",
        ),
        (args.workers < 1, f"--workers is {args.workers}; it must be at least 1"),
        (
            args.tokenizer_model not in (None, "None", "none") and not Path(args.tokenizer_model).exists(),
            f"--tokenizer-model {args.tokenizer_model} does not exist",
        ),
        (
            args.save_to_legacy and args.save_model_type == "hf",
            "--save-to-legacy contradicts --save-model-type hf",
        ),
        (
            args.ckpt_format == "torch_dist" and (args.save_to_legacy or args.save_model_type == "legacy"),
            "--ckpt-format torch_dist holds mcore checkpoints only; drop --save-to-legacy",
        ),
    )


#: Flags that describe how a Megatron result is cut; upstream's commands also give them for the source, where they apply.
_MEGATRON_RESULT_OPTIONS = (
    "expert_tensor_parallel_size",
    "num_layer_list",
    "num_layers_per_virtual_pipeline_stage",
    "noop_layers",
    "schedules_method",
    "moe_grouped_gemm",
    "moe_tp_extend_ep",
    "transformer_impl",
    "mla_layout",
    "ckpt_format",
    "make_vocab_size_divisible_by",
)


def _check_hf_result(args: argparse.Namespace) -> None:
    """Raise ValueError for a split of an HF folder, which has none; print the other flags without effect on it."""
    for name in ("target_tensor_parallel_size", "target_pipeline_parallel_size", "target_expert_parallel_size"):
        value, flag = vars(args)[name], f"--{name.replace('_', '-')}"
        if value != 1:
            raise ValueError(f"{flag} {value}: the result is a Hugging Face folder, which is not split; leave it out or give 1")
    # a namespace does not record the given flags: a value that differs from its default was given
    defaults = make_parser().parse_args(["--load-dir", ".", "--save-dir", "."])
    for name in _MEGATRON_RESULT_OPTIONS:
        if vars(args)[name] != vars(defaults)[name]:
            print_status(
                f"note: --{name.replace('_', '-')} has no effect: the result is a Hugging Face folder; a source has its own"
            )


def print_plan(plan: Plan) -> None:
    """Print the files and tensors that a conversion would write."""
    source, destination = plan.source, plan.destination
    print(
        f"{source.path} ({source.kind}, {source.architecture.name}, {source.dtype}) -> {destination.final} ({destination.kind})"
    )
    for path, num_bytes, items in plan.files:
        print(f"{path}  {num_bytes / 1e6:.1f} MB, {len(items)} tensors")
        for name, shape, dtype in items:
            print(f"    {name}  {list(shape)} {str(dtype).removeprefix('torch.')}")
    print(
        f"{len(plan.files)} files, {plan.num_bytes / 1e9:.3f} GB; tensors in memory at most {plan.memory_bytes / 1e6:.1f} MB "
        "per worker; nothing was written"
    )


class Bar(Progress):
    """A tqdm bar in bytes, which shows GB/s and the time left on a terminal and nothing when piped."""

    def start(self, what: str, total_bytes: int, done_bytes: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            desc=what, total=total_bytes, initial=done_bytes, unit="B", unit_scale=True, unit_divisor=1000, disable=None
        )

    def advance(self, num_bytes: int) -> None:
        self._bar.update(num_bytes)

    def finish(self) -> None:
        self._bar.close()

    def warn(self, text: str) -> None:
        print_status(f"note: {text}")


def _convert(args: argparse.Namespace) -> int:
    _check_flags(args)
    take_adapter(args, "--load-dir")
    if args.load_model_type == "gguf" or args.load_dir.suffix == ".gguf":
        return _convert_gguf(args)
    options = build_options(ConvertOptions, args)
    # the options are checked before torch is imported, which takes seconds
    from mindspeed_rl.checkpoint import command, convert, lora
    from mindspeed_rl.checkpoint.trained_template import copy_beside_adapter

    source = command.open_source(options)
    for notice in source.warnings:
        print_status(f"note: {notice}")
    if args.save_lora_to_hf:
        source, scale = command.adapter_of(options, source)
        if args.dry_run:
            print_status(f"would write {len(source.adapters)} adapters to {options.save_dir}")
            return 0
        base = str(source.companions) if source.companions is not None else None
        shards = [shard for _, a, b in source.adapters.values() for shard in (*a, *b)]
        num_bytes = sum(math.prod(shard.shape) * shard.dtype.itemsize for shard in shards)
        with convert.nothing_left(options.save_dir, num_bytes, [lora.get_staging_path(options.save_dir)]):
            modules = lora.export_peft(options.save_dir, source.adapters, scale, base, source.architecture)
            if (trained := options.load_dir / HF_FILES).is_dir():  # beside a checkpoint of a training
                copy_beside_adapter(trained, options.save_dir)
        print_status(f"wrote the adapter of {', '.join(modules)} to {options.save_dir}")
        return 0
    plan = command.plan_conversion(options, source)
    if args.dry_run:
        print_plan(plan)
        return 0
    convert.check_destination(plan.destination)
    start = time.perf_counter()
    result = convert.run_plan(plan, workers=args.workers, verify=args.verify, progress=Bar())
    seconds = time.perf_counter() - start
    proof = ""
    if args.verify:
        skipped = f" that was not skipped ({source.num_dropped} were)" if source.num_dropped else ""
        proof = f", every tensor{skipped} verified"
    print_status(
        f"wrote {result}: {plan.num_bytes / 1e9:.2f} GB in {seconds:.1f} s ({plan.num_bytes / 1e9 / seconds:.2f} GB/s){proof}"
    )
    return 0


def _convert_gguf(args: argparse.Namespace) -> int:
    """Write a GGUF file as a Hugging Face folder, from which every other form can be made."""
    if args.save_model_type != "hf":
        raise ValueError("a GGUF file becomes a Hugging Face folder: give --save-model-type hf, and convert its result further")
    defaults = make_parser().parse_args(["--load-dir", ".", "--save-dir", "."])
    used = "load_model_type save_model_type load_dir save_dir params_dtype max_shard_size overwrite dry_run".split()
    if other := next((name for name, value in vars(defaults).items() if name not in used and vars(args)[name] != value), None):
        raise ValueError(f"--{other.replace('_', '-')}: it does not apply to a GGUF file")
    # by name: it imports torch, which wrong options do not need
    convert_file = registry.load("mindspeed_rl.checkpoint.gguf:convert_file", "convert")
    print_status(convert_file(build_options(ConvertOptions, args), dry_run=args.dry_run))
    return 0


def main(argv: Sequence[str]) -> int:
    """Convert a checkpoint and return the exit status. Errors are one line on stderr."""
    return run_resumable(lambda: _convert(make_parser().parse_args(list(argv))))
