"""`mindspeed-rl convert`: checkpoints between HF, Megatron (mcore and legacy) and torch_dist, under any split.

Accepts the flags of both converters of MindSpeed-LLM; docs/checkpoint_conversion.md lists them all.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:
    import torch

    from mindspeed_rl.checkpoint.conversion_plan import Destination, Plan
    from mindspeed_rl.checkpoint.lora import PeftMerge
    from mindspeed_rl.checkpoint.source import Source
    from mindspeed_rl.models.layout import Layout
    from mindspeed_rl.models.network import Network

#: Flags of upstream's converters that change nothing here, and why.
WITHOUT_EFFECT = {
    "--max-queue-size": "there is no queue: tensors go straight to their place",
    "--no-checking": "checks cost nothing here and stay on",
    "--spec": "the layer spec follows from config.json",
    "--vocab-file": "the vocabulary size is the one of config.json",
    "--true-vocab-size": "the vocabulary size is the one of config.json; padding is removed",
    "--ckpt-cfg-path": "model types are read from config.json",
    "--load-hf-from-config": "weights of the target HF folder are never read",
    "--loader": "--load-model-type says it",
    "--saver": "--save-model-type says it",
    "--context-parallel-size": "context parallelism never changes a checkpoint: any CP size loads it",
    "--target-context-parallel-size": "context parallelism never changes a checkpoint: any CP size loads it",
    "--sequence-parallel": "sequence parallelism never changes a checkpoint",
}
_WITHOUT_EFFECT_SWITCHES = {
    "--trust-remote-code": "no code of a checkpoint is run; its Python files are copied",
    "--save-layer-by-layer": "every conversion streams",
}
#: Flags that ask for something that no supported model has.
REFUSED_SWITCHES = {
    "--add-dense-bias": "no supported model has biases in its dense layers",
    "--add-output-layer-bias": "no supported model has a bias in its head",
    "--embed-layernorm": "no supported model has a norm after the embedding",
    "--w-pack": "the legacy packed layout of Baichuan is not supported",
    "--qlora-nf4": "NF4 quantization needs an NPU kernel and is not supported",
    "--mla-mm-split": "split latent-attention projections are not supported; use --mla-layout mindspeed or megatron",
}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            known = [flag for action in self._actions for flag in action.option_strings]
            first = next((word for word in message.removeprefix(prefix).split() if word.startswith("-")), "")
            near = difflib.get_close_matches(first, known, n=1)
            message += f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(message)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(prog="convert_ckpt.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    group = parser.add_argument_group("from and to")
    group.add_argument("--load-model-type", choices=("hf", "mg", "optim"), help="form of --load-dir; default: what lies there")
    group.add_argument("--save-model-type", choices=("mg", "hf", "megatron", "legacy"), default="mg", help="form of the result")
    group.add_argument("--load-dir", type=Path, required=True, help="HF folder or Megatron checkpoint folder")
    group.add_argument("--save-dir", type=Path, required=True, help="destination; for mg to hf also the original HF folder")
    group.add_argument("--hf-cfg-dir", type=Path, help="mg source: HF folder with config.json and tokenizer")
    group.add_argument("--load-iteration", type=int, help="mg source: iteration to read; default the latest")
    group.add_argument("--load-from-legacy", action="store_true", help="the mg source has the legacy layout (checked)")
    group.add_argument("--save-to-legacy", action="store_true", help="write Megatron's legacy layout")
    group.add_argument("--use-mcore-models", action="store_true", help="write the mcore layout (the default)")
    group.add_argument(
        "--ckpt-format", choices=("torch", "torch_dist"), default="torch", help="mcore: one file a rank, or torch_dist"
    )
    group.add_argument("--tokenizer-model", help="checked to exist; tokenizer files are copied from the HF folder")

    group = parser.add_argument_group("model")
    group.add_argument("--model-type", choices=("GPT",), help="upstream's model class")
    group.add_argument("--model-type-hf", help="checked against config.json, from which the model type is read")
    group.add_argument("--add-qkv-bias", action="store_true", help="checked against config.json")
    group.add_argument("--post-norm", action="store_true", help="checked against config.json")
    group.add_argument("--params-dtype", choices=tuple(_DTYPES), help="cast the weights; default: keep their dtype")
    group.add_argument("--orm", action="store_true", help="reward model: one score in place of the vocabulary head")
    group.add_argument("--mtp-num-layers", type=int, help="multi-token-prediction layers to keep (HF source: default none)")
    group.add_argument("--num-layers", type=int, help="convert the first layers only (debugging)")
    group.add_argument("--first-k-dense-replace", type=int, help="override of config.json (debugging)")
    group.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=1, help="pad the vocabulary to a multiple of this x TP"
    )
    group.add_argument("--load-checkpoint-loosely", action="store_true", help="skip tensors that the model does not have")

    group = parser.add_argument_group("split of the result")
    group.add_argument("--target-tensor-parallel-size", type=int, default=1)
    group.add_argument("--target-pipeline-parallel-size", type=int, default=1)
    group.add_argument("--target-expert-parallel-size", "--target-expert-model-parallel-size", type=int, default=1)
    group.add_argument("--expert-tensor-parallel-size", type=int, help="TP inside an expert; default: TP")
    group.add_argument("--target-data-parallel-size", type=int, default=1, help="must be 1: weights do not depend on it")
    group.add_argument("--num-layer-list", nargs="+", help="layers per pipeline stage, e.g. 11,13")
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    group.add_argument("--noop-layers", help="positions of empty layers, e.g. 0,63")
    group.add_argument("--schedules-method", choices=("dualpipev",))
    group.add_argument("--moe-grouped-gemm", action="store_true", help="stack the experts of a rank")
    group.add_argument("--moe-tp-extend-ep", action="store_true", help="divide experts over EP x TP, not inside")
    group.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local", help="parameter names")
    group.add_argument(
        "--mla-layout", choices=("megatron", "mindspeed"), default="megatron", help="packing of latent attention"
    )

    group = parser.add_argument_group("LoRA")
    group.add_argument("--lora-load", type=Path, help="adapter to merge: a PEFT folder, or a mg checkpoint cut like the base")
    group.add_argument("--lora-r", type=int, help="checked against the adapter")
    group.add_argument("--lora-alpha", type=float, help="checked against the adapter; needed if it does not state its alpha")
    group.add_argument("--lora-target-modules", nargs="*", default=[], help="checked: the adapted Megatron modules")
    group.add_argument("--save-lora-to-hf", action="store_true", help="write the adapter alone, as a PEFT folder")

    group = parser.add_argument_group("running")
    group.add_argument("--workers", type=int, default=1, help="processes that write")
    group.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    group.add_argument("--verify", action="store_true", help="read the result back and compare every tensor bit for bit")
    group.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is at the destination")
    group.add_argument("--max-shard-size", default="5GB", help="HF result: size of a weight file")

    for flag in WITHOUT_EFFECT:
        add(flag, nargs="*", help=argparse.SUPPRESS)
    for flag in (*_WITHOUT_EFFECT_SWITCHES, *REFUSED_SWITCHES):
        add(flag, action="store_true", help=argparse.SUPPRESS)
    return parser


def _value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _form_of(folder: Path) -> Literal["hf", "mg"]:
    """What a folder looks like; "hf" in doubt."""
    from mindspeed_rl.checkpoint.mcore import LATEST_NAME

    if (folder / "config.json").is_file():
        return "hf"
    names = (LATEST_NAME, "metadata.json", "iter_*", "release", "mp_rank_*")
    return "mg" if any(next(folder.glob(name), None) for name in names) else "hf"


def _check_flags(args: argparse.Namespace) -> None:
    for flag, reason in REFUSED_SWITCHES.items():
        if _value(args, flag):
            raise ValueError(f"{flag}: {reason}")
    for flag, reason in {**WITHOUT_EFFECT, **_WITHOUT_EFFECT_SWITCHES}.items():
        if _value(args, flag):
            _say(f"note: {flag} has no effect: {reason}")
    if args.load_model_type is None:
        args.load_model_type = _form_of(args.load_dir)
    if args.load_model_type == "optim":
        raise ValueError(
            "--load-model-type optim: optimizer state is not converted; save torch_dist checkpoints to re-split it"
        )
    if args.target_data_parallel_size != 1:
        raise ValueError("--target-data-parallel-size: weights do not depend on data parallelism; leave it out")
    if args.workers < 1:
        raise ValueError(f"--workers is {args.workers}; it must be at least 1")
    if args.tokenizer_model not in (None, "None", "none") and not Path(args.tokenizer_model).exists():
        raise ValueError(f"--tokenizer-model {args.tokenizer_model} does not exist")
    if args.save_to_legacy and args.save_model_type == "hf":
        raise ValueError("--save-to-legacy contradicts --save-model-type hf")
    if args.ckpt_format == "torch_dist" and (args.save_to_legacy or args.save_model_type == "legacy"):
        raise ValueError("--ckpt-format torch_dist holds mcore checkpoints only; drop --save-to-legacy")
    if args.load_model_type == args.save_model_type == "hf":
        raise ValueError("--save-model-type hf of an HF source would only copy it; to merge LoRA go through mg")


def _layout(args: argparse.Namespace, network: Network) -> Layout:
    """The target split.

    Raises:
        ValueError: it does not fit the model.
    """
    from mindspeed_rl.checkpoint.megatron_args import parse_layers
    from mindspeed_rl.models.layout import Layout

    pp = args.target_pipeline_parallel_size
    layer_list = parse_layers(",".join(args.num_layer_list), "--num-layer-list") if args.num_layer_list else None
    noop = parse_layers(args.noop_layers, "--noop-layers")
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    vpp = 2 if args.schedules_method == "dualpipev" else 1
    if per_chunk is not None:
        slots = network.num_layers + len(noop)
        if per_chunk < 1 or pp < 1 or slots % (pp * per_chunk):
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {per_chunk}: {slots} layers cannot be divided "
                f"over {pp} stages in chunks of {per_chunk}"
            )
        vpp = slots // pp // per_chunk
        if vpp == 1:
            raise ValueError(f"--num-layers-per-virtual-pipeline-stage {per_chunk} is the whole stage; use a smaller number")
    return Layout(
        num_layers=network.num_layers,
        tp=args.target_tensor_parallel_size,
        pp=pp,
        vpp=vpp,
        ep=args.target_expert_parallel_size,
        etp=args.expert_tensor_parallel_size,
        num_layer_list=layer_list,
        noop_layers=noop,
        num_experts=network.num_moe_experts or 0,
        moe_tp_extend_ep=args.moe_tp_extend_ep,
        schedule=args.schedules_method,
    )


def _open(args: argparse.Namespace) -> Source:
    from mindspeed_rl.checkpoint.source import ModelOptions, open_hf, open_megatron

    options = ModelOptions(
        model_type=args.model_type_hf,
        add_qkv_bias=args.add_qkv_bias,
        post_norm=args.post_norm,
        reward_head=args.orm,
        mtp_num_layers=args.mtp_num_layers,
        num_layers=args.num_layers,
        first_k_dense_replace=args.first_k_dense_replace,
        loosely=args.load_checkpoint_loosely,
        hf_folder=args.hf_cfg_dir,
        iteration=args.load_iteration,
    )
    if args.load_model_type == "hf":
        return open_hf(args.load_dir, options)
    if args.num_layers is not None or args.first_k_dense_replace is not None:
        raise ValueError("--num-layers and --first-k-dense-replace need an HF source")
    source = open_megatron(args.load_dir, options, args.save_dir if args.save_model_type == "hf" else None)
    if args.load_from_legacy and source.kind != "legacy":
        raise ValueError(f"--load-from-legacy contradicts {args.load_dir}, which has the {source.kind} layout")
    return source


def _merge_adapter(args: argparse.Namespace, source: Source) -> tuple[Source, PeftMerge | None]:
    """The source with its adapter merged as it is read, and the PEFT adapter to merge in HF's terms."""
    from mindspeed_rl.checkpoint import lora

    if args.lora_load is not None and lora.is_peft_folder(args.lora_load):
        shapes = {name: shape for op in source.architecture.weight_ops(source.network) for name, shape in zip(op.hf, op.shapes)}
        return source, lora.open_peft(args.lora_load, shapes, args.lora_r, args.lora_alpha)
    source = _with_loaded_adapters(args, source)
    if not source.adapters:
        if args.lora_r is not None or args.lora_alpha is not None:
            raise ValueError(
                f"--lora-r and --lora-alpha need an adapter; {args.load_dir} holds none and --lora-load is not given"
            )
        return source, None
    _check_target_modules(args.lora_target_modules, source)
    scale = lora.checked_scale(args.lora_r, args.lora_alpha, source.adapters, source.lora)
    return source.merged(scale), None


def _with_loaded_adapters(args: argparse.Namespace, source: Source) -> Source:
    from dataclasses import replace

    from mindspeed_rl.checkpoint.mcore import MegatronFolder

    if args.lora_load is None:
        return source
    if source.layout is None or source.kind != "mcore":
        raise ValueError(
            f"--lora-load {args.lora_load}: a Megatron adapter needs a per-rank mcore base; PEFT folders fit any base"
        )
    folder = MegatronFolder(args.lora_load)
    adapters = folder.adapters(source.architecture, source.network, source.layout)
    return replace(source, adapters=adapters, lora=(folder.args.lora_r, folder.args.lora_alpha))


def _check_target_modules(modules: Sequence[str], source: Source) -> None:
    if not modules:
        return
    actual = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in source.adapters})
    if sorted(modules) != actual:
        raise ValueError(f"--lora-target-modules {' '.join(modules)} does not match the adapter, which has {' '.join(actual)}")


def _export_adapter(args: argparse.Namespace, source: Source) -> int:
    from mindspeed_rl.checkpoint import lora

    source = _with_loaded_adapters(args, source)
    if not source.adapters:
        raise ValueError("--save-lora-to-hf: neither --load-dir nor --lora-load holds LoRA weights")
    _check_target_modules(args.lora_target_modules, source)
    scale = lora.checked_scale(args.lora_r, args.lora_alpha, source.adapters, source.lora)
    if args.dry_run:
        _say(f"would write {len(source.adapters)} adapters to {args.save_dir}")
        return 0
    base = str(source.companions) if source.companions is not None else None
    modules = lora.export_peft(args.save_dir, source.adapters, scale, base)
    _say(f"wrote the adapter of {', '.join(modules)} to {args.save_dir}")
    return 0


def _destination(args: argparse.Namespace, source: Source) -> Destination:
    import torch

    from mindspeed_rl.checkpoint.conversion_plan import Destination

    dtype: torch.dtype | None = getattr(torch, _DTYPES[args.params_dtype]) if args.params_dtype else None
    common: dict[str, Any] = {"dtype": dtype, "overwrite": args.overwrite}
    if args.save_model_type == "hf":
        path = args.save_dir
        if (path / "config.json").is_file() and not args.overwrite:
            # upstream's first converter takes the original HF folder as --save-dir and writes below it
            path = path / "mg2hf"
        return Destination("hf", path, max_shard_bytes=_parse_size(args.max_shard_size), **common)
    legacy = args.save_to_legacy or args.save_model_type == "legacy"
    return Destination(
        "legacy" if legacy else "torch_dist" if args.ckpt_format == "torch_dist" else "mcore",
        args.save_dir,
        layout=_layout(args, source.network),
        grouped_gemm=args.moe_grouped_gemm,
        transformer_engine=args.transformer_impl == "transformer_engine",
        mindspeed_mla=args.mla_layout == "mindspeed",
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
        **common,
    )


def _parse_size(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    for unit, factor in units.items():
        number = text.upper().removesuffix(unit)
        if text.upper().endswith(unit) and number.replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise ValueError(f"--max-shard-size {text}: expected a number with KB, MB, GB, KiB, MiB or GiB, such as 5GB")


def _print_plan(plan: Plan) -> None:
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


class _Bar:
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


def _convert(args: argparse.Namespace) -> int:
    import time

    from mindspeed_rl.checkpoint.conversion_plan import make_plan
    from mindspeed_rl.checkpoint.convert import check_destination, run_plan

    _check_flags(args)
    source = _open(args)
    for notice in source.notices:
        _say(f"note: {notice}")
    if args.save_lora_to_hf:
        return _export_adapter(args, source)
    source, peft = _merge_adapter(args, source)
    plan = make_plan(source, _destination(args, source), peft)
    if args.dry_run:
        _print_plan(plan)
        return 0
    check_destination(plan.destination)
    start = time.perf_counter()
    made = run_plan(plan, workers=args.workers, verify=args.verify, progress=_Bar())
    seconds = time.perf_counter() - start
    proof = ", every tensor verified" if args.verify else ""
    _say(f"wrote {made}: {plan.num_bytes / 1e9:.2f} GB in {seconds:.1f} s ({plan.num_bytes / 1e9 / seconds:.2f} GB/s){proof}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Convert a checkpoint; the process's exit status. Errors are one line on stderr."""
    try:
        return _convert(make_parser().parse_args(list(argv)))
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; the same command continues where it stopped")
        return 130
