"""The gate-up product of many rows that ends in the activation, against its twin, and that it compiles for Hopper."""

import pytest
import torch

from tessera.kernels import reference

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.gate_up_silu import GateUpPlan, gate_up_silu

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SMALL = GateUpPlan(rows=32, columns=16, depth=32, group=2)  # several groups, the last one lower


def tensor(half, device, generator, rows, k):
    """[rows, k] with not-a-numbers behind it."""
    memory = torch.randn((rows + 9, k), dtype=half, device=device, generator=generator)
    memory[rows:] = float("nan")
    return memory[:rows]


@pytest.mark.parametrize("plan", [None, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("m", [0, 17, 200])
@pytest.mark.parametrize(("size", "k"), [(56, 96), (136, 72)])
def test_it_is_the_product_and_the_activation(half, device, generator, m, size, k, plan):
    x, weight = tensor(half, device, generator, m, k), tensor(half, device, generator, 2 * size, k) / k**0.5
    actual, expected = gate_up_silu(x, weight, plan), reference.gate_up_silu(x, weight)
    assert actual.dtype == half
    step = torch.finfo(half).eps
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2 * step, atol=2 * step)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 20).half(), torch.ones(16, 20).half(), r"multiples of 8, not \[2, 20\]"),
        (torch.ones(2, 64).half(), torch.ones(24, 64).half(), r"multiples of 8, .* \[24, 64\]"),
        (torch.ones(2, 64).half(), torch.ones(16, 128).half(), r"\[16, 128\]"),
        (torch.ones(2, 64), torch.ones(16, 64), "bfloat16 or both float16"),
        (torch.ones(2, 64).half(), torch.ones(16, 64).bfloat16(), "bfloat16 or both float16"),
        (torch.ones(2, 64).short(), torch.ones(16, 64).short(), "bfloat16 or both float16"),
        (torch.ones(2, 64).half(), torch.ones(64, 16).half().T, "contiguous"),
        (torch.ones(129).half()[1:].view(2, 64), torch.ones(16, 64).half(), "16 bytes"),
    ],
)
def test_refuses_operands(x, weight, message):
    with pytest.raises(ValueError, match=message):
        gate_up_silu(x, weight)
