"""Model type -> family class, imported when asked for."""

from __future__ import annotations

from pkgutil import resolve_name

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import one_of
from tessera.models.family import ModelFamily

FAMILIES = {
    "internvl": "tessera.models.internvl.processor:InternVL",
    "internvl_chat": "tessera.models.internvl.processor:InternVL",
    "qwen2_vl": "tessera.models.qwen2_vl.processor:Qwen2VL",
}


def family_for(config: CheckpointConfig) -> ModelFamily:
    """The family of a checkpoint. Raises CheckpointError for a model type that none is registered for."""
    one_of(config.model_type, FAMILIES, "model_type")
    return resolve_name(FAMILIES[config.model_type])(config)
