"""Compiles the kernels w4a16, gate_up_silu, row_linear, early_linear, likeliest, of decoding and of experts for Hopper,
on any machine.

A script, as an interpreted process cannot compile.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tessera.kernels.early_linear import _early_product
from tessera.kernels.experts import _LARGE_STAGES, GroupedPlan, _arrange, _grouped, _route, plan_grouped
from tessera.kernels.gate_up_silu import GateUpPlan, _gate_up_silu
from tessera.kernels.grouped_rows import _grouped_rows, _number_tiles
from tessera.kernels.likeliest import _of_parts, _of_rows
from tessera.kernels.operands import EARLY_WARPS, plan_early
from tessera.kernels.paged_decode import SETTLED_PLAN, _decode_kernel
from tessera.kernels.row_linear import RowPlan, _row_product, plan_rows
from tessera.kernels.w4a16 import W4Plan, _swizzled, _w4a16

SHARED_MEMORY = 227 * 1024


def compile_for_hopper(
    source: type[ASTSource],
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, int],
    product: str,
    **options: int,
) -> str:
    """The PTX. Raises what the compiler raises; AssertionError if the tensor cores are not used or the memory does not
    do."""
    names = kernel.arg_names
    whole = source(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(whole, target=GPUTarget("cuda", 90, 32), options=options)
    assert product in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_MEMORY
    return compiled.asm["ptx"]


def gate_up_silu(plan: GateUpPlan) -> None:
    signature = {
        "x": f"tensordesc<bf16[{plan.rows}, {plan.depth}]>",
        "weight": f"tensordesc<bf16[2, {plan.columns}, {plan.depth}]>",
        "out": f"tensordesc<bf16[{plan.rows}, {plan.columns}]>",
        **dict.fromkeys(("m", "size", "k"), "i32"),
    }
    constants = {"ROWS": plan.rows, "COLUMNS": plan.columns, "DEPTH": plan.depth, "GROUP": plan.group}
    product = f"wgmma.mma_async.sync.aligned.m64n{2 * plan.columns}k16"
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    compile_for_hopper(ASTSource, _gate_up_silu, signature, constants, product, **options)


def row_linear(plan: RowPlan, form: str) -> None:
    """All plans must multiply by wgmma: that rows' bits are their own is known of one kind of instruction."""
    depth = plan.depth // (1 if form == "fp8e4nv" else 2)
    signature = {
        "x": f"tensordesc<{form}[{plan.rows}, {depth}]>",
        "weight": f"tensordesc<{form}[{plan.columns}, {depth}]>",
        "out": f"tensordesc<bf16[{plan.rows}, {plan.columns}]>",
        "bias": "*bf16",
        **dict.fromkeys(("m", "n", "k"), "i32"),
        **(dict.fromkeys(("x_scales", "scales"), "*fp32") if form == "fp8e4nv" else {}),
    }
    constants = {"ROWS": plan.rows, "COLUMNS": plan.columns, "DEPTH": depth, "GROUP": plan.group, "EARLY": True}
    none = {name: None for name in ("x_scales", "scales") if name not in signature}
    product = f"wgmma.mma_async.sync.aligned.m64n{plan.columns}k"
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    compile_for_hopper(ASTSource, _row_product, signature, {**constants, **none}, product, **options)


def early_linear(place: str, n: int, k: int) -> None:
    """Before the wait all weights are asked for, and what is fetched passes through no shared memory."""
    gated, rotated, normed = place == "gate_up", place == "qkv", place in ("qkv", "gate_up")
    plan = plan_early(n, k, gated)
    assert plan is not None
    signature = {
        **dict.fromkeys(("x", "weight", "out", "norm" if normed else "residual"), "*bf16"),
        **dict.fromkeys(("m", "n"), "i32"),
        "eps": "fp32",
        **({"slots": "*i64", **dict.fromkeys(("cos", "sin"), "*fp32")} if rotated else {}),
        **(dict.fromkeys(("keys", "values", "bias"), "*bf16") if rotated else {}),
    }
    heads = {"HEADS": 16, "KV_HEADS": 2, "HALF": 64} if rotated else {"HEADS": 0, "KV_HEADS": 1, "HALF": 1}
    tile = {"K": k, "BLOCK_K": plan.block_k, "SLICES": EARLY_WARPS, "COLUMNS": plan.columns, "GATED": gated}
    none = dict.fromkeys({"norm", "residual", "bias", "cos", "sin", "slots", "keys", "values"} - signature.keys())
    options = {"num_warps": EARLY_WARPS}
    constants = {**tile, **heads, **none, "EARLY": True}
    ptx = compile_for_hopper(ASTSource, _early_product, signature, constants, "mma.sync.aligned.m16n8k16", **options)
    early, _ = ptx.split("griddepcontrol.wait")
    assert early.count("ld.global") >= plan.columns * k // (32 * EARLY_WARPS * 8) and "st.shared" not in early


def settled_attention() -> None:
    """Keys and values are asked for before the second wait, which is that of the programs that do so."""
    signature = {
        **dict.fromkeys(("q", "keys", "values", "out"), "*bf16"),
        **dict.fromkeys(("blocks", "context"), "*i64"),
        **dict.fromkeys(("partial", "weights"), "*fp32"),
        "scale": "fp32",
        **dict.fromkeys(("q_row", "cache_block", "cache_slot", "blocks_step", "blocks_column", "out_row"), "i32"),
    }
    sizes = {"KV_HEADS": 2, "GROUP": 8, "HEAD_DIM": 128, "COLUMNS": 128, "BLOCK_SIZE": 16, "SPLITS": 16}
    options = SETTLED_PLAN.launch
    tile = {name: options.pop(name) for name in ("ROWS", "TOKENS")}
    constants = {**sizes, **tile, "key_scales": None, "value_scales": None, "SETTLED": 1, "EARLY": True}
    ptx = compile_for_hopper(ASTSource, _decode_kernel, signature, constants, "mma.sync.aligned.m16n8k16", **options)
    _, early, late = ptx.split("griddepcontrol.wait")
    assert "ld.global" in early and "mma.sync" not in early and "mma.sync" in late


def w4a16(rows: int, plan: W4Plan, gated: bool) -> None:
    signature = {
        "x": f"tensordesc<bf16[4, {rows}, 64],{_swizzled(64, 3)!r}>",
        "codes": f"tensordesc<i16[{plan.block_n // (1 + gated)}, 64],{_swizzled(64, 2)!r}>",
        **dict.fromkeys(("words", "arrivals"), "*i32"),
        **dict.fromkeys(("bias", "out"), "*bf16"),
        "partials": "*fp32",
        **dict.fromkeys(("m", "n", "k", "tiles"), "i32"),
    }
    constants = {"GROUP_BLOCKS": 1, "GROUPS": 2, "GATED": gated, "BLOCK_N": plan.block_n, "STAGES": plan.stages}
    compile_for_hopper(GluonASTSource, _w4a16, signature, constants, "wgmma.mma_async", num_warps=plan.warps)


def experts(pairs: int, form: str) -> None:
    """The products of 128 experts, as many pairs as make small tiles or large ones; a token has 8."""
    scaled, packed = form == "fp8e4nv", form == "i16"
    plan = plan_grouped(pairs, 128, 2048, 1 if scaled else 2, packed)
    signature = {
        "x": "*fp8e4nv" if scaled else "*bf16",
        "weight": f"*{form}",
        "scales": "*i32" if packed else "*fp32",
        **dict.fromkeys(("pairs", "bounds"), "*i32"),
        "k": "i32",
        "all_rows": "i32",
        "n": "i32",
        **({"x_scales": "*fp32"} if scaled else {}),
    }
    if not (scaled or packed):
        del signature["scales"]
    constants = {
        "PICKED": 8,
        "EXPERTS": 128,
        "CHUNK": 64 * packed,
        "GROUP": 128,
        "PTX": True,
        "EARLY": True,
        **plan.launch,
    }
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    down = {"pair_weights": "*bf16", "tokens": "i32", "out": "*fp32" if plan.rows < 64 else "*bf16"}
    for gate, more in ((True, {"out": "*bf16"}), (False, down)):
        own = {**signature, **more}
        none = {name: None for name in ("x_scales", "scales", "pair_weights", "tokens") if name not in own}
        if not gate and plan.rows >= 128 and not packed:
            grouped_rows(plan, form, scaled)
            continue
        compile_for_hopper(ASTSource, _grouped, own, {**constants, **none, "GATE": gate}, "wgmma.mma_async", **options)


def grouped_rows(plan: GroupedPlan, form: str, scaled: bool) -> None:
    signature = {
        "x": f"tensordesc<{form}[{plan.rows}, {plan.depth}]>",
        "weight": f"tensordesc<{form}[{plan.columns}, {plan.depth}]>",
        **dict.fromkeys(("pairs", "bounds", "tiles"), "*i32"),
        **dict.fromkeys(("pair_weights", "out"), "*bf16"),
        **dict.fromkeys(("tokens", "n", "k"), "i32"),
        **(dict.fromkeys(("x_scales", "scales"), "*fp32") if scaled else {}),
    }
    constants = {"PICKED": 8, "EARLY": True, **plan.launch} | ({} if scaled else {"x_scales": None, "scales": None})
    options = {"num_warps": constants.pop("num_warps"), "num_stages": _LARGE_STAGES}
    del constants["num_stages"]
    compile_for_hopper(ASTSource, _grouped_rows, signature, constants, "wgmma.mma_async", **options)


def likeliest(masked: bool) -> None:
    """Of rows that may choose some tokens only, or any."""
    lines, bits = ({"lines": "*i64"}, {"bits": "*u8"}) if masked else ({}, {})
    out = {"tops": "*fp32", "places": "*i64"}
    numbers = dict.fromkeys(("row_stride", "width", "vocabulary"), "i32")
    none = {} if masked else {"lines": None, "bits": None}
    parts = {"logits": "*bf16", **lines, **bits, **out, **numbers}
    compile_for_hopper(ASTSource, _of_parts, parts, {"BLOCK": 4096, "EARLY": True, **none}, "st.global", num_warps=4)
    rows = {**out, "chosen": "*i64", "parts": "i32"}
    compile_for_hopper(ASTSource, _of_rows, rows, {"BLOCK": 64, "EARLY": True}, "st.global", num_warps=4)


def routing() -> None:
    pointers = {"logits": "*bf16", "ids": "*i32", "weights": "*bf16", "experts": "i32"}
    constants = {"PICKED": 8, "PLACES": 8, "BLOCK": 128, "NORMALIZE": True, "EARLY": True}
    compile_for_hopper(ASTSource, _route, pointers, constants, "st.global", num_warps=1)
    pointers = {"ids": "*i32", "pairs": "*i32", "bounds": "*i32", "count": "i32"}
    compile_for_hopper(ASTSource, _arrange, pointers, {"BLOCK": 4096, "EARLY": True}, "st.global", num_warps=8)
    constants = {"EXPERTS": 128, "ALL": 128, "ROWS": 128, "EARLY": True}
    compile_for_hopper(
        ASTSource, _number_tiles, dict.fromkeys(("bounds", "tiles"), "*i32"), constants, "st.global", num_warps=1
    )


if __name__ == "__main__":
    routing()
    for masked in (False, True):
        likeliest(masked)
    for pairs, form in ((80, "bf16"), (80, "i16"), (8192, "i16"), (65536, "i16"), (65536, "fp8e4nv"), (65536, "bf16")):
        experts(pairs, form)
    for place, n, k in (("qkv", 2560, 1024), ("output", 1024, 2048), ("gate_up", 6144, 1024), ("down", 1024, 3072)):
        early_linear(place, n, k)
    settled_attention()
    gate_up_silu(GateUpPlan())
    for plan in {plan_rows(m, n, 132) for m in (1, 64, 128, 512, 2528, 8192) for n in (1024, 3584, 37888)}:
        for form in ("bf16", "fp8e4nv"):
            row_linear(plan, form)
    for gated in (False, True):
        w4a16(8, W4Plan(64, 2), gated)
        w4a16(64, W4Plan(128, 2, warps=8), gated)
