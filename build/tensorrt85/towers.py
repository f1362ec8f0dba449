"""A checkpoint's vision tower beside a plan of it: graphs for TensorRT 8.5, a plan's rows, our own tower's times.

    python build/tensorrt85/towers.py graphs --checkpoint DIR --out DIR [--random-weights] GRAPH...
    python build/tensorrt85/towers.py judge DIR ROWS [FIRST]
    python build/tensorrt85/towers.py times --checkpoint DIR --reference DIR [--random-weights]

graphs writes those that 8.5's parser reads, with tiles and torch's rows. A GRAPH is TYPES or TYPES-TILES: ``free-8``,
``typed``, ``half``. TILES fixes the number of tiles; without it any number may come. TYPES:
 - ``free`` is float32 throughout; the builder may choose float16;
 - ``typed`` has float16 operands of matrix products and float32 between them, as the container's TensorRT gets it;
 - ``half`` is float16 throughout;
 - ``plugin`` is the same with the LayerNorm of TensorRT's plugin library, which its compiler does not fuse: that gets
   many small graphs in place of one.
--out gets GRAPH.onnx, tiles.u8 (uint8 [6, side, side, 3]) and rows.npy (torch's, float32). Beside the types this
changes what 8.5's parser has no operator for: LayerNormalization becomes nine, in the order that PyTorch's exporter
made popular and compilers look for; bfloat16 rows become float16; the class row is concatenated.

judge compares a plan's rows with torch's: DIR is that of graphs; ROWS the file that `trtprobe run` wrote for DIR's
tiles, again and again from tile FIRST on. Prints the least cosine over all rows; exit code 1 below 0.99 or with
anything not finite. times are those of the service's own tower on this GPU, as a CUDA graph, beside a plan's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python_backends"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from check_export import test_tiles
from export_vision_onnx import tensorrt_graph

from tessera.kernels.tuning import MeasuredChoices, choices_path, graph_milliseconds
from tessera.models.internvl.vision import InternViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import serving_tower

PRECISION = {
    "free": "float32",
    "half": "float32",
    "plugin": "float32",
    "typed": "float16",
}  # that the graph is exported in
LEAST = 0.99
SAMPLES = 6  # the tiles of graphs
COUNTS = (1, 8, 32)


class Rewriter:
    """Nodes for TensorRT 8.5, made one by one from those of the project's own graph."""

    def __init__(self, model: onnx.ModelProto, types: str) -> None:
        self.model, self.half, self.plugin = model, types in ("half", "plugin"), types == "plugin"
        self.constants = {constant.name: constant for constant in model.graph.initializer}

    def constant(self, values: np.ndarray) -> str:
        name = f"own_{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(values, name)
        return name

    def layer_norm(self, node: NodeProto) -> Iterator[NodeProto]:
        x, scale, shift = node.input
        out = node.output[0]
        epsilon = next(attribute.f for attribute in node.attribute if attribute.name == "epsilon")

        def add(operator: str, *inputs: str, name: str = "", **attributes: object) -> NodeProto:
            result = f"{out}_{name}" if name else out
            return helper.make_node(operator, inputs, [result], name=result, **attributes)

        yield add("ReduceMean", x, name="mean", axes=[-1], keepdims=1)
        yield add("Sub", x, f"{out}_mean", name="centred")
        yield add("Pow", f"{out}_centred", self.constant(np.array(2, np.float32)), name="square")
        yield add("ReduceMean", f"{out}_square", name="variance", axes=[-1], keepdims=1)
        yield add("Add", f"{out}_variance", self.constant(np.array(epsilon, np.float32)), name="positive")
        yield add("Sqrt", f"{out}_positive", name="deviation")
        yield add("Div", f"{out}_centred", f"{out}_deviation", name="normal")
        yield add("Mul", f"{out}_normal", scale, name="scaled")
        yield add("Add", f"{out}_scaled", shift)

    def class_row(self, node: NodeProto) -> Iterator[NodeProto]:
        """A row of zeros before the patches: Pad, for any number of tiles, of common operators."""
        x, out = node.input[0], node.output[0]
        bounds = [self.constant(np.array([value], np.int64)) for value in (0, 1, 1)]
        yield helper.make_node("Slice", [x, *bounds], [f"{out}_first"], name=f"{out}_first")
        zero = self.constant(np.array(0, np.float32))
        yield helper.make_node("Mul", [f"{out}_first", zero], [f"{out}_zeros"], name=f"{out}_zeros")
        yield helper.make_node("Concat", [f"{out}_zeros", x], [out], name=f"{out}_joined", axis=1)

    def rewrite(self, node: NodeProto) -> Iterator[NodeProto]:
        if node.op_type == "LayerNormalization" and self.plugin:
            node.op_type = "LayerNorm"
            node.attribute.append(helper.make_attribute("plugin_version", "1"))
            yield node
        elif node.op_type == "LayerNormalization":
            yield from self.layer_norm(node)
        elif node.op_type == "Pad":
            yield from self.class_row(node)
        elif node.op_type == "Cast":
            (target,) = node.attribute
            if target.i == TensorProto.BFLOAT16 or (self.half and target.i == TensorProto.FLOAT):
                target.i = TensorProto.FLOAT16
            yield node
        else:
            yield node

    def run(self, tiles: int | None) -> onnx.ModelProto:
        graph = self.model.graph
        nodes = list(
            without_idle_casts([new for node in graph.node for new in self.rewrite(node)], graph.output[0].name)
        )
        used = {name for node in nodes for name in node.input}
        constants = [constant for name, constant in self.constants.items() if name in used]
        if self.half:
            constants = [to_half(constant) for constant in constants]
        graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
        if tiles:
            for value in (*graph.input, *graph.output):
                value.type.tensor_type.shape.dim[0].dim_value = tiles
        del graph.node[:], graph.initializer[:]
        graph.node.extend(nodes)
        graph.initializer.extend(constants)
        return self.model


def without_idle_casts(nodes: list[NodeProto], output: str) -> Iterator[NodeProto]:
    """The nodes without casts to the type that a tensor has already."""
    kept: dict[str, str] = {}  # what an idle cast made -> what it was made of
    casted: dict[str, int] = {}  # the type that a tensor surely has
    computed = {
        "MatMul",
        "Mul",
        "Add",
        "Sub",
        "Div",
        "Softmax",
        "Erf",
        "Reshape",
        "Transpose",
        "Concat",
        "Slice",
        "LayerNorm",
    }
    for node in nodes:
        node.input[:] = [kept.get(name, name) for name in node.input]
        source, out = node.input[0], node.output[0]
        if node.op_type == "Cast":
            target = node.attribute[0].i
            if casted.get(source) == target and out != output:
                kept[out] = source
                continue
            casted[out] = target
        elif node.op_type in computed and source in casted:
            casted[out] = casted[source]
        yield node


def to_half(constant: TensorProto) -> TensorProto:
    if constant.data_type != TensorProto.FLOAT:
        return constant
    return numpy_helper.from_array(numpy_helper.to_array(constant).astype(np.float16), constant.name)


def graphs(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = read_config(arguments.checkpoint)
    tower = load_tower(config, random_weights=arguments.random_weights)
    if not isinstance(tower, InternViT):
        raise SystemExit(f"{arguments.checkpoint}: there is no graph for the vision tower of {config.layout}")
    for name in arguments.graphs:
        types, _, tiles = name.partition("-")
        if types not in PRECISION or (tiles and not tiles.isdigit()):
            raise SystemExit(f"{name} is no graph: TYPES or TYPES-TILES is, with TYPES of {', '.join(PRECISION)}")
        model = tensorrt_graph(tower, precision=PRECISION[types])
        model = Rewriter(model, types).run(int(tiles) if tiles else None)
        file = arguments.out / f"{name}.onnx"
        onnx.save(model, f"{file}.part")
        Path(f"{file}.part").rename(file)
        print(f"{file}: {len(model.graph.node)} nodes, {file.stat().st_size / 1e6:.1f} MB", flush=True)
    tiles_u8 = test_tiles(config.vision.image_size)
    tiles_u8.tofile(arguments.out / "tiles.u8")
    with torch.inference_mode():
        rows = tower(torch.from_numpy(tiles_u8)).float().numpy()
    np.save(arguments.out / "rows.npy", rows)
    print(f"{arguments.out}: {len(tiles_u8)} tiles, rows {rows.shape}, largest {np.abs(rows).max():.3g}")


def least_cosine(rows: np.ndarray, wanted: np.ndarray, first: int = 0) -> tuple[float, list[float]]:
    """Of [n, rows, hidden] against the reference [6, rows, hidden] repeated; over all, and of each of the samples."""
    wanted = wanted.reshape(SAMPLES, -1, wanted.shape[-1]).astype(np.float64)
    order = (np.arange(len(rows)) + first) % SAMPLES
    a, b = rows.reshape(len(rows), -1, wanted.shape[-1]).astype(np.float64), wanted[order]
    cosine = (a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-300)
    by_tile = cosine.min(1)
    return float(by_tile.min()), [float(by_tile[order == k].min()) for k in range(SAMPLES) if (order == k).any()]


def judge(arguments: argparse.Namespace) -> int:
    wanted = np.load(arguments.folder / "rows.npy")
    rows = np.fromfile(arguments.rows, np.float16).reshape(
        -1, wanted.size // SAMPLES // wanted.shape[-1], wanted.shape[-1]
    )
    finite = bool(np.isfinite(rows).all())
    least, by_tile = least_cosine(rows, wanted, arguments.first)
    names = ("black", "white", "noise", "smooth", "smooth", "smooth")
    each = ", ".join(f"{name} {cosine:.6f}" for name, cosine in zip(names, by_tile, strict=False))
    print(f"COSINE {arguments.rows.name}: {least:.7f} at least over {len(rows)} tiles ({each}); finite: {finite}")
    return 0 if finite and least >= LEAST else 1


@torch.inference_mode()
def times(arguments: argparse.Namespace) -> None:
    settings = VisionSettings("graph", dtype="bfloat16", device="cuda", random_weights=arguments.random_weights)
    tower = serving_tower(read_config(arguments.checkpoint), settings)
    choices = MeasuredChoices(choices_path(), graph_milliseconds)
    samples = np.fromfile(arguments.reference / "tiles.u8", np.uint8).reshape(6, *tower.unit_shape)
    wanted = np.load(arguments.reference / "rows.npy")
    for count in COUNTS:
        tiles = torch.from_numpy(samples[np.arange(count) % 6]).cuda()
        forward = tower.tuned(count, choices)
        rows = forward(tiles).float().cpu().numpy().reshape(count, -1, wanted.shape[-1])
        milliseconds = graph_milliseconds(lambda: forward(tiles))  # noqa: B023
        print(
            f"OWN TOWER {count} tiles, bfloat16, CUDA graph: {milliseconds:.3f} ms, "
            f"{count * 1e3 / milliseconds:.0f} tiles/s, cosine {least_cosine(rows, wanted)[0]:.7f}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    for name, does, folder in (("graphs", graphs, "--out"), ("times", times, "--reference")):
        step = steps.add_parser(name)
        step.set_defaults(does=does)
        step.add_argument("--checkpoint", type=Path, required=True)
        step.add_argument(folder, type=Path, required=True, help="the folder of graphs, tiles and rows")
        step.add_argument("--random-weights", action="store_true")
        if does is graphs:
            step.add_argument("graphs", nargs="+", metavar="GRAPH")
    step = steps.add_parser("judge")
    step.set_defaults(does=judge)
    step.add_argument("folder", type=Path)
    step.add_argument("rows", type=Path)
    step.add_argument("first", type=int, nargs="?", default=0)
    arguments = parser.parse_args(argv)
    return arguments.does(arguments) or 0


if __name__ == "__main__":
    raise SystemExit(main())
