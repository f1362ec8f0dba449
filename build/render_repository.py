"""Writes a model repository with other settings than the tracked one, whose files stay untouched.

    python build/render_repository.py --gpu --out DIR --instances preprocess=8 --set vision_encoder.threads=2
    tessera serve --model-repository DIR

Copies model_repository/, changes instance counts and stage parameters, and refuses names that do not exist.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

ROOT = Path(__file__).resolve().parent.parent
# Vision stage and language model on one GPU, each in a process of its own (see docs/gpu.md).
GPU_SETTINGS = {
    "vision_encoder.runner": "graph",
    "vision_encoder.device": "cuda",
    "vision_encoder.dtype": "bfloat16",
    "vision_encoder.visual_infer_batch_size": "32",
    "vision_encoder.memory_bytes": str(7 << 30),
    "language_model.device": "cuda",
    "language_model.dtype": "bfloat16",
    "language_model.kv_cache_bytes": "0",
    "language_model.max_batched_tokens": "8192",
    "language_model.max_sequences": "256",
    "language_model.engine_process": "1",
}
# What the vision stage's process takes of a GPU beside its memory_bytes: CUDA's context and libraries.
CONTEXT_BYTES = 1 << 30


def render(
    source: Path,
    out: Path,
    instances: dict[str, int],
    parameters: dict[str, str],
    only: Collection[str] = (),
) -> None:
    """Copies `source` to `out` and applies the changes.

    Args:
        source: a model repository.
        out: the folder to write; must not exist.
        instances: model -> number of instances.
        parameters: "model.parameter" -> value; the parameter must be in the model's config.pbtxt.
        only: the models to copy; empty for all.

    Raises:
        ValueError: a model or a parameter does not exist, or `out` does, or the stages' shares of a GPU disagree.
    """
    if out.exists():
        raise ValueError(f"{out} exists already")
    for model in only:
        _read(source, model)
    for folder in sorted(source.iterdir()):
        if folder.is_dir() and (not only or folder.name in only):
            shutil.copytree(folder, out / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    for model, count in instances.items():
        config = _read(out, model)
        del config.instance_group[1:]
        config.instance_group[0].count = count
        _write(out, model, config)
    for name, value in parameters.items():
        model, _, parameter = name.partition(".")
        config = _read(out, model)
        if parameter not in config.parameters:
            known = ", ".join(sorted(config.parameters))
            raise ValueError(f"{model} has no parameter {parameter!r}; it has {known}")
        config.parameters[parameter].string_value = value
        _write(out, model, config)
    # A relative checkpoint counts from the repository, which lies elsewhere now.
    for file in out.glob("*/config.pbtxt"):
        config = _read(out, file.parent.name)
        if "checkpoint" in config.parameters:
            checkpoint = config.parameters["checkpoint"].string_value
            config.parameters["checkpoint"].string_value = str((source / checkpoint).resolve())
            _write(out, file.parent.name, config)
    if not only:
        _check_shares(_read(out, "vision_encoder").parameters, _read(out, "language_model").parameters)


def _check_shares(vision: Mapping[str, Any], language: Mapping[str, Any]) -> None:
    """On one GPU the vision stage may hold no more than the language model leaves to it."""
    if vision["vision_url"].string_value or {p["device"].string_value for p in (vision, language)} != {"cuda"}:
        return
    own, left = int(vision["memory_bytes"].string_value), int(language["vision_memory_bytes"].string_value)
    if own + CONTEXT_BYTES > left:
        raise ValueError(
            f"vision_encoder.memory_bytes {own} and {CONTEXT_BYTES} for CUDA itself exceed "
            f"language_model.vision_memory_bytes {left}; lower the first or raise the last"
        )


def _read(repository: Path, model: str) -> model_config_pb2.ModelConfig:
    file = repository / model / "config.pbtxt"
    if not file.is_file():
        known = ", ".join(sorted(path.parent.name for path in repository.glob("*/config.pbtxt")))
        raise ValueError(f"there is no model {model!r}; there are {known}")
    return text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())


def _write(repository: Path, model: str, config: model_config_pb2.ModelConfig) -> None:
    (repository / model / "config.pbtxt").write_text(text_format.MessageToString(config))


def _pairs(given: list[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in given]
    wrong = [item for item, (_, equals, value) in zip(given, pairs) if not equals or not value]
    if wrong:
        raise ValueError(f"expected NAME=VALUE, got {wrong[0]!r}")
    return {name: value for name, _, value in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "model_repository")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", action="store_true", help="both models on the GPU; --set still wins")
    parser.add_argument("--only", nargs="*", default=[], metavar="MODEL", help="copy these models and no others")
    parser.add_argument("--instances", nargs="*", default=[], metavar="MODEL=N")
    parser.add_argument("--set", nargs="*", default=[], metavar="MODEL.PARAMETER=VALUE", dest="parameters")
    arguments = parser.parse_args()
    try:
        instances = {model: int(count) for model, count in _pairs(arguments.instances).items()}
        only = arguments.only
        gpu = {name: value for name, value in GPU_SETTINGS.items() if not only or name.split(".")[0] in only}
        parameters = (gpu if arguments.gpu else {}) | _pairs(arguments.parameters)
        render(arguments.source, arguments.out, instances, parameters, only)
    except ValueError as error:
        print(f"render_repository: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
