"""Writes a model repository with other settings than the tracked one, whose files stay untouched.

    python build/render_repository.py --gpu --out DIR --instances preprocess=8 --set vision_encoder.threads=2
    tessera serve --model-repository DIR
    python build/render_repository.py --gpu --tensorrt CHECKPOINT --max-tiles 32 --out DIR
    tessera serve --model-repository DIR --model-config-name tensorrt

Copies model_repository/, changes instance counts and stage parameters, and refuses names that do not exist.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python_backends"))

from tessera.checkpoint.config import read_config
from tessera.errors import TesseraError

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
SHARING = ("vision_encoder", "language_model")


@dataclass(frozen=True)
class PlanShape:
    """What the named config `tensorrt` says of a plan: ``side`` of a tile in pixels, ``rows`` a tile of ``hidden``
    numbers each, ``max_tiles`` of the profile."""

    side: int
    rows: int
    hidden: int
    max_tiles: int

    @staticmethod
    def of_checkpoint(folder: Path, max_tiles: int) -> PlanShape:
        """Raises CheckpointError for a folder that holds no known checkpoint."""
        config = read_config(folder)
        return PlanShape(config.vision.image_size, config.vision.tokens_per_tile, config.text.hidden_size, max_tiles)

    def buckets(self) -> list[int]:
        """Numbers of tiles that get a CUDA graph: powers of two and the maximum."""
        return [1 << power for power in range(self.max_tiles.bit_length()) if 1 << power < self.max_tiles] + [
            self.max_tiles
        ]


def render(
    source: Path,
    out: Path,
    instances: dict[str, int],
    parameters: dict[str, str],
    plan: PlanShape | None = None,
    only: Collection[str] = (),
) -> None:
    """Copies `source` to `out` and applies the changes, to named configs (MODEL/configs/) as well.

    Args:
        source: a model repository.
        out: the folder to write; must not exist.
        instances: model -> number of instances.
        parameters: "model.parameter" -> value; the parameter must be in one of the model's configs.
        plan: makes the named config `tensorrt` fit this plan.
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
        for file, config in _read(out, model).items():
            del config.instance_group[1:]
            config.instance_group[0].count = count
            _write(file, config)
    for name, value in parameters.items():
        model, _, parameter = name.partition(".")
        configs = _read(out, model)
        having = {file: config for file, config in configs.items() if parameter in config.parameters}
        if not having:
            known = ", ".join(sorted({name for config in configs.values() for name in config.parameters}))
            raise ValueError(f"{model} has no parameter {parameter!r}; it has {known}")
        for file, config in having.items():
            config.parameters[parameter].string_value = value
            _write(file, config)
    if plan:
        _fit(out, plan)
    # A relative checkpoint counts from the repository, which lies elsewhere now.
    for model in out.glob("*/config.pbtxt"):
        for file, config in _read(out, model.parent.name).items():
            if "checkpoint" in config.parameters:
                checkpoint = config.parameters["checkpoint"].string_value
                config.parameters["checkpoint"].string_value = str((source / checkpoint).resolve())
                _write(file, config)
    if not only:
        try:
            _check_shares(*(_read(out, model)[out / model / "config.pbtxt"].parameters for model in SHARING))
        except ValueError:
            shutil.rmtree(out)
            raise


def _check_shares(vision: Mapping[str, Any], language: Mapping[str, Any]) -> None:
    """On one GPU the vision stage may hold no more than the language model leaves to it."""
    if vision["vision_url"].string_value or {p["device"].string_value for p in (vision, language)} != {"cuda"}:
        return
    own, left = int(vision["memory_bytes"].string_value), int(language["vision_memory_bytes"].string_value)
    if not own:
        raise ValueError("vision_encoder.memory_bytes 0 is no limit, which two stages on one GPU need; set it")
    if own + CONTEXT_BYTES > left:
        raise ValueError(
            f"vision_encoder.memory_bytes {own} and {CONTEXT_BYTES} for CUDA itself exceed "
            f"language_model.vision_memory_bytes {left}; lower the first or raise the last"
        )


def _fit(repository: Path, plan: PlanShape) -> None:
    """Write a plan's numbers into the named config `tensorrt`."""
    tile = [plan.side, plan.side, 3]
    file = repository / "preprocess" / "configs" / "tensorrt.pbtxt"
    preprocess = _read(repository, "preprocess")[file]
    preprocess.parameters["max_cost"].string_value = str(plan.max_tiles)
    next(output for output in preprocess.output if output.name == "TILES").dims[:] = [-1, *tile]
    _write(file, preprocess)
    file = repository / "vision_encoder" / "configs" / "tensorrt.pbtxt"
    vision = _read(repository, "vision_encoder")[file]
    vision.max_batch_size = plan.max_tiles
    vision.input[0].dims[:] = tile
    vision.output[0].dims[:] = [plan.rows, plan.hidden]
    del vision.optimization.cuda.graph_spec[:]
    least = 1
    for bucket in plan.buckets():
        graph = vision.optimization.cuda.graph_spec.add(batch_size=bucket)
        graph.input["TILES"].dim[:] = tile
        graph.graph_lower_bound.batch_size = least
        graph.graph_lower_bound.input["TILES"].dim[:] = tile
        least = bucket + 1
    _write(file, vision)


def _read(repository: Path, model: str) -> dict[Path, model_config_pb2.ModelConfig]:
    """The model's config.pbtxt and its named configs, by file."""
    default = repository / model / "config.pbtxt"
    if not default.is_file():
        known = ", ".join(sorted(path.parent.name for path in repository.glob("*/config.pbtxt")))
        raise ValueError(f"there is no model {model!r}; there are {known}")
    files = [default, *sorted((repository / model / "configs").glob("*.pbtxt"))]
    return {file: text_format.Parse(file.read_text(), model_config_pb2.ModelConfig()) for file in files}


def _write(file: Path, config: model_config_pb2.ModelConfig) -> None:
    file.write_text(text_format.MessageToString(config))


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
    parser.add_argument(
        "--tensorrt", type=Path, metavar="CHECKPOINT", help="fit the named config to the plan of this checkpoint"
    )
    parser.add_argument("--max-tiles", type=int, default=32, help="of the plan's profile (%(default)s)")
    parser.add_argument("--instances", nargs="*", default=[], metavar="MODEL=N")
    parser.add_argument("--set", nargs="*", default=[], metavar="MODEL.PARAMETER=VALUE", dest="parameters")
    arguments = parser.parse_args()
    try:
        instances = {model: int(count) for model, count in _pairs(arguments.instances).items()}
        only = arguments.only
        gpu = {name: value for name, value in GPU_SETTINGS.items() if not only or name.split(".")[0] in only}
        parameters = (gpu if arguments.gpu else {}) | _pairs(arguments.parameters)
        if arguments.max_tiles < 1:
            raise ValueError(f"--max-tiles wants 1 or more, not {arguments.max_tiles}")
        plan = PlanShape.of_checkpoint(arguments.tensorrt, arguments.max_tiles) if arguments.tensorrt else None
        render(arguments.source, arguments.out, instances, parameters, plan, only)
    except (ValueError, TesseraError) as error:
        print(f"render_repository: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
