"""How a kernel of flash attention is cut into programs, for vision and engine."""

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
