"""How a kernel of flash attention is cut into programs, for vision and engine.

How hopper_attention's programs are cut, apart from the kernel, which needs Triton with Gluon.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionPlan:
    """``rows`` (queries, times the heads that share a key head) and ``tokens`` (keys) of a tile, powers of two of at
    least 16; ``warps``, a power of two; ``stages`` of the pipeline of loads; ``registers`` a thread may take at most,
    None for what the compiler likes.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None

    def __str__(self) -> str:
        return "/".join(str(number) for number in vars(self).values() if number is not None)

    @property
    def launch(self) -> dict[str, int | None]:
        """What triton's launch takes of it."""
        return {
            "ROWS": self.rows,
            "TOKENS": self.tokens,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


@dataclass(frozen=True)
class HopperPlan:
    """``rows`` (queries) of a tile, of which each of two groups of ``warps`` takes half, a power of two and 16 for each
    warp at least; ``tokens`` (keys) of a tile, a power of two; ``stages`` of keys and values in the shared memory.
    ``programs`` share the tiles of queries and the heads evenly: one for each multiprocessor.

    The numbers are those that were the fastest on an H200 (docs/gpu.md).
    """

    programs: int
    rows: int = 128
    tokens: int = 128
    warps: int = 4
    stages: int = 4

    def __str__(self) -> str:
        return f"{self.rows}/{self.tokens}/{self.warps}/{self.stages}"
