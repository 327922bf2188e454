"""The registry of the parts of an engine."""

from __future__ import annotations

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.multi_token_prediction import PredictionLosses
from mindspeed_rl.engine.part import EnginePart
from mindspeed_rl.engine.router_losses import RouterLosses
from mindspeed_rl.engine.sparse_attention import IndexerLosses, SharedIndexers

#: in the order in which an engine calls them; `RoutedLayers` is added by the worker whose rows have routing
PARTS: tuple[type[EnginePart], ...] = (RouterLosses, IndexerLosses, SharedIndexers, PredictionLosses)


def build_parts(config: MegatronConfig, model: BuiltModel) -> list[EnginePart]:
    """Build the parts that a model needs."""
    built = [kind.build(config, model) for kind in PARTS]
    return [part for part in built if part is not None]
