"""All tests of this folder are of `make test-gpu`, and skip themselves without a GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))
