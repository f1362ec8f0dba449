"""Build a TensorRT engine ("plan") from an exported vision graph.

    python build/vision/build_plan.py --onnx FILE --out model_repository/vision_encoder/1/model.plan [--max-tiles 32]
    python build/vision/build_plan.py --onnx FILE --out FILE.engine --compute-capability 8.9

The first runs where the plan will be served (same GPU model, same TensorRT) with the module `tensorrt`; the second
compiles ahead of time with `tensorrt_rtx`, no GPU needed: it proves that the graph parses, its types and its profile,
but such an engine never loads in tritonserver (docs/tensorrt.md). The network is strongly typed: the types are those of
the graph, which build/vision/export_graph.py --target tensorrt writes. Needs nothing of this project.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

INPUT, OUTPUT = ("TILES", "UINT8"), ("EMBEDDINGS", "BF16")
MODULES = ("tensorrt", "tensorrt_rtx")
_LAYERS = "Layers:"  # how the builder's log begins the list of an engine's layers
_KIND = re.compile(r'"?LayerType"?: "?(\w+)')  # of a layer, in that list and in the inspector's JSON


class PlanError(Exception):
    """The plan cannot be built; the message says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """``max_tiles`` bounds a batch, ``usual_tiles`` is the one that kernels are chosen for; bytes of scratch memory."""

    max_tiles: int = 32
    usual_tiles: int = 8
    workspace_bytes: int = 4 << 30
    timing_cache: Path | None = None
    compute_capability: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.usual_tiles <= self.max_tiles:
            raise PlanError(f"1 <= usual tiles <= max tiles is needed, not {self.usual_tiles} and {self.max_tiles}")
        if self.workspace_bytes < 1 << 20:
            raise PlanError(f"{self.workspace_bytes} bytes of workspace are too few; give at least 1 MiB")


class Tensor(NamedTuple):
    """``shape`` has -1 for the number of tiles."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Plan:
    """``profile``: least, usual and largest shape of the input; ``layers``: one line for each layer of the engine,
    fused ones as one; ``source`` says who listed them."""

    engine: bytes
    input: Tensor
    output: Tensor
    profile: list[tuple[int, ...]]
    builder: str
    seconds: float
    source: str = ""
    layers: list[str] = field(default_factory=list)

    def kinds(self) -> Counter[str]:
        """How many layers there are of each kind."""
        return Counter(found[1] for line in self.layers if (found := _KIND.search(line)))

    def report(self) -> str:
        engine = f"{len(self.engine)} bytes, built in {self.seconds:.1f} s by {self.builder}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds().most_common())
        head = [engine, f"{self.input}, {self.profile}", str(self.output), f"layers, by {self.source}: {kinds}"]
        return "\n".join([*head, *self.layers]) + "\n"


@dataclass(frozen=True)
class Toolkit:
    """The module, and the few things in which `tensorrt` and `tensorrt_rtx` differ."""

    module: Any

    @property
    def is_rtx(self) -> bool:
        return self.module.__name__ == "tensorrt_rtx"

    @property
    def name(self) -> str:
        return f"{'TensorRT-RTX' if self.is_rtx else 'TensorRT'} {self.module.__version__}"

    @property
    def has_timing_cache(self) -> bool:
        """TensorRT-RTX measures nothing while it builds, so there is nothing to keep."""
        return not self.is_rtx

    def aim_at(self, config: Any, capability: str | None) -> None:
        """Compile for another GPU than the one here; only TensorRT-RTX can."""
        if capability is None:
            return
        if not self.is_rtx:
            raise PlanError("--compute-capability: TensorRT builds for the GPU at hand only; use tensorrt_rtx")
        known = {name[2:]: value for name, value in self.module.ComputeCapability.__members__.items() if "SM" in name}
        wanted = capability.replace(".", "")
        if wanted not in known:
            raise PlanError(
                f"{self.name} does not compile for compute capability {capability}; it knows {', '.join(known)}"
            )
        config.num_compute_capabilities = 1
        config.set_compute_capability(known[wanted], 0)


def load_toolkit(name: str | None = None) -> Toolkit:
    """The named module, or the first of `tensorrt` and `tensorrt_rtx` that is installed."""
    for candidate in (name,) if name else MODULES:
        try:
            return Toolkit(importlib.import_module(candidate))
        except ImportError as error:
            reason = error
    raise PlanError(
        f"no {name or ' or '.join(MODULES)} here ({reason}): run this in NVIDIA's TensorRT container, or install "
        "requirements-tensorrt.txt to compile ahead of time with TensorRT-RTX"
    )


def build_plan(toolkit: Toolkit, onnx: Path, settings: Settings) -> Plan:
    """Parse, check the graph's input and output, and build. Raises PlanError."""
    trt = toolkit.module
    logger = _logger(trt)
    try:
        builder = trt.Builder(logger)
    except (TypeError, RuntimeError) as error:
        raise PlanError(f"{toolkit.name} does not start: {logger.last_error or error}") from None
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not onnx.is_file():
        raise PlanError(f"{onnx} does not exist; write it with build/vision/export_graph.py --target tensorrt")
    if not parser.parse_from_file(str(onnx)):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise PlanError(f"{toolkit.name} cannot parse {onnx}: {'; '.join(errors)}")
    given, output = _contract(network, onnx)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    toolkit.aim_at(config, settings.compute_capability)
    profile = builder.create_optimization_profile()
    shapes = [(tiles, *given.shape[1:]) for tiles in (1, settings.usual_tiles, settings.max_tiles)]
    profile.set_shape(given.name, *shapes)
    if config.add_optimization_profile(profile) < 0:
        raise PlanError(f"{toolkit.name} refuses the profile {shapes}: {logger.last_error}")
    kept = settings.timing_cache if toolkit.has_timing_cache else None
    if kept:  # has the build use and add to what earlier ones measured
        cache = config.create_timing_cache(kept.read_bytes() if kept.is_file() else b"")
        if not config.set_timing_cache(cache, False):
            raise PlanError(f"{kept} is no timing cache of this GPU and {toolkit.name}; remove it")
    started = time.perf_counter()
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise PlanError(f"{toolkit.name} cannot build {onnx}: {logger.last_error or 'it does not say why'}")
    seconds = time.perf_counter() - started
    if kept:
        _write(kept, bytes(config.get_timing_cache().serialize()))
    profiled = [tuple(shape) for shape in profile.get_shape(given.name)]
    plan = Plan(bytes(built), given, output, profiled, toolkit.name, seconds)
    plan.source, plan.layers = _layers(trt, logger, plan.engine)
    return plan


def _contract(network: Any, onnx: Path) -> list[Tensor]:
    """The graph's only input and output. Raises PlanError if they are not those of the named config `tensorrt`."""
    given = [network.get_input(index) for index in range(network.num_inputs)]
    given += [network.get_output(index) for index in range(network.num_outputs)]
    found = [Tensor(tensor.name, tensor.dtype.name, tuple(tensor.shape)) for tensor in given]
    dynamic = all(tensor.shape[0] == -1 and min(tensor.shape[1:]) > 0 for tensor in found)
    if [tensor[:2] for tensor in found] != [INPUT, OUTPUT] or not dynamic:
        raise PlanError(
            f"{onnx} has {', '.join(map(str, found))}, not {INPUT} and {OUTPUT} over any number of tiles: "
            "export it with --target tensorrt"
        )
    return found


def _layers(trt: Any, logger: Any, engine: bytes) -> tuple[str, list[str]]:
    """Who listed the engine's layers, and the list: the engine inspector, or, without a driver, the builder's log."""
    logged = logger.layers
    loaded = trt.Runtime(logger).deserialize_cuda_engine(engine)
    if loaded is None:
        return "the builder's log (no GPU here that could load the engine for the inspector)", logged
    inspector = loaded.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return "the engine inspector", [json.dumps(layer) for layer in json.loads(text)["Layers"]]


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc,name-defined]
        """Keeps the last error and the list of layers; shows nothing by itself."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = ""
            self.layers: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.last_error = message
            elif message.startswith(_LAYERS):
                self.layers = message.splitlines()[1:]

    return Logger()


def _write(file: Path, content: bytes) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".part")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--onnx", type=Path, required=True, help="a graph of build/vision/export_graph.py --target tensorrt")
    add("--out", type=Path, required=True, help="the engine to write")
    add("--max-tiles", type=int, default=Settings.max_tiles, help="the profile's maximum (%(default)s)")
    add("--usual-tiles", type=int, default=Settings.usual_tiles, help="the batch to be fastest at (%(default)s)")
    add("--workspace-bytes", type=int, default=Settings.workspace_bytes, help="scratch memory (%(default)s)")
    add("--timing-cache", type=Path, metavar="FILE", help="kept between builds: the next one is quicker")
    add("--report", type=Path, metavar="FILE", help="the engine's layers as text (default: beside --out, .txt)")
    add("--compute-capability", metavar="X.Y", help="compile ahead of time for such a GPU, with tensorrt_rtx")
    add("--module", choices=MODULES, help="default: tensorrt if it is installed; tensorrt_rtx for ahead of time")
    args = parser.parse_args(argv)
    try:
        given = {name: getattr(args, name) for name in Settings.__dataclass_fields__}
        toolkit = load_toolkit(args.module or ("tensorrt_rtx" if args.compute_capability else None))
        if toolkit.is_rtx and args.out.suffix == ".plan":
            raise PlanError(f"{toolkit.name} builds no plan for tritonserver: give --out another ending than .plan")
        plan = build_plan(toolkit, args.onnx, Settings(**given))
        _write(args.out, plan.engine)
        report = args.report or args.out.with_suffix(".txt")
        _write(report, plan.report().encode())
    except (PlanError, OSError) as error:
        print(f"build_plan: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(plan.engine) / 1e6:.1f} MB for 1 to {args.max_tiles} tiles, {plan.seconds:.1f} s")
    print(f"{report}: {len(plan.layers)} layers, by {plan.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
