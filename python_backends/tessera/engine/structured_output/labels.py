"""Label scoring: how likely each of a few given answers is, in as few forward passes as possible.

The labels' tokens form a trie. Only where it branches is the model asked; a token that is the only way on is forced,
costs nothing and counts as probability 1. Labels that differ in their first token thus need the prompt's last logits
and nothing else. A label that begins another one branches where it ends: there its way on is the end of the answer,
whose probability is that of all stop tokens together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from tessera.errors import InvalidRequest

# The way on from a label's last token; smaller than any token id.
END = -1
# Stands for the log probability of what cannot be, so that sums and JSON stay finite.
IMPOSSIBLE = -1e9


class LabelAnswer(NamedTuple):
    """What scoring labels came to: the best label's text and tokens, and one JSON-ready dict a label, in their order.

    ``label``. ``logprob``: the sum over the label's decisions (the branches on its way) of the natural log of the
    model's probability, over the whole vocabulary and before temperature, of the way it takes. ``probability``: its
    exp; over all labels at most 1, and what is missing is the model's wish to say something else. ``normalized``:
    exp(logprob / decisions), rescaled to sum to 1 over the labels, so that a label pays nothing for having more
    decisions than another.
    """

    best: str
    tokens: tuple[int, ...]
    scores: list[dict[str, Any]]

    @property
    def margin(self) -> float:
        """The log odds of the best label against the second, in nats."""
        best, second = sorted((score["logprob"] for score in self.scores), reverse=True)[:2]
        return best - second


class _Way(NamedTuple):
    """The tokens that are a branch's one way on (several only where a label ends) and the labels that take it."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]


class Branch(NamedTuple):
    """A question to the model: after the prompt and ``path``, how likely is each token of ``children``?"""

    path: tuple[int, ...]
    ways: tuple[_Way, ...]

    @property
    def children(self) -> tuple[int, ...]:
        return tuple(token for way in self.ways for token in way.tokens)


class LabelScorer:
    """Asks for one branch after another and adds up the answers::

        while not scorer.done:
            scorer.observe(log_probabilities(scorer.branch))
        text, _, scores = scorer.answer()

    Branches come depth first, a parent before its children: whatever a path shares with any earlier one, it shares
    with the one just before it, and its last token is always new.
    """

    def __init__(
        self, labels: Sequence[str], encode: Callable[[str], Sequence[int]], end_tokens: Collection[int]
    ) -> None:
        """Of at least two labels. ``encode`` gives a text's token ids without special tokens. ``end_tokens``: those
        that end an answer.

        Raises InvalidRequest naming labels that have no tokens, the same tokens, or one that ends an answer.
        """
        self._labels = tuple(labels)
        self._token_ids = tuple(tuple(label_token_ids(label, encode)) for label in labels)
        _check(self._labels, self._token_ids, end_tokens)
        closed = [(*ids, END) for ids in self._token_ids]
        by_tokens = sorted(range(len(closed)), key=closed.__getitem__)
        self._branches = list(_branchings(closed, by_tokens, tuple(sorted(end_tokens))))
        self._observed = 0
        self._logprobs = [0.0] * len(closed)
        self._decisions = [0] * len(closed)

    @property
    def branch(self) -> Branch | None:
        """What to ask the model next; None when all is known."""
        return None if self.done else self._branches[self._observed]

    @property
    def done(self) -> bool:
        return self._observed == len(self._branches)

    @property
    def longest_path(self) -> int:
        """The most tokens that any branch needs after the prompt."""
        return max(len(branch.path) for branch in self._branches)

    @property
    def largest_token(self) -> int:
        """The largest id of all labels' tokens."""
        return max(token for ids in self._token_ids for token in ids)

    def observe(self, logprobs: Sequence[float]) -> None:
        """The answer to ``branch``: natural log probabilities of its children, in their order.

        Raises ValueError if their number is wrong, IndexError if nothing was asked.
        """
        branch = self._branches[self._observed]
        of_token = dict(zip(branch.children, logprobs, strict=True))
        for way in branch.ways:
            gained = _log_sum([of_token[token] for token in way.tokens])
            for label in way.labels:
                self._logprobs[label] += gained
                self._decisions[label] += 1
        self._observed += 1

    def answer(self) -> LabelAnswer:
        """All scores; the best label is the likeliest, the first of equals. Raises RuntimeError before all is known."""
        if not self.done:
            raise RuntimeError(f"{len(self._branches) - self._observed} branches are still to be observed")
        means = [logprob / decisions for logprob, decisions in zip(self._logprobs, self._decisions)]
        top = max(means)
        weights = [math.exp(mean - top) for mean in means]
        total = sum(weights)
        scores = [
            {"label": label, "logprob": logprob, "probability": math.exp(logprob), "normalized": weight / total}
            for label, logprob, weight in zip(self._labels, self._logprobs, weights)
        ]
        best = max(range(len(self._labels)), key=self._logprobs.__getitem__)
        return LabelAnswer(self._labels[best], self._token_ids[best], scores)


def label_token_ids(label: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The tokens in which a model writes ``label``: as they stand after the line break that ends a prompt.

    A tokenizer may treat the first word of a text as if a space stood before it; an answer's first word has none.
    """
    before, whole = list(encode("\n")), list(encode("\n" + label))
    return whole[len(before) :] if whole[: len(before)] == before else list(encode(label))


def _check(labels: Sequence[str], token_ids: Sequence[tuple[int, ...]], end_tokens: Collection[int]) -> None:
    owners: dict[tuple[int, ...], str] = {}
    for label, ids in zip(labels, token_ids, strict=True):
        if not ids:
            raise InvalidRequest(f"sampling_parameters: choices: {label!r:.50} has no tokens")
        if not set(ids).isdisjoint(end_tokens):
            raise InvalidRequest(f"sampling_parameters: choices: {label!r:.50} holds a token that ends an answer")
        if ids in owners:
            raise InvalidRequest(
                f"sampling_parameters: choices: {owners[ids]!r:.50} and {label!r:.50} have the same tokens"
            )
        owners[ids] = label


def _branchings(rows: Sequence[tuple[int, ...]], order: Sequence[int], ends: tuple[int, ...]) -> Iterator[Branch]:
    """Where the trie of ``rows`` branches, depth first; each way on has the rows that take it.

    ``order``: places of at least two rows, sorted by them, so that rows which agree for longest are neighbours. No
    row begins another. ``ends``: the tokens that END stands for.
    """
    first, last = rows[order[0]], rows[order[-1]]
    depth = next(at for at, (one, other) in enumerate(zip(first, last)) if one != other)
    ways = tuple(
        _Way(ends if token == END else (token,), tuple(members))
        for token, members in groupby(order, key=lambda row: rows[row][depth])
    )
    yield Branch(first[:depth], ways)
    for way in ways:
        if len(way.labels) > 1:
            yield from _branchings(rows, way.labels, ends)


def _log_sum(logprobs: Sequence[float]) -> float:
    """log(sum(exp)); IMPOSSIBLE for nothing, and in place of what is no number."""
    finite = [max(IMPOSSIBLE, logprob) for logprob in logprobs]
    top = max(finite, default=IMPOSSIBLE)
    return top + math.log(sum(math.exp(logprob - top) for logprob in finite) or 1.0)
