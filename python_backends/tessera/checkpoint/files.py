"""Small JSON files of a checkpoint folder, and what they must state.

Messages of ``read_json`` name the file, never the folder: clients may see them.

A checkpoint by its name on the Hugging Face hub, in the cache that the hub's own tools fill; never downloaded.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.errors import CheckpointError

PILLOW_BICUBIC = 3  # as an image processor's "resample" has it


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in ``folder/name``, or {} if there is no such file."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{name} of the checkpoint is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} of the checkpoint must hold an object, not {type(value).__name__}")
    return value


def read_processor(folder: Path) -> dict[str, Any]:
    """preprocessor_config.json and the image processor's part of processor_config.json as one; the latter wins.

    Without the nulls, which savers write for what is not set.
    """
    whole = read_json(folder, "processor_config.json")
    merged = read_json(folder, "preprocessor_config.json") | (whole.get("image_processor") or {})
    merged |= {name: value for name, value in whole.items() if not isinstance(value, dict)}
    return {name: value for name, value in merged.items() if value is not None}


def read_token_names(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json calls its tokens, as "image_token": flat, or under extra_special_tokens."""
    stated = read_json(folder, "tokenizer_config.json")
    extra = stated.get("extra_special_tokens")
    return (extra if isinstance(extra, dict) else {}) | stated


def section(raw: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """An object inside config.json; raises CheckpointError where there is none."""
    if not isinstance(raw.get(name), dict):
        raise CheckpointError(f"{where} has no section {name!r}")
    return raw[name]


def check_sizes(values: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raises CheckpointError unless each of ``names`` is a positive whole number among ``values``."""
    for name in names:
        if type(values[name]) is not int or values[name] < 1:
            raise CheckpointError(f"{where}{name} must be a positive whole number, not {values[name]!r:.50}")


def check_number(value: Any, what: str) -> None:
    """Raises CheckpointError unless it is a positive number."""
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{what} must be a positive number, not {value!r:.50}")


def one_of(value: Any, supported: Iterable[Any], what: str, refused: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises CheckpointError for any other value; ``refused``: why, of those that are known and not supported."""
    if value not in (known := list(supported)):
        why = f": {reason}" if (reason := refused.get(str(value))) else ""
        raise CheckpointError(f"{what} {value!r:.80} is not supported{why}; supported are {', '.join(map(str, known))}")


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(named: Path | str) -> bool:
    """Whether this may be a model's name on the hub."""
    return _NAME.fullmatch(str(named)) is not None


def find_checkpoint(named: Path | str, environment: Mapping[str, str] = os.environ, base: Path = Path()) -> Path:
    """The folder ``named``, from ``base`` on; where there is none, the newest snapshot that the cache has of the model
    so called.

    Raises CheckpointError that says how to fetch it.
    """
    folder = base / named
    if folder.is_dir():
        return folder
    if not is_name(named):
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    cache = _cache(environment)
    model = cache / f"models--{str(named).replace('/', '--')}"
    try:
        commit = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        commit = ""
    if commit and (snapshot := model / "snapshots" / commit).is_dir():
        return snapshot
    raise CheckpointError(
        f"there is no checkpoint folder {named}, and the hub's cache {cache} has no model of this name: fetch it by "
        f"`hf download {named}` (of the package huggingface_hub), or name a folder"
    )


def _cache(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models, by the variables that it reads."""
    if stated := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(stated).expanduser()
    home = environment.get("HF_HOME")
    if not home:
        home = os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"
