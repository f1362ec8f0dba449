"""The document model's tokenizer: a token a character, and the marks of MinerU's answers.

    python document_tokens.py checkpoint

Byte-level, so that any text is possible; the characters of the pages beyond ASCII are merged into one token each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pages.words import ACCENTED

CONTROLS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<|box_start|>", "<|box_end|>", "<|ref_start|>", "<|ref_end|>"),
    *("<|rotate_up|>", "<|rotate_right|>", "<|rotate_down|>", "<|rotate_left|>"),
)
PAD, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(7)
CELLS = ("<fcel>", "<ecel>", "<lcel>", "<ucel>", "<xcel>", "<nl>")
"""OTSL's; part of an answer's text, so that leaving out special tokens leaves them in."""

SYSTEM = "You are a helpful assistant."
PROMPTS = {
    "layout": "\nLayout Detection:",
    "text": "\nText Recognition:",
    "table": "\nTable Recognition:",
    "equation": "\nFormula Recognition:",
}
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] in ['image', 'image_url'] %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Controls have the lowest ids, in order; then cells, bytes, merged characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries, merges = [*CONTROLS, *CELLS, *letters], []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for character in ACCENTED:
        ((spelt, _),) = byte_level.pre_tokenize_str(character)
        for length in range(2, len(spelt) + 1):
            if spelt[:length] not in entries:
                entries.append(spelt[:length])
                merges.append((spelt[: length - 1], spelt[length - 1]))
    tokenizer = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROLS])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in CELLS])
    return tokenizer


class ChatTokens:
    """A chat about one picture, cut into what stands before its rows, what behind, and the answer."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer or make_tokenizer()
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


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json, its settings and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "extra_special_tokens": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    save_tokenizer(Path(sys.argv[1]))
