"""What every stage shares when it runs inside tritonserver's Python backend: settings, tensors, errors, responses.

The stages' logic is importable, and testable with a fake, everywhere: see :func:`backend`.
"""

from typing import Any


def backend() -> Any:
    """The Python backend's module, which is there, and whole, only inside a stub process that has started."""
    import triton_python_backend_utils

    return triton_python_backend_utils
