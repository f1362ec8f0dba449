"""Architecture name -> model class, imported only when asked for."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tessera.errors import CheckpointError

if TYPE_CHECKING:
    from tessera.models.text.qwen2 import Qwen2

_MODELS = {
    "Qwen2ForCausalLM": "tessera.models.text.qwen2:Qwen2",
    "Qwen3ForCausalLM": "tessera.models.text.qwen3:Qwen3",
    "LlamaForCausalLM": "tessera.models.text.qwen2:Qwen2",
    "Phi3ForCausalLM": "tessera.models.text.fused:Phi3",
    "InternLM2ForCausalLM": "tessera.models.text.fused:InternLM2",
}


def model_class(architecture: str) -> type[Qwen2]:
    """The class that runs a text architecture; CheckpointError names those that are supported."""
    if architecture not in _MODELS:
        raise CheckpointError(
            f"text architecture {architecture!r} is not supported; supported are {', '.join(_MODELS)}"
        )
    return resolve_name(_MODELS[architecture])
