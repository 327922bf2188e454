"""Images in transformers' modules: features of the model's own tower in the place of image tokens.

Positions, order and features of images come from the batch, as with Megatron (`engine/vision.py`); transformers' own search for
image tokens would take one that the model has sampled for an image. The tower is gathered in full with the root of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mindspeed_rl import adaptors
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.vision import VisionEncoder
from mindspeed_rl.models.model_config import VisionConfig
from mindspeed_rl.models.vision import get_tower_part

#: prefix of the tower's parameters in a model of transformers
TOWER = "model.visual."


class ImageInputs:
    """Inputs of the decoder of a model that sees images.

    A micro-batch without an image computes the smallest one where the tower trains, so that every rank has all gradients.
    """

    def __init__(self, model: PreTrainedModel, vision: VisionConfig) -> None:
        """Take the tower of a model.

        Args:
            model: the model.
            vision: its vision config.
        """
        tower: Any = model.get_submodule(TOWER.removesuffix("."))
        # all its modules read it from here; transformers would refuse a kernel that it does not know
        tower.config._attn_implementation = adaptors.tower_attention()
        self._encoder = VisionEncoder(tower, vision)

    @classmethod
    def build(cls, model: PreTrainedModel, vision: VisionConfig | None) -> ImageInputs | None:
        """Return the inputs of a model; None where it sees no images."""
        return None if vision is None else cls(model, vision)

    def prepare(self, decoder: nn.Module, micro_batch: MicroBatch) -> dict[str, Any]:
        """Return the arguments of the decoder that stand for the tokens of a micro-batch."""
        embeddings = cast(nn.Embedding, decoder.embed_tokens)(micro_batch.input_ids)
        placed, added = self._encoder.embed(embeddings.transpose(0, 1), micro_batch.images)
        inputs: dict[str, Any] = {"inputs_embeds": placed.transpose(0, 1), "position_ids": micro_batch.position_ids}
        if added is not None:
            rows, width = micro_batch.input_ids.shape
            # the decoder adds them row by row, and they are in the order of hidden states
            cells = added.tokens % rows * width + added.tokens // rows
            order = cells.argsort()
            mask = torch.zeros(rows * width, dtype=torch.bool, device=cells.device)
            mask[cells] = True
            inputs["visual_pos_masks"] = mask.view(rows, width)
            inputs["deepstack_visual_embeds"] = [level.index_select(0, order) for level in added.levels]
        return inputs


def choose_trained(named: Iterable[tuple[str, Tensor]], parts: Collection[str]) -> None:
    """Freeze the parts of a tower that do not train.

    Args:
        named: parameters by their names in a model of transformers.
        parts: those that train, as `models.vision.get_tower_part` names them.
    """
    for name, parameter in named:
        if name.startswith(TOWER) and get_tower_part(name.removeprefix(TOWER)) not in parts:
            parameter.requires_grad_(False)
