"""Token sequences: one picture, many questions.

A training sequence is the chat up to and including the picture, once, then one branch per question.  A branch sees the
picture and itself, and its positions continue the picture's, so each computes exactly what a chat of its own would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from checkpoints import IM_END, PAD, ROOMS
from tokenizers import Tokenizer

IMG_CONTEXT = 5
TOKENS_PER_TILE = 64
IGNORE = -100


@dataclass(frozen=True)
class Branch:
    """One question's tokens after the picture; the last `answer_length` (with `<|im_end|>`) are the answer."""

    ids: tuple[int, ...]
    answer_length: int


class ChatTokens:
    """The chat template with a picture first, cut into the pieces that training packs."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(ROOMS / "tokenizer.json"))
        self.head = self._encode("<|im_start|>user\n<img>")
        self.tail = self._encode("</img>\n")
        self._turn = self._encode("<|im_end|>\n<|im_start|>assistant\n")

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prefix(self, tiles: int) -> list[int]:
        """Ids from the chat's start to the newline after a picture of `tiles` tiles."""
        return [*self.head, *[IMG_CONTEXT] * (TOKENS_PER_TILE * tiles), *self.tail]

    def branch(self, question: str, answer: str) -> Branch:
        answer_ids = [*self._encode(answer), IM_END]
        return Branch((*self._encode(question), *self._turn, *answer_ids), len(answer_ids))


@dataclass(frozen=True)
class PackedBranches:
    """Branches of a batch, [pictures, length] each: token ids; branch number (-1 = padding); position from the branch's
    start; the next token to predict (IGNORE where none); that prediction's weight in the loss."""

    ids: np.ndarray
    number: np.ndarray
    position: np.ndarray
    label: np.ndarray
    weight: np.ndarray


def pack(rows: Sequence[Sequence[Branch]], length: int, long_weight: float = 0.2) -> PackedBranches:
    """Lay each picture's branches end to end in `length` places; a branch that does not fit is left out.

    Tokens of answers longer than 8 tokens weigh `long_weight`, so that descriptions do not drown the short answers.
    """
    shape = (len(rows), length)
    packed = PackedBranches(
        np.full(shape, PAD, np.int32),
        np.full(shape, -1, np.int8),
        np.zeros(shape, np.int32),
        np.full(shape, IGNORE, np.int64),
        np.zeros(shape, np.float32),
    )
    for row, branches in enumerate(rows):
        start = 0
        for number, branch in enumerate(branches):
            n, k = len(branch.ids), branch.answer_length
            if start + n > length:
                continue
            where = slice(start, start + n)
            packed.ids[row, where] = branch.ids
            packed.number[row, where] = number
            packed.position[row, where] = np.arange(n)
            answer = slice(start + n - k - 1, start + n - 1)  # each place predicts the next token
            packed.label[row, answer] = branch.ids[-k:]
            packed.weight[row, answer] = 1.0 if k <= 8 else long_weight
            start += n
    return packed


def attention_mask(prefix: int, number: torch.Tensor) -> torch.Tensor:
    """bool [batch, 1, S, S] for `prefix` shared tokens and then branches `number` [batch, length]; True = may look."""
    batch, length = number.shape
    size = prefix + length
    owner = torch.cat([number.new_full((batch, prefix), -2), number], dim=1)
    causal = torch.ones(size, size, dtype=torch.bool, device=number.device).tril()
    same = (owner[:, :, None] == owner[:, None, :]) | (owner == -2)[:, None, :]
    return (same & causal)[:, None]
