"""A checkpoint by its name on the Hugging Face hub, in the cache that the hub's own tools fill; never downloaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tessera.errors import CheckpointError

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
