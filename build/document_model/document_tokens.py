"""The document model's tokens: one a character, and the marks of MinerU's answers.

The tokenizer is byte-level, so that any text is possible; the characters of the pages beyond ASCII are merged into one
token each.
"""

from collections.abc import Sequence

from checkpoints import DOCUMENTS, IM_END, PAD
from tokenizers import Tokenizer

IMAGE_PAD = 5
CELLS = ("<fcel>", "<ecel>", "<lcel>", "<ucel>", "<xcel>", "<nl>")
"""OTSL's; part of an answer's text, so that leaving out special tokens leaves them in."""

SYSTEM = "You are a helpful assistant."
PROMPTS = {
    "layout": "\nLayout Detection:",
    "text": "\nText Recognition:",
    "table": "\nTable Recognition:",
    "equation": "\nFormula Recognition:",
}


class ChatTokens:
    """A chat about one picture, cut into what stands before its rows, what behind, and the answer."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(DOCUMENTS / "tokenizer.json"))
        self.size = self.tokenizer.get_vocab_size()
        (self.newline,) = self.ids("\n")
        self.head = self.ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<|vision_start|>")
        self.tails = {
            name: self.ids(f"<|vision_end|>{prompt}<|im_end|>\n<|im_start|>assistant\n")
            for name, prompt in PROMPTS.items()
        }

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def answer(self, text: str) -> list[int]:
        return [*self.ids(text), IM_END]

    def decode(self, ids: Sequence[int]) -> str:
        """What a client sees: all but what ends an answer."""
        return self.tokenizer.decode([i for i in ids if i not in (IM_END, PAD)], skip_special_tokens=False)
