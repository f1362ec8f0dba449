"""What each phase leaves on disk, so that a killed run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tessera.errors import ConfigError
from tessera.user_cache import write_whole

Made = tuple[dict[str, torch.Tensor], dict[str, Any]]


def kept(path: Path, make: Callable[[], Made]) -> Made:
    """Tensors from ``path`` (.safetensors) and facts from the JSON beside it; ``make`` makes both if it is not there.

    They are read from disk in either case: whoever resumes sees what an undisturbed run sees.
    """
    beside = path.with_suffix(".json")
    if not path.exists():
        tensors, facts = make()
        write_whole(beside, lambda draft: draft.write_text(json.dumps(facts)))
        write_whole(path, lambda draft: save_file(tensors, draft, metadata={"format": "pt"}))  # last: it says "done"
    return load_file(path), json.loads(beside.read_text())


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Makes ``folder`` the place of a run with these settings. Raises ConfigError where another run's lie there."""
    path, text = folder / "settings.json", json.dumps(settings, indent=1, sort_keys=True)
    if not path.exists():
        write_whole(path, lambda draft: draft.write_text(text))
    elif path.read_text() != text:
        raise ConfigError(f"{folder} holds the artefacts of a run with other settings: finish that run or delete them")
