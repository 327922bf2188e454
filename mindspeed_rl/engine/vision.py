"""Images of a micro-batch: their tokens and rotary positions, and the tower that computes their features on the first stage.

The features replace the embeddings of image tokens before these are scattered over tensor ranks. Features of further levels
(deepstack, arXiv:2406.04334) are added to the hidden states after the first layers; they travel with the layout of the
micro-batch, because a layer that is recomputed in backward must find them again.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from mindspeed_rl import adaptors
from mindspeed_rl.engine.sequence_layout import AddedFeatures, PackedLayout, PaddedLayout
from mindspeed_rl.models.model_config import HfConfig, VisionConfig
from mindspeed_rl.models.vision import PreparedImage, PreparedVideo, get_tower_part

#: features that a process keeps on the host: 600 images of 1,000 tokens, for a model of hidden size 3,584 in bfloat16
_CACHE_BYTES = 4 << 30


@dataclass(frozen=True)
class ImageBatch:
    """Images of a micro-batch of which this rank has tokens.

    Attributes:
        images: different ones, each of which is computed once.
        tokens: [n] int64; indices of their tokens in this rank's embeddings, flattened from [s, b, h] to [s * b, h].
        features: [n] int64; for each of these the row in the concatenated features of the images.
        later: the same two of the tokens that each multi-token-prediction layer embeds.
    """

    images: tuple[PreparedImage, ...]
    tokens: Tensor
    features: Tensor
    later: tuple[tuple[Tensor, Tensor], ...] = ()

    @classmethod
    def build(
        cls,
        images: Sequence[PreparedImage],
        owners: Tensor,
        rows: Tensor,
        vision: VisionConfig,
        later: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> ImageBatch:
        """Build the batch of the tokens of this rank.

        Args:
            images: images of the micro-batch.
            owners: [tokens] int64 on the host; index of the image of each token of the hidden states, -1 for text.
            rows: [tokens] int64; row of the token in the features of its image.
            later: owners and rows of the tokens that each multi-token-prediction layer embeds.
        """
        present = torch.cat([owners, *(shifted for shifted, _ in later)]).unique()
        present = present[present >= 0]
        mine = tuple(images[index] for index in present.tolist())
        counts = torch.tensor([vision.count_tokens(image.grid) for image in mine], dtype=torch.int64)
        starts = counts.cumsum(0) - counts

        def locate(owners: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            tokens = (owners >= 0).nonzero()[:, 0]
            return tokens, starts[torch.searchsorted(present, owners[tokens])] + rows[tokens] if mine else tokens

        return cls(mine, *locate(owners, rows), tuple(locate(*shifted) for shifted in later))

    def count_features(self, vision: VisionConfig) -> int:
        """Return the rows of the concatenated features."""
        return sum(vision.count_tokens(image.grid) for image in self.images)


def find_images(
    ids: Tensor, images: Sequence[PreparedImage], vision: VisionConfig, sequences: Sequence[tuple[int, int]] | None = None
) -> list[int]:
    """Return the index of the first token of each image of a row.

    Images take runs of image tokens, and videos of video tokens, that are as long as their features, in order. Other runs are
    text: a model may sample the token itself. Where several choices fit, the one with the most runs between the marks of an
    image is taken, then the one with the most runs in prompts, then the earliest.

    Args:
        ids: the sequences of the row, one after the other.
        images: images of all sequences.
        vision: vision config of the model.
        sequences: tokens of the prompt and of all of each sequence. None: one prompt.

    Raises:
        ValueError: no choice of runs fits.
    """
    runs = _list_runs(ids, vision, sequences or [(len(ids), len(ids))])
    counts = [(_get_token(image, vision), vision.count_tokens(image.grid)) for image in images]
    # scores[r][i]: of the best places of images i, i + 1 ... in runs r, r + 1 ...
    impossible = -1
    scores = [[impossible] * len(counts) + [0]]
    for _, run, score in reversed(runs):
        after = scores[-1]
        taken = [later + score if run == count and later >= 0 else impossible for count, later in zip(counts, after[1:])]
        scores.append([max(pair) for pair in zip(taken, after)] + [0])
    scores.reverse()
    if scores[0][0] == impossible:
        missing, count = _find_missing(runs, counts), len(images)
        token, length = counts[missing]
        raise ValueError(
            f"image {missing} of {count} has {length} tokens (grid {list(images[missing].grid)}), and no run of as"
            f" many tokens {token} follows the previous images'; text and images are not of the same processor"
        )
    placed: list[int] = []
    for (start, run, score), here, after in zip(runs, scores, scores[1:]):
        image = len(placed)
        later = after[image + 1] if image < len(counts) and run == counts[image] else impossible
        if later >= 0 and later + score == here[image]:
            placed.append(start)
    return placed


def _get_token(image: PreparedImage, vision: VisionConfig) -> int:
    """Return the token in whose place the features of an image or of a video's frames are put."""
    return vision.video_token_id if isinstance(image, PreparedVideo) else vision.image_token_id


#: start, (token, length) and score of adjacent tokens of an image
_Run: TypeAlias = tuple[int, tuple[int, int], int]


def _list_runs(ids: Tensor, vision: VisionConfig, sequences: Sequence[tuple[int, int]]) -> list[_Run]:
    """Return each run of image tokens or of video tokens, which ends with its sequence."""
    runs: list[_Run] = []
    first = 0
    for prompt, total in sequences:
        own = ids[first : first + total]
        padded = nn.functional.pad(own, (1, 1), value=-1)
        for token in (vision.image_token_id, vision.video_token_id):
            marks = (padded == token).to(torch.int8).diff()
            starts, ends = ((marks == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
            for start, end in zip(starts, ends):
                frame = (int(padded[start]), int(padded[end + 1]))
                score = 2 * (frame == vision.image_frame) + (start < prompt)
                runs.append((first + start, (token, end - start), score))
        first += total
    return sorted(runs)


def _find_missing(runs: Sequence[_Run], counts: Sequence[tuple[int, int]]) -> int:
    """Return the first image without a run of its length after the runs of earlier images."""
    lengths = (run for _, run, _ in runs)
    return next(index for index, count in enumerate(counts) if count not in lengths)


def compute_axis_positions(length: int, starts: Sequence[int], images: Sequence[PreparedImage], vision: VisionConfig) -> Tensor:
    """Return [3, length] int64: time, height and width of each token of a sequence.

    Text advances on all axes together. An image begins at the next position; its rows and columns of tokens count from there,
    and the text after it continues past the larger of the two. Time counts in steps of the video, and text does not wait for
    its end, as in transformers.
    """
    positions = torch.arange(length).repeat(3, 1)
    for start, image in zip(starts, images):
        frames, rows, columns = image.grid[0], *(size // vision.merge_size for size in image.grid[1:])
        end = start + frames * rows * columns
        first = int(positions[0, start])
        times = torch.arange(frames)
        if isinstance(image, PreparedVideo):
            times = (times * torch.tensor(image.time_step)).long()
        axes = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
        positions[:, start:end] = first + torch.stack(axes).flatten(1)
        positions[:, end:] += first + max(rows, columns) - end - (first - start)
    return positions


@dataclass
class PlacedImages:
    """Images of the sequences of a micro-batch, by token in natural order.

    Attributes:
        images: different ones.
        positions: [3, tokens] int64.
        owners, rows: as of `ImageBatch.build`.
    """

    images: list[PreparedImage]
    positions: Tensor
    owners: Tensor
    rows: Tensor

    @classmethod
    def build(
        cls,
        sequences: Sequence[Tensor],
        images: Sequence[tuple[Sequence[int], Sequence[PreparedImage]]],
        starts: Sequence[int],
        positions: Tensor,
        vision: VisionConfig,
    ) -> PlacedImages:
        """Place the images of sequences.

        Args:
            sequences: token ids of each.
            images: images of each sequence, with the index of their first tokens in it.
            starts: index of the first token of each sequence.
            positions: [tokens] int64, as in a text without images.
        """
        placed = cls([], positions.repeat(3, 1), torch.full_like(positions, -1), torch.zeros_like(positions))
        known: dict[str, int] = {}
        for ids, (firsts, some), start in zip(sequences, images, starts):
            if not some:
                continue
            placed.positions[:, start : start + len(ids)] = compute_axis_positions(len(ids), firsts, some, vision)
            for first, image in zip(firsts, some):
                if image.key not in known:
                    known[image.key] = len(placed.images)
                    placed.images.append(image)
                count = vision.count_tokens(image.grid)
                tokens = slice(start + first, start + first + count)
                placed.owners[tokens], placed.rows[tokens] = known[image.key], torch.arange(count)
        return placed


# ---------------------------------------------------------------------- the tower


def build_tower(hf_config: HfConfig) -> nn.Module:
    """Build transformers' vision tower and projector of a model, with random weights; releases 5.10 to 5.19."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    keys: dict[str, Any] = copy.deepcopy(dict(hf_config))  # transformers changes parts of it
    config = AutoConfig.for_model(**keys)
    # earlier releases find no class for the config of a single tower
    with torch.device("meta"):
        tower_class: Any = type(AutoModelForImageTextToText.from_config(config).model.visual)
    tower = tower_class._from_config(config.vision_config, attn_implementation="sdpa")
    # in a list, so that a module that is converted to 16 bits leaves it as it is
    tower.exact_angles = [tower.rotary_pos_emb.inv_freq.clone()]
    # all its modules read it from here; transformers would refuse a kernel that it does not know
    tower.config._attn_implementation = adaptors.tower_attention()
    return tower


class _BlankImage:
    """The smallest image: ranks and micro-batches without one take part in the backward pass of a tower that trains."""

    key = ""

    def __init__(self, vision: VisionConfig) -> None:
        self.grid = (1, vision.merge_size, vision.merge_size)
        self._shape = (vision.merge_size**2, vision.patch_dim)

    def read(self) -> Tensor:
        return torch.zeros(self._shape)


#: input of a multi-token-prediction layer: ids of its tokens, and which of them are of images, as in `ImageBatch.later`
LaterTokens: TypeAlias = tuple[Tensor, "tuple[Tensor, Tensor] | None"]


def list_later_tokens(ids: Sequence[Tensor], images: ImageBatch | None) -> list[LaterTokens]:
    """Return the input of each multi-token-prediction layer.

    Args:
        ids: ids of its tokens.
    """
    return list(zip(ids, [None] * len(ids) if images is None else images.later, strict=True))


class DecoderInputs:
    """Inputs of a decoder of text, and of prediction layers after it; chosen when the model is built."""

    def prepare(
        self,
        model: GPTModel,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None,
        layout: PackedSeqParams | None,
        images: ImageBatch | None,
    ) -> tuple[Tensor, Tensor | None, PackedSeqParams | None]:
        """Return the positions, the hidden states that enter the decoder (None: the model embeds its tokens) and the layout.

        Args:
            images: images of the micro-batch.
        """
        return position_ids, decoder_input, layout

    def embed_later(self, model: GPTModel, tokens: LaterTokens, position_ids: Tensor) -> Tensor:
        """Embed the tokens of a multi-token-prediction layer, as the decoder's are."""
        return model.embedding(input_ids=tokens[0], position_ids=position_ids)

    def send(self, hidden_states: Tensor) -> Tensor:
        """Return what the next stage receives in place of the hidden states."""
        return hidden_states

    def release(self, layout: PackedSeqParams | None) -> None:
        """Release after a forward pass what no layer needs again."""


class ImagePositions(DecoderInputs):
    """Inputs of a later stage of a model that sees images: positions have three axes.

    Multi-token-prediction layers are on the last stage and embed images too. The first stage sends it the features of its
    images behind the hidden states, in further rows of the one tensor that stages exchange; stages between pass them on.
    """

    def __init__(self, vision: VisionConfig) -> None:
        self._vision = vision
        # [rows, hidden size] during a forward pass
        self._features: Tensor | None = None

    def prepare(
        self,
        model: GPTModel,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None,
        layout: PackedSeqParams | None,
        images: ImageBatch | None,
    ) -> tuple[Tensor, Tensor | None, PackedSeqParams | None]:
        """Return the positions of text on all three axes, where they have one."""
        self._features = None  # those of a pass that failed were not released
        if position_ids.dim() == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        if images is not None and images.later and not model.pre_process:
            self._receive(model, images.count_features(self._vision))
        return position_ids, decoder_input, layout

    def _receive(self, model: GPTModel, count: int) -> None:
        """Divide what the stage has received into hidden states and features."""
        received = model.decoder.input_tensor
        assert received is not None  # a stage after the first
        length = received.size(0) - -(-count // received.size(1))
        model.set_input_tensor(received[:length])
        self._features = received[length:].flatten(0, 1)[:count]

    def send(self, hidden_states: Tensor) -> Tensor:
        """Return [s, b, h] with the features in further rows, the last of which may have padding."""
        if self._features is None:
            return hidden_states
        features, width = self._features.to(hidden_states.dtype), hidden_states.size(1)
        features = nn.functional.pad(features, (0, 0, 0, -len(features) % width))
        return torch.cat([hidden_states, features.view(-1, width, features.size(1))])

    def embed_later(self, model: GPTModel, tokens: LaterTokens, position_ids: Tensor) -> Tensor:
        """Embed the tokens of a multi-token-prediction layer, with the features of images in place of their embeddings."""
        ids, places = tokens
        embeddings = model.embedding(input_ids=ids, position_ids=position_ids)
        if places is not None and self._features is not None:
            embeddings = _put(embeddings, places[0], self._features.index_select(0, places[1]))
        if not model.config.sequence_parallel:
            return embeddings
        return scatter_to_sequence_parallel_region(embeddings, group=model.pg_collection.tp)

    def release(self, layout: PackedSeqParams | None) -> None:
        """Release the features; the graph has what backward needs."""
        self._features = None


def _put(embeddings: Tensor, tokens: Tensor, features: Tensor) -> Tensor:
    """Return embeddings [s, b, h] with those of tokens of images replaced by their features."""
    flat = embeddings.flatten(0, 1).index_copy(0, tokens, features.to(embeddings.dtype))
    return flat.view_as(embeddings)


class VisionEncoder(ImagePositions):
    """Inputs of the first stage, with the features of the tower, a submodule of the model, in place of image tokens.

    Features of a frozen tower stay on the host, so that an update finds those that the log-probs were computed with.
    """

    def __init__(self, tower: nn.Module, vision: VisionConfig) -> None:
        super().__init__(vision)
        self._tower = tower
        self._cached: OrderedDict[str, list[Tensor]] = OrderedDict()
        self._cached_bytes = 0

    @property
    def is_trained(self) -> bool:
        """True where a part of the tower trains."""
        return any(parameter.requires_grad for parameter in self._tower.parameters())

    def set_trained(self, parts: Collection[str]) -> None:
        """Choose the parts of the tower that train, as `get_tower_part` names them."""
        for name, parameter in self._tower.named_parameters():
            parameter.requires_grad_(get_tower_part(name) in parts)

    def prepare(
        self,
        model: GPTModel,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None,
        layout: PackedSeqParams | None,
        images: ImageBatch | None,
    ) -> tuple[Tensor, Tensor | None, PackedSeqParams | None]:
        """Return positions, embeddings with the features of images, and a layout that has the features of further levels."""
        position_ids, _, layout = super().prepare(model, input_ids, position_ids, decoder_input, layout, images)
        embeddings = model.embedding(input_ids=input_ids, position_ids=position_ids)
        decoder_input, added = self.embed(embeddings, images)
        if model.config.sequence_parallel:
            group = model.pg_collection.tp
            decoder_input = scatter_to_sequence_parallel_region(decoder_input, group=group)
            if added is not None:
                length = decoder_input.size(0) * decoder_input.size(1)
                # a rank adds its slice, and the tower of each needs the gradients of all
                added.levels = [copy_to_tensor_model_parallel_region(level, group=group) for level in added.levels]
                added.select_slice(group.rank() * length, length)
        if added is not None:
            layout = PaddedLayout() if layout is None else layout
            decoder_input = AttachFeatures.apply(added, decoder_input, *added.levels)
        if isinstance(layout, (PaddedLayout, PackedLayout)):
            layout.added = added
        return position_ids, decoder_input, layout

    def release(self, layout: PackedSeqParams | None) -> None:
        """Release the features, those of further levels where no layer is computed again."""
        super().release(layout)
        if isinstance(layout, (PaddedLayout, PackedLayout)) and not torch.is_grad_enabled():
            layout.added = None

    def embed(self, embeddings: Tensor, images: ImageBatch | None) -> tuple[Tensor, AddedFeatures | None]:
        """Put the features of images in place of their tokens' embeddings [s, b, h].

        Returns:
            The embeddings, and the features of further levels for `AttachFeatures`.
        """
        if images is None or not images.images:
            if self.is_trained and torch.is_grad_enabled():
                levels = self._compute([_BlankImage(self._vision)])
                embeddings = embeddings + 0.0 * sum(level.sum() for level in levels)
            return embeddings, None
        levels = [level.to(embeddings.dtype) for level in self._encode(images.images)]
        self._features = levels[0] if images.later else None
        first, *others = (level.index_select(0, images.features) for level in levels)
        embeddings = _put(embeddings, images.tokens, first)
        if not others:
            return embeddings, None
        return embeddings, AddedFeatures(images.tokens, others)

    def _encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """Return the features [tokens of all images, hidden size] of each level."""
        if self.is_trained:
            return self._compute(images)
        missing = [image for image in images if image.key not in self._cached]
        features = {image.key: self._cached[image.key] for image in images if image.key in self._cached}
        if missing:
            counts = [self._vision.count_tokens(image.grid) for image in missing]
            levels = [level.split(counts) for level in self._compute(missing)]
            features |= {image.key: [level[index] for level in levels] for index, image in enumerate(missing)}
        for key in (image.key for image in images):
            self._cache(key, features[key])
        device = next(self._tower.parameters()).device
        return [
            torch.cat([features[image.key][level].to(device) for image in images])
            for level in range(len(features[images[0].key]))
        ]

    def _cache(self, key: str, levels: list[Tensor]) -> None:
        """Keep features on the host; those that were not asked for the longest time go first."""
        if key not in self._cached:
            self._cached[key] = [level.cpu() for level in levels]
            self._cached_bytes += sum(level.nbytes for level in self._cached[key])
        self._cached.move_to_end(key)
        while self._cached_bytes > _CACHE_BYTES and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._cached_bytes -= sum(level.nbytes for level in oldest)

    def _compute(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        weight = next(self._tower.parameters())
        pixels = torch.cat([image.read() for image in images]).to(weight.device, weight.dtype)
        grids = torch.tensor([image.grid for image in images], device=weight.device)
        # a 16-bit model rounds every buffer; the angles of the tower are computed in float32
        rotary: Any = self._tower.rotary_pos_emb
        if rotary.inv_freq.dtype != torch.float32:
            (angles,) = cast("list[Tensor]", self._tower.exact_angles)
            rotary.inv_freq = angles.to(weight.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_trained):
            output = self._tower(pixels, grid_thw=grids)
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]


class AttachFeatures(torch.autograd.Function):
    """Identity on the embeddings that hands features to layers, and collects their gradients when those have run backward.

    Layers get leaves and not the features: one that is recomputed runs its own backward pass, and several of them would walk
    through the graph of the tower.
    """

    @staticmethod
    def forward(ctx: Any, added: AddedFeatures, embeddings: Tensor, *levels: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        leaves = [level.detach().requires_grad_(needed) for level, needed in zip(levels, ctx.needs_input_grad[2:])]
        added.levels, ctx.added = leaves, added
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  (as above)
        leaves, ctx.added.levels = ctx.added.levels, []
        return None, grad, *(leaf.grad for leaf in leaves)


def add_to_layers(model: GPTModel, layers: Sequence[int | None], levels: int) -> None:
    """Have the first layers of the model add the features of further levels to what they return.

    Args:
        layers: index of the real layer in each slot of the chunk, None for an empty one.
        levels: the number of them: level i is added after layer i.
    """
    for module, layer in zip(model.decoder.layers, layers):
        if layer is not None and layer < levels:
            module.register_forward_hook(_build_hook(layer), with_kwargs=True)


def _build_hook(level: int) -> Any:
    def add(module: nn.Module, args: object, kwargs: dict[str, Any], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        added = getattr(kwargs.get("packed_seq_params"), "added", None)
        if added is None:
            return output
        hidden, *others = output
        flat = hidden.flatten(0, 1).index_add(0, added.tokens, added.levels[level])
        return (flat.view_as(hidden), *others)

    return add
