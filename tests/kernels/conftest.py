"""Kernels run compiled on a GPU; without one tests/conftest.py has triton interpret them."""

from collections.abc import Iterator

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# The interpreter computes bfloat16 wrongly without saying so.
HALVES = [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=[torch.float32, *HALVES], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Every dtype that elementwise kernels run in here."""
    return request.param


@pytest.fixture(params=HALVES, ids=str)
def half(request: pytest.FixtureRequest) -> torch.dtype:
    """Every dtype of two bytes that kernels run in here."""
    return request.param


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(4)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives not-a-numbers, so that a value never written or never meant to be read shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which is what makes torch fill new memory
    yield
    torch.use_deterministic_algorithms(before)
