"""Model type -> family class, imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tessera.errors import CheckpointError
from tessera.family.family import ModelFamily

if TYPE_CHECKING:
    from tessera.checkpoint.config import CheckpointConfig

FAMILIES = {
    "internvl": "tessera.family.internvl:InternVL",
    "internvl_chat": "tessera.family.internvl:InternVL",
}


def family_for(config: CheckpointConfig) -> ModelFamily:
    """The family of a checkpoint. Raises CheckpointError for a model type that none is registered for."""
    try:
        module, name = FAMILIES[config.model_type].split(":")
    except KeyError:
        raise CheckpointError(
            f"no model family for model_type {config.model_type!r}; known are {sorted(FAMILIES)}"
        ) from None
    return getattr(import_module(module), name)(config)
