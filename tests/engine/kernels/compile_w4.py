"""Compiles the kernel of 4-bit weights for a Hopper GPU, on any machine: a script, as interpreted processes cannot."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tessera.engine.kernels.w4_product import W4Plan, _swizzled, _w4_product

SHARED_MEMORY = 227 * 1024


def compile_for_hopper(dtype: str, rows: int, plan: W4Plan, gated: bool, chunk: int = 64) -> None:
    """Raises what the compiler raises; AssertionError if the tensor cores are not used or the memory does not do."""
    bits = 8 if dtype == "fp8e4nv" else 16
    signature = {
        "x": f"tensordesc<{dtype}[4, {rows}, {chunk}],{_swizzled(chunk, bits, 3)!r}>",
        "codes": f"tensordesc<i16[{plan.block_n // (1 + gated)}, {chunk}],{_swizzled(chunk, 16, 2)!r}>",
        **dict.fromkeys(("words", "arrivals"), "*i32"),
        **dict.fromkeys(("bias", "out"), "*bf16"),
        "partials": "*fp32",
        **dict.fromkeys(("m", "n", "k", "tiles"), "i32"),
    }
    constants = {"GROUP_BLOCKS": 1, "GROUPS": 2, "GATED": gated, "BLOCK_N": plan.block_n, "STAGES": plan.stages}
    if bits == 8:
        signature["x_scales"] = "*fp32"
    else:
        constants["x_scales"] = None
    names = _w4_product.arg_names
    source = GluonASTSource(
        _w4_product,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": plan.warps})
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k{256 // bits}" in compiled.asm["ptx"]
    assert compiled.metadata.shared < SHARED_MEMORY


if __name__ == "__main__":
    for gated in (False, True):
        compile_for_hopper("bf16", 8, W4Plan(64, 2), gated)
        compile_for_hopper("bf16", 64, W4Plan(128, 2, warps=8), gated)
        compile_for_hopper("fp8e4nv", 8, W4Plan(64, 2), gated)
        compile_for_hopper("fp8e4nv", 64, W4Plan(128, 2, stages=3), gated)
