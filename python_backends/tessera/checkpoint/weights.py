"""Tensors of a checkpoint folder: read from safetensors only, given out strictly.

Pickle files are refused: unpickling runs whatever the file says. torch is imported with the first tensor.

Exact tables of weight names: each layout's stored names -> the names our modules use.

Every pattern matches a whole name. A name that no pattern matches is an error, so a weight that nobody reads
cannot pass unseen; one that follows from the configuration stands there with no name of ours. The tables are the
families'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import CheckpointError

if TYPE_CHECKING:
    import torch


#: takes one stored tensor to where it belongs; raises CheckpointError if it does not fit
Target = Callable[["torch.Tensor"], None]
_SHOWN = 10
_LFS = b"version https://git-lfs"
_PICKLES = ("*.bin", "*.pt", "*.pth")


class TensorError(CheckpointError):
    """The tensor or module called ``name`` is wrong, which need not be the one that a target was given last."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class SafetensorsFolder:
    """The tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    A folder without weights has no names (its configuration can still be used with random weights); a folder
    that has only pickle files raises CheckpointError.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._files = self._find_files()
        self._open: dict[Path, Any] = {}

    def names(self) -> list[str]:
        """Names of all stored tensors, sorted."""
        return sorted(self._files)

    def get(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in the stored dtype. Raises CheckpointError if it is not stored."""
        return self._read(name, lambda file: file.get_tensor(name))

    def dtype(self, name: str) -> str:
        """The stored dtype as safetensors calls it, such as "BF16", from the file's header alone."""
        return self._read(name, lambda file: file.get_slice(name).get_dtype())

    def _read(self, name: str, read: Callable[[Any], Any]) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self._files.get(name)
        if path is None:
            raise CheckpointError(f"{self.folder} holds no weight {name!r}")
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            return read(self._open[path])
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


class SafetensorsHeaders(SafetensorsFolder):
    """The same folder without its numbers: tensors on torch's device "meta". Files are mapped, so none is read."""

    def get(self, name: str) -> torch.Tensor:
        return super().get(name).to("meta")


def fill(
    owner: str,
    targets: Mapping[str, Target],
    tensors: Iterable[tuple[str, torch.Tensor]],
    stored: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Gives each tensor to the target of its name. ``owner`` and ``stored``, the checkpoint's names by ours, are for
    messages.

    Raises CheckpointError naming what is missing, left over, given twice, or refused by its target.
    """
    missing = dict.fromkeys(targets)
    faults: list[tuple[str, object]] = []
    for name, tensor in tensors:
        if name not in missing:
            faults.append((name, "given twice" if name in targets else "left over"))
            continue
        del missing[name]
        try:
            targets[name](tensor)
        except TensorError as error:
            faults.append((error.name, error))
        except CheckpointError as error:
            faults.append((name, error))
    faults += [(name, "missing") for name in missing]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        told = "; ".join(f"{name_in_file(name, stored)}: {fault}" for name, fault in faults[:_SHOWN])
        raise CheckpointError(f"weights of {owner}: {told}{more}")


def copy_whole(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fills ``target``, of any floating dtype; CheckpointError if the shape is another."""
    if tensor.shape != target.shape:
        raise CheckpointError(f"has shape {list(tensor.shape)}, expected {list(target.shape)}")
    target.copy_(plain(tensor))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor; CheckpointError if its numbers mean nothing without a scale."""
    if tensor.is_floating_point() and tensor.itemsize > 1:
        return tensor
    raise CheckpointError(
        f"is stored as {tensor.dtype}, which config.json does not explain: no quantization is known for it"
    )


def _stored_names(path: Path) -> list[str]:
    """Tensor names of a safetensors file, without reading tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except SafetensorError as error:
        with open(path, "rb") as stream:
            pointer = stream.read(len(_LFS)) == _LFS
        why = "it is the pointer that Git LFS leaves in its place: run `git lfs pull`" if pointer else error
        raise CheckpointError(f"{path} is not a safetensors file, or not all of one: {why}") from error


WB = r"(weight|bias)"
#: what the vision tower's linear layers store, in FP8 too
WBS = r"(weight|bias|weight_scale)"
#: what the language model's linear layers store, by any quantization; a layer's scheme says which of them it wants
LINEAR = (
    r"(weight|bias|qweight|qzeros|scales|g_idx|weight_packed|weight_shape|weight_scale|weight_zero_point|weight_g_idx"
    r"|weight_scale_inv|input_scale)"
)

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def split_names(names: Iterable[str], config: CheckpointConfig) -> dict[str, dict[str, str]]:
    """Sort stored weight names into ``{"vision": {stored: ours}, "text": {stored: ours}}``.

    The text model's names are those of transformers' own class (``model.layers.N...``, ``lm_head.weight``) or, for
    InternLM2, the original ones (``model.layers.N.attention.wqkv.weight``, ``output.weight``).
    Raises CheckpointError for names that are not understood or that mean the same weight.
    """
    tables = [(part, *entry) for part, table in config.weight_names.items() for entry in table]
    split: dict[str, dict[str, str]] = {part: {} for part in config.weight_names}
    unknown: list[str] = []
    taken: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        matches = ((part, re.fullmatch(pattern, name), ours) for part, pattern, ours in tables)
        found = next(((part, match.expand(ours)) for part, match, ours in matches if match), None)
        if found is None:
            unknown.append(name)
            continue
        if not found[1]:
            continue
        if found in taken:
            raise CheckpointError(f"{config.folder}: weights {taken[found]!r} and {name!r} are the same weight")
        taken[found] = name
        part, ours = found
        split[part][name] = ours
    if unknown:
        raise CheckpointError(
            f"{config.folder}: {len(unknown)} weights are not known to layout {config.layout} with a "
            f"{config.text.architecture} body: {listed(unknown)}"
        )
    return split


def name_in_file(name: str, stored: Mapping[str, str]) -> str:
    """What the checkpoint calls a tensor or a module of ours, or would call one that it lacks.

    ``stored``: its names by ours. One that it lacks is called like that of another layer, else like its neighbours.
    """
    if name in stored:
        return stored[name]
    layers, anywhere = iter(_LAYER.findall(name)), re.compile(r"\d+".join(map(re.escape, _LAYER.split(name))))
    if alike := next((theirs for ours, theirs in stored.items() if anywhere.fullmatch(ours)), None):
        return _LAYER.sub(lambda layer: next(layers, layer[0]), alike)
    place = name
    while place:
        for ours, theirs in stored.items():
            rest = ours.removeprefix(place)
            if rest != ours and rest.startswith(".") and theirs.endswith(rest):
                return theirs.removesuffix(rest) + name[len(place) :]
        place = place.rpartition(".")[0]
    return name


def listed(names: Iterable[str]) -> str:
    """The first ten names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 10} more" if len(ordered) > 10 else ""
    return ", ".join(ordered[:10]) + more
