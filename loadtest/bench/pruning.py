"""Equal groups of patches left out (`tile_policy: {"prune": "equal"}`): how many they are, and what is read without
them, on a CPU (`make bench NAME=pruning`). What it saves of a page's joules: `replay`.

    python loadtest/bench pruning replay.zip        real pages as `tessera parse` asks about them
    python loadtest/bench pruning --pages 200       the default document model on its held-out pages

Both of pictures as PNG, which is what `tessera parse` sends, and as JPEG of quality 90. The first prints which share of
the groups is left out, and a page's tokens and patches with and without. The second asks a server about every layout
and every crop of the true boxes, with all groups and without equal ones, and prints by how many percentage points more
characters are wrong (`cer_lost`) and fewer blocks are found (`layout_f1_lost`).
"""

import argparse
import io
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import figures
from PIL import Image
from serving import Setup, serve
from tqdm import tqdm

from bench.replay_set import ReplaySet, png
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera_client import Answer, Client

sys.path += [str(figures.ROOT / "build" / room) for room in ("", "document_model", "training")]
SHAPE = figures.ROOT / "loadtest" / "shapes" / "mineru25-shape"
DOCUMENTS = figures.ROOT / "build" / "document_model" / "checkpoint"
WAYS = {"whole": {"prune": "never"}, "pruned": {"prune": "equal"}}
STEPS = ("layout", "crops")
LOST = {"cer": 0.1, "layout_f1": 0.2}
"""Percentage points that are to be lost at most."""
Chat = tuple[list[dict[str, Any]], dict[str, Any]]
"""A conversation, and its sampling parameters."""


def jpeg(encoded: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(encoded)).convert("RGB").save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


FILES: dict[str, Callable[[bytes], bytes]] = {"png": lambda encoded: encoded, "jpeg90": jpeg}


def count_groups(path: Path, every: int) -> None:
    """Emits what is left out of the pages, by what is asked about them."""
    pages, preprocess = ReplaySet(path), Preprocessor.from_checkpoint(SHAPE)
    numbers, kept, prompts = range(0, len(pages.pages), every), Counter[Any](), Counter[Any]()
    for number in tqdm(numbers, "pages"):
        page = pages.picture(number)
        for request in pages.pages[number].requests:
            encoded, step = pages.client.picture(page, request), STEPS[request.box is not None]
            system, user = pages.client.messages(request, b"")
            messages = [system, user | {"content": [{"type": "image"}, user["content"][1]]}]
            for kind, file in FILES.items():
                for way, policy in WAYS.items():
                    asked = PreprocessRequest(messages=messages, images=[file(encoded)], tile_policy=policy)
                    planned = preprocess.plan(asked)
                    kept[kind, step, way] += planned.plans[0].cost
                    prompts[kind, step, way] += len(planned.prompt.input_ids)
    for kind in FILES:
        for step in STEPS:
            share = 1 - kept[kind, step, "pruned"] / kept[kind, step, "whole"]
            notes = {
                "pages": len(numbers),
                "prompt_tokens_a_page": {way: round(prompts[kind, step, way] / len(numbers)) for way in WAYS},
                "patches_a_page": {way: round(4 * kept[kind, step, way] / len(numbers)) for way in WAYS},
            }
            figures.emit(f"pages.pruned.{step}.{kind}", round(share, 4), "share of groups left out", **notes)


def answers(client: Client, chats: Sequence[Chat], policy: Any, concurrency: int, told: str) -> list[Answer]:
    def ask(chat: Chat) -> Answer:
        return client.chat(chat[0], tile_policy=policy, **chat[1])

    with ThreadPoolExecutor(concurrency) as pool:
        return list(tqdm(pool.map(ask, chats), told, len(chats)))


def read(checkpoint: Path, count: int, concurrency: int, label: str) -> None:
    """Emits what a document model loses on the first ``count`` held-out pages."""
    from document_batches import PENALTIES
    from document_tokens import PROMPTS, SYSTEM, ChatTokens
    from evaluate import ROOM, HeldOut, unpatched
    from evaluate import figures as scores

    held_out = HeldOut(count, ChatTokens())

    def chats(file: Callable[[bytes], bytes]) -> list[Chat]:
        found = []
        for sample in held_out.samples:
            picture = file(png(Image.fromarray(unpatched(sample)).convert("RGB")))
            content = [{"type": "image", "image": picture}, {"type": "text", "text": PROMPTS[sample.step]}]
            once, each = PENALTIES[sample.step]
            sampling = {"presence_penalty": once, "frequency_penalty": each, "skip_special_tokens": False}
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
            found.append((messages, sampling | {"max_tokens": int(ROOM * len(sample.answer)) + 8}))
        return found

    with serve(Setup(checkpoint=checkpoint)) as server, Client(server.grpc[0], timeout=None) as client:
        for kind, file in FILES.items():
            asked, read, tokens = chats(file), {}, {}
            for way, policy in WAYS.items():
                told = answers(client, asked, policy, concurrency, f"{kind}, {way}")
                read[way] = scores(held_out.pairs([answer.text for answer in told]))
                tokens[way] = sum(answer.usage.image_tokens for answer in told if answer.usage)
            notes = {"pages": count, "answers": len(asked), "image_tokens": tokens, **read}
            for name, most in LOST.items():
                lost = 100 * (read["pruned"][name] - read["whole"][name]) * (1 if name == "cer" else -1)
                figures.emit(f"pages.pruned.{name}_lost.{kind}{label}", round(lost, 2), "points", at_most=most, **notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", type=Path, nargs="?", help="what replay_pages made; without it the held-out pages")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one in N of the set's pages (all)")
    parser.add_argument("--pages", type=int, default=24, help="held-out pages (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path, default=DOCUMENTS, help="another document model")
    parser.add_argument("--label", default="", help="ends the figures' names, with a dot before it")
    options = parser.parse_args()
    if options.set:
        count_groups(options.set, options.every)
    else:
        read(options.checkpoint, options.pages, options.concurrency, options.label and f".{options.label}")
    return 0
