"""Products on a CPU whose bits depend neither on how many rows they have nor on which: for a deterministic server.

A library multiplies one row by other instructions than many, and adds up in another order. Here every product of a
linear layer is one of ROWS rows, filled up with zeros.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tessera.errors import ConfigError

ROWS = 16


class FixedRows(TorchFunctionMode):
    """Where it is entered, torch's ``linear`` is one of these.

    Raises ConfigError at the first product of a shape in which a row's bits depend on its place among the ROWS.
    """

    def __init__(self) -> None:
        super().__init__()
        self._checked: set[tuple[torch.Size, torch.dtype]] = set()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (self._linear if function is F.linear else function)(*args, **kwargs or {})

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if (weight.shape, weight.dtype) not in self._checked:
            same = F.linear(torch.randn_like(weight[:1]).repeat(ROWS, 1), weight)
            if not torch.equal(same, same[:1].expand_as(same)):
                raise ConfigError(
                    f"engine: deterministic is on, and on this CPU {ROWS} equal rows times weights "
                    f"{list(weight.shape)} of {weight.dtype} differ: turn it off, or set dtype to float32"
                )
            self._checked.add((weight.shape, weight.dtype))
        filled = F.pad(x, (0, 0, 0, -len(x) % ROWS))
        return torch.cat([F.linear(rows, weight, bias) for rows in filled.split(ROWS)])[: len(x)]
