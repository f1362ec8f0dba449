"""Model type -> family class, imported when asked for."""

from __future__ import annotations

from pkgutil import resolve_name

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import one_of
from tessera.family.family import ModelFamily

FAMILIES = {
    "internvl": "tessera.family.internvl:InternVL",
    "internvl_chat": "tessera.family.internvl:InternVL",
    "qwen2_vl": "tessera.family.qwen2_vl:Qwen2VL",
}


def family_for(config: CheckpointConfig) -> ModelFamily:
    """The family of a checkpoint. Raises CheckpointError for a model type that none is registered for."""
    one_of(config.model_type, FAMILIES, "model_type")
    return resolve_name(FAMILIES[config.model_type])(config)
