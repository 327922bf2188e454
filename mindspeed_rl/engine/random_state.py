"""All random generators of a rank as tensors, so that they can be saved without pickling."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.engine import parallel

_TRACKER = "tracker."


def capture() -> dict[str, Tensor]:
    """The state of Python's, NumPy's, torch's, the device's and Megatron's generators."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state()
    assert isinstance(numpy_state, tuple)  # a dict would be of another generator than the Mersenne twister
    name, keys, position, has_gauss, cached = numpy_state
    assert version == 3 and name == "MT19937"
    states = {
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        "device": platform.current().rng_state().cpu(),
    }
    tracker = parallel.rng_tracker().get_states()
    return states | {_TRACKER + key: state.cpu() for key, state in tracker.items()}


def restore(states: dict[str, Tensor]) -> None:
    """Puts all generators back to what `capture` saw."""
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = states["numpy_rest"].tolist()
    keys = states["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, states["numpy_gauss"].item()))
    torch.set_rng_state(states["torch"])
    platform.current().set_rng_state(states["device"])
    tracker = {key.removeprefix(_TRACKER): state for key, state in states.items() if key.startswith(_TRACKER)}
    parallel.rng_tracker().set_states(tracker)
