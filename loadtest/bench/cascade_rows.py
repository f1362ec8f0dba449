"""Asks the default model both ways, one tile and its own cut, and keeps a row a picture for `cascade`
(`make bench NAME=cascade_rows`; rooms take 35 minutes of one core, small 12, a shift two; begun again it goes on
from the rows that there are).

The server's chain in one process: Preprocessor -> VisionEncoder (ONNX) -> Engine, float32, greedy, at most 16 tokens
(of the 252 descriptions the first 16). Sets:

- rooms: the held-out set's 4,524 pictures and questions, of which one tile is enough for nearly all;
- small: 1,200 other held-out pictures of 1280 pixels and more. Every other one is asked whether there is a thing that
  it has once, of at most 11 pixels in one tile and 34 or more in twelve; the rest, after a thing that is not there;
- dark (40 % of the light), blurred, jpeg30: the first 200 of rooms, so changed before they are sent.

A row: ``margin`` float16, nats, of the first cut's answer: the least gap between its tokens' log probabilities and
those of the second best, the end included; ``tiles`` uint8, the full cut's; ``flags`` uint8: 1 both cuts gave one
answer, 2 the first is right, 4 the full one is right, 8 descriptions, which are neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import cv2
import figures
import numpy as np
from tqdm import tqdm

from bench.parity import CHECKPOINT
from tessera.engine.engine import Engine
from tessera.engine.sequence import Request, SamplingParameters
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem
from tessera_evaluation.recall import normal

ROWS = figures.ROOT / "loadtest" / "results" / "cascade_rows.npz"
ONE_TILE = {"max_tiles": 1}
SAME, FIRST_RIGHT, FULL_RIGHT, DESCRIBES = 1, 2, 4, 8
SAMPLING = SamplingParameters(max_tokens=16, logprobs=2)
AT_A_TIME = 16
DTYPE = np.dtype([("margin", np.float16), ("tiles", np.uint8), ("flags", np.uint8)])
SMALL_SEED, SMALL_PICTURES, SMALL_PIXELS = 9_000_000, 1200, 11.0
SHIFTED_PICTURES = 200

sys.path.insert(0, str(figures.ROOT / "build" / "default_model"))


class Case(NamedTuple):
    jpeg: bytes
    question: str
    answer: str
    kind: str


def rooms() -> Iterator[Case]:
    """The held-out set."""
    import scene

    for item in scene.heldout():
        jpeg = scene.encode_jpeg(scene.sample(item.scene_seed, "heldout"))
        yield Case(jpeg, item.question, item.answer, item.kind)


def small() -> Iterator[Case]:
    """Questions about things that one tile may lose, and as many about things that are not there."""
    import scene

    seed, asked = SMALL_SEED, 0
    while asked < SMALL_PICTURES:
        room = scene.sample.__wrapped__(seed, "heldout")
        seed += 1
        longer = max(room.width, room.height)
        if longer < 1280:
            continue
        boxes = [item.kind for item in room.items]
        tiny = {item.kind for item in room.items if 0 < item.extent * 448 / longer <= SMALL_PIXELS}
        wanted = "no" if asked % 2 else "yes"
        fitting = [
            each
            for each in scene.questions(room)
            if each.kind == "presence"
            and each.answer == wanted
            and (wanted == "no" or (each.cls in tiny and boxes.count(each.cls) == 1))
        ]
        if fitting:
            question = fitting[seed % len(fitting)]
            asked += 1
            yield Case(scene.encode_jpeg(room), question.text, question.answer, question.kind)


def shifted(change: Callable[[np.ndarray], np.ndarray], quality: int) -> Callable[[], Iterator[Case]]:
    """The first rooms, each picture changed and encoded again."""

    def cases() -> Iterator[Case]:
        for case in islice(rooms(), SHIFTED_PICTURES):
            picture = change(cv2.imdecode(np.frombuffer(case.jpeg, np.uint8), cv2.IMREAD_COLOR))
            _, file = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])
            yield case._replace(jpeg=file.tobytes())

    return cases


def blurred(picture: np.ndarray) -> np.ndarray:
    """By a 200th of its longer side."""
    return cv2.GaussianBlur(picture, (0, 0), max(picture.shape) / 200)


SETS: dict[str, tuple[Callable[[], Iterator[Case]], int]] = {
    "rooms": (rooms, 4524),
    "small": (small, SMALL_PICTURES),
    "dark": (shifted(lambda picture: (picture * 0.4).astype(np.uint8), 90), SHIFTED_PICTURES),
    "blurred": (shifted(blurred, 90), SHIFTED_PICTURES),
    "jpeg30": (shifted(lambda picture: picture, 30), SHIFTED_PICTURES),
}


class Asked(NamedTuple):
    """An answer's tokens without their end, its least margin, and the prompt's tiles."""

    text: str
    margin: float
    tiles: int


class Asker:
    def __init__(self, threads: int) -> None:
        self._prepare = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings())
        self._encoder = VisionEncoder.from_checkpoint(CHECKPOINT, VisionSettings(threads=threads))
        config = EngineConfig(dtype="float32", threads=threads, max_sequences=AT_A_TIME)
        self._engine = Engine.from_checkpoint(CHECKPOINT, config)

    def ask(self, cases: list[Case], policy: dict[str, int] | None) -> list[Asked]:
        prepared = [
            self._prepare(PreprocessRequest(text=case.question, images=[case.jpeg], tile_policy=policy))
            for case in cases
        ]
        rows = self._encoder.encode([VisionItem(each.pixels, each.plan, each.digest) for each in prepared])
        numbers, margins = [], {}
        for each, embedded in zip(prepared, rows, strict=True):
            parts = (each.input_ids, each.spans, embedded, each.digest)
            request = Request("", *parts, SAMPLING, positions=each.positions)
            numbers.append(self._engine.submit(request))
            margins[request.number] = float("inf")
        while self._engine.has_work():
            for number, _, report in self._engine.step().tokens:
                (_, best), (_, second) = sorted(report.top, key=lambda pair: -pair[1])
                margins[number] = min(margins[number], best - second)
        return [
            Asked(
                self._prepare.prompts.tokenizer.decode(sequence.outputs, skip_special_tokens=True),
                margins[sequence.request.number],
                len(each.pixels) // (448 * 448 * 3),
            )
            for sequence, each in zip(numbers, prepared, strict=True)
        ]


def tables(name: str, threads: int, known: np.ndarray) -> Iterator[np.ndarray]:
    """The set's rows behind those that are known, as far as they go: more and more of them."""
    make, count = SETS[name]
    found = np.zeros(count, DTYPE)
    found[: (at := len(known))] = known
    asker, cases = Asker(threads), islice(make(), at, None)
    with tqdm(total=count, initial=at, desc=name) as bar:
        while some := list(islice(cases, AT_A_TIME)):
            for case, first, full in zip(some, asker.ask(some, ONE_TILE), asker.ask(some, None), strict=True):
                right = [normal(each.text) == normal(case.answer) for each in (first, full)]
                flags = SAME * (first.text == full.text) + FIRST_RIGHT * right[0] + FULL_RIGHT * right[1]
                found[at] = first.margin, full.tiles, flags + DESCRIBES * (case.kind == "description")
                at += 1
            bar.update(len(some))
            yield found[:at]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", choices=SETS, default=[*SETS], dest="sets")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    kept = dict(np.load(options.rows)) if options.rows.exists() else {}
    for name in options.sets:
        for rows in tables(name, options.threads, kept.get(name, np.zeros(0, DTYPE))):
            kept[name] = rows
            np.savez_compressed(options.rows, **kept)
    return 0
