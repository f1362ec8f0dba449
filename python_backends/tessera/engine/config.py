"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.errors import ConfigError
from tessera.settings import check, setting

QUANTIZATIONS = {"checkpoint": "checkpoint", "fp8": "fp8", "fp8-language": "fp8", "fp8-vision": "checkpoint"}
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; all sizes are per engine.

    ``device``: a torch device name. ``dtype``: "auto" (float32 on cpu, bfloat16 elsewhere), "float32", "bfloat16" or
    "float16". ``block_size``: tokens a key/value block. ``max_batched_tokens``: tokens one step may run.
    ``max_sequences``: sequences that may run at once; it stays below ``max_batched_tokens``, so that a step full of
    decodes still moves a prompt on. ``max_in_flight``: requests accepted at once, waiting ones included.
    ``max_model_len``: prompt + answer; None takes the checkpoint's context length. ``kv_cache_bytes``: 0 takes what
    ``max_sequences`` full contexts need, at most 1 GiB on the CPU, on a GPU what the engine's share leaves.
    ``kv_cache_dtype``: "auto" is the model's, "fp8" e4m3 with a scale a position and head (half the bytes of bfloat16).
    ``memory_bytes``: that share, weights included (gpu_memory.py divides a card); 0 is nine tenths of the card but
    ``embedding_pool_bytes``, for the rows of pictures whose requests wait or run. ``graph_batch_size``: decode steps of
    up to this many sequences run as CUDA graphs, and other small steps too; 0 records none. ``prefix_cache``: "content"
    reuses equal prefixes including pictures, "exclude" stops before the first picture, "off" reuses nothing.
    ``weights``: "random" draws them from ``seed`` instead of reading the checkpoint's. ``quantization``: "checkpoint"
    runs the weights as they are stored, "fp8" quantizes unquantized ones, all but the head's, while they are read (a
    user says it for both stages at once). ``resident``: "auto" keeps an FP8 copy of 4-bit weights for many rows while
    half of the card is free, "off" never. ``attention``: a backend's name, or "auto". ``threads``: torch's intra-op
    threads on the CPU.
    """

    device: str = "cpu"
    dtype: str = setting("auto", cpu="float32", cuda="bfloat16", common=True, choices=DTYPES)
    block_size: int = setting(16, settable=False, least=1)
    max_batched_tokens: int = setting(8192, cpu=2048, least=1)
    max_sequences: int = setting(256, cpu=64, least=1)
    max_in_flight: int = setting(512, settable=False, least=1)
    max_model_len: int | None = setting(None, common=True, kind=int, least=2)
    kv_cache_dtype: str = setting("auto", choices=("auto", "fp8"))
    kv_cache_bytes: int = setting(0, cpu=512 << 20, least=0)
    memory_bytes: int = setting(0, settable=False, least=0, share="language")
    embedding_pool_bytes: int = setting(4 << 30, cuda=0, settable=False, least=0, share="embedding_pool")
    graph_batch_size: int = setting(256, settable=False, least=0)
    prefix_cache: str = setting("content", choices=("content", "exclude", "off"))
    weights: str = setting("checkpoint", common=True, choices=("checkpoint", "random"))
    quantization: str = setting("checkpoint", common=True, choices=QUANTIZATIONS)
    resident: str = setting("auto", settable=False, choices=("auto", "off"))
    attention: str = setting("auto", settable=False)
    threads: int = setting(1, common=True, least=1)
    seed: int = 0

    def __post_init__(self) -> None:
        check(self, "engine")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(
                f"engine: device is {self.device!r}; it must be cpu or cuda (CUDA_VISIBLE_DEVICES says which GPU)"
            )
        if self.max_sequences >= self.max_batched_tokens:
            raise ConfigError(
                f"engine: max_sequences {self.max_sequences} must stay below max_batched_tokens "
                f"{self.max_batched_tokens}, or decodes could keep every prompt out"
            )
