"""What goes into the engine and what comes out: requests and token events."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.errors import InvalidRequest
from tessera.sampling import SamplingParameters

if TYPE_CHECKING:
    import torch


class Usage(NamedTuple):
    """Tokens of one request; image rows count as prompt tokens too."""

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt. ``number`` names the request in all books of its process and the engine's; two never have the same.

    ``input_ids`` int32 [L]. ``spans`` int32 [k, 2]: start and length of each picture's rows in ``input_ids``; the
    ids that stand there are ignored. ``embeddings`` [sum of span lengths, hidden], any float dtype, on any device,
    or None without pictures. ``digest`` int64 [2k]: the content key of each picture. ``positions`` int [axes, L],
    None for 0..L-1. ``arrival_ns`` and ``deadline_ns`` (None: never) are on time.monotonic_ns's clock. ``lease``: the
    names of what ends it with its client (tritonserver/leases.py), maybe none.
    """

    request_id: str
    input_ids: np.ndarray
    spans: np.ndarray
    embeddings: torch.Tensor | None
    digest: np.ndarray
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stream: bool = True
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    positions: np.ndarray | None = None
    deadline_ns: int | None = None
    lease: str = ""
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def image_tokens(self) -> int:
        """Rows of pictures in the prompt."""
        return int(np.asarray(self.spans).reshape(-1, 2)[:, 1].sum())

    def validate(self, vocab_size: int, hidden_size: int, position_axes: int = 1) -> None:
        """Raises InvalidRequest when the parts of the request do not fit each other or the model."""
        ids, spans = np.asarray(self.input_ids), np.asarray(self.spans).reshape(-1, 2)
        if ids.ndim != 1 or not len(ids):
            raise InvalidRequest(f"input_ids must be a non-empty row of tokens, not of shape {ids.shape}")
        starts, lengths = spans[:, 0].astype(np.int64), spans[:, 1].astype(np.int64)
        ends = starts + lengths
        if len(spans) and (
            starts[0] < 0 or (lengths <= 0).any() or (starts[1:] < ends[:-1]).any() or ends[-1] > len(ids)
        ):
            raise InvalidRequest(f"spans {spans.tolist()} must ascend without overlap inside 0..{len(ids)}")
        is_text = np.ones(len(ids), bool)
        for start, end in zip(starts, ends):
            is_text[start:end] = False
        wrong = is_text & ((ids < 0) | (ids >= vocab_size))
        if wrong.any():
            where = int(wrong.argmax())
            raise InvalidRequest(f"input_ids[{where}] is {int(ids[where])}; the model knows 0..{vocab_size - 1}")
        for name, tokens in self.sampling.named_tokens.items():
            unknown = next((token for token in tokens if token >= vocab_size), None)
            if unknown is not None:
                raise InvalidRequest(
                    f"sampling_parameters: {name} holds the token {unknown}; the model knows 0..{vocab_size - 1}"
                )
        rows = (0, hidden_size) if self.embeddings is None else tuple(self.embeddings.shape)
        if rows != (int(lengths.sum()), hidden_size):
            raise InvalidRequest(
                f"embeddings has shape {list(rows)}; spans ask for [{int(lengths.sum())}, {hidden_size}]"
            )
        if np.size(self.digest) != 2 * len(spans):
            raise InvalidRequest(f"digest holds {np.size(self.digest)} numbers; {len(spans)} pictures need two each")
        if self.positions is not None and (
            self.positions.shape != (position_axes, len(ids)) or self.positions.min() < 0
        ):
            raise InvalidRequest(f"positions must be [{position_axes}, {len(ids)}] and not negative")


@dataclass(frozen=True, eq=False)
class TokenEvent:
    """News of one request: a delta of text and tokens, or its end, or both.

    Exactly one event of a request has a ``finish_reason`` ("stop", "length", "cancelled", "deadline" or "error", the
    last with ``error``, words for the client), and it is the last. ``logprobs``: one JSON-ready dict a token:
    token_id, text, logprob and top, a list of {token_id, text, logprob}. ``choices``: one JSON-ready dict a label, at
    the end of a request that scores labels. Times are on time.monotonic_ns's clock, 0 where it did not happen.
    """

    request: Request
    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]] | None
    finish_reason: str | None
    usage: Usage
    cached_tokens: int
    scheduled_ns: int
    first_token_ns: int
    emitted_ns: int
    error: str | None = None
    choices: list[dict[str, Any]] | None = None
