"""How pictures and prompts are prepared, and what one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.settings import check, setting


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. ``max_file_pixels`` is for each picture, ``max_request_bytes`` for all together.

    ``max_cost``: the work of all its pictures together, in the family's units (InternVL: tiles); 0: the family's limit.
    """

    max_images: int = setting(8, least=0)
    max_cost: int = setting(0, least=0)
    max_file_pixels: int = setting(50_000_000, least=1)
    max_request_bytes: int = setting(64 << 20, least=1)

    def __post_init__(self) -> None:
        check(self, "preprocess")


@dataclass(frozen=True)
class PreprocessSettings:
    """A deployment's settings. None means the checkpoint's own: how pictures are cut, context in tokens, system text.

    ``tile_policy``: how finely pictures are cut where a request does not say (docs/tile_policies.md; for models of
    native resolution docs/preprocessing.md). ``resize``: reference, as the checkpoint was trained, or fast
    (docs/preprocessing.md). ``gpu_pixels``: JPEGs of at least this many pixels are left to the vision stage, to decode
    them on its GPU; 0 leaves it none.
    """

    limits: Limits = field(default_factory=Limits)
    resize: str = setting("reference", choices=("reference", "fast"))
    tile_policy: Any = setting(None, kind=str)
    context_length: int | None = setting(None, name="max_model_len", common=True, kind=int, least=2)
    system: str | None = None
    gpu_pixels: int = setting(0, common=True, least=0)

    def __post_init__(self) -> None:
        check(self, "preprocess")
