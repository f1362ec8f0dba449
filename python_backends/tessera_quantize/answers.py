"""How often a checkpoint is right about a labelled folder: the serving stages in this process, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import read_config
from tessera.engine.config import EngineConfig
from tessera.engine.engine import Engine
from tessera.engine.request import Request
from tessera.family.tokenizer import Tokenizer
from tessera.preprocess.preprocessor import PreprocessRequest
from tessera.sampling import SamplingParameters
from tessera.vision.encoding.pictures import VisionItem
from tessera_evaluation import recall
from tessera_evaluation.datasets import Item
from tessera_quantize.samples import Chain

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
        images = [item.picture.read_bytes()]
        prepared = chain.preprocess(PreprocessRequest(text=item.question, images=images, tile_policy=tile_policy))
        (rows,) = chain.vision.encode([VisionItem(prepared.pixels, prepared.plan, prepared.digest)])
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
