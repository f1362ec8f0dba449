"""Compiles the W4A16 kernel for a Hopper GPU, on any machine: a script, as an interpreted process cannot compile."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tessera.kernels.w4a16 import W4Plan, _swizzled, _w4a16

SHARED_MEMORY = 227 * 1024


def compile_for_hopper(rows: int, plan: W4Plan, gated: bool) -> None:
    """Raises what the compiler raises; AssertionError if the tensor cores are not used or the memory does not do."""
    signature = {
        "x": f"tensordesc<bf16[4, {rows}, 64],{_swizzled(64, 3)!r}>",
        "codes": f"tensordesc<i16[{plan.block_n // (1 + gated)}, 64],{_swizzled(64, 2)!r}>",
        **dict.fromkeys(("words", "arrivals"), "*i32"),
        **dict.fromkeys(("bias", "out"), "*bf16"),
        "partials": "*fp32",
        **dict.fromkeys(("m", "n", "k", "tiles"), "i32"),
    }
    constants = {"GROUP_BLOCKS": 1, "GROUPS": 2, "GATED": gated, "BLOCK_N": plan.block_n, "STAGES": plan.stages}
    names = _w4a16.arg_names
    source = GluonASTSource(
        _w4a16,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": plan.warps})
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared < SHARED_MEMORY


if __name__ == "__main__":
    for gated in (False, True):
        compile_for_hopper(8, W4Plan(64, 2), gated)
        compile_for_hopper(64, W4Plan(128, 2, warps=8), gated)
