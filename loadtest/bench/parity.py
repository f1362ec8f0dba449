"""Our greedy tokens against `transformers`' on held-out pictures (`make bench NAME=parity`).

Float32, on the CPU, with the default checkpoint; twice: on identical pixels (our preprocessor's uint8 tiles given to
both), and through each side's own processor. Ours is the same chain as the server's, in one process: Preprocessor ->
VisionEncoder (ONNX) -> Engine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import figures
import numpy as np
import torch
from rich.progress import track

from bench.ladder_transformers import Loop
from tessera.engine.engine import Engine
from tessera.engine.sequence import Request, SamplingParameters
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem

sys.path.insert(0, str(figures.ROOT / "build" / "default_model"))
CHECKPOINT = figures.ROOT / "build" / "default_model" / "checkpoint"
MAX_TOKENS = 8
SHORT = SamplingParameters(max_tokens=MAX_TOKENS)


@dataclass
class Ours:
    """The server's chain in one process."""

    preprocessor: Preprocessor
    encoder: VisionEncoder
    engine: Engine

    @classmethod
    def load(cls, checkpoint: Path = CHECKPOINT) -> Ours:
        return cls(
            Preprocessor.from_checkpoint(checkpoint, PreprocessSettings()),
            VisionEncoder.from_checkpoint(checkpoint, VisionSettings(threads=2)),
            Engine.from_checkpoint(checkpoint, EngineConfig(dtype="float32", threads=2, max_sequences=1)),
        )

    def request(self, asked: PreprocessRequest, sampling: SamplingParameters) -> tuple[Prepared, Request]:
        """What the first two stages make of pictures and a question."""
        prepared = self.preprocessor(asked)
        (rows,) = self.encoder.encode([VisionItem(prepared.pixels, prepared.plan, prepared.digest)])
        parts = (prepared.input_ids, prepared.spans, rows, prepared.digest)
        return prepared, Request("", *parts, sampling, positions=prepared.positions)

    def tokens(self, asked: PreprocessRequest, sampling: SamplingParameters = SHORT) -> tuple[Prepared, list[int]]:
        """The prepared request and the token ids of its answer."""
        prepared, request = self.request(asked, sampling)
        sequence = self.engine.submit(request)
        while self.engine.has_work():
            self.engine.step()
        return prepared, sequence.outputs


class Theirs(Loop):
    """`transformers`: model, and its own processor, in float32 on the CPU."""

    def __init__(self, checkpoint: Path = CHECKPOINT) -> None:
        super().__init__(checkpoint, "cpu", random_weights=False)

    def answered(self, inputs: dict[str, torch.Tensor]) -> list[int]:
        """The greedy token ids of an answer."""
        return self.tokens(inputs, 0, MAX_TOKENS)[0].tolist()

    def from_prepared(self, prepared: Prepared) -> dict[str, torch.Tensor]:
        """Inputs for transformers from our token ids and uint8 tiles, normalised in float32."""
        tiles = torch.from_numpy(prepared.pixels.reshape(-1, 448, 448, 3).copy()).permute(0, 3, 1, 2)
        settings = self.processor.image_processor
        mean = torch.tensor(settings.image_mean).view(1, 3, 1, 1)
        std = torch.tensor(settings.image_std).view(1, 3, 1, 1)
        ids = torch.from_numpy(prepared.input_ids.astype(np.int64))[None]
        pixels = (tiles.float() / 255 - mean) / std
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def pictures(count: int) -> list[tuple[bytes, str]]:
    """This many held-out pictures with their questions, spread over the whole set."""
    import scene

    items = scene.heldout()
    chosen = items[:: len(items) // count][:count]
    return [(scene.encode_jpeg(scene.sample(item.scene_seed, "heldout")), item.question) for item in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=200)
    count = parser.parse_args().pictures
    torch.set_num_threads(2)
    ours, theirs = Ours.load(), Theirs()
    same_pixels = own_processor = 0
    for jpeg, question in track(pictures(count), "comparing", transient=True):
        prepared, tokens = ours.tokens(PreprocessRequest(text=question, images=[jpeg]))
        same_pixels += tokens == theirs.answered(theirs.from_prepared(prepared))
        own_processor += tokens == theirs.answered(theirs.inputs([jpeg], [question]))
    for name, same in (("same_pixels", same_pixels), ("own_processor", own_processor)):
        figures.emit(f"parity.{name}", same / count, "share equal", ceiling=1, pictures=count)
    return 0
