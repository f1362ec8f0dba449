"""Which implementation the layers use: the triton kernels on a GPU, their twins in torch elsewhere."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def layer_kernels(device_type: str) -> ModuleType:
    """`fast.py` for "cuda", `reference.py` for any other type of device; imports triton for the former alone."""
    return import_module(f"tessera.engine.kernels.{'fast' if device_type == 'cuda' else 'reference'}")
