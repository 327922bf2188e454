"""A rollout batch on disk: NAME.safetensors with the columns and NAME.json with their description.

Columns (B rows, R response positions padded on the right; the samples of a prompt are adjacent rows):

    response_mask      [B, R] bool     required: tokens the actor sampled
    rewards            [B]    float    required: total score of each response
    log_probs          [B, R] float    required: of the policy that is trained, at the sampled tokens
    input_ids          [B, S] int      prompt and response, to run the model again; not read here
    loss_mask          [B, R] bool     tokens that train, when fewer than response_mask
    truncated          [B]    bool     the response hit the length limit (overlong_filter)
    scored             [B]    bool     the response has a score; others take no part
    old_log_probs, ref_log_probs, rollout_log_probs, entropy, values, squared_probs   [B, R] float
    marked             [B, R] bool     tokens that clip_cov or kl_cov has chosen; otherwise chosen by the replay
    weight_versions    [B, R] int      of the weights that sampled each token, -1 after the response; not read here
    lengths            [B]    int      tokens of a row of input_ids; not read here
    prompt_lengths, response_lengths   [B] int: of its prompt and its response, which add up to the row unless it has several
                                       sequences; not read here
    greedy_rewards     [B]    float    remax
    reward_components  [B, K] float    gdpo; the reward functions in the order of the run file, then a reward model

The JSON object:

    format               "mindspeed_rl.rollout_batch"
    version              1
    group_size           samples of a prompt
    max_response_length  maximum tokens of a response (dr_grpo)
    stage                ray_grpo, ray_dapo or ray_ppo
    rl_config            the keys of the run file's group that differ from their defaults
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_rl.files import read_json

_FORMAT, _VERSION = "mindspeed_rl.rollout_batch", 1
_REQUIRED = ("response_mask", "rewards", "log_probs")
_BOOL_COLUMNS = ("response_mask", "loss_mask", "truncated", "scored", "marked")
_TOKEN_COLUMNS = (
    "loss_mask",
    "weight_versions",
    "log_probs",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "entropy",
    "values",
    "squared_probs",
    "marked",
)
_ROW_COLUMNS = ("rewards", "truncated", "scored", "greedy_rewards", "lengths", "prompt_lengths", "response_lengths")
_COLUMNS = ("input_ids", "response_mask", "reward_components", *_TOKEN_COLUMNS, *_ROW_COLUMNS)


@dataclass(frozen=True)
class RolloutBatch:
    """A rollout batch and its settings; see the module's docstring for the columns."""

    columns: Mapping[str, Tensor]
    group_size: int
    max_response_length: int
    stage: str = "ray_grpo"
    rl_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in _REQUIRED if name not in self.columns]
        if missing:
            raise ValueError(f"the rollout batch lacks the columns {', '.join(missing)}")
        unknown = [name for name in self.columns if name not in _COLUMNS]
        if unknown:
            raise ValueError(f"the rollout batch has unknown columns {', '.join(unknown)}; known: {', '.join(_COLUMNS)}")
        mask = self.columns["response_mask"]
        if mask.dim() != 2:
            raise ValueError(f"column response_mask is {list(mask.shape)}, but must be [B, R]")
        for name, column in self.columns.items():
            # input_ids and reward_components have other widths
            expected = mask.shape if name in _TOKEN_COLUMNS else mask.shape[:1] if name in _ROW_COLUMNS else column.shape
            if column.shape != expected or column.shape[0] != mask.shape[0]:
                raise ValueError(f"column {name} is {list(column.shape)}, but response_mask is {list(mask.shape)}")
            if name in _BOOL_COLUMNS and column.dtype != torch.bool:
                raise ValueError(f"column {name} must be bool, not {column.dtype}")

    def save(self, path: Path) -> None:
        """Write `path`, which ends in .safetensors, and the JSON file next to it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # safetensors takes no strided views
        save_file({name: column.detach().cpu().contiguous() for name, column in self.columns.items()}, path)
        description = {
            "format": _FORMAT,
            "version": _VERSION,
            "group_size": self.group_size,
            "max_response_length": self.max_response_length,
            "stage": self.stage,
            "rl_config": dict(self.rl_config),
        }
        path.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> RolloutBatch:
        """Return the batch saved under `path`.

        Raises:
            ValueError: a file is missing, is of another format, or its columns do not fit together.
        """
        sidecar = path.with_suffix(".json")
        for file in (path, sidecar):
            if not file.is_file():
                raise ValueError(
                    f"{file} does not exist; a rollout batch is a .safetensors file with a .json file of the same name"
                )
        description = read_json(sidecar)
        if (description.get("format"), description.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(
                f"{sidecar}: format {description.get('format')!r} version {description.get('version')!r}, "
                f"not {_FORMAT!r} {_VERSION}"
            )
        missing = [name for name in ("group_size", "max_response_length", "stage", "rl_config") if name not in description]
        if missing:
            raise ValueError(f"{sidecar} lacks {', '.join(missing)}")
        try:
            return cls(
                load_file(path),
                description["group_size"],
                description["max_response_length"],
                description["stage"],
                description["rl_config"],
            )
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
