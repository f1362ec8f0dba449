"""How many key/value blocks fit the engine's share of the memory."""

from array import array
from collections.abc import Callable

import numpy as np
import torch

from tessera.engine.scheduling.scheduler import ScheduledBatch, ScheduledSpan
from tessera.engine.sequence import Request, SamplingParameters, Sequence
from tessera.errors import ConfigError
from tessera.settings.stages import EngineConfig

_CPU_CACHE_BYTES = 1 << 30
# What the driver, libraries and recorded graphs take besides torch's tensors, and the choice of more rows' tokens than
# that step has: with a vocabulary of 152,000, 0.9 GB of logits of 1,024 in 16 and 32 bits, and up to 2.3 for those that
# are drawn at once.
_RESERVE_BYTES = 7 << 29

_PROMPTS = 16  # that share the largest step, where that many may run

Forward = Callable[[int, ScheduledBatch], object]


def count_blocks(
    config: EngineConfig, block_bytes: int, device: torch.device, max_model_len: int, forward: Forward
) -> int:
    """Blocks of the cache, of ``block_bytes`` each: what fits, at most what every sequence at full length needs.

    The engine shares the device with the vision stage and the rows of waiting pictures. On a GPU the cache gets what
    ``memory_bytes`` leaves beside the weights and the largest step, which is measured by running one: ``forward`` runs
    a batch on a cache of this many blocks. On the CPU, and with ``kv_cache_bytes``, nothing is measured. Raises
    ConfigError when the shares exceed the card or leave no room for one full context.
    """
    one = -(-max_model_len // config.block_size)
    cache_bytes = _cache_bytes(config, block_bytes, device, max_model_len, forward)
    blocks = cache_bytes // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"engine: a cache of {cache_bytes} bytes holds no block of {config.block_size} tokens, which takes "
            f"{block_bytes}; raise kv_cache_bytes or gpu_memory"
        )
    if device.type == "cuda" and blocks < one:
        raise ConfigError(
            f"engine: the cache holds {blocks * config.block_size} tokens, less than one context of {max_model_len}; "
            + ("raise kv_cache_bytes" if config.kv_cache_bytes else "raise gpu_memory")
            + ", or lower max_model_len"
        )
    return min(blocks, config.max_sequences * one)


def _cache_bytes(
    config: EngineConfig, block_bytes: int, device: torch.device, max_model_len: int, forward: Forward
) -> int:
    if device.type != "cuda":
        return config.kv_cache_bytes or _CPU_CACHE_BYTES
    share = engine_share(config, torch.cuda.get_device_properties(device).total_memory)
    if config.kv_cache_bytes:
        return config.kv_cache_bytes
    torch.cuda.reset_peak_memory_stats(device)
    batch, blocks = prompts_of(config.max_batched_tokens, max_model_len, config)
    forward(blocks, batch)
    torch.cuda.synchronize(device)
    used = torch.cuda.max_memory_allocated(device) - blocks * block_bytes
    torch.cuda.empty_cache()
    if used + _RESERVE_BYTES >= share:
        raise ConfigError(
            f"engine: weights and the largest step take {used / 2**30:.1f} GiB and {_RESERVE_BYTES / 2**30:.1f} GiB "
            f"are kept back; that is all of the engine's {share / 2**30:.1f} GiB; raise gpu_memory"
        )
    return share - used - _RESERVE_BYTES


def prompts_of(tokens: int, max_model_len: int, config: EngineConfig) -> tuple[ScheduledBatch, int]:
    """A step of this many tokens of whole prompts, each one's likeliest token chosen, and the blocks that it needs."""
    sampling, none = SamplingParameters(max_tokens=1, temperature=0), np.zeros((0, 2), np.int32)
    left, first, spans = tokens, 0, []
    share = -(-left // min(config.max_sequences, _PROMPTS))
    for _ in range(config.max_sequences):
        length = min(left, max(max_model_len - 1, 1), share)
        if not length:
            break
        sequence = Sequence(Request("", np.zeros(length, np.int32), none, None, none, sampling))
        sequence.expect()
        count = -(-length // config.block_size)
        sequence.block_table = array("q", range(first, first + count))
        spans.append(ScheduledSpan(sequence, 0, length, 1))
        left, first = left - length, first + count
    return ScheduledBatch(sorted(spans, key=lambda span: span.count > 1)), first


def engine_share(config: EngineConfig, total: int) -> int:
    """Bytes of a card of ``total`` for the language model: ``memory_bytes``, or nine tenths less the rows' pool.

    Raises ConfigError when the two together exceed the card.
    """
    share = config.memory_bytes or total * 9 // 10 - config.embedding_pool_bytes
    if share <= 0 or share + config.embedding_pool_bytes > total:
        raise ConfigError(
            f"engine: {config.embedding_pool_bytes / 2**30:.1f} GiB for waiting pictures and {share / 2**30:.1f} GiB "
            f"for the language model exceed the card's {total / 2**30:.1f} GiB; lower gpu_memory"
        )
    return share
