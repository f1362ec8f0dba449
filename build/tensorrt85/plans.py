"""What go.sh does in Python for plans of TensorRT 8.5.3: libraries, graphs, rows and times, and a plan served.

    python build/tensorrt85/plans.py pack WHEELS OUT [--megabytes 39.6]
    python build/tensorrt85/plans.py graphs --checkpoint DIR --out DIR [--random-weights] GRAPH...
    python build/tensorrt85/plans.py judge DIR ROWS [FIRST]
    python build/tensorrt85/plans.py times --checkpoint DIR --reference DIR [--random-weights]
    python build/tensorrt85/plans.py serve PLAN REFERENCE --backend libtriton_tensorrt.so [--pictures 24] [--out DIR]

pack carries the libraries to a machine without a package registry: it fills folders that are carried one by one. WHEELS
holds tensorrt==8.5.3.1 (cp310), nvidia-cuda-runtime-cu11, nvidia-cublas-cu11 and nvidia-cudnn-cu11 (8.6). OUT/p1, p2,
... hold pieces of the libraries, compressed, for `go.sh unpack`; OUT/libs.sha256 what they must be once joined. Code of
other chips than sm_90 is zeroed, except in libnvinfer_builder_resource, whose digest TensorRT checks.

graphs writes those that 8.5's parser reads, with tiles and torch's rows. A GRAPH is TYPES or TYPES-TILES: ``free-8``,
``typed``, ``half``. TILES fixes the number of tiles; without it any number may come. TYPES:
 - ``free`` is float32 throughout; the builder may choose float16;
 - ``typed`` has float16 operands of matrix products and float32 between them, as the container's TensorRT gets it;
 - ``half`` is float16 throughout;
 - ``plugin`` is the same with the LayerNorm of TensorRT's plugin library, which its compiler does not fuse: that gets
   many small graphs in place of one.
--out gets GRAPH.onnx, tiles.u8 (uint8 [6, side, side, 3]) and rows.npy (torch's, float32).

judge compares a plan's rows with torch's: DIR is that of graphs; ROWS the file that `trtprobe run` wrote for DIR's
tiles, again and again from tile FIRST on. Prints the least cosine over all rows; exit code 1 below 0.99 or with
anything not finite. times are those of the service's own tower on this GPU, as a CUDA graph, beside a plan's.

serve: PLAN, built for the default checkpoint and a range of tiles, inside tritonserver by the named config
`tensorrt`: its rows, its times, its batches, the ensemble's answers; REFERENCE is a folder of graphs. Run it with
TensorRT's libraries on LD_LIBRARY_PATH. A second server with the default config answers the same questions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import shutil
import statistics
import struct
import sys
import tempfile
import time
import urllib.request
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto

sys.path += [str(Path(__file__).resolve().parents[2] / room) for room in ("build/vision", "python_backends", "clients")]

from check_graph import cosines, test_tiles
from export_graph import TypedWriter

from tessera.kernels.tuning import MeasuredChoices, choices_path, graph_milliseconds
from tessera.models.internvl.vision import InternViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import serving_tower

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 24 << 20  # as go.sh joins them
WHOLE = ("libnvinfer_builder_resource.so.8.5.3", "libnvinfer_plugin.so.8", "libnvonnxparser.so.8")
HOST = ("libcudart.so.11.0", "libcudnn.so.8")
SLIMMED = ("libnvinfer.so.8", "libcublas.so.11", "libcublasLt.so.11", "libcudnn_ops_infer.so.8")
FATBIN = re.compile(b"\x50\xed\x55\xba\x01\x00\x10\x00")
PTX, CUBIN, HOPPER = 1, 2, 90
DEFAULT = ROOT / "build" / "default_model" / "checkpoint"
TYPES = ("free", "typed", "half", "plugin")
LEAST = 0.99
SAMPLES = ("black", "white", "noise", "smooth", "smooth", "smooth")  # the tiles of graphs
TIMED, SERVED, REPEATS = (1, 8, 32), (1, 2, 3, 5, 8, 13, 17, 32), 10  # numbers of tiles, and of requests for each


def slim(library: bytearray) -> int:
    """Zero the machine code of other chips, and PTX beside sm_90's own code; headers stay. Returns the zeroed bytes."""
    zeroed = 0
    for found in FATBIN.finditer(bytes(library)):
        at = found.start() + 16
        end = at + struct.unpack_from("<Q", library, found.start() + 8)[0]
        entries = []
        while at < end <= len(library):
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            if kind not in (PTX, CUBIN) or not 32 <= header <= 4096 or at + header + size > end + 64:
                break
            entries.append((kind, struct.unpack_from("<I", library, at + 28)[0], at + header, size))
            at += header + size
        native = any(kind == CUBIN and chip == HOPPER for kind, chip, _, _ in entries)
        for kind, chip, start, size in entries:
            if (kind == CUBIN and chip != HOPPER) or (kind == PTX and native):
                library[start : start + size] = bytes(size)
                zeroed += size
    return zeroed


def compress(library: Path, number: int) -> Path:
    """One piece of a library; literals aligned to the 16 bytes of an instruction, which halves the time."""
    with library.open("rb") as file:
        file.seek(number * CHUNK)
        data = file.read(CHUNK)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": CHUNK, "lc": 0, "lp": 4, "pb": 4}]
    out = library.with_name(f"{library.name}.{number:02d}.xz")
    out.write_bytes(lzma.compress(data, filters=filters, check=lzma.CHECK_CRC32))
    return out


def pack(arguments: argparse.Namespace) -> None:
    work = arguments.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    sums: dict[str, str] = {}
    jobs: list[tuple[Path, int]] = []
    for wheel in sorted(arguments.wheels.glob("*.whl")):
        archive = zipfile.ZipFile(wheel)
        for member in archive.namelist():
            name = Path(member).name
            if name not in (*WHOLE, *HOST, *SLIMMED):
                continue
            library = bytearray(archive.read(member))
            zeroed = slim(library) if name in SLIMMED else 0
            print(f"{name}: {len(library) / 1e6:.0f} MB, zeroed {zeroed / 1e6:.0f}", flush=True)
            (work / name).write_bytes(library)
            sums[name] = hashlib.sha256(library).hexdigest()
            jobs += [(work / name, number) for number in range(-(-len(library) // CHUNK))]
    if missing := {*WHOLE, *HOST, *SLIMMED} - sums.keys():
        raise SystemExit(f"{arguments.wheels} has no {', '.join(sorted(missing))}: see docs/tensorrt.md for the wheels")
    (arguments.out / "libs.sha256").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    with ProcessPoolExecutor() as pool:
        pieces = sorted(pool.map(compress, *zip(*jobs)), key=lambda piece: -piece.stat().st_size)
    left: list[float] = []  # in each folder; first fit, largest first
    for piece in pieces:
        size = piece.stat().st_size
        place = next((number for number, room in enumerate(left) if size <= room), len(left))
        if place == len(left):
            left.append(arguments.megabytes * 1e6)
        left[place] -= size
        folder = arguments.out / f"p{place + 1}"
        folder.mkdir(exist_ok=True)
        piece.rename(folder / piece.name)
    print(f"{len(pieces)} pieces in p1 to p{len(left)}")


class Writer85(TypedWriter):
    """What 8.5's parser has no operator for: LayerNormalization becomes nine, in the order that PyTorch's exporter made
    popular and compilers look for; the class row is concatenated, for any number of tiles; rows are float16."""

    rows_type = TensorProto.FLOAT16

    def __init__(self, tower: InternViT, types: str) -> None:
        super().__init__(tower, TensorProto.FLOAT if types == "free" else TensorProto.FLOAT16)
        self.mixed, self.half, self.plugin = types == "typed", types in ("half", "plugin"), types == "plugin"

    def narrow(self, x: str) -> str:
        return super().narrow(x) if self.mixed or x == self.tiles else x

    def wide(self, x: str) -> str:
        return super().wide(x) if self.mixed else x

    def constant(self, value: Any) -> str:
        array = value.detach().float().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        return super().constant(array.astype(np.float16) if self.half and array.dtype == np.float32 else array)

    def norm(self, x: str, norm: torch.nn.Module) -> str:
        if not isinstance(norm, torch.nn.LayerNorm):
            return super().norm(x, norm)
        scale, shift = self.constant(norm.weight), self.constant(norm.bias)
        if self.plugin:
            return self.add("LayerNorm", x, scale, shift, axis=-1, epsilon=norm.eps, plugin_version="1")
        centred = self.add("Sub", x, self.add("ReduceMean", x, axes=[-1], keepdims=1))
        square = self.add("Pow", centred, self.constant(np.float32(2)))
        variance = self.add("ReduceMean", square, axes=[-1], keepdims=1)
        deviation = self.add("Sqrt", self.add("Add", variance, self.constant(np.float32(norm.eps))))
        return self.add("Add", self.add("Mul", self.add("Div", centred, deviation), scale), shift)

    def class_row(self, patches: str) -> str:
        first = self.add("Slice", patches, *(self.constant(np.array([value])) for value in (0, 1, 1)))
        return self.add("Concat", self.times(first, 0), patches, axis=1)


def graph_for_8_5(tower: InternViT, name: str) -> onnx.ModelProto:
    types, _, tiles = name.partition("-")
    if types not in TYPES or (tiles and not tiles.isdigit()):
        raise SystemExit(f"{name} is no graph: TYPES or TYPES-TILES is, with TYPES of {', '.join(TYPES)}")
    model = Writer85(tower, types).model("", types)
    for value in (*model.graph.input, *model.graph.output) if tiles else ():
        value.type.tensor_type.shape.dim[0].dim_value = int(tiles)
    return model


def graphs(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = read_config(arguments.checkpoint)
    tower = load_tower(config, random_weights=arguments.random_weights)
    if not isinstance(tower, InternViT):
        raise SystemExit(f"{arguments.checkpoint}: there is no graph for the vision tower of {config.layout}")
    for name in arguments.graphs:
        model, file = graph_for_8_5(tower, name), arguments.out / f"{name}.onnx"
        onnx.save(model, f"{file}.part")
        Path(f"{file}.part").rename(file)
        print(f"{file}: {len(model.graph.node)} nodes, {file.stat().st_size / 1e6:.1f} MB", flush=True)
    tiles = test_tiles(config.vision.image_size)
    tiles.tofile(arguments.out / "tiles.u8")
    with torch.inference_mode():
        rows = tower(torch.from_numpy(tiles)).view(len(tiles), *tower.row_shape).numpy()
    np.save(arguments.out / "rows.npy", rows)
    print(f"{arguments.out}: {len(tiles)} tiles, rows {rows.shape}, largest {np.abs(rows).max():.3g}")


def reference(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tiles [6, side, side, 3] of a folder of graphs, and torch's rows [6, rows, hidden] of them."""
    tiles = np.fromfile(folder / "tiles.u8", np.uint8)
    side = round((tiles.size / len(SAMPLES) / 3) ** 0.5)
    return tiles.reshape(-1, side, side, 3), np.load(folder / "rows.npy")


def least_cosines(rows: np.ndarray, wanted: np.ndarray, first: int = 0) -> np.ndarray:
    """Of each of some tiles' rows, from tile ``first`` on, against the reference's repeated."""
    order = (np.arange(len(rows)) + first) % len(wanted)
    return cosines(wanted[order], rows.reshape(len(rows), *wanted.shape[1:])).min(1)


def judge(arguments: argparse.Namespace) -> int:
    _, wanted = reference(arguments.folder)
    rows = np.fromfile(arguments.rows, np.float16).reshape(-1, *wanted.shape[1:])
    finite, found = bool(np.isfinite(rows).all()), least_cosines(rows, wanted, arguments.first)
    names = np.resize(np.roll(SAMPLES, -arguments.first), len(rows))
    each = ", ".join(f"{name} {found[names == name].min():.6f}" for name in dict.fromkeys(names))
    least = float(found.min())
    print(f"COSINE {arguments.rows.name}: {least:.7f} at least over {len(rows)} tiles ({each}); finite: {finite}")
    return 0 if finite and least >= LEAST else 1


@torch.inference_mode()
def times(arguments: argparse.Namespace) -> None:
    settings = VisionSettings("graph", dtype="bfloat16", device="cuda", random_weights=arguments.random_weights)
    tower = serving_tower(read_config(arguments.checkpoint), settings)
    choices = MeasuredChoices(choices_path(), graph_milliseconds)
    samples, wanted = reference(arguments.reference)
    for count in TIMED:
        tiles = torch.from_numpy(samples[np.arange(count) % len(samples)]).cuda()
        forward = tower.tuned(count, choices)
        rows = forward(tiles).float().cpu().numpy().reshape(count, *wanted.shape[1:])
        milliseconds = graph_milliseconds(lambda: forward(tiles))  # noqa: B023
        print(
            f"OWN TOWER {count} tiles, bfloat16, CUDA graph: {milliseconds:.3f} ms, "
            f"{count * 1e3 / milliseconds:.0f} tiles/s, cosine {least_cosines(rows, wanted).min():.7f}",
            flush=True,
        )


def make_repository(repository: Path, plan: Path, backend: Path) -> None:
    """The repository with the plan and its backend; rows travel as float16, for TensorRT 8.5 has no bfloat16."""
    from plan_repository import render

    render(repository, DEFAULT, max(SERVED))
    for stage in ("vision_encoder", "language_model"):
        file = repository / stage / "configs" / "tensorrt.pbtxt"
        text = file.read_text()
        assert text.count("TYPE_BF16") == 1, f"{file} does not name bfloat16 once"
        file.write_text(text.replace("TYPE_BF16", "TYPE_FP16"))
    version = repository / "vision_encoder" / "1"
    shutil.copy(plan, version / "model.plan")
    shutil.copy(backend, version / "libtriton_tensorrt.so")  # where tritonserver looks first


def statistics_of(server: Any) -> dict:
    with urllib.request.urlopen(f"{server.http_url}/v2/models/vision_encoder/stats", timeout=10) as page:
        return json.load(page)["model_stats"][0]


def ask_the_plan(server: Any, folder: Path) -> None:
    """Tiles straight to the plan: rows against torch's, milliseconds at the client and by the server's own count."""
    import tritonclient.grpc as triton

    tiles, wanted = reference(folder)
    with triton.InferenceServerClient(server.grpc_url) as client:
        for count in SERVED:
            some = np.ascontiguousarray(tiles[(np.arange(count) + count) % len(tiles)])  # begins elsewhere each time
            given = triton.InferInput("TILES", some.shape, "UINT8")
            given.set_data_from_numpy(some)
            wish = triton.InferRequestedOutput("EMBEDDINGS")
            spent = []
            for number in range(1 + REPEATS):
                if number == 1:  # the first is judged and not timed
                    before = statistics_of(server)["inference_stats"]
                start = time.perf_counter()
                found = client.infer("vision_encoder", [given], outputs=[wish], client_timeout=60)
                spent.append((time.perf_counter() - start) * 1e3)
            after = statistics_of(server)["inference_stats"]
            parts = {
                part: round((after[f"compute_{part}"]["ns"] - before[f"compute_{part}"]["ns"]) / 1e6 / REPEATS, 3)
                for part in ("input", "infer", "output")
            }
            least = least_cosines(found.as_numpy("EMBEDDINGS"), wanted, count).min()
            client_ms = statistics.median(spent[1:])
            print(f"SERVED {count} tiles: cosine {least:.7f}; client {client_ms:.2f} ms; server {parts}", flush=True)


def ask_the_ensemble(server: Any, asked: list[tuple[bytes, str, str]]) -> list[str]:
    from tessera_client import Client

    with Client(server.grpc_url) as client:
        client.ask(asked[0][0], asked[0][1], max_tokens=2)
        texts = [client.ask(picture, question, max_tokens=24).text.strip() for picture, question, _ in asked]
        right = sum(text == answer for text, (_, _, answer) in zip(texts, asked, strict=True))
        jobs = [(picture, question + " " * again) for again in range(10) for picture, question, _ in asked]
        start = time.perf_counter()
        rate = len(list(client.ask_many(jobs, concurrency=64, max_tokens=4))) / (time.perf_counter() - start)
        alone = client.ask(None, "Hello?", max_tokens=6, ignore_eos=True).text
    print(
        f"ENSEMBLE {right} of {len(asked)} right, {rate:.0f} requests/s at 64 at once; text only: {alone!r}", flush=True
    )
    return [*texts, alone]


def serve(arguments: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT / "build" / "default_model"))
    import scene
    from tessera.launcher.options import ServerOptions
    from tessera.launcher.process import Server

    def server(repository: Path, log: str, **more: Any) -> Server:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        given = {"checkpoint": DEFAULT, "ready_timeout_s": 240, "log_path": arguments.out / log, "settings": settings}
        return Server(ServerOptions(repository, **ports, **given, **more))

    settings = dict(pair.split("=", 1) for pair in arguments.set)
    items = scene.heldout()
    items = items[:: max(len(items) // arguments.pictures, 1)][: arguments.pictures]
    asked = [(scene.encode_jpeg(scene.sample(i.scene_seed, "heldout")), i.question, i.answer) for i in items]
    with tempfile.TemporaryDirectory() as folder:
        repository, log = Path(folder) / "repository", "server-tensorrt.log"
        make_repository(repository, arguments.plan, arguments.backend)
        with server(repository, log, model_config_name="tensorrt", extra_flags=("--log-verbose=1",)) as running:
            try:
                ask_the_plan(running, arguments.reference)
                planned = ask_the_ensemble(running, asked)
                runs = {b["batch_size"]: b["compute_infer"]["count"] for b in statistics_of(running)["batch_stats"]}
                print("BATCHES run, by tiles:", dict(sorted(runs.items())))
            finally:
                text = (arguments.out / log).read_text(errors="replace")
                sizes = {int(n) for n in re.findall(r"captured CUDA graph for \S+ batch size (\d+)", text)}
                launched = text.count("is launching CUDA graph")
                print(f"GRAPHS captured for {sorted(sizes)} tiles, launched {launched} times")
    with server(ROOT / "model_repository", "server-default.log") as running:
        default = ask_the_ensemble(running, asked)
    same = sum(ours == theirs for ours, theirs in zip(planned, default, strict=True))
    print(f"SAME ANSWERS as the default config: {same} of {len(default)}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)

    def step(does: Any, *paths: str) -> Any:
        added = steps.add_parser(does.__name__)
        added.set_defaults(does=does)
        for path in paths:
            added.add_argument(path, type=Path, **({"required": True} if path.startswith("-") else {}))
        return added.add_argument

    step(pack, "wheels", "out")("--megabytes", type=float, default=39.6, help="of a folder (%(default)s)")
    add = step(graphs, "--checkpoint", "--out")
    add("--random-weights", action="store_true")
    add("graphs", nargs="+", metavar="GRAPH")
    step(judge, "folder", "rows")("first", type=int, nargs="?", default=0)
    step(times, "--checkpoint", "--reference")("--random-weights", action="store_true")
    add = step(serve, "plan", "reference", "--backend")
    add("--pictures", type=int, default=24)
    add("--out", type=Path, default=Path("."), help="for the servers' logs")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of `tessera serve`")
    arguments = parser.parse_args(argv)
    return arguments.does(arguments) or 0


if __name__ == "__main__":
    raise SystemExit(main())
