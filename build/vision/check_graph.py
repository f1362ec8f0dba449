"""Compare an exported vision graph with torch in float32, layer by layer where they part.

    python build/vision/check_graph.py --checkpoint DIR --onnx FILE

Prints one JSON line; exit code 0 only if the least cosine over all rows and tiles is at least the bound of the graph's
precision (``--cosine`` for another). A graph written for TensorRT runs here in onnxruntime on the CPU with the same
roundings at the same places, so this judges the graph, not TensorRT's kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python_backends"))

from tessera.errors import CheckpointError, TesseraError
from tessera.models.internvl.onnx_graph import FINGERPRINT, PRECISION
from tessera.models.internvl.vision import InternViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower, vision_fingerprint
from tessera.vision.onnx_runner import session_of

# The least cosine to torch in float32 that passes, by what the matrix products compute in. bfloat16 has 8 bits, fp8 4.
BOUNDS = {"float32": 0.9999, "float16": 0.9999, "bfloat16": 0.999, "int8": 0.99, "fp8": 0.99}
TILES, ROWS = "tiles", "embeddings"  # what the graph of the CPU vision stage calls them


def for_cpu(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph written for TensorRT, made to run in onnxruntime on the CPU with the same roundings: uint8 "tiles" in and
    float32 "embeddings" out. One that has them already is returned as it is.

    onnxruntime has no bfloat16 arithmetic on the CPU and hands out no bfloat16. So the rows leave as the float32 that
    is in the graph anyway, and in a bfloat16 graph every change of type becomes a rounding to bfloat16 and back to
    float32.
    """
    (given,), (output,) = model.graph.input, model.graph.output
    if (given.name, output.name) == (TILES, ROWS):
        return model
    changed = deepcopy(model)
    graph = changed.graph
    narrow = any(constant.data_type == TensorProto.BFLOAT16 for constant in graph.initializer)
    nodes = []
    for node in (node for node in graph.node if node.output[0] != "EMBEDDINGS"):
        node.input[:] = [TILES if name == "TILES" else name for name in node.input]
        if narrow and node.op_type == "Cast":
            rounded = f"{node.output[0]}_rounded"
            nodes.append(helper.make_node("Cast", node.input, [rounded], f"{node.name}_round", to=TensorProto.BFLOAT16))
            nodes.append(helper.make_node("Cast", [rounded], node.output, node.name, to=TensorProto.FLOAT))
        else:
            nodes.append(node)
    for constant in graph.initializer:
        if constant.data_type == TensorProto.BFLOAT16:
            wide = numpy_helper.to_array(constant).astype("float32")
            constant.CopyFrom(numpy_helper.from_array(wide, constant.name))
    graph.input[0].name, graph.output[0].name = TILES, ROWS
    graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.node[:]
    graph.node.extend(nodes)
    return changed


def test_tiles(side: int, seed: int = 0) -> np.ndarray:
    """uint8 [6, side, side, 3]: black, white, noise, and smooth random fields as pictures have them."""
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 256, (1, side, side, 3), dtype=np.uint8)
    coarse = torch.from_numpy(generator.random((3, 3, 9, 9), dtype=np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1) * 255
    flat = [np.full((1, side, side, 3), value, np.uint8) for value in (0, 255)]
    return np.concatenate([*flat, noise, smooth.permute(0, 2, 3, 1).to(torch.uint8).numpy()])


@torch.inference_mode()
def torch_states(tower: InternViT, tiles: np.ndarray) -> dict[str, np.ndarray]:
    """Every tensor that the graph names, in order of computation."""
    x, update = tower.embed(torch.from_numpy(tiles)), None
    states = {"embedded": x}
    for number, layer in enumerate(tower.blocks[: tower.depth]):
        x, update = layer(x, update)
        states[f"layers.{number}"] = x + update
    states[ROWS] = tower(torch.from_numpy(tiles))
    return {name: state.numpy() for name, state in states.items()}


def graph_states(model: onnx.ModelProto, names: list[str], tiles: np.ndarray) -> dict[str, np.ndarray]:
    """Run the graph with its inner tensors ``names`` as further outputs."""
    present = {output.name for output in model.graph.output}
    more = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in present]
    model.graph.output.extend(more)
    session = session_of(model.SerializeToString(), threads=0)
    return dict(zip(names, session.run(names, {TILES: tiles}), strict=True))


def cosines(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Of the rows [..., size] of both, of one shape: float64 [...]."""
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / np.maximum(norms, np.finfo(np.float64).tiny)


def compare(expected: np.ndarray, actual: np.ndarray) -> dict[str, float]:
    """Least cosine over the rows, and the greatest absolute difference."""
    a, b = (rows.reshape(-1, rows.shape[-1]) for rows in (expected, actual))
    return {"cosine": float(cosines(a, b).min()), "max_difference": float(np.abs(a - b).max())}


def check(checkpoint: Path, onnx_file: Path, bound: float | None = None, random: bool = False) -> dict[str, Any]:
    """The comparison as a plain dict; ``layers`` is filled only if the result is below the bound."""
    config = read_config(checkpoint)
    model = onnx.load(str(onnx_file))
    stored = {prop.key: prop.value for prop in model.metadata_props}
    if stored.get(FINGERPRINT) != ("random" if random else vision_fingerprint(config)):
        raise CheckpointError(f"{onnx_file} was not exported from the weights of {checkpoint}")
    precision = stored[PRECISION]
    bound = BOUNDS[precision.partition(" ")[0]] if bound is None else bound
    model, tiles = for_cpu(model), test_tiles(config.vision.image_size)
    expected = torch_states(load_tower(config, random_weights=random), tiles)
    actual = graph_states(model, [ROWS], tiles)[ROWS]
    result: dict[str, Any] = {"precision": precision, "bound": bound, **compare(expected[ROWS], actual)}
    result["passed"] = result["cosine"] >= bound
    if not result["passed"]:
        states = graph_states(model, list(expected), tiles)
        result["layers"] = {name: compare(expected[name], states[name]) for name in expected}
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--onnx", type=Path, required=True, help="the exported file")
    parser.add_argument("--cosine", type=float, help="least cosine that passes (default: by the graph's precision)")
    parser.add_argument("--random-weights", action="store_true", help="it was exported with --random-weights")
    args = parser.parse_args(argv)
    try:
        result = check(args.checkpoint, args.onnx, args.cosine, args.random_weights)
    except TesseraError as error:
        print(f"check_graph: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    if not result["passed"]:
        # Not "<": a cosine with infinities in it is no number.
        worst = next(name for name, it in result["layers"].items() if not it["cosine"] >= result["bound"])
        print(
            f"check_graph: cosine {result['cosine']:.6f} is below {result['bound']:g} ({result['precision']}); "
            f"the first tensor below it is {worst}",
            file=sys.stderr,
        )
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
