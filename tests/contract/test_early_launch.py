"""A kernel that is launched early waits for the one in front of it before it does anything, or before all but fetching
what no kernel that may still run writes.

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
# Those that fetch before they wait, and what they may not touch until then.
FETCHING = {"_early_product": {"x", "residual", "out"}, "_decode_kernel": {"q", "out", "partial", "weights"}}


def named(kernel):
    return kernel.values[0].name


def touched(node, made_of):
    """The kernel's arguments that an expression is made of, through the names that they were given."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names.union(*(made_of.get(name, set()) for name in names))


def test_there_are_such_kernels():
    assert {"_linear", "_gate_up", "_decode_kernel", "_rotate_and_store"} <= set(map(named, EARLY))
    assert FETCHING.keys() <= set(map(named, EARLY))


@pytest.mark.parametrize("kernel", [each for each in EARLY if named(each) not in {"wait_for_previous", *FETCHING}])
def test_it_waits_first_of_all(kernel):
    first = kernel.body[ast.get_docstring(kernel) is not None]
    assert ast.unparse(first) == "wait_for_previous(EARLY)"


@pytest.mark.parametrize("kernel", [each for each in EARLY if named(each) in FETCHING])
def test_it_fetches_nothing_that_is_being_written(kernel):
    calls = [each for each in ast.walk(kernel) if isinstance(each, ast.Call)]
    waits = max(each.lineno for each in calls if ast.unparse(each) == "gdc_wait()")
    made_of = {}
    for each in sorted(ast.walk(kernel), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(each, ast.Assign | ast.AugAssign):
            targets = [each.target] if isinstance(each, ast.AugAssign) else each.targets
            for name in {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}:
                made_of[name] = made_of.get(name, set()) | touched(each.value, made_of)
    before = [each for each in calls if each.lineno < waits]
    fetched = [each for each in before if ast.unparse(each.func) in ("tl.load", "load_tile")]
    assert fetched and not any(ast.unparse(each.func) == "tl.store" for each in before)
    for each in fetched:
        assert not touched(each.args[0], made_of) & FETCHING[kernel.name], ast.unparse(each)
