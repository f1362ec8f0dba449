"""How many tokens MinerU2.5 would answer with: counted with Qwen's published vocabulary, which its tokenizer has.

Qwen2's merges are those of Qwen's `qwen.tiktoken`, a line for each token (base64, rank), which the package dashscope
ships; pieces of text are cut by the pattern below.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from unicodedata import normalize

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

PIECE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = Split(Regex(PIECE), "isolated")
SPECIALS_OF_A_BOX = 5  # <|box_start|> <|box_end|> <|ref_start|> <|ref_end|> <|rotate_up|>


class Tokens:
    """Counts tokens. ``vocabulary``: the content of a qwen.tiktoken."""

    def __init__(self, vocabulary: bytes) -> None:
        lines = (line.split() for line in vocabulary.splitlines())
        self._ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self._piece = cache(self._count_piece)

    def count(self, text: str) -> int:
        """Of plain text."""
        return sum(self._piece(piece) for piece, _ in PIECES.pre_tokenize_str(normalize("NFC", text)))

    def layout(self, boxes: Sequence[tuple[str, Sequence[int]]]) -> int:
        """Of the layout answer with these types and boxes: a line each, of four numbers of three digits."""
        lines = (f"{left:03} {top:03} {right:03} {bottom:03}" for _, (left, top, right, bottom) in boxes)
        stated = sum(self.count(line) + SPECIALS_OF_A_BOX for line in lines) + sum(
            self.count(kind) for kind, _ in boxes
        )
        return stated + len(boxes) - 1  # the ends of lines

    def table(self, rows: Sequence[Sequence[str]]) -> int:
        """Of a table: a token before each cell and one after each row, as MinerU's OTSL has them."""
        return sum(1 + sum(1 + self.count(cell) for cell in row) for row in rows)

    def _count_piece(self, piece: str) -> int:
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1:
            merges = [(self._ranks.get(a + b), at) for at, (a, b) in enumerate(pairwise(parts))]
            known = [(rank, at) for rank, at in merges if rank is not None]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return len(parts)
