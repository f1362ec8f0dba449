"""Questions about pictures with their right answers, as the language model sees them: what calibration runs on.

How often a checkpoint is right about a labelled folder: the serving stages in this process, without a server.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.engine.engine import Engine
from tessera.engine.sequence import Request
from tessera.engine.structured_output.labels import label_token_ids
from tessera.models.registry import read_config
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest
from tessera.prompt.sampling import SamplingParameters
from tessera.prompt.tokenizer import Tokenizer
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem
from tessera_evaluation import recall
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

    def prepare(
        self, item: Item, picture: bool = True, tile_policy: Any = None
    ) -> tuple[Prepared, torch.Tensor | None]:
        """An item's question about its picture as token ids, and the picture's rows."""
        images = [item.picture.read_bytes()] if picture else []
        prepared = self.preprocess(PreprocessRequest(text=item.question, images=images, tile_policy=tile_policy))
        (rows,) = self.vision.encode([VisionItem(prepared.pixels, prepared.plan, prepared.digest)])
        return prepared, rows

    def samples(
        self, body: Body, items: Sequence[Item], pictures: bool, advance: Callable[[], None]
    ) -> Iterator[Sample]:
        """Each item's question, its picture (left out where ``pictures`` is False) and its answer."""
        for item in items:
            prepared, rows = self.prepare(item, pictures)
            answer = label_token_ids(item.answer, lambda text: self.tokenizer.encode(text, special=False))
            ids = np.concatenate([prepared.input_ids, np.array(answer, np.int32)]).astype(np.int64)
            places = [np.arange(start, start + length) for start, length in prepared.spans]
            hidden = body.embed(
                torch.from_numpy(ids), torch.from_numpy(np.concatenate(places)) if places else None, rows
            )
            positions, weights = _positions(prepared.positions, len(ids)), row_weights(len(ids), places)
            behind = len(ids) - int(prepared.spans.sum(1).max(initial=0))
            yield Sample(hidden, positions, weights, len(answer) + 1, behind)
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


MAX_TOKENS = 96  # as in `tessera recall`
_AT_A_TIME = 32
_CACHE_BYTES = 2 << 30


def ask(
    folder: Path, items: Sequence[Item], device: str, tile_policy: Any, advance: Callable[[], None]
) -> list[Request]:
    """Each item's question about its picture, as the language model of the checkpoint in ``folder`` is given it."""
    chain = Chain(read_config(folder), device)
    requests = []
    for item in items:
        prepared, rows = chain.prepare(item, tile_policy=tile_policy)
        asked = (prepared.input_ids, prepared.spans, rows, prepared.digest, SamplingParameters(max_tokens=MAX_TOKENS))
        requests.append(Request(item.picture.name, *asked, positions=prepared.positions))
        advance()
    return requests


def figures(
    folder: Path, items: Sequence[Item], requests: Sequence[Request], device: str, advance: Callable[[], None]
) -> dict[str, Any]:
    """``tessera_evaluation.recall.figures`` of the greedy answers of the checkpoint in ``folder``."""
    settings = EngineConfig(device=device, kv_cache_bytes=_CACHE_BYTES, graph_batch_size=0, max_batched_tokens=4096)
    engine = Engine.from_checkpoint(folder, settings)
    tokenizer = Tokenizer.from_folder(folder)
    answers: dict[int, list[int]] = {request.number: [] for request in requests}
    for start in range(0, len(requests), _AT_A_TIME):
        for request in requests[start : start + _AT_A_TIME]:
            engine.submit(request)
        while engine.has_work():
            progress = engine.step()
            for number, token, _ in progress.tokens:
                answers[number].append(token)
            for _ in progress.ends:
                advance()
    texts = [tokenizer.decode(answers[request.number]) for request in requests]
    return recall.figures([recall.Outcome(item, text) for item, text in zip(items, texts, strict=True)], 0.0)
