"""Owns the blocks of keys and values: who holds which, which are free, which may be found again by content.

A freed block keeps its content and its place in the prefix index until it is handed out again; the longest free
go first.

Finds blocks of keys and values by the content of the prefix they end.

A block's key is the hash of the key before it and the cache ids in it, so equal keys mean equal prefixes; the ids
are compared as well. A picture's row has a cache id made of the picture's digest, so pictures need no case here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tessera.engine.sequence import Sequence


class BlockManager:
    """``num_blocks`` blocks of ``block_size`` tokens; a sequence's ``cache_limit`` says what of it may be reused."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._index = PrefixIndex()
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def prepare(self, sequence: Sequence) -> None:
        """Finds what a sequence's blocks are asked for by, before any thread but the caller's knows it."""
        for number in self._reusable(sequence):
            self._identity(sequence, number)

    def admit(self, sequence: Sequence, reserve: int = 0) -> bool:
        """Gives a sequence that holds nothing blocks for all its tokens, reusing the longest cached prefix.

        ``computed`` then counts the reused positions; at least one position is left to compute. Returns False, and
        changes nothing, unless ``reserve`` blocks would stay free.
        """
        reused = self._match(sequence)
        if not self._fits(sequence, reused, reserve):
            return False
        for block in reused:
            self._hold(block)
        sequence.block_table = reused
        sequence.computed = len(reused) * self.block_size
        sequence.committed = len(reused)
        return self.grow(sequence, sequence.length)

    def fits(self, sequence: Sequence, reserve: int = 0) -> bool:
        """Whether :meth:`admit` would take it."""
        return self._fits(sequence, self._match(sequence), reserve)

    def cached(self, sequence: Sequence) -> int:
        """How many of its positions :meth:`admit` would reuse now."""
        return len(self._match(sequence)) * self.block_size

    def keeps(self, sequence: Sequence) -> bool:
        """Whether all full blocks that a sequence has computed are found again once it has given them back."""
        return sequence.computed // self.block_size <= sequence.committed

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Makes the sequence's blocks reach ``tokens`` positions; False, changing nothing, if too few are free."""
        fresh = self.blocks_for(tokens) - len(sequence.block_table)
        if fresh > len(self._free):
            return False
        for _ in range(fresh):
            block = next(iter(self._free))
            self._index.forget(block)
            self._hold(block)
            sequence.block_table.append(block)
        return True

    def advance(self, sequence: Sequence, end: int) -> bool:
        """For a planned step that computes the positions up to ``end``; False, changing nothing, if too few blocks are
        free. What it writes of the prompt may be found from now on, by those that the same step begins."""
        if end > len(sequence.block_table) * self.block_size and not self.grow(sequence, end):
            return False
        sequence.computed = end
        if min(end, sequence.prompt_length) // self.block_size > sequence.committed:
            self.commit(sequence)
        return True

    def commit(self, sequence: Sequence) -> None:
        """Makes the sequence's full, computed blocks findable. The step that writes them must be planned."""
        positions = min(sequence.computed, sequence.known, sequence.cache_limit)
        for number in range(sequence.committed, positions // self.block_size):
            parent, key, ids = self._identity(sequence, number)
            self._index.insert(key, parent, ids, sequence.block_table[number])
            sequence.offered.append(key)
            sequence.committed = number + 1

    def invalidate(self, keys: Iterable[bytes]) -> None:
        """What was written under these keys may be NaN: it is not found any more."""
        for key in keys:
            self._index.drop(key)

    def release(self, sequence: Sequence) -> None:
        """Takes back all blocks; the end of a prefix is reused before its beginning."""
        self._give_back(sequence, 0)
        sequence.computed = sequence.committed = 0

    def shrink(self, sequence: Sequence) -> None:
        """Takes back the blocks beyond a sequence's end, which labels may move back, and drafts that were wrong."""
        kept = self.blocks_for(sequence.length)
        if kept >= len(sequence.block_table):
            return
        beyond = sequence.block_table[kept:]
        self._give_back(sequence, kept)
        for block in beyond:  # nobody would find what was written there: they go before those that may be found
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def _give_back(self, sequence: Sequence, kept: int) -> None:
        while len(sequence.block_table) > kept:
            block = sequence.block_table.pop()
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None

    def reset(self) -> None:
        """Nobody holds anything and nothing written so far may be found, because a step failed midway."""
        self._holders = [0] * self.num_blocks
        self._free = OrderedDict.fromkeys(range(self.num_blocks))
        self._index = PrefixIndex()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the books agree with ``sequences``, all those that may hold blocks."""
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        assert all(0 <= block < self.num_blocks for block in held), "a block that does not exist is held"
        assert {b: n for b, n in enumerate(self._holders) if n} == dict(held), "holder counts are wrong"
        assert set(self._free) == set(range(self.num_blocks)) - set(held), "free blocks are wrong"
        for sequence in sequences:
            table = sequence.block_table
            name = f"request {sequence.request.request_id!r}"
            assert len(set(table)) == len(table), f"{name} holds a block twice"
            assert len(table) * self.block_size >= sequence.computed, f"{name} outgrew its blocks"
            assert not table or len(table) <= self.blocks_for(sequence.length), f"{name} holds blocks beyond its end"
            # Only what is complete and never written again may have several holders.
            assert all(held[block] == 1 for block in table[sequence.committed :]), f"{name} shares an open block"
        self._index.check()

    def _fits(self, sequence: Sequence, reused: array[int], reserve: int) -> bool:
        fresh = self.blocks_for(sequence.length) - len(reused)
        revived = sum(self._holders[block] == 0 for block in reused)
        return fresh + revived + reserve <= len(self._free)

    def _reusable(self, sequence: Sequence) -> range:
        """Its blocks that may be found written already; its last position must run."""
        return range(min(sequence.known - 1, sequence.cache_limit) // self.block_size)

    def _match(self, sequence: Sequence) -> array[int]:
        blocks = array("q")
        for number in self._reusable(sequence):
            parent, key, ids = self._identity(sequence, number)
            block = self._index.find(key, parent, ids)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _identity(self, sequence: Sequence, number: int) -> tuple[bytes, bytes, bytes]:
        """(parent key, key, identities) of the sequence's block ``number``; those before it were asked for already."""
        keys = sequence.block_keys
        ids = sequence.identity(number * self.block_size, (number + 1) * self.block_size)
        parent = keys[number - 1] if number else PrefixIndex.root(sequence.cache_salt)
        if len(keys) == number:
            keys.append(PrefixIndex.chain(parent, ids))
        return parent, keys[number], ids

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1


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
