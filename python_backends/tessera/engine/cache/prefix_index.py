"""Finds blocks of keys and values by the content of the prefix they end.

A block's key is the hash of the key before it and the cache ids in it, so equal keys mean equal prefixes; the ids
are compared as well. A picture's row has a cache id made of the picture's digest, so pictures need no case here.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np


class _Entry(NamedTuple):
    block: int
    parent: bytes
    ids: bytes


class PrefixIndex:
    """Chain key -> block."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, _Entry] = {}
        self._key_of: dict[int, bytes] = {}

    @staticmethod
    def root(salt: int) -> bytes:
        """The key before the first block; different salts never share blocks."""
        return salt.to_bytes(16, "little", signed=True)

    @staticmethod
    def chain(parent: bytes, ids: bytes) -> bytes:
        """The key of the block that holds ``ids`` (of int64) after the prefix ``parent``."""
        return hashlib.blake2b(ids, digest_size=16, key=parent).digest()

    def find(self, key: bytes, parent: bytes, ids: bytes) -> int | None:
        """The block that holds exactly this prefix, or None."""
        entry = self._by_key.get(key)
        if entry is None or entry.parent != parent or entry.ids != ids:
            return None
        return entry.block

    def insert(self, key: bytes, parent: bytes, ids: bytes, block: int) -> None:
        """Offers a block; the first block of a key stays."""
        if key not in self._by_key:
            self._by_key[key] = _Entry(block, parent, ids)
            self._key_of[block] = key

    def forget(self, block: int) -> None:
        """The block is about to be overwritten."""
        if block in self._key_of:
            self.drop(self._key_of[block])

    def drop(self, key: bytes) -> None:
        """Nothing is found by this key any more."""
        entry = self._by_key.pop(key, None)
        if entry is not None:
            del self._key_of[entry.block]

    def check(self) -> None:
        """Raises AssertionError unless both directions agree and every key is the hash of what it names."""
        assert {entry.block: key for key, entry in self._by_key.items()} == self._key_of, "directions disagree"
        for key, entry in self._by_key.items():
            assert self.chain(entry.parent, entry.ids) == key, f"wrong key {key.hex()}"


def image_cache_ids(digest: np.ndarray, lengths: np.ndarray, secret: bytes) -> np.ndarray:
    """Cache ids int64 [sum of lengths] of pictures' rows.

    ``digest`` int64 [2k], ``lengths`` [k] rows a picture. A row's id depends on its picture's digest and its number
    in the picture; bit 62 is set, so that it never equals a token id, and without ``secret`` (per process)
    nobody can construct a picture that collides.
    """
    ids = [np.zeros(0, np.int64)]
    for pair, length in zip(np.asarray(digest, np.int64).reshape(-1, 2), lengths):
        stream = hashlib.shake_128(secret + pair.tobytes()).digest(8 * int(length))
        ids.append(np.frombuffer(stream, np.int64) & ((1 << 62) - 1) | (1 << 62))
    return np.concatenate(ids)
