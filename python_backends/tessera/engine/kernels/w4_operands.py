"""4-bit codes in registers, widened to operands of Hopper's tensor cores.

In bfloat16 and float16 two neighbouring codes become two halves of a register by a shift, one logical operation that
sets the exponent (128 + code in bfloat16, 1024 + code in float16, both exact) and one subtraction of the zero point,
exact too.

In e4m3 a byte of 0 .. 15 already is a number, that many times the SMALLEST: the seven subnormal numbers and
the first eight normal ones are equally far from each other. So four neighbouring codes become four operands by a
permutation of bytes, a shift and a mask. The zero point is not subtracted from them but from the sums of a group, as
often as the sum of x, which the tensor cores compute on the way from ones in the place of weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SMALLEST = gl.constexpr(2**-9)  # of e4m3's positive numbers


@gluon.constexpr_function
def _halves_assembly(chunk: int, bfloat16: bool) -> str:
    """$0 = two halves, the codes of one chunk in the words $1, less the zero points $2, which hold the same offset."""
    exponent, half = ("0x43004300", "bf16x2") if bfloat16 else ("0x64006400", "f16x2")
    shift = f"shr.u32 t, $1, {4 * chunk};" if chunk else "mov.b32 t, $1;"
    return f"{{ .reg .b32 t; {shift} lop3.b32 t, t, 0x000F000F, {exponent}, 0xEA; sub.{half} $0, t, $2; }}"


@gluon.constexpr_function
def _bytes_assembly(chunk: int) -> str:
    """$0 = four bytes, the codes of one chunk in the four words $1 and $2."""
    selector = "0x7531" if chunk >= 2 else "0x6420"  # the words' upper bytes or their lower ones
    shift = "shr.u32 t, t, 4;" if chunk % 2 else ""
    return f"{{ .reg .b32 t; prmt.b32 t, $1, $2, {selector}; {shift} and.b32 $0, t, 0x0F0F0F0F; }}"


@gluon.jit
def widen(words, zero, CHUNK: gl.constexpr, DTYPE: gl.constexpr):
    """Chunk number CHUNK of int16 words [n, chunk] -> DTYPE [n, chunk], exact.

    In e4m3 code * SMALLEST, else code less the zero point int32 [n].
    """
    if gl.float8e4nv == DTYPE:
        BYTES: gl.constexpr = _bytes_assembly(CHUNK)
        weight = gl.inline_asm_elementwise(BYTES, "=r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4)
    else:
        BFLOAT16: gl.constexpr = gl.bfloat16 == DTYPE
        EXPONENT: gl.constexpr = 0x4300 if BFLOAT16 else 0x6400  # the value it stands for has a last place of one
        HALVES: gl.constexpr = _halves_assembly(CHUNK, BFLOAT16)
        half = (zero | EXPONENT).to(gl.int16).to(DTYPE, bitcast=True)
        half, words = gl.broadcast(gl.expand_dims(half, 1), words)
        weight = gl.inline_asm_elementwise(HALVES, "=r,r,r", [words, half], dtype=half.dtype, is_pure=True, pack=2)
    return weight
