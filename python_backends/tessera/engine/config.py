"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
PREFIX_POLICIES = ("content", "exclude", "off")
WEIGHT_SOURCES = ("checkpoint", "random")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; all sizes are per engine.

    ``device``: a torch device name. ``dtype``: "auto" (float32 on cpu, bfloat16 elsewhere), "float32", "bfloat16" or
    "float16". ``block_size``: tokens a key/value block. ``max_batched_tokens``: tokens one step may run.
    ``max_sequences``: sequences that may run at once; it stays below ``max_batched_tokens``, so that a step full of
    decodes still moves a prompt on. ``max_in_flight``: requests accepted at once, waiting ones included.
    ``max_model_len``: prompt + answer; None takes the checkpoint's context length. ``kv_cache_bytes``: 0 takes what
    ``max_sequences`` full contexts need, at most 1 GiB on the CPU, on a GPU what the engine's share leaves.
    ``memory_bytes``: that share, weights included; 0 is all of the card but ``vision_memory_bytes``, for the vision
    stage, ``embedding_pool_bytes``, for the rows of pictures whose requests wait or run, and ``server_memory_bytes``,
    for the server's own pool of GPU memory and the contexts of its processes. ``graph_batch_size``: decode steps of up
    to so many sequences run as CUDA graphs; 0 records none. ``prefix_cache``: "content" reuses equal prefixes including
    pictures, "exclude" stops before the first picture, "off" reuses nothing. ``weights``: "random" draws them from
    ``seed`` instead of reading the checkpoint's. ``attention``: a backend's name, or "auto".
    ``threads``: torch's intra-op threads on the CPU.
    """

    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 16
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    max_in_flight: int = 512
    max_model_len: int | None = None
    kv_cache_bytes: int = 0
    memory_bytes: int = 0
    vision_memory_bytes: int = 8 << 30
    embedding_pool_bytes: int = 4 << 30
    server_memory_bytes: int = 0
    graph_batch_size: int = 256
    prefix_cache: str = "content"
    weights: str = "checkpoint"
    attention: str = "auto"
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(
                f"engine: device is {self.device!r}; it must be cpu or cuda (CUDA_VISIBLE_DEVICES says which GPU)"
            )
        for name in ("block_size", "max_batched_tokens", "max_sequences", "max_in_flight", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine: {name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"engine: max_model_len is {self.max_model_len}; it must be at least 2")
        for name in (
            "kv_cache_bytes",
            "memory_bytes",
            "vision_memory_bytes",
            "embedding_pool_bytes",
            "server_memory_bytes",
            "graph_batch_size",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"engine: {name} is {getattr(self, name)}; it cannot be negative")
        if self.max_sequences >= self.max_batched_tokens:
            raise ConfigError(
                f"engine: max_sequences {self.max_sequences} must stay below max_batched_tokens "
                f"{self.max_batched_tokens}, or decodes could keep every prompt out"
            )
        for name, allowed in (
            ("dtype", DTYPES),
            ("prefix_cache", PREFIX_POLICIES),
            ("weights", WEIGHT_SOURCES),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"engine: {name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
