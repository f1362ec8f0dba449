"""A kernel that is launched early waits for the one in front of it before it does anything.

Else it would read what is not written yet, and only on Hopper, now and then.
"""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).resolve().parents[2] / "python_backends").rglob("*.py"))
EARLY = [
    pytest.param(node, id=node.name)
    for source in SOURCES
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef) and "EARLY" in [argument.arg for argument in node.args.args]
]


def test_there_are_such_kernels():
    assert {"_linear", "_gate_up", "_decode_kernel", "_rotate_and_store"} <= {each.values[0].name for each in EARLY}


@pytest.mark.parametrize("kernel", [each for each in EARLY if each.values[0].name != "wait_for_previous"])
def test_it_waits_first_of_all(kernel):
    first = kernel.body[ast.get_docstring(kernel) is not None]
    assert ast.unparse(first) == "wait_for_previous(EARLY)"
