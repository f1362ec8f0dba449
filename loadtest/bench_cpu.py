"""`make bench-cpu`: the ensemble against a `transformers` loop: same checkpoint, pictures, questions, machine, run.

The loop is what a user would write: processor, generate (greedy), decode, one picture after the other. It gets whatever
number of threads is fastest for it on the warm-up pictures (on some machines one thread beats two).
The ensemble gets the same JPEG bytes over gRPC from `--concurrency` callers at once. Both are warmed up first, and
each answer of one is compared with the other's.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import figures
import torch
from rich.progress import track

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera_client import Client

sys.path.insert(0, str(figures.ROOT / "build" / "default_model"))
CHECKPOINT = figures.ROOT / "build" / "default_model" / "checkpoint"
MAX_TOKENS = 8

Job = tuple[bytes, str]


def jobs(pictures: int) -> list[Job]:
    """Distinct held-out pictures, spread over the whole set, each with its question (no descriptions)."""
    import scene

    items = [item for item in scene.heldout() if item.kind != "description"]
    chosen = items[:: len(items) // pictures][:pictures]
    return [
        (scene.encode_jpeg(scene.sample(item.scene_seed, "heldout")), item.question)
        for item in track(chosen, "rendering pictures", transient=True)
    ]


def transformers_loop(work: list[Job]) -> list[str]:
    """One picture after the other through transformers; the caller times it."""
    from PIL import Image

    answers = []
    for jpeg, question in work:
        picture = Image.open(io.BytesIO(jpeg)).convert("RGB")
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = PROCESSOR.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = PROCESSOR(images=[picture], text=prompt, return_tensors="pt")
        with torch.inference_mode():
            output = MODEL.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        answers.append(PROCESSOR.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def ensemble(client: Client, work: list[Job], concurrency: int) -> list[str]:
    """All pictures through the running server, `concurrency` at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda job: client.ask(job[0], job[1], max_tokens=MAX_TOKENS).text, work))


def fastest_threads(work: list[Job]) -> int:
    """The number of torch threads with which the loop is fastest on some pictures; also its warm-up."""
    seconds = {}
    for threads in range(1, (os.cpu_count() or 1) + 1):
        torch.set_num_threads(threads)
        transformers_loop(work[:2])
        started = time.perf_counter()
        transformers_loop(work)
        seconds[threads] = time.perf_counter() - started
    return min(seconds, key=seconds.__getitem__)


def load_transformers() -> None:
    from architecture import load_processor
    from transformers import AutoModelForImageTextToText

    global MODEL, PROCESSOR
    MODEL = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    PROCESSOR = load_processor(CHECKPOINT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    work = jobs(arguments.pictures)
    warm_up = work[: arguments.concurrency]
    load_transformers()

    threads = fastest_threads(warm_up)
    torch.set_num_threads(threads)
    started = time.perf_counter()
    theirs = transformers_loop(work)
    loop_seconds = time.perf_counter() - started

    # Distinct pictures: caches must not help, so the warm-up shows the ensemble other bytes of the same scenes.
    options = ServerOptions(
        model_repository=figures.ROOT / "model_repository", http_port=0, grpc_port=0, metrics_port=0
    )
    with Server(options) as server, Client(server.grpc_url) as client:
        ensemble(client, [(jpeg + b"\0", question) for jpeg, question in warm_up], arguments.concurrency)
        started = time.perf_counter()
        ours = ensemble(client, work, arguments.concurrency)
        ensemble_seconds = time.perf_counter() - started

    count = len(work)
    same = sum(a == b for a, b in zip(ours, theirs))
    print(
        f"transformers loop {count / loop_seconds:.2f} pictures/s, ensemble {count / ensemble_seconds:.2f} pictures/s,"
    )
    print(f"{same} of {count} answers the same")
    figures.emit(
        "cpu.ratio_distinct",
        round(loop_seconds / ensemble_seconds, 3),
        "ratio",
        command="make bench-cpu",
        pictures=count,
        concurrency=arguments.concurrency,
        transformers_threads=threads,
        transformers_req_s=round(count / loop_seconds, 3),
        ensemble_req_s=round(count / ensemble_seconds, 3),
        same_answers=same,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
