"""What every layout reads alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import read_json, read_processor
from tessera.checkpoint.names import TEXT_NAMES
from tessera.checkpoint.text import read_text


def assemble(
    folder: Path,
    raw: dict[str, Any],
    text_section: Mapping[str, Any],
    tie: bool | None = None,
    mrope_section: Sequence[int] | None = None,
    **fields: Any,
) -> CheckpointConfig:
    """``text_section`` describes the language model (``read_text``); ``fields`` are CheckpointConfig's others, and
    ``vision_names``."""
    text = read_text(folder, text_section, raw, tie, mrope_section)
    eos = read_json(folder, "generation_config.json").get("eos_token_id", text_section.get("eos_token_id"))
    return CheckpointConfig(
        folder=folder,
        model_type=raw.get("model_type", fields["layout"]),
        text=text,
        weight_names={"vision": fields.pop("vision_names"), "text": TEXT_NAMES[text.architecture]},
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        raw=raw,
        processor=read_processor(folder),
        **fields,
    )
