"""How a tokenizer's pieces spell text, as bytes: what its decoder does, one piece at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

from tokenizers import Tokenizer

from tessera.errors import CheckpointError
from tessera.family.sentencepiece_model import SPACE

# The steps of sentencepiece's decoder, as `spm_backend` and transformers write them.
REPLACE = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BYTE_FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}


def spelling_of(backend: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """A piece's bytes, and whether a space in front of the whole text is taken off.

    Raises CheckpointError for a decoder that is neither byte-level nor sentencepiece's.
    """
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if REPLACE not in steps or any(step not in (REPLACE, STRIP, BYTE_FALLBACK, FUSE) for step in steps):
        raise CheckpointError(
            f"tokenizer.json has the decoder {'+'.join(map(str, kinds))}, which is not supported; supported are "
            "ByteLevel and sentencepiece's (Replace, ByteFallback, Fuse, Strip)"
        )
    return _byte_fallback if BYTE_FALLBACK in steps else _spaced, STRIP in steps


def _spaced(piece: str) -> bytes:
    return piece.replace(SPACE, " ").encode()


def _byte_fallback(piece: str) -> bytes:
    is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return bytes.fromhex(piece[3:5]) if is_byte else _spaced(piece)


def _byte_level(piece: str) -> bytes:
    table = _byte_level_table()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()


@cache
def _byte_level_table() -> dict[str, int]:
    """GPT-2's character for each byte: printable ones stand for themselves, the others are numbered from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
