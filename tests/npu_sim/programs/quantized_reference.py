"""Quantized products by the definitions of their formats, in float64, and proven weight syncs of quantized matrices."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from microscaling import round_blocks

Tensor = torch.Tensor
#: layers that keep the format of the run: what engines fold or widen, routers, the head, the tower
KEPT = ("kv_b_proj", "in_proj_a", "in_proj_b", "in_proj_ba", "gate", "shared_expert_gate", "lm_head")
#: layers of which each tensor-parallel rank has some of the columns
ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")


class OtherTorch(ModuleType):
    """torch with other formats under some names, for a module that casts."""

    def __init__(self, **formats: torch.dtype) -> None:
        super().__init__("torch")
        vars(self).update(formats)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def quantize_float32() -> None:
    """Engines with quantized matrices may be in float32, which vllm-ascend refuses because its operators take nothing wider.

    The simulated ones do, and in bfloat16 nothing can be compared more closely than to two digits. Products of experts in int4
    are in bfloat16 whatever the engine is in; they stay in float32 too.
    """
    from vllm_ascend.ops.fused_moe import moe_mlp
    from vllm_ascend.quantization.modelslim_config import AscendModelSlimConfig

    moe_mlp.torch = OtherTorch(bfloat16=torch.float32)
    AscendModelSlimConfig.get_supported_act_dtypes = classmethod(lambda cls: [torch.bfloat16, torch.float32])


def return_float32() -> None:
    """Experts in MXFP8 return float32, in graphs too, which an engine captures when it is built.

    vllm-ascend has them return bfloat16 in a model of bfloat16 and float16 in any other, for which the format is not made.
    """
    importlib.import_module("vllm_ascend.ops")  # imports the module of this class, which else imports it
    from vllm_ascend.device.device_op import A5DeviceAdaptor

    read_types = A5DeviceAdaptor.get_quant_gmm2_kwargs

    def widen(*, use_mxfp_quant: bool = False, **others: Any) -> dict[str, Any]:
        types = read_types(use_mxfp_quant=use_mxfp_quant, **others)
        return types | {"output_dtype": torch.float32} if use_mxfp_quant else types

    A5DeviceAdaptor.get_quant_gmm2_kwargs = staticmethod(widen)


class Sides:
    """Whole numbers of an engine's int8 activations, which the definition takes where it lies at an edge of rounding.

    Engine and definition add up in other orders, so that an element closer to an edge than that may fall on either side, and
    moves all that follows by as much as int8 rounds. Any other element is the definition's own, whatever the engine has.
    """

    #: distance from an edge, where the largest element of a row is 127: sums in float32 move an element by less
    TOLERANCE = 2e-4

    def __init__(self) -> None:
        self.num_elements = self.num_taken = 0
        self._recorded: list[tuple[Tensor, Tensor]] = []
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def record(self, quantize: Callable[[], Any], folder: Path, rank: int, world_size: int) -> Any:
        """Return what a call returns, and keep what it quantizes on all ranks, each of which has a part.

        Args:
            folder: of all ranks.
        """
        from simulator import mc2

        quantize_rows = mc2.quantize_rows
        self._recorded, self._rows = [], {}

        def quantize_and_keep(x: Tensor) -> tuple[Tensor, Tensor]:
            elements, scales = quantize_rows(x)
            self._recorded.append((x.flatten(0, -2).double(), elements.flatten(0, -2).double()))
            return elements, scales

        mc2.quantize_rows = quantize_and_keep
        try:
            result = quantize()
        finally:
            mc2.quantize_rows = quantize_rows
        torch.save(self._recorded, folder / f"sides{rank}.pt")
        dist.barrier()
        rows = [row for index in range(world_size) for row in torch.load(folder / f"sides{index}.pt")]
        dist.barrier()
        widths = {x.shape[-1] for x, _ in rows}
        for width in widths:
            inputs, elements = zip(*(row for row in rows if row[0].shape[-1] == width))
            self._rows[width] = torch.cat(inputs), torch.cat(elements)
        return result

    def round(self, quotients: Tensor, x: Tensor) -> Tensor:
        """Return the whole numbers of rows [rows, columns], of which each element of a row is divided by the row's scale."""
        rounded = torch.round(quotients)
        at_edge = (quotients - quotients.floor() - 0.5).abs() < self.TOLERANCE
        self.num_elements += quotients.numel()
        known, elements = self._rows.get(x.shape[-1], (None, None))
        for row in at_edge.any(-1).nonzero()[:, 0].tolist() if known is not None else ():
            distances = (known - x[row]).abs().amax(-1)
            nearest = distances.argmin()
            if distances[nearest] > 1e-4 * x[row].abs().max():
                continue  # no row of the engine's
            taken = at_edge[row] & ((elements[nearest] - quotients[row]).abs() < 0.5 + self.TOLERANCE)
            self.num_taken += int((taken & (rounded[row] != elements[nearest])).sum())
            rounded[row] = torch.where(taken, elements[nearest], rounded[row])
        return rounded


def scale_rows(x: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Return max |row| / 127, as it is stored in a type."""
    return (x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127).to(scale_dtype).double()


def round_rows(x: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Whole numbers from -127 to 127 times max |row| / 127; weights are divided in float32, which decides at the halves."""
    scales = scale_rows(x, scale_dtype)
    return torch.round((x / scales).float()).double().clamp(-127, 127) * scales


def round_tokens(x: Tensor, sides: Sides) -> Tensor:
    """Rows of activations in int8."""
    scales = scale_rows(x, torch.float32)
    return sides.round(x / scales, x).clamp(-127, 127) * scales


def round_groups(weight: Tensor) -> Tensor:
    """Whole numbers from -7 to 7 times max of 256 elements of a row / 7, in float16; divided in float32 as in `round_rows`."""
    groups = weight.reshape(len(weight), -1, 256)
    scales = (groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7).half().double()
    return (torch.round((groups / scales).float()).double().clamp(-7, 7) * scales).view(weight.shape)


def round_parts(x: Tensor, parts: int, sides: Sides) -> Tensor:
    """Rows of activations in int8, of which each of some ranks has an equal part of the columns, with a scale of its own."""
    return torch.cat([round_tokens(part, sides) for part in x.chunk(parts, -1)], -1)


def multiply_int4(x: Tensor, weight: Tensor, parts: int, sides: Sides) -> Tensor:
    """Return x @ weight^T of experts in int4, in float64; `parts` as in `multiply`."""
    return round_parts(x.double(), parts, sides) @ round_groups(weight.double()).t()


def multiply(x: Tensor, weight: Tensor, quantization: str, dtype: torch.dtype, parts: int, sides: Sides) -> Tensor:
    """Return x @ weight^T in a format, in float64; scales of int8 weights are stored in the engine's type.

    Args:
        parts: ranks that have equal parts of the columns. In int8 each rank quantizes its part of a row of x by itself, with
            a scale of its own; the weights have one scale for the full row.
    """
    x, weight = x.double(), weight.double()
    if quantization == "mxfp8":
        return round_blocks(x) @ round_blocks(weight).t()
    return round_parts(x, parts, sides) @ round_rows(weight, dtype).t()


def quantize_reference(
    reference: Any, quantization: str, dtype: torch.dtype, ranks: int = 1, expert_ranks: int = 1, sides: Sides | None = None
) -> None:
    """Let transformers' model compute the layers in a format that engines have in it.

    Args:
        ranks: tensor-parallel ranks, which divide the columns of the output matrices of attention and MLPs.
        expert_ranks: ranks that divide those of each expert; 1 where a rank has full experts.
        sides: of an engine's activations.
    """
    sides = sides or Sides()

    def linear(layer: Any, inputs: tuple[Tensor, ...], output: Tensor, parts: int) -> Tensor:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        done = multiply(rows, layer.weight.data, quantization, dtype, parts, sides).to(output.dtype).view(output.shape)
        return done if layer.bias is None else done + layer.bias

    def product(x: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
        if quantization == "w4a8":
            return multiply_int4(x, weight, parts, sides)
        return multiply(x, weight, quantization, dtype, parts, sides)

    def experts(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, ids, factors = (one.view(-1, one.shape[-1]) for one in inputs)
        total = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(len(x)):
            for expert, factor in zip(ids[token].tolist(), factors[token].tolist()):
                row, up_down = x[token][None], (layer.gate_up_proj.data[expert], layer.down_proj.data[expert])
                gate, up = product(row, up_down[0]).float().chunk(2, dim=-1)
                inner = torch.nn.functional.silu(gate) * up
                total[token] += factor * product(inner, up_down[1], expert_ranks)[0]
        return total.to(output.dtype).view(output.shape)

    for name, module in reference.named_modules():
        if isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
            module.register_forward_hook(experts)
        end = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear) and end not in KEPT and "visual" not in name:
            module.register_forward_hook(partial(linear, parts=ranks if end in ROW_PARALLEL else 1))


def split_experts(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the same tensors with each expert by itself, as a weight sync sends them."""
    for name, tensor in tensors.items():
        before, _, end = name.rpartition(".")
        for expert, matrix in enumerate(tensor if end in ("gate_up_proj", "down_proj") else ()):
            parts = {"gate_proj": 0, "up_proj": 1} if end == "gate_up_proj" else {"down_proj": 0}
            for part, index in parts.items():
                yield f"{before}.{expert}.{part}.weight", matrix.chunk(len(parts))[index].clone()
        if end not in ("gate_up_proj", "down_proj"):
            yield name, tensor


class Noise:
    """Random errors as large as those of bfloat16 in what the modules of a model return, while `size` is set."""

    def __init__(self, reference: Any) -> None:
        self.size = 0.0
        for module in reference.modules():
            if not list(module.children()):
                module.register_forward_hook(self._disturb)

    def _disturb(self, module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if not self.size or not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        return output * (1 + self.size * (2 * torch.rand_like(output) - 1))


class QuantizedSync:
    """Weight syncs of engines that have all weights on so many ranks together; each trainer has all by itself."""

    def __init__(self, engine: Any, quantization: str, dtype: torch.dtype, ranks: int = 1, *, delta: bool = False) -> None:
        self._engine, self._quantization, self._dtype, self._ranks, self._delta = engine, quantization, dtype, ranks, delta
        self._push: Any = None
        self._tensors: dict[str, Tensor] = {}

    def load(self, tensors: dict[str, Tensor], version: int) -> int:
        """Replace all weights and prove every byte of them.

        Args:
            tensors: in full precision, under their HF names.

        Returns:
            Number of the engine's parameters that were compared.
        """
        self._tensors = {name: tensor.to("npu") for name, tensor in tensors.items()}
        self._engine.load_weights(self._write, version)
        return self.prove()

    def prove(self) -> int:
        model = self._engine.get_model()
        return self._push.prove(model, self._engine.hooks.unpack(model)).num_parameters

    def list_replaced(self, model: Any) -> list[Tensor]:
        return self._push.list_replaced(model, self._engine.hooks.unpack(model))

    def list_types(self) -> list[str]:
        """Return the ends of the names of the engine's parameters in bytes, each once."""
        names = {name for name, value in self._engine.get_model().named_parameters() if value.dtype.itemsize == 1}
        return sorted({name.partition(".layers.")[2].partition(".")[2] for name in names if not name.endswith("_scale")})

    def find_damage(self) -> list[str]:
        """Return what the proof says of one other byte in each kind of matrix, which is put right again."""
        from mindspeed_rl.resharding.proof import WeightDeliveryError

        detected = []
        model = self._engine.get_model()
        tensors = {name: value.data for name, value in model.named_parameters()}
        for name, module in model.named_modules():  # what kernels read beside the parameters
            tensors |= {f"{name}.{key}": value for key, value in vars(module).items() if key.endswith("_scale_fp32")}
        scales = ("down_proj.weight_scale_fp32", "w13_weight_scale_fp32", "w13_scale_bias")
        for end in ("down_proj.weight", "down_proj.weight_scale", "w13_weight", "w2_weight_scale", *scales):
            names = [name for name in tensors if name.endswith(end)]
            if not names:
                continue
            data = tensors[names[-1]]
            elements = data.view(torch.uint8) if data.dtype.itemsize == 1 else data.view(torch.int16)
            # of a scale in 8 bytes the lower half, which is the number
            place = (*(-1,) * (elements.dim() - 1), -4 if data.dtype.itemsize == 8 else -1)
            elements[place] += 1
            try:
                self.prove()
                detected.append(f"nothing at {names[-1]}")
            except WeightDeliveryError as error:
                shown = names[-1].removesuffix("_fp32").replace("_scale_bias", "_weight_scale")
                detected.append(end if shown in str(error) else str(error))
            elements[place] -= 1
        return detected

    def stays_damaged(self, version: int) -> bool:
        """Return True where another sync of the same weights leaves another byte as it is, which is put right again."""
        from mindspeed_rl.resharding.proof import WeightDeliveryError

        parameters = self._engine.get_model().named_parameters()
        elements = [value.data for name, value in parameters if name.endswith("w2_weight")][-1].view(torch.uint8)
        elements[-1, -1, -1] += 1
        self._engine.load_weights(self._write, version)
        try:
            self.prove()
        except WeightDeliveryError:
            elements[-1, -1, -1] -= 1
            return True
        return False

    def _write(self, model: Any) -> None:
        from mindspeed_rl.adaptors.engine_hooks import DERIVED
        from mindspeed_rl.config.quantized_formats import find_format
        from mindspeed_rl.resharding.destinations import read_destinations
        from mindspeed_rl.resharding.exchange import Exchange
        from mindspeed_rl.resharding.layouts import full_slice
        from mindspeed_rl.resharding.push import WeightPush
        from mindspeed_rl.resharding.quantization import quantize_side, stored_dtypes
        from mindspeed_rl.resharding.trained_weights import TrainedWeights

        if self._push is None:
            shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
            holders = {name: {full_slice(shape): [*range(dist.get_world_size())]} for name, shape in shapes.items()}
            device = torch.device("npu", torch.npu.current_device())
            full = TrainedWeights(holders, shapes, _Sources(self, shapes), device, 1 << 20)
            trained = quantize_side(full, find_format(self._quantization, "npu"))
            stored = stored_dtypes(trained.quantized, trained.quantization)
            load: Callable[..., Any] = model.load_weights
            destinations = read_destinations(model, load, trained.shapes, self._dtype, skip=DERIVED, stored=stored)
            layout = {"replica": dist.get_rank() // self._ranks, "derived": DERIVED, "delta": self._delta}
            self._push = WeightPush(trained, destinations, Exchange.from_world(), **layout)
        self._push.write(model)


class _Sources:
    """The trained weights as `ReadsSlices`."""

    def __init__(self, owner: QuantizedSync, shapes: dict[str, tuple[int, ...]]) -> None:
        self._owner, self._shapes = owner, shapes

    def views(self, name: str, tensor_slice: Any) -> Iterator[tuple[Any, Tensor]]:
        from mindspeed_rl.resharding.layouts import full_slice, relative_index

        yield tensor_slice, self._owner._tensors[name][relative_index(tensor_slice, full_slice(self._shapes[name]))]

    def read(self, name: str, tensor_slice: Any, out: Tensor, copies: Any = None) -> None:
        out.copy_(next(self.views(name, tensor_slice))[1])

    def forget_merged(self) -> None:
        pass
