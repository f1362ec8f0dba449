"""How many tokens prompt and answer may have together: preprocess and engine ask this one rule."""

from __future__ import annotations

from tessera.checkpoint.config import TextConfig
from tessera.errors import ConfigError


def context_length(text: TextConfig, max_model_len: int | None = None) -> int:
    """``max_model_len`` in tokens, or the trained length where it is None.

    Raises ConfigError for more than the trained length, unless the checkpoint's rope is dynamic: only that one reaches
    further.
    """
    trained = text.max_position_embeddings
    asked = max_model_len or trained
    if asked > trained and (text.rope_scaling or {}).get("rope_type") != "dynamic":
        raise ConfigError(f"max_model_len {asked} exceeds the checkpoint's context of {trained}")
    return asked
