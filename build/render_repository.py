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
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python_backends"))

from tessera.checkpoint.config import read_config
from tessera.errors import TesseraError
from tessera.gpu_memory import ServerSettings
from tessera.launcher.settings import STAGES
from tessera.settings import nearest, settings_of

ROOT = Path(__file__).resolve().parent.parent

# What --gpu says: all else follows from the device.
GPU_SETTINGS = {"preprocess.device": "cuda", "vision_encoder.device": "cuda", "language_model.device": "cuda"}


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
        ValueError: a model or a parameter does not exist, or `out` does.
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
        known = [
            entry.name for kind in (ServerSettings, STAGES.get(model, ServerSettings)) for entry in settings_of(kind)
        ]
        if parameter not in known:
            raise ValueError(f"{model} has no parameter {parameter!r}{nearest(parameter, known)}")
        for file, config in configs.items():
            if config.backend == "python":
                config.parameters[parameter].string_value = value
                _write(file, config)
    if plan:
        _fit(out, plan)
    # A relative checkpoint counts from the repository, which lies elsewhere now.
    for model in set(STAGES) & {path.name for path in out.iterdir()}:
        for file, config in _read(out, model).items():
            if config.backend == "python":
                said = config.parameters["checkpoint"].string_value or ServerSettings.checkpoint
                config.parameters["checkpoint"].string_value = str((source / said).resolve())
                _write(file, config)


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
