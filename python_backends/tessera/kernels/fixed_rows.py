"""Products whose bits depend neither on how many rows they have nor on which: for a deterministic server.

A library multiplies one row by other instructions than many, and adds up in another order. Here every product of a
linear layer on a CPU is one of ROWS rows, filled up with zeros. On a GPU a product is ours
(:mod:`tessera.kernels.row_linear`), or the library's where that has the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tessera.errors import ConfigError
from tessera.kernels.tuning import layer_kernels

ROWS = 16
#: rows of a GPU's products are learned by
USUAL = 128
# Values that equal bits are found out by. Sums of another order differ in most bits of float32, but rounded to 16 bits
# in one value of 4,000 to 8,000 (simulated, k of 1,024 to 3,072): a row of 1,024 values would seldom tell.
_COMPARED = 1 << 18
_HOPPER = (9, 0)  # the compute capability on which it was shown that our ways, and so the library's, have equal bits
_FIXED: ContextVar[bool] = ContextVar("fixed", default=False)


def fixed() -> bool:
    """Whether a :class:`FixedRows` is entered: kernels then take the way in which a row's bits depend on it alone."""
    return _FIXED.get()


class FixedRows(TorchFunctionMode):
    """Where it is entered, torch's ``linear`` is one of these.

    Raises ConfigError at the first product of a shape in which a row's bits depend on its place among the ROWS, or on a
    GPU of another generation than Hopper's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._learns = False
        self._same: dict[Any, bool] = {}
        self._entered: list[Token[bool]] = []

    def __enter__(self) -> Any:
        self._entered.append(_FIXED.set(True))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _FIXED.reset(self._entered.pop())

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (self._linear if function is F.linear else function)(*args, **kwargs or {})

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Enters it. On a GPU it is found out of the sizes of products that come whether the library, which is often
        faster, has our bits: it has, unless it splits k. From then on it takes what it can of others' rows too."""
        self._learns = True
        try:
            with self:
                yield
        finally:
            self._learns = False

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        size = weight.shape, weight.dtype
        if x.is_cuda:
            rows = x.reshape(-1, x.shape[-1]).contiguous()  # the library chooses by strides too
            return self._on_gpu(rows, weight, bias).view(*x.shape[:-1], len(weight))
        if size not in self._same:
            for _ in _draws(ROWS, weight):
                same = F.linear(torch.randn_like(weight[:1]).repeat(ROWS, 1), weight)
                if not torch.equal(same, same[:1].expand_as(same)):
                    raise ConfigError(
                        f"engine: deterministic is on, and on this CPU {ROWS} equal rows times weights "
                        f"{list(weight.shape)} of {weight.dtype} differ: turn it off, or set dtype to float32"
                    )
            self._same[size] = True
        filled = F.pad(x, (0, 0, 0, -len(x) % ROWS))
        return torch.cat([F.linear(rows, weight, bias) for rows in filled.split(ROWS)])[: len(x)]

    def _on_gpu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        row_linear = layer_kernels("cuda").row_linear
        if weight.itemsize != 2 or torch.cuda.get_device_capability(x.device) != _HOPPER:
            raise ConfigError(
                "deterministic is on, which on a GPU needs one of compute capability 9.0, and dtype bfloat16 or float16"
            )
        size = weight.shape, weight.dtype, bias is None
        if self._learns and (len(x), size) not in self._same and not torch.cuda.is_current_stream_capturing():
            self._same[len(x), size] = _library_has_bits_of(row_linear, x, weight, bias)
        most = len(x) if self._same.get((len(x), size)) else len(x) // USUAL * USUAL
        if not self._same.get((most, size)):
            return row_linear(x, weight, bias)
        product = x.new_empty((len(x), len(weight)))
        _of_library(x[:most], weight, bias, product[:most])
        if most < len(x):
            product[most:] = row_linear(x[most:], weight, bias)
        return product


def _draws(rows: int, weight: torch.Tensor) -> range:
    """As many as _COMPARED values take."""
    return range(-(-_COMPARED // max(1, rows * len(weight))))


def _library_has_bits_of(
    ours: Callable[..., torch.Tensor], like: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    """Whether it multiplies as many rows as ``like`` has to the bits of ``ours``."""
    for _ in _draws(len(like), weight):
        rows = torch.randn_like(like) * torch.randn_like(like).mul_(3).exp2_()  # of many magnitudes, as activations are
        expected = ours(rows, weight, bias)
        if not torch.equal(_of_library(rows, weight, bias, torch.empty_like(expected)), expected):
            return False
    return True


def _of_library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
