"""Compiles the gate-up product for a Hopper GPU, on any machine: a script, as an interpreted process cannot compile."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tessera.kernels.gate_up_silu import GateUpPlan, _gate_up_silu

SHARED_MEMORY = 227 * 1024


def compile_for_hopper(plan: GateUpPlan) -> None:
    """Raises what the compiler raises; AssertionError if the tensor cores are not used or the memory does not do."""
    signature = {
        "x": f"tensordesc<bf16[{plan.rows}, {plan.depth}]>",
        "weight": f"tensordesc<bf16[2, {plan.columns}, {plan.depth}]>",
        "out": f"tensordesc<bf16[{plan.rows}, {plan.columns}]>",
        **dict.fromkeys(("m", "size", "k"), "i32"),
    }
    constants = {"ROWS": plan.rows, "COLUMNS": plan.columns, "DEPTH": plan.depth, "GROUP": plan.group}
    names = _gate_up_silu.arg_names
    source = ASTSource(
        _gate_up_silu,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert f"wgmma.mma_async.sync.aligned.m64n{2 * plan.columns}k16" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_MEMORY


if __name__ == "__main__":
    compile_for_hopper(GateUpPlan())
