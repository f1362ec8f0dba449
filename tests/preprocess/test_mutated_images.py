"""A corpus of damaged files: each gives pixels or an InvalidRequest, within a second, and never another error."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import encoded_pictures as pictures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import InvalidRequest
from tessera.preprocess.decode import Limits, decode, encoded_bytes

CORPUS = pictures.corpus()
LIMITS = Limits(max_file_pixels=4_000_000)
PER_FILE = 110  # x 20 files = 2,200 mutants


def mutants(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Flipped, overwritten, removed, repeated and inserted bytes, half of them in the first 64, where headers are."""
    dice = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(dice.choice([1, 1, 2, 5, 20])):
            at = dice.randrange(min(len(mutant), 64) if dice.random() < 0.5 else len(mutant))
            kind = dice.randrange(5)
            if kind == 0:
                mutant[at] ^= 1 << dice.randrange(8)
            elif kind == 1:
                mutant[at] = dice.choice([0, 1, 0x7F, 0x80, 0xFF])
            elif kind == 2:
                del mutant[at : at + dice.randrange(1, 9)]
            elif kind == 3:
                mutant[at:at] = mutant[at : at + dice.randrange(1, 33)]
            else:
                mutant[at:at] = dice.randbytes(dice.randrange(1, 5))
            if not mutant:
                break
        yield bytes(mutant)


def outcome(data: bytes, enough: tuple[int, int] | None = None) -> str:
    """What became of it; fails on any error but InvalidRequest and when decoding takes a second of processor time."""
    started = time.process_time()
    try:
        encoded = encoded_bytes(data, "image 0")
        width, height = pictures.probe_size(encoded, LIMITS, "image 0")
        pixels = decode(encoded, LIMITS, "image 0", enough)
    except InvalidRequest as error:
        assert str(error).startswith("image 0 ")
        assert ".py" not in str(error) and str(Path(__file__).parents[2]) not in str(error)
        result = "refused"
    else:
        assert pixels.dtype == np.uint8
        if enough is None:
            assert pixels.shape == (height, width, 3)
        result = "decoded"
    assert time.process_time() - started < 1
    return result


@pytest.mark.parametrize("kind", list(CORPUS))
def test_mutants(kind: str) -> None:
    found = {outcome(mutant) for mutant in mutants(CORPUS[kind], len(kind), PER_FILE)}
    assert "refused" in found


@pytest.mark.parametrize("kind", [kind for kind in CORPUS if kind.startswith("jpeg")])
def test_mutants_decoded_small(kind: str) -> None:
    found = {outcome(mutant, enough=(11, 7)) for mutant in mutants(CORPUS[kind], len(kind) + 1, PER_FILE)}
    assert found == {"refused", "decoded"}


@settings(max_examples=200)
@given(st.sampled_from(list(CORPUS.values())), st.floats(0, 1))
def test_files_cut_anywhere(data: bytes, share: float) -> None:
    cut = data[: int(len(data) * share)]
    assert outcome(cut) == ("decoded" if cut == data else "refused")


@settings(max_examples=200)
@given(
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x20\0\0\0WEBP", b"data:"]),
    st.binary(max_size=80),
)
def test_any_bytes(start: bytes, rest: bytes) -> None:
    outcome(start + rest)
