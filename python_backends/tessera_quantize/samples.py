"""Questions about pictures with their right answers, as the language model sees them: what calibration runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.engine.labels import label_token_ids
from tessera.family.tokenizer import Tokenizer
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.vision.encoding.encoder import VisionEncoder
from tessera.vision.encoding.pictures import VisionItem
from tessera.vision.settings import VisionSettings
from tessera_evaluation.datasets import Item
from tessera_quantize.body import Body


class Sample(NamedTuple):
    """Prompt and answer: ``hidden`` [n, hidden] into the first layer, ``positions`` int64 [axes, n].

    ``weights`` float32 [n]: how much each row counts in calibration. ``answer``: the last N rows are those whose
    logits choose the answer's tokens and its end; ``text``: the last N are all those behind the last picture.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    answer: int
    text: int


class Chain:
    """Pictures and words -> what the language model is given: the serving stages themselves, in this process."""

    def __init__(self, config: CheckpointConfig, device: str) -> None:
        dtype = "float32" if device == "cpu" else "bfloat16"
        self.preprocess = Preprocessor.from_checkpoint(config.folder)
        self.vision = VisionEncoder.from_checkpoint(
            config, VisionSettings(runner="torch", device=device, dtype=dtype, cache_bytes=0)
        )
        self.tokenizer = Tokenizer.from_folder(config.folder)

    def samples(
        self, body: Body, items: Sequence[Item], pictures: bool, advance: Callable[[], None]
    ) -> Iterator[Sample]:
        """Each item's question, its picture (left out where ``pictures`` is False) and its answer."""
        for item in items:
            images = [item.picture.read_bytes()] if pictures else []
            prepared = self.preprocess(PreprocessRequest(text=item.question, images=images))
            (rows,) = self.vision.encode([VisionItem(prepared.pixels, prepared.plan, prepared.digest)])
            answer = label_token_ids(item.answer, lambda text: self.tokenizer.encode(text, special=False))
            ids = np.concatenate([prepared.input_ids, np.array(answer, np.int32)]).astype(np.int64)
            places = [np.arange(start, start + length) for start, length in prepared.spans]
            hidden = body.embed(
                torch.from_numpy(ids), torch.from_numpy(np.concatenate(places)) if places else None, rows
            )
            yield Sample(
                hidden,
                _positions(prepared.positions, len(ids)),
                row_weights(len(ids), places),
                len(answer) + 1,
                len(ids) - int(prepared.spans.sum(1).max(initial=0)),
            )
            advance()


def row_weights(count: int, places: Sequence[np.ndarray]) -> torch.Tensor:
    """float32 [count], sum 1: words and pictures (the rows ``places``) count half each, however many rows they have.

    A picture is thousands of rows beside a dozen words, but it is the words that the answer is read from, and errors in
    them weigh more (Li et al., "MBQ: Modality-Balanced Quantization for Large Vision-Language Models",
    arXiv 2412.19509).
    """
    is_picture = np.zeros(count, bool)
    for place in places:
        is_picture[place] = True
    shares = np.where(is_picture, 1 / max(is_picture.sum(), 1), 1 / max((~is_picture).sum(), 1))
    return torch.from_numpy((shares / shares.sum()).astype(np.float32))


def _positions(prompt: np.ndarray | None, count: int) -> torch.Tensor:
    """The prompt's positions int [axes, length], None for 0 to length - 1, gone on by one up to ``count``."""
    if prompt is None:
        return torch.arange(count)[None]
    more = prompt.max() + 1 + np.arange(count - prompt.shape[1])
    return torch.from_numpy(np.concatenate([prompt, np.broadcast_to(more, (len(prompt), len(more)))], axis=1)).long()
