"""What a cascade's plan and the server that follows it both must know (docs/cascade.md)."""

from __future__ import annotations

from hashlib import blake2b

MOST_TOKENS = 16
"""Of an answer that is no label: each token's margin counts, and nothing is told before the last."""


def question_class(question: str) -> str:
    """The class that a question is of, 16 hexadecimal digits: all with its very text, whatever its pictures."""
    return blake2b(question.encode(), digest_size=8).hexdigest()
