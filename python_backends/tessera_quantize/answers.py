"""How often a checkpoint is right about a labelled folder: the serving stages in this process, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import read_config
from tessera.engine.config import EngineConfig
from tessera.engine.engine import Engine
from tessera.engine.request import Request
from tessera.preprocess.preprocessor import PreprocessRequest
from tessera.sampling import SamplingParameters
from tessera.vision.encoding.pictures import VisionItem
from tessera_evaluation import recall
from tessera_evaluation.datasets import Item
from tessera_quantize.samples import Chain

MAX_TOKENS = 96  # as in `tessera recall`
_AT_A_TIME = 32
_CACHE_BYTES = 2 << 30


def figures(
    folder: Path, items: Sequence[Item], device: str, tile_policy: Any, advance: Callable[[], None]
) -> dict[str, Any]:
    """``tessera_evaluation.recall.figures`` of the greedy answers of the checkpoint in ``folder``."""
    chain = Chain(read_config(folder), device)
    engine = Engine.from_checkpoint(
        folder, EngineConfig(device=device, kv_cache_bytes=_CACHE_BYTES, graph_batch_size=0, max_batched_tokens=4096)
    )
    outcomes = []
    for start in range(0, len(items), _AT_A_TIME):
        part = items[start : start + _AT_A_TIME]
        requests = [_request(chain, item, tile_policy) for item in part]
        answers: dict[int, list[int]] = {request.number: [] for request in requests}
        for request in requests:
            engine.submit(request)
        while engine.has_work():
            for number, token in engine.step().tokens:
                answers[number].append(token.token_id)
        for item, request in zip(part, requests, strict=True):
            outcomes.append(recall.Outcome(item, chain.tokenizer.decode(answers[request.number])))
            advance()
    return recall.figures(outcomes, 0.0)


def _request(chain: Chain, item: Item, tile_policy: Any) -> Request:
    images = [item.picture.read_bytes()]
    prepared = chain.preprocess(PreprocessRequest(text=item.question, images=images, tile_policy=tile_policy))
    (rows,) = chain.vision.encode([VisionItem(prepared.pixels, prepared.plan, prepared.digest)])
    return Request(
        item.picture.name,
        prepared.input_ids,
        prepared.spans,
        rows,
        prepared.digest,
        SamplingParameters(max_tokens=MAX_TOKENS),
        positions=prepared.positions,
    )
