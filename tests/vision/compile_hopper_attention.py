"""Compiles attention for a Hopper GPU, on any machine: a script, as an interpreted process cannot compile.

Prints what it takes, and checks the machine code where the disassembler is there.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tessera.kernels.hopper_attention import _hopper_attention, swizzled
from tessera.kernels.operands import HopperPlan, parts_of

SHARED_MEMORY = 227 * 1024
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def compile_for_hopper(plan: HopperPlan, size: int) -> triton.compiler.CompiledKernel:
    """Raises what the compiler raises."""
    wide, tail = parts_of(size)
    counts = {"query": plan.rows // 2, "key": plan.tokens, "value": plan.tokens}
    signature = {
        "tiles": "*i32",
        "out": "*bf16",
        "scale": "fp32",
        **dict.fromkeys(("out_row", "count", "items"), "i32"),
    }
    for name, count in counts.items():
        for suffix, columns in (("", wide), ("_tail", tail or wide)):
            signature[name + suffix] = f"tensordesc<bf16[{count}, {columns}],{swizzled(columns)!r}>"
    constants = {"TAIL": tail, "STAGES": plan.stages}
    names = _hopper_attention.arg_names
    source = GluonASTSource(
        _hopper_attention,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("tiles", "out", "out_row")},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": plan.warps})


def check(plan: HopperPlan, size: int) -> None:
    """AssertionError if the memory does not do, registers spill, or one is written that a product still reads."""
    compiled = compile_for_hopper(plan, size)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared < SHARED_MEMORY
    if not DISASSEMBLER.exists():
        return
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        # Lines of debugging sections need not be text.
        code = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, check=True).stdout.decode(
            errors="replace"
        )
    assert "STL" not in code, f"{plan} for heads of {size} spills registers"
    assert "HGMMA" in code and not overwritten(code)


def overwritten(code: str) -> list[str]:
    """Instructions of a disassembly that write registers which products in flight read as their first operand.

    The assembler is not told, by the program, that these are read until the wait.
    """
    read: set[int] = set()
    found = []
    for line in re.sub(r"/\*.*?\*/", "", code).splitlines():
        product, target = re.search(r"HGMMA\S* R\d+, R(\d+)", line), re.match(r"\s*(?:@\S+ )?(\S+) R(\d+)\b", line)
        if product:
            read |= set(range(int(product[1]), int(product[1]) + 4))
        elif re.search(r"DEPBAR\S* gsb0, 0x0", line):  # waits for all of them
            read.clear()
        elif target and {int(target[2]), int(target[2]) + bool(re.search("64|WIDE", target[1]))} & read:
            found.append(line)
    return found


if __name__ == "__main__":
    for size in (80, 64):
        check(HopperPlan(programs=132), size)
