"""A sentencepiece ``tokenizer.model`` read without sentencepiece, and made into a ``tokenizers`` object.

The file is a protobuf message (sentencepiece_model.proto): field 1 the pieces (1 text, 2 score, 3 type), field 2
the trainer's settings (3 model type), field 3 the normalizer's (2 character map, 3 dummy prefix, 4 whitespace).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from tessera.errors import CheckpointError

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BPE = 2


@dataclass(frozen=True)
class SentencePieceModel:
    """Pieces in order of id: (text, score, type), and the rules round them."""

    pieces: tuple[tuple[str, float, int], ...]
    model_type: int
    charsmap: bytes
    dummy_prefix: bool
    collapse_spaces: bool

    @staticmethod
    def parse(data: bytes) -> SentencePieceModel:
        """Raises CheckpointError if ``data`` is not such a message."""
        pieces: list[tuple[str, float, int]] = []
        model_type, charsmap, dummy_prefix, collapse = 1, b"", True, True
        try:
            for field, value in _fields(data):
                if field == 1:
                    piece = dict(_fields(value))
                    (score,) = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))
                    pieces.append((piece[1].decode("utf-8"), score, piece.get(3, NORMAL)))
                elif field == 2:
                    model_type = dict(_fields(value)).get(3, 1)
                elif field == 3:
                    rules = dict(_fields(value))
                    charsmap = rules.get(2, b"")
                    dummy_prefix, collapse = bool(rules.get(3, 1)), bool(rules.get(4, 1))
        except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointError(f"tokenizer.model is not a sentencepiece model: {error!r}") from None
        if not pieces:
            raise CheckpointError("tokenizer.model holds no pieces")
        return SentencePieceModel(tuple(pieces), model_type, charsmap, dummy_prefix, collapse)

    def to_tokenizer(self) -> Tokenizer:
        """A BPE tokenizer with byte fallback. Raises CheckpointError for other model types (unigram, word, char)."""
        if self.model_type != BPE:
            raise CheckpointError(
                f"tokenizer.model has sentencepiece model type {self.model_type}; supported is 2 (BPE). "
                "Save the tokenizer as tokenizer.json"
            )
        vocabulary = {text: index for index, (text, _, _) in enumerate(self.pieces)}
        unknown = next((text for text, _, kind in self.pieces if kind == UNKNOWN), None)
        fallback = any(kind == BYTE for _, _, kind in self.pieces)
        model = models.BPE(
            vocab=vocabulary,
            merges=self._merges(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=fallback,
        )
        tokenizer = Tokenizer(model)
        steps: list[Any] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.collapse_spaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.dummy_prefix:
            steps.append(normalizers.Prepend(SPACE))
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        tokenizer.decoder = spm_decoder(self.dummy_prefix)
        tokenizer.add_special_tokens(
            [
                AddedToken(text, special=True, normalized=False)
                for text, _, kind in self.pieces
                if kind in (UNKNOWN, CONTROL)
            ]
        )
        tokenizer.add_tokens(
            [AddedToken(text, normalized=False) for text, _, kind in self.pieces if kind == USER_DEFINED]
        )
        return tokenizer

    def _merges(self, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
        """Every way of joining two pieces into a third, best score first: what sentencepiece decides on the fly."""
        usable = {text for text, _, kind in self.pieces if kind == NORMAL}
        found = [
            (-score, vocabulary[text[:cut]], vocabulary[text[cut:]], (text[:cut], text[cut:]))
            for text, score, kind in self.pieces
            if kind == NORMAL
            for cut in range(1, len(text))
            if text[:cut] in usable and text[cut:] in usable
        ]
        return [merge for *_, merge in sorted(found)]


def spm_decoder(dummy_prefix: bool) -> Any:
    """Pieces to text: spaces back, bytes fused, and the space that the dummy prefix put in front taken off."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of one protobuf message: int, or bytes for fixed and delimited ones."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(data):
            raise ValueError("cut off")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
