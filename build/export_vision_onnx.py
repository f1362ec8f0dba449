"""Export the vision tower of a checkpoint to one ONNX file.

    python build/export_vision_onnx.py --checkpoint DIR --out FILE [--target onnxruntime]
    python build/export_vision_onnx.py --checkpoint DIR --out FILE --target tensorrt \
        [--precision float16|bfloat16|float32] [--quantize int8|fp8 [--pictures DIR]]

``onnxruntime`` (the default) is what the CPU vision stage runs, which also exports it by itself; ``tensorrt`` is a
strongly typed graph of standard operators for build/build_vision_plan.py (docs/tensorrt.md).
``--quantize`` inserts Q/DQ nodes whose scales are measured first, on ``--pictures`` or else on training pictures of the
default data set (never held-out ones).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python_backends"))

from calibration import KINDS, Quantization, calibrate
from vision_graphs import PRECISIONS, tensorrt_graph

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import ConfigError, TesseraError
from tessera.models.internvl.onnx_graph import vision_graph
from tessera.models.internvl.vision import InternViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower, vision_fingerprint
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.settings.user_cache import write_whole

ROOT = Path(__file__).resolve().parent.parent
PICTURES = 32
_ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}


def export(model: onnx.ModelProto, out: Path, target: str) -> None:
    """Write the graph, whole or not at all."""
    if target != "onnxruntime":
        onnx.checker.check_model(model)
    write_whole(out, lambda draft: onnx.save(model, str(draft)))


def calibration_pictures(folder: Path | None, count: int) -> Iterator[bytes]:
    """Encoded pictures: of a folder, or training scenes drawn for this (the renderer's seeds are never held out)."""
    if folder is None:
        sys.path.insert(0, str(ROOT / "build" / "default_model"))
        import scene

        for seed in range(count):
            yield scene.encode_jpeg(scene.sample(seed, "train"))
        return
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _ENDINGS)
    if not files:
        raise ConfigError(f"--pictures: no {', '.join(sorted(_ENDINGS))} in {folder}")
    for file in files[:count]:
        yield file.read_bytes()


def measure(config: CheckpointConfig, tower: InternViT, kind: str, pictures: Iterator[bytes]) -> Quantization:
    """The scales for ``kind``, from pictures cut into tiles as the service cuts them."""
    preprocessor = Preprocessor.from_checkpoint(config.folder)
    side = config.vision.image_size
    batches = []
    for picture in pictures:
        prepared = preprocessor(PreprocessRequest(text="", images=[picture]))
        batches.append(torch.from_numpy(prepared.pixels.reshape(-1, side, side, 3)))
    return calibrate(tower, batches, kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="checkpoint folder")
    add("--out", type=Path, required=True, help="the file to write")
    add("--target", choices=("onnxruntime", "tensorrt"), default="onnxruntime", help="what will read the file")
    add("--random-weights", action="store_true", help="for measuring a shape without weights")
    typed = parser.add_argument_group("with --target tensorrt")
    add = typed.add_argument
    add("--precision", choices=list(PRECISIONS), help="operands of the matrix products (default float16)")
    add("--quantize", choices=list(KINDS), help="Q/DQ nodes around the layers' linear maps")
    add("--pictures", type=Path, metavar="DIR", help="calibrate on these (default: training pictures of our data set)")
    add("--count", type=int, default=PICTURES, help="calibrate on this many pictures (%(default)s)")
    args = parser.parse_args()
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
        scales = None
        if args.quantize:
            pictures = calibration_pictures(args.pictures, args.count)
            scales = measure(config, tower, args.quantize, pictures)
        if args.target == "tensorrt":
            model = tensorrt_graph(tower, fingerprint, args.precision or "float16", scales)
        else:
            model = vision_graph(tower, fingerprint)
        export(model, args.out, args.target)
    except TesseraError as error:
        print(f"export_vision_onnx: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB, target {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
