"""Tensors of a checkpoint folder: read from safetensors only, copied into modules strictly.

Pickle files are refused: unpickling runs whatever the file says. torch is imported with the first tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tessera.checkpoint.names import listed, split_names
from tessera.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["Placement", "SafetensorsFolder", "load_strict", "split_names"]

_PICKLES = ("*.bin", "*.pt", "*.pth")


class Placement(NamedTuple):
    """Where a tensor goes: a parameter, and the rows (dimension 0) of it that the tensor fills."""

    parameter: str
    tensor: torch.Tensor
    rows: slice = slice(None)


class SafetensorsFolder:
    """The tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    A folder without weights has no names (its configuration can still be used with random weights); a folder
    that has only pickle files raises CheckpointError.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._files = self._find_files()
        self._open: dict[Path, object] = {}

    def names(self) -> list[str]:
        """Names of all stored tensors, sorted."""
        return sorted(self._files)

    def get(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in the stored dtype. Raises CheckpointError if it is not stored."""
        from safetensors import SafetensorError, safe_open

        path = self._files.get(name)
        if path is None:
            raise CheckpointError(f"{self.folder} holds no weight {name!r}")
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            return self._open[path].get_tensor(name)  # type: ignore[attr-defined]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: weight {name!r} cannot be read: {error}") from error

    def _find_files(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if single.is_file():
            return dict.fromkeys(_stored_names(single), single)
        if index.is_file():
            return self._read_index(index)
        pickles = sorted(path.name for pattern in _PICKLES for path in self.folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{self.folder} holds only pickle weights ({listed(pickles)}), which are never loaded; "
                "convert them to safetensors"
            )
        return {}

    def _read_index(self, index: Path) -> dict[str, Path]:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        stored: dict[str, str] = {}
        for file_name in sorted(set(weight_map.values())):
            path = self.folder / file_name
            if path.parent != self.folder or path.suffix != ".safetensors":
                raise CheckpointError(f"{index}: {file_name!r} is not a safetensors file in this folder")
            if not path.is_file():
                raise CheckpointError(f"{index} names {file_name}, which is missing")
            stored |= dict.fromkeys(_stored_names(path), file_name)
        differing = {name for name, _ in stored.items() ^ weight_map.items()}
        if differing:
            raise CheckpointError(f"{index} does not agree with its shards about {listed(differing)}")
        return {name: self.folder / file_name for name, file_name in weight_map.items()}


def load_strict(
    module: torch.nn.Module,
    mapping: Mapping[str, str],
    source: SafetensorsFolder,
    transform: Callable[[str, torch.Tensor], torch.Tensor | Iterable[Placement]] | None = None,
) -> None:
    """Copy the tensors named by ``mapping`` (stored name -> our name) into ``module``, leaving nothing out.

    ``transform(our_name, tensor)`` may reshape a tensor, or return Placements that fill rows of packed
    parameters. Values are converted to each parameter's dtype and device. Raises CheckpointError naming the
    parameters that were not filled, the weights that found no place, and the shapes that do not fit.
    """
    import torch

    state = module.state_dict(keep_vars=True)
    missing_rows = {name: (value.shape[0] if value.dim() else 1) for name, value in state.items()}
    left_over: list[str] = []
    misfits: list[str] = []
    for stored, ours in mapping.items():
        tensor = source.get(stored)
        placed = tensor if transform is None else transform(ours, tensor)
        for place in [Placement(ours, placed)] if isinstance(placed, torch.Tensor) else placed:
            if place.parameter not in state:
                left_over.append(stored)
                continue
            target = state[place.parameter].data
            target = target[place.rows] if target.dim() else target
            if target.shape != place.tensor.shape:
                misfits.append(f"{stored} {list(place.tensor.shape)}, expected {list(target.shape)}")
                continue
            target.copy_(place.tensor)
            missing_rows[place.parameter] -= target.shape[0] if target.dim() else 1
    missing = [name for name, rows in missing_rows.items() if rows > 0]
    twice = [name for name, rows in missing_rows.items() if rows < 0]
    if left_over or misfits or missing or twice:
        problems = {
            "left over": left_over,
            "wrong shape": misfits,
            # A misfit is reported once, as such.
            "missing": [] if misfits else missing,
            "given twice": twice,
        }
        text = "; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names)
        raise CheckpointError(f"weights of {type(module).__name__} do not fit: {text}")


def _stored_names(path: Path) -> list[str]:
    """Tensor names of a safetensors file, without reading tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
