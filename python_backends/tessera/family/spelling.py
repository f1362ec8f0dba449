"""How a tokenizer's pieces spell text, as bytes: what its decoder does, one piece at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer

from tessera.errors import CheckpointError
from tessera.family.sentencepiece_model import SPACE

# The steps of sentencepiece's decoder, as `spm_decoder` and transformers write them.
REPLACE = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BYTE_FALLBACK, FUSE, BYTE_LEVEL = "ByteFallback", "Fuse", "ByteLevel"


@dataclass(frozen=True)
class Spelling:
    """``byte_level``: a character a byte (GPT-2's table); else spaces are written as SPACE and, with
    ``byte_fallback``, single bytes as <0x..>. ``strip_space``: a space in front of the whole text is taken off."""

    byte_level: bool
    byte_fallback: bool = False
    strip_space: bool = False

    @staticmethod
    def of(backend: Tokenizer) -> Spelling:
        """Raises CheckpointError for a decoder of another kind."""
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        steps = decoder.get("decoders", [decoder])
        kinds = [step.get("type") for step in steps]
        if kinds == [BYTE_LEVEL]:
            return Spelling(byte_level=True)
        other = [
            step for step in steps if step not in (REPLACE, STRIP) and step.get("type") not in (BYTE_FALLBACK, FUSE)
        ]
        if other or REPLACE not in steps:
            raise CheckpointError(
                f"tokenizer.json has the decoder {'+'.join(map(str, kinds))}, which is not supported; supported are "
                "ByteLevel and sentencepiece's (Replace, ByteFallback, Fuse, Strip)"
            )
        return Spelling(False, BYTE_FALLBACK in kinds, STRIP in steps)

    def bytes_of(self, piece: str) -> bytes:
        if self.byte_level:
            table = _byte_level_table()
            return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE, " ").encode()


@cache
def _byte_level_table() -> dict[str, int]:
    """GPT-2's character for each byte: printable ones stand for themselves, the others are numbered from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
