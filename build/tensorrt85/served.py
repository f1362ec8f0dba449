"""A plan inside tritonserver, by the named config `tensorrt`: its rows, its times, its batches, the ensemble's answers.

    python build/tensorrt85/served.py PLAN REFERENCE --backend libtriton_tensorrt.so [--pictures 24] [--out DIR]

PLAN was built for the default checkpoint and a range of tiles; REFERENCE is the folder of `towers.py graphs`. Run it
with TensorRT's libraries on LD_LIBRARY_PATH. A second server with the default config answers the same questions.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python_backends"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "clients"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "default_model"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from render_repository import PlanShape, render
from towers import least_cosine

import scene
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera_client import Client

BUILD = Path(__file__).resolve().parents[1]
CHECKPOINT = BUILD / "default_model" / "checkpoint"
COUNTS = (1, 2, 3, 5, 8, 13, 17, 32)
REPEATS = 10


def make_repository(folder: Path, plan: Path, backend: Path) -> Path:
    """The repository with the plan and its backend; rows travel as float16, for TensorRT 8.5 has no bfloat16."""
    repository = folder / "repository"
    render(repository, PlanShape.of_checkpoint(CHECKPOINT, max(COUNTS)))
    for stage in ("vision_encoder", "language_model"):
        file = repository / stage / "configs" / "tensorrt.pbtxt"
        text = file.read_text()
        assert text.count("TYPE_BF16") == 1, f"{file} does not name bfloat16 once"
        file.write_text(text.replace("TYPE_BF16", "TYPE_FP16"))
    version = repository / "vision_encoder" / "1"
    shutil.copy(plan, version / "model.plan")
    shutil.copy(backend, version / "libtriton_tensorrt.so")  # where tritonserver looks first
    return repository


def statistics_of(server: Server) -> dict:
    with urllib.request.urlopen(f"{server.http_url}/v2/models/vision_encoder/stats", timeout=10) as page:
        return json.load(page)["model_stats"][0]


def infer(client: triton.InferenceServerClient, tiles: np.ndarray) -> np.ndarray:
    given = triton.InferInput("TILES", tiles.shape, "UINT8")
    given.set_data_from_numpy(tiles)
    wanted = triton.InferRequestedOutput("EMBEDDINGS")
    return client.infer("vision_encoder", [given], outputs=[wanted], client_timeout=60).as_numpy("EMBEDDINGS")


def ask_the_plan(server: Server, reference: Path) -> None:
    """Tiles straight to the plan: rows against torch's, milliseconds at the client and by the server's own count."""
    wanted = np.load(reference / "rows.npy")
    tiles = np.fromfile(reference / "tiles.u8", np.uint8)
    side = round((tiles.size / 6 / 3) ** 0.5)
    tiles = tiles.reshape(6, side, side, 3)
    with triton.InferenceServerClient(server.grpc_url) as client:
        for count in COUNTS:
            some = np.ascontiguousarray(tiles[(np.arange(count) + count) % 6])  # another beginning for every size
            least, _ = least_cosine(infer(client, some), wanted, count)
            before, times = statistics_of(server)["inference_stats"], []
            for _ in range(REPEATS):
                start = time.perf_counter()
                infer(client, some)
                times.append((time.perf_counter() - start) * 1e3)
            after = statistics_of(server)["inference_stats"]
            parts = {
                part: (after[f"compute_{part}"]["ns"] - before[f"compute_{part}"]["ns"]) / 1e6 / REPEATS
                for part in ("input", "infer", "output")
            }
            print(
                f"SERVED {count} tiles: cosine {least:.7f}; client {statistics.median(times):.2f} ms; server",
                {part: round(ms, 3) for part, ms in parts.items()},
                flush=True,
            )


def questions(count: int) -> list[tuple[bytes, str, str]]:
    items = scene.heldout()
    chosen = items[:: max(len(items) // count, 1)][:count]
    return [(scene.encode_jpeg(scene.sample(i.scene_seed, "heldout")), i.question, i.answer) for i in chosen]


def ask_the_ensemble(server: Server, asked: list[tuple[bytes, str, str]]) -> list[str]:
    with Client(server.grpc_url) as client:
        client.ask(asked[0][0], asked[0][1], max_tokens=2)
        texts = [client.ask(picture, question, max_tokens=24).text.strip() for picture, question, _ in asked]
        right = sum(text == answer for text, (_, _, answer) in zip(texts, asked, strict=True))
        jobs = [(picture, question + " " * again) for again in range(10) for picture, question, _ in asked]
        start = time.perf_counter()
        many = list(client.ask_many(jobs, concurrency=64, max_tokens=4))
        rate = len(many) / (time.perf_counter() - start)
        alone = client.ask(None, "Hello?", max_tokens=6, ignore_eos=True).text
    print(
        f"ENSEMBLE {right} of {len(asked)} right, {rate:.0f} requests/s at 64 at once; text only: {alone!r}",
        flush=True,
    )
    return [*texts, alone]


def report_graphs(log: Path) -> None:
    text = log.read_text(errors="replace")
    captured = sorted({int(n) for n in re.findall(r"captured CUDA graph for \S+ batch size (\d+)", text)})
    print(f"GRAPHS captured for {captured} tiles, launched {len(re.findall('is launching CUDA graph', text))} times")


def options(repository: Path, log: Path, config: str | None, settings: dict[str, str]) -> ServerOptions:
    return ServerOptions(
        repository,
        checkpoint=CHECKPOINT,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        model_config_name=config,
        ready_timeout_s=240,
        log_path=log,
        settings=settings,
        extra_flags=("--log-verbose=1",) if config else (),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--backend", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("."), help="for the servers' logs")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of `tessera serve`")
    arguments = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in arguments.set)
    asked = questions(arguments.pictures)
    with tempfile.TemporaryDirectory() as folder:
        repository = make_repository(Path(folder), arguments.plan, arguments.backend)
        log = arguments.out / "server-tensorrt.log"
        with Server(options(repository, log, "tensorrt", settings)) as server:
            try:
                ask_the_plan(server, arguments.reference)
                planned = ask_the_ensemble(server, asked)
                batches = statistics_of(server)["batch_stats"]
                runs = Counter({batch["batch_size"]: batch["compute_infer"]["count"] for batch in batches})
                print("BATCHES run, by tiles:", dict(sorted(runs.items())))
            finally:
                report_graphs(log)
    with Server(
        options(BUILD.parent / "model_repository", arguments.out / "server-default.log", None, settings)
    ) as server:
        default = ask_the_ensemble(server, asked)
    same = sum(ours == theirs for ours, theirs in zip(planned, default, strict=True))
    print(f"SAME ANSWERS as the default config: {same} of {len(default)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
