"""Which scheme a checkpoint's modules have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.engine.quantization.scheme import SchemeSelector
from tessera.engine.quantization.unquantized import Unquantized
from tessera.errors import CheckpointError


def scheme_selector(quantization: Mapping[str, Any] | None) -> SchemeSelector:
    """From a checkpoint's quantization_config to the scheme of each module, by the module's exact name.

    Raises CheckpointError for a method that is not supported.
    """
    if quantization is None:
        scheme = Unquantized()
        return lambda module_name: scheme
    method = quantization.get("quant_method")
    raise CheckpointError(f"quantization method {method!r} is not supported; use an unquantized checkpoint")
