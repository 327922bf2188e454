"""The experts of each device, as the JSON that vllm-ascend takes (`generate_config.expert_map_path`).

Written by `mindspeed-rl plan experts`, checked before a run starts, passed to the engine by adaptors/vllm_ascend.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rl.files import read_json_value

_KEY = "generate_config.expert_map_path"

#: experts by device, by layer with experts
_ExpertMap = list[list[list[int]]]


def write_expert_map(layers: Sequence[Sequence[Sequence[int]]]) -> str:
    """Return the text of the file."""
    tree = {
        "moe_layer_count": len(layers),
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": len(devices),
                "device_list": [{"device_id": device, "device_expert": experts} for device, experts in enumerate(devices)],
            }
            for layer, devices in enumerate(layers)
        ],
    }
    return json.dumps(tree, indent=1) + "\n"


def read_expert_map(path: Path) -> _ExpertMap:
    """Read the experts by device, by layer with experts.

    Raises:
        ValueError: the file cannot be read, is of another form, or has an expert of a layer on two devices. A second copy of an
            expert would get its weights, but the proof of a weight sync sums over all devices.
    """
    try:
        tree = read_json_value(path)
        layers: _ExpertMap = [[list(item["device_expert"]) for item in layer["device_list"]] for layer in tree["layer_list"]]
    except OSError as error:
        raise ValueError(f"{_KEY}: {path} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{_KEY}: {path} is not an expert map, which has layer_list, device_list and device_expert "
            f"({type(error).__name__}: {error})."
        ) from None
    for layer, devices in enumerate(layers):
        experts = [expert for device in devices for expert in device]
        if any(type(expert) is not int for expert in experts):
            raise ValueError(f"{_KEY}: {path} is not an expert map; the experts of layer {layer} are not all numbers.")
        twice = sorted({expert for expert in experts if experts.count(expert) > 1})
        if twice:
            raise ValueError(
                f"{_KEY}: {path} places expert {twice[0]} of layer {layer} on two devices; "
                "redundant experts cannot be used, because a weight sync proves each expert once."
            )
    return layers


def check_expert_map(path: Path, num_layers: int, num_experts: int, num_devices: int) -> None:
    """Check that a file places the experts of this model and layout.

    Args:
        num_layers: the model's layers with experts.
        num_devices: the devices over which an engine spreads them.

    Raises:
        ValueError: `read_expert_map` refuses the file, or it is for another model or layout.
    """
    layers = read_expert_map(path)
    if len(layers) != num_layers:
        raise ValueError(f"{_KEY}: {path} is for {len(layers)} layers with experts, and this model has {num_layers}.")
    for layer, devices in enumerate(layers):
        if len(devices) != num_devices:
            raise ValueError(
                f"{_KEY}: {path} spreads layer {layer} over {len(devices)} devices, and the engine's experts are on "
                f"{num_devices} (infer_tensor_parallel_size x infer_expert_parallel_size)."
            )
        if sorted(expert for device in devices for expert in device) != list(range(num_experts)):
            raise ValueError(f"{_KEY}: {path} does not place each of the {num_experts} experts of layer {layer}.")
