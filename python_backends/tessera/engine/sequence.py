"""One request on its way through the engine: tokens known so far, keys and values computed so far.

What goes into the engine and what comes out: requests and token events.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tessera.engine.structured_output.labels import LabelAnswer
from tessera.errors import InvalidRequest, TesseraError
from tessera.prompt.sampling import SamplingParameters, rank

if TYPE_CHECKING:
    import torch

    from tessera.engine.drafts.drafter import Drafting

_PLACES = 512  # made at a time for an answer's tokens, at first
NOT_FINITE = -1
"""In a token's place: the model's logits held NaN or an infinity, so there is none."""


class Report(NamedTuple):
    """A chosen token's log probability, and others (id, log probability): what a request may ask for besides the token.

    For a sequence that scores labels ``top`` holds its branch's children, and the token means nothing. ``margin``: by
    how many nats the token was likelier than any other that it might have been, at most MOST_MARGIN.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    margin: float = 0.0


MOST_MARGIN = 1e9
"""Stands for the margin where nothing else was possible, so that JSON stays finite."""

SampledToken: TypeAlias = tuple[int, Report | None]
"""One chosen token, or NOT_FINITE, and the report where one was asked for."""


class Sequence:
    """The state of one request; compared and hashed by identity.

    Positions count from 0 over prompt and answer. ``computed`` positions have keys and values in ``block_table``
    (counted when their step is planned). ``in_flight`` tokens were planned to be sampled but are not known yet, so
    that a step may be planned while the one before it still runs. The step in flight may verify a ``draft``: tokens
    that are taken to follow the known ones, of which each position chooses the next token, so that between one and
    all of these and one more become known. What follows the prompt has on all of its ``position_axes`` the same rotary
    position: its place plus ``position_offset``.
    """

    # Else, with more of them than CPython keeps in an object's own place, each is looked up in a dict of its own.
    __slots__ = (
        *("request", "rank", "prompt_length", "max_tokens", "seed", "ends", "stop_ids", "image_positions"),
        *("embeddings", "ids", "position_axes", "position_offset", "identities", "cache_limit"),
        *("cache_salt", "outputs", "drafting", "draft", "in_flight", "computed", "block_table", "block_keys"),
        *("committed", "offered", "cached_tokens", "follows", "finish_reason", "error", "finite", "scheduled_ns"),
        *("first_token_ns", "_greedy_from", "likeliest"),
    )
    rewinds = False  # whether the tokens after the prompt may change again
    uncounted = 0  # tokens that steps chose for it, all told, and that are none of its answer's

    def __init__(
        self,
        request: Request,
        cache_limit: int | None = None,
        image_cache_ids: np.ndarray | None = None,
        cache_salt: int = 0,
        stop_ids: Collection[int] = (),
        max_tokens: int | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """``cache_limit``: positions at the front that may be reused by others; None is all. ``image_cache_ids``
        int64: one id a picture row, which stands for the row wherever prefixes are compared. ``cache_salt`` keeps
        apart prefixes whose keys and values differ though their tokens agree. ``stop_ids``: tokens that end an
        answer; the request may name others besides. ``max_tokens``: None is the request's, which must then say.
        ``drafting``: who proposes its drafts; None: nobody.
        """
        prompt = np.asarray(request.input_ids)
        spans = np.asarray(request.spans).reshape(-1, 2)
        self.request = request
        self.rank = rank(request.sampling.priority, request.since_ns or request.arrival_ns)
        self.prompt_length = len(prompt)
        most = max_tokens or request.sampling.max_tokens
        assert most is not None, "nothing says how long the answer may be"
        self.max_tokens = most
        seed = request.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed
        self.ends = frozenset() if request.sampling.ignore_eos else frozenset(stop_ids)
        self.stop_ids = self.ends.union(request.sampling.stop_token_ids)
        self.image_positions = np.concatenate(
            [np.arange(start, start + length) for start, length in spans] or [np.zeros(0, np.int64)]
        )
        #: whether of the tokens that may come, see :meth:`mask`, the likeliest is asked for, maybe under penalties
        self.likeliest = request.sampling.likeliest and not request.margin
        plain = self.likeliest and not request.sampling.constraint
        self._greedy_from = 0 if plain else math.inf  # a place in the answer
        if self.stop_ids:  # until then they are forbidden
            self._greedy_from = max(self._greedy_from, request.sampling.min_tokens)
        self.embeddings = request.embeddings
        self.ids = prompt.astype(np.int64)
        self.ids[self.image_positions] = 0  # their rows come from embeddings; the ids need not be valid
        self.position_axes, self.position_offset = 1, 0
        identities = self.ids.copy()
        if image_cache_ids is not None:
            identities[self.image_positions] = image_cache_ids
        if request.positions is not None:
            self.position_axes = len(request.positions)
            self.position_offset = int(request.positions.max()) + 1 - self.prompt_length
            identities = np.column_stack([identities, request.positions.T])
        #: what the prompt's prefixes are compared by, of int64 [n] or [n, 1 + axes]: ids, of pictures' rows those that
        #: stand for them, and, where the request gave any, the rotary positions; bytes, which are cut once a block
        self.identities = identities.tobytes()
        self.cache_limit = self.prompt_length + self.max_tokens if cache_limit is None else cache_limit
        self.cache_salt = cache_salt
        self.outputs: list[int] = []
        self.drafting = drafting
        self.draft: SequenceType[int] = ()
        self.in_flight = 0
        self.computed = 0
        self.block_table = array("q")  # int64, which numpy reads as it is
        self.block_keys: list[bytes] = []  # chain hashes of the full blocks at the front, filled as needed
        self.committed = 0  # blocks at the front of the table that were offered to the prefix index
        self.offered: list[bytes] = []  # keys of those that it computed itself
        self.cached_tokens = 0  # prompt positions reused from the cache when the sequence first ran
        self.follows = False  # most of its prompt was cached when it came
        self.finish_reason: str | None = None
        self.error: str | None = None  # why the reason is "error", in words for the client
        self.finite = True  # whether the logits of all tokens so far were
        self.scheduled_ns = 0
        self.first_token_ns = 0
        self._make_places()

    @property
    def known(self) -> int:
        """Positions whose token is known."""
        return self.prompt_length + len(self.outputs)

    @property
    def length(self) -> int:
        """Positions planned: known ones and those whose token is being sampled or verified."""
        return self.known + self.in_flight + len(self.draft)

    @property
    def place(self) -> int:
        """Of the last token in flight, in the answer; of a step that verifies a draft its first one."""
        return len(self.outputs) + self.in_flight - 1

    @property
    def greedy(self) -> bool:
        """Whether of the token in flight nothing is asked but that it is the likeliest, maybe under penalties."""
        return len(self.outputs) + self.in_flight > self._greedy_from  # not self.place: once a token

    @property
    def pending(self) -> int:
        """Positions that a step could run now."""
        planned = len(self.outputs) + self.in_flight
        if self.in_flight and (self.draft or planned >= self.max_tokens):
            return 0
        return self.prompt_length + planned - self.computed  # not self.length: once a token

    @property
    def parked(self) -> bool:
        """Whether it stands outside the queue and holds nothing, until what its next token needs is there."""
        return False

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, in words for the client, where that was found after its last token was taken."""
        return None

    @property
    def children(self) -> tuple[int, ...]:
        """Tokens whose log probabilities are asked for, where labels are scored."""
        return ()

    @property
    def turns(self) -> int:
        """As long as steps are planned ahead of the one before, it runs in every n-th; this is n."""
        return 1

    def mask(self, drafted: int = 0) -> np.ndarray | int | None:
        """The tokens that may come next, or behind this many of the draft, uint8 [ceil(vocabulary / 8)] with the lowest
        bit first, or the only one; None: any."""
        return None

    @property
    def certain(self) -> SequenceType[int]:
        """Tokens that the answer must begin with, to be drafted before there are any."""
        return ()

    def verifiable(self, draft: SequenceType[int]) -> SequenceType[int]:
        """As much of a draft as the next step may verify."""
        return draft

    @property
    def labels(self) -> LabelAnswer | None:
        """What scoring labels came to."""
        return None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def passes(self, other: Sequence) -> bool:
        """Whether it goes before one that came earlier."""
        return self.request.sampling.priority < other.request.sampling.priority and self.rank < other.rank

    def take(self, chosen: list[SampledToken]) -> list[SampledToken]:
        """Takes what a step sampled, and ends the sequence if that was its last token or none.

        ``chosen``: one token, and one behind each token of the draft. They count up to the first that is not the
        draft's own. Returns those that are part of the answer.
        """
        if not self.draft:  # as for most
            return chosen if self._accept(*chosen[0]) else []
        draft, self.draft = self.draft, ()
        tokens = [token for token, _ in chosen]
        right = 0
        while right < len(draft) and tokens[right] == draft[right]:
            right += 1
        if not self._take_all(tokens[: right + 1]):
            right = 0
            while self._accept(*chosen[right]) and not self.finished and right < len(draft):
                if tokens[right] != draft[right]:
                    break
                right += 1
        self.computed = min(self.computed, self.known - 1)  # it is 0 where the blocks were given back meanwhile
        assert self.drafting is not None, "nobody drafted this"
        self.drafting.learn(len(draft), right + (right < len(draft) and chosen[right][0] == draft[right]))
        return chosen[: right + self.finite]

    def _take_all(self, tokens: list[int]) -> bool:
        """Takes a draft's first tokens and one more, if none of them can end the answer."""
        outputs, place = self.outputs, self.known
        ends = len(outputs) + len(tokens) >= self.max_tokens or not self.stop_ids.isdisjoint(tokens)
        if ends or NOT_FINITE in tokens:
            return False
        self.ids[place + len(tokens) - 1] = tokens[-1]  # the others stand there since :meth:`expect`
        outputs.extend(tokens)
        return True

    def _accept(self, token: int, report: Report | None) -> bool:
        """Whether it is part of the answer."""
        outputs = self.outputs
        if token == NOT_FINITE:
            step = "decode" if outputs else "prefill"
            self.finish_reason, self.finite = "error", False
            self.error = f"the model's logits are NaN or infinite ({step}, position {self.known - 1})"
            return False
        place = self.prompt_length + len(outputs)  # not self.known: once a token
        self.ids[place] = token
        outputs.append(token)
        if token in self.stop_ids and len(outputs) >= self.request.sampling.min_tokens:
            self.finish_reason = "stop"
        elif len(outputs) >= self.max_tokens:
            self.finish_reason = "length"
        return True

    def expect(self, draft: SequenceType[int] = ()) -> None:
        """A step was planned that samples the next token, and verifies ``draft``."""
        self.in_flight += 1
        self.draft = draft
        if self.prompt_length + len(self.outputs) + self.in_flight + len(draft) >= len(self.ids):
            self._make_places()
        if draft:
            self.ids[self.known : self.known + len(draft)] = draft

    def _make_places(self) -> None:
        """Lengthens the ids where they end with the planned positions; few answers come near their limit."""
        end = min(self.length + max(len(self.outputs), _PLACES), self.prompt_length + self.max_tokens)
        if self.length >= len(self.ids) < end:
            self.ids = np.concatenate([self.ids, np.zeros(end - len(self.ids), np.int64)])

    def identity(self, start: int, end: int) -> bytes:
        """What the known positions [start, end) are compared by where prefixes are: ``identities``, and what they would
        be of the answer."""
        width = len(self.identities) // self.prompt_length
        of_prompt, first = self.identities[start * width : end * width], max(start, self.prompt_length)
        if first >= end:
            return of_prompt
        said = self.ids[first:end]
        if self.request.positions is not None:
            rows = np.empty((end - first, 1 + self.position_axes), np.int64)
            rows[:, 0], rows[:, 1:] = said, np.arange(first, end)[:, None] + self.position_offset
            said = rows
        return of_prompt + said.tobytes()

    def image_rows(self, start: int, end: int) -> tuple[np.ndarray, slice]:
        """Picture rows inside [start, end): their positions, and which of ``embeddings``' rows they are."""
        low, high = np.searchsorted(self.image_positions, (start, end))
        return self.image_positions[low:high], slice(int(low), int(high))


def with_marks(ids: np.ndarray, spans: np.ndarray, marks: Iterable[int]) -> np.ndarray:
    """A prompt's ids [n] with one of ``marks`` where the rows of each picture stood; ``spans`` as in Request."""
    tokens, kept = np.array(ids), np.ones(len(ids), bool)
    for (start, rows), mark in zip(np.asarray(spans).reshape(-1, 2), marks):
        tokens[start], kept[start + 1 : start + rows] = mark, False
    return tokens[kept]


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
    names of what ends it with its client (tritonserver/leases.py), maybe none. ``margin``: whether the margin of its
    tokens is wanted. ``since_ns``: what it ranks by, where it waited before, with another cut; else 0. ``draft``: the
    tokens of the one that it asks for.
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
    margin: bool = False
    since_ns: int = 0
    draft: list[int] | None = None
    number: int = field(default_factory=itertools.count().__next__)

    @cached_property
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

    Exactly one event of a request has a ``finish_reason``, and it is the last: "stop", "length", "cancelled",
    "deadline", "error" with ``error``, words for the client, or "refused" with ``refusal``, and nothing else, where the
    engine did not take the request. ``logprobs``: one JSON-ready dict a token:
    token_id, text, logprob and top, a list of {token_id, text, logprob}. ``choices``: one JSON-ready dict a label, at
    the end of a request that scores labels. ``drafted_tokens``: how many were verified, and how many of these were
    right. ``margin``, at the end: the log odds of the best label against the second, or, where the request wants it,
    the least margin of the answer's tokens. Times are on time.monotonic_ns's clock, 0 where it did not happen.
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
    refusal: TesseraError | None = None
    drafted_tokens: tuple[int, int] = (0, 0)
    margin: float | None = None
