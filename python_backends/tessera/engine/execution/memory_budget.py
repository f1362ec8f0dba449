"""How many key/value blocks fit the configured bytes."""

from __future__ import annotations

from tessera.errors import ConfigError

_DEFAULT_BYTES = 1 << 30


def count_blocks(
    kv_cache_bytes: int, bytes_per_block: int, block_size: int, max_model_len: int, max_sequences: int
) -> int:
    """Blocks of the cache; ``kv_cache_bytes`` 0 takes what every sequence at full length needs, at most 1 GiB.

    Raises ConfigError when not even one block fits. A context longer than the cache is no error here: requests
    that can never fit are refused one by one.
    """
    full = max_sequences * -(-max_model_len // block_size)
    blocks = (kv_cache_bytes or _DEFAULT_BYTES) // bytes_per_block
    if blocks < 1:
        raise ConfigError(
            f"engine: kv_cache_bytes {kv_cache_bytes or _DEFAULT_BYTES} holds no block; "
            f"one of {block_size} tokens takes {bytes_per_block} bytes"
        )
    return min(blocks, full)
