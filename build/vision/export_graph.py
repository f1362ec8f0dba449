"""Export the vision tower of a checkpoint to one ONNX file.

    python build/vision/export_graph.py --checkpoint DIR --out FILE [--target onnxruntime]
    python build/vision/export_graph.py --checkpoint DIR --out FILE --target tensorrt \
        [--precision float16|bfloat16|float32] [--quantize int8|fp8 [--pictures DIR]]

``onnxruntime`` (the default) is what the CPU vision stage runs, which also exports it by itself; ``tensorrt`` is a
strongly typed graph of standard operators for build/vision/build_plan.py (docs/tensorrt.md).
``--quantize`` inserts Q/DQ nodes whose scales are measured first, on ``--pictures`` or else on training pictures of the
default data set (never held-out ones).

The latter maps "TILES" to bfloat16 "EMBEDDINGS", as the stages name them: the graph of the CPU vision stage
(tessera.models.internvl.onnx_graph) in standard operators (opset 17), for a strongly typed network: the types stand in
the graph. Matrix products take narrow operands (float16, bfloat16, or quantised ones) and all between them is float32:
residual stream, norms, softmax, activations, biases. The rows in float32 are a tensor named ``embeddings`` here too,
each layer's output is one named ``layers.N``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python_backends"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "default_model"))

from tessera.errors import ConfigError, TesseraError
from tessera.models.internvl.onnx_graph import GraphWriter, vision_graph
from tessera.models.internvl.vision import InternViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower, vision_fingerprint
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.settings.user_cache import write_whole

_ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}
PRECISIONS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_OPSET_FP8 = 19  # the first whose QuantizeLinear knows float8
# Pixels are scaled into 0..1 by a power of two, which rounds nothing: the patch embedding's weights, which hold the
# division by 255, would else be subnormal numbers in float16.
_PIXEL_SCALE = 256.0
_LEAST = 1e-12  # the magnitude that a tensor of zeros counts as, so that no scale is 0
# The type of the stored numbers (FP8 is E4M3), and the largest of them.
KINDS = {"int8": (TensorProto.INT8, 127.0), "fp8": (TensorProto.FLOAT8E4M3FN, 448.0)}


def quantized_layers(tower: InternViT) -> dict[str, torch.nn.Linear]:
    """The linear maps that are quantised, by name: all of the layers, neither patch embedding nor projector."""
    return {name: layer for name, layer in tower.fp8_linears().items() if name.startswith("layers.")}


@torch.inference_mode()
def calibrate(tower: InternViT, tiles: Iterable[torch.Tensor]) -> dict[str, float]:
    """Run the tower on ``tiles`` (batches of uint8 [n, side, side, 3]): name of a linear map -> its largest input.

    Raises ConfigError without tiles.
    """
    amax: dict[str, float] = {}

    def note(name: str, x: torch.Tensor) -> None:
        amax[name] = max(amax.get(name, 0.0), float(x.abs().max()))

    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
        for name, layer in quantized_layers(tower).items()
    ]
    for batch in tiles:
        tower(batch)
    for handle in handles:
        handle.remove()
    if not amax:
        raise ConfigError("calibration needs at least one tile")
    return amax


def tensorrt_graph(
    tower: InternViT,
    fingerprint: str = "",
    precision: str = "float16",
    quantize: str = "",
    amax: Mapping[str, float] | None = None,
) -> onnx.ModelProto:
    """Write the graph of a float32 tower; see ``onnx_graph.vision_graph``.

    ``precision`` is the type of the matrix products' operands (of PRECISIONS). ``quantize`` (of KINDS) gives the
    layers' linear maps explicit Q/DQ nodes instead (attention and projector keep ``precision``): inputs of ``amax``
    map to the largest number, and larger ones are cut off there.
    """
    writer = TypedWriter(tower, PRECISIONS[precision], quantize, amax or {})
    return writer.model(fingerprint, f"{quantize} and {precision}" if quantize else precision)


class TypedWriter(GraphWriter):
    """Standard operators; narrow operands for matrix products, float32 for all else."""

    tiles, rows, rows_type = "TILES", "EMBEDDINGS", TensorProto.BFLOAT16
    domains = ()

    def __init__(self, tower: InternViT, narrow: int, quantize: str = "", amax: Mapping[str, float] | None = None):
        super().__init__(tower)
        self.narrow_type = narrow
        self.quantized: dict[str, str] = {}  # a tensor -> itself after its Q and DQ, shared by q, k and v
        self.amax: dict[torch.nn.Module, float] = {}
        if quantize:
            self.quantized_type, self.largest = KINDS[quantize]
            self.amax = {layer: (amax or {})[name] for name, layer in quantized_layers(tower).items()}
            self.opset = _OPSET_FP8 if quantize == "fp8" else self.opset

    def gelu(self, x: str) -> str:
        return self.gelu_of(x, self.add("Erf", self.times(x, 2**-0.5)))

    def finish(self, rows: str) -> None:
        self.add("Cast", rows, to=self.rows_type, out=self.rows)

    def pixels(self, tiles: str) -> str:
        # TensorRT knows uint8 at its inputs only, so the type changes before the shape does. 0..255 fit exactly.
        narrow = self.narrow(tiles)
        return self.add("Mul", narrow, self.narrow_constant(torch.tensor(1 / _PIXEL_SCALE)))

    def embed_patches(self, patches: str) -> str:
        linear = self.tower.patch_embedding
        x = self.add("MatMul", patches, self.narrow_constant(linear.weight.t() * _PIXEL_SCALE))
        return self.add("Add", self.wide(x), self.constant(linear.bias))

    def matrix(self, x: str, weight: torch.Tensor, layer: torch.nn.Linear) -> str:
        if layer in self.amax:
            return self.add("MatMul", self.quantized_input(x, self.amax[layer]), self.quantized_weight(weight))
        return self.wide(self.add("MatMul", self.narrow(x), self.narrow_constant(weight.t())))

    def product(self, a: str, b: str) -> str:
        return self.wide(self.add("MatMul", self.narrow(a), self.narrow(b)))

    def quantized_input(self, x: str, amax: float) -> str:
        if x not in self.quantized:
            scale = self.constant(np.float32(max(amax, _LEAST) / self.largest))
            zero = self.stored(np.float32(0), self.quantized_type)
            self.quantized[x] = self.add("DequantizeLinear", self.add("QuantizeLinear", x, scale, zero), scale, zero)
        return self.quantized[x]

    def quantized_weight(self, weight: torch.Tensor) -> str:
        """One scale an output channel; stored as it is multiplied, with a DequantizeLinear alone."""
        scale = weight.abs().amax(dim=1).clamp(min=_LEAST) / self.largest
        values = (weight / scale[:, None]).t().contiguous().numpy()
        zero = self.stored(np.zeros(len(scale), np.float32), self.quantized_type)
        stored = self.stored(values, self.quantized_type)
        return self.add("DequantizeLinear", stored, self.constant(scale), zero, axis=1)

    def narrow(self, x: str) -> str:
        return self.add("Cast", x, to=self.narrow_type)

    def wide(self, x: str) -> str:
        return self.add("Cast", x, to=TensorProto.FLOAT)

    def narrow_constant(self, value: torch.Tensor) -> str:
        return self.stored(value.float().contiguous().numpy(), self.narrow_type)

    def stored(self, values: np.ndarray | np.generic, element_type: int) -> str:
        """A constant of ``element_type``, rounded to nearest even."""
        kind = helper.tensor_dtype_to_np_dtype(element_type)
        array = np.rint(values) if np.issubdtype(kind, np.integer) else np.asarray(values)
        return self.constant(np.asarray(array).astype(kind))


def calibration_pictures(folder: Path | None, count: int) -> Iterator[bytes]:
    """Encoded pictures: of a folder, or training scenes drawn for this (the renderer's seeds are never held out)."""
    if folder is None:
        import scene

        yield from (scene.encode_jpeg(scene.sample(seed, "train")) for seed in range(count))
        return
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _ENDINGS)
    if not files:
        raise ConfigError(f"--pictures: no {', '.join(sorted(_ENDINGS))} in {folder}")
    yield from (file.read_bytes() for file in files[:count])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="checkpoint folder")
    add("--out", type=Path, required=True, help="the file to write")
    add("--target", choices=("onnxruntime", "tensorrt"), default="onnxruntime", help="what will read the file")
    add("--random-weights", action="store_true", help="for measuring a shape without weights")
    add = parser.add_argument_group("with --target tensorrt").add_argument
    add("--precision", choices=list(PRECISIONS), help="operands of the matrix products (default float16)")
    add("--quantize", choices=list(KINDS), help="Q/DQ nodes around the layers' linear maps")
    add("--pictures", type=Path, metavar="DIR", help="calibrate on these (default: training pictures of our data set)")
    add("--count", type=int, default=32, help="calibrate on this many pictures (%(default)s)")
    args = parser.parse_args(argv)
    if args.target != "tensorrt" and (args.precision or args.quantize):
        parser.error("--precision and --quantize are for --target tensorrt")
    if args.count < 1:
        parser.error("--count wants a number of 1 or more")
    try:
        config = read_config(args.checkpoint)
        tower = load_tower(config, random_weights=args.random_weights)
        if not isinstance(tower, InternViT):
            raise ConfigError(f"{args.checkpoint}: there is no graph for the vision tower of {config.layout}")
        fingerprint = "random" if args.random_weights else vision_fingerprint(config)
        if args.target == "tensorrt":
            amax = None
            if args.quantize:  # on pictures cut into tiles as the service cuts them
                cut = Preprocessor.from_checkpoint(config.folder)
                pictures = calibration_pictures(args.pictures, args.count)
                pixels = (cut(PreprocessRequest(text="", images=[picture])).pixels for picture in pictures)
                amax = calibrate(tower, (torch.from_numpy(each.reshape(-1, *tower.unit_shape)) for each in pixels))
            model = tensorrt_graph(tower, fingerprint, args.precision or "float16", args.quantize or "", amax)
            onnx.checker.check_model(model)
        else:
            model = vision_graph(tower, fingerprint)
        write_whole(args.out, lambda draft: onnx.save(model, str(draft)))
    except TesseraError as error:
        print(f"export_graph: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB, target {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
