"""A whole checkpoint of quantized layers: the artefacts as its shards, and everything else as it was.

Quantized weights are stored as compressed-tensors, ``pack-quantized`` and ``float-quantized``. Source: the package
compressed-tensors 0.19, ``compressors/pack_quantized`` and ``compressors/naive_quantized``.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import SafetensorsFolder, split_names
from tessera.linear.formats.compressed import Packed
from tessera.linear.formats.int4 import dequantize
from tessera_quantize.methods import Fp8Weight, Int4Weight, Recipe, to_fp8

VERSION = "0.19.0"

# Of the tower's linear layers, by our names: patch embedding and projector stay as they are.
_VISION = "layers."
_EMBEDDINGS = ("embed_tokens", "tok_embeddings")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")


def write(config: CheckpointConfig, layers: Sequence[Path], recipe: Recipe, vision_fp8: bool, out: Path) -> None:
    """Writes the folder ``out``, which must not exist, of ``layers``' files: whole or not at all."""
    draft = out.with_name(f"{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(config.folder, draft, ignore=shutil.ignore_patterns(*_WEIGHTS))
    source, quantized = SafetensorsFolder(config.folder), _names(layers)
    modules = {name.rpartition(".")[0] for name in quantized if name.endswith(".weight_scale")}
    known, vision = split_names(source.names(), config), []
    of_layers = {name for name, ours in known["text"].items() if ours.startswith("model.layers.")}
    rest = {name: source.get(name) for name in source.names() if name not in of_layers}
    for name, ours in known["vision"].items() if vision_fp8 else ():
        if ours.startswith(_VISION) and _is_linear(name, rest[name]):
            vision.append(name.removesuffix(".weight"))
            weight = rest.pop(name)
            made = stored_tensors(to_fp8(weight.float(), weight.dtype), symmetric=True)
            rest |= {f"{vision[-1]}.{leaf}": tensor for leaf, tensor in made.items()}
    linear = {name.removesuffix(".weight") for name, tensor in rest.items() if _is_linear(name, tensor)}
    # Of a layer, what no method takes: routers.
    plain = {name for name in quantized if name.endswith(".weight") and name.removesuffix(".weight") not in modules}
    linear |= {name.removesuffix(".weight") for name in plain if source.get(name).dim() == 2}
    # The output head may share the embedding's weight and have no tensor of its own.
    head = f"language_model.{config.text.names.head}"
    _write_shards(draft, layers, rest)
    raw = dict(config.raw)
    ignored = {_module_name(config, name) for name in (*linear.difference(vision), head)}
    in_fp8 = {_module_name(config, name) for name in vision}
    form = recipe.method, recipe.group_size, recipe.symmetric
    raw["quantization_config"] = quantization_config(*form, ignored, in_fp8)
    (draft / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    draft.rename(out)


def weight_bytes(folder: Path) -> int:
    """What all tensors of a checkpoint take on disk."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _is_linear(name: str, tensor: torch.Tensor) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and tensor.dim() == 2 and not module.endswith(_EMBEDDINGS)


def _module_name(config: CheckpointConfig, stored: str) -> str:
    """What the checkpoint's own code calls a module, and with it all readers of ``quantization_config``."""
    for pattern, begin in config.module_names:
        if match := re.match(pattern, stored):
            return begin + stored[match.end() :]
    return stored


def _names(files: Iterable[Path]) -> set[str]:
    found: set[str] = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def _write_shards(folder: Path, layers: Sequence[Path], rest: Mapping[str, torch.Tensor]) -> None:
    count = len(layers) + 1
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    save_file(dict(rest), folder / names[0], metadata={"format": "pt"})
    weight_map = dict.fromkeys(rest, names[0])
    for path, name in zip(layers, names[1:], strict=True):
        shutil.copyfile(path, folder / name)
        weight_map |= dict.fromkeys(_names([path]), name)
    size = sum((folder / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def pack(nibbles: torch.Tensor) -> torch.Tensor:
    """Values 0..15 [rows, columns] -> int32 [rows, ceil(columns / 8)], the first of eight in the lowest bits."""
    padded = torch.nn.functional.pad(nibbles.to(torch.int32), (0, -nibbles.shape[1] % 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=nibbles.device)
    return (padded.unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


def stored_tensors(weight: Int4Weight | Fp8Weight, symmetric: bool) -> dict[str, torch.Tensor]:
    """What a file holds of one module's weight, by leaf name, on the CPU."""
    if isinstance(weight, Fp8Weight):
        tensors = {"weight": weight.values, "weight_scale": weight.scales}
    else:
        tensors = {
            # Codes are stored with 8 added to a signed number: the unsigned code itself.
            "weight_packed": pack(weight.codes),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.codes.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack(weight.zeros.T).T
    return {leaf: tensor.cpu().contiguous() for leaf, tensor in tensors.items()}


def dequantized(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight, float32 [out, in], of what :func:`stored_tensors` made."""
    scales = tensors["weight_scale"].float()
    if "weight" in tensors:
        return tensors["weight"].float() * scales
    rows, columns = tensors["weight_shape"].tolist()
    reader = Packed(columns // scales.shape[1], "weight_zero_point" not in tensors, by_group=False)
    read = reader.decode(tensors, rows, columns)
    return dequantize(read["codes"], read["scales"], read["zeros"])


_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def quantization_config(
    method: str, group_size: int, symmetric: bool, ignore: Iterable[str], vision: Iterable[str] = ()
) -> dict[str, Any]:
    """``quantization_config`` of config.json. ``ignore``: the linear modules left as they are; ``vision``: those of the
    vision tower that are FP8, whatever ``method`` made of the others."""
    fp8 = {"weights": _FP8_WEIGHTS, "input_activations": _FP8_INPUTS, "format": "float-quantized"}
    int4_weights = dict(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group_size)
    int4 = {"weights": int4_weights, "input_activations": None, "format": "pack-quantized"}
    groups = {"group_0": {"targets": ["Linear"], "output_activations": None} | (fp8 if method == "fp8" else int4)}
    if vision and method != "fp8":
        groups["group_1"] = {"targets": sorted(vision), "output_activations": None} | fp8
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": sorted(ignore),
        "config_groups": groups,
        "version": VERSION,
    }
