"""How hopper_attention's programs may be cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HopperPlan:
    """How a program is cut.

    ``rows`` (queries) of a program, of which each of ``groups`` of ``warps`` takes an equal part, a power of two and 16
    for each warp at least; ``tokens`` (keys) of a tile, a power of two; ``stages`` of keys and values in the shared
    memory. One group fetches its tiles itself. More have another warp to do it, and are not in step: while one
    multiplies, another may compute its softmax; with ``turns`` two groups start their products in turn. ``registers``
    a thread takes when the program starts, None for what the compiler likes. ``programs`` of several groups share the
    tiles of queries and the heads evenly, and fetch for the next while they end the last; 0: a program for each.
    ``held``: the queries stay in registers, so that the tensor cores read less of the shared memory.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    groups: int = 1
    turns: bool = False
    registers: int | None = None
    programs: int = 0
    held: bool = False

    def __post_init__(self) -> None:
        if self.groups not in (1, 2, 3) or (self.turns and self.groups != 2) or (self.programs and self.groups == 1):
            raise ValueError(f"no plan of hopper_attention: {self}")

    def __str__(self) -> str:
        limit = "" if self.registers is None else f"/{self.registers}"
        ways = "t" * self.turns + "h" * self.held + (f" in {self.programs}" if self.programs else "")
        return f"{self.rows}/{self.tokens}/{self.groups}x{self.warps}/{self.stages}{limit}{ways}"


#: in the order of promise
HOPPER_PLANS = (
    HopperPlan(128, 128, 4, 2, groups=2),
    HopperPlan(128, 64, 4, 2),
    HopperPlan(128, 128, 4, 4, groups=2, programs=132),
    HopperPlan(192, 64, 4, 4, groups=3),
    HopperPlan(192, 64, 4, 4, groups=3, held=True),
    HopperPlan(128, 128, 4, 2, groups=2, held=True),
    HopperPlan(128, 128, 4, 2, groups=2, turns=True),
    HopperPlan(256, 64, 4, 4, groups=2),
    HopperPlan(128, 128, 4, 4, groups=2, turns=True, programs=132),
    HopperPlan(192, 64, 4, 4, groups=3, programs=132),
    HopperPlan(128, 64, 4, 4),
    HopperPlan(128, 64, 8, 2, registers=128),
    HopperPlan(128, 128, 8, 2),
)
