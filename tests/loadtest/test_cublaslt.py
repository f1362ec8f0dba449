"""Calls of cuBLASLt through a stand-in behind C's calling convention, which keeps the descriptors and multiplies."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_float, c_int, c_uint32, c_void_p, cast
from types import SimpleNamespace

import bench_joules
import cublaslt
import numpy as np
import pytest
import torch
from cublaslt import Heuristic, Products
from energy import Repeater
from gpu_power import GpuPower


class Library:
    """Two algorithms: 7 multiplies, 9 forgets the bias, 11 refuses."""

    def __init__(self) -> None:
        self.made: list[dict[int, object]] = [{}]
        functions = {name: CFUNCTYPE(c_int, *types)(getattr(self, name)) for name, types in cublaslt.SIGNATURES.items()}
        self.functions = SimpleNamespace(**functions)

    def _new(self, place, **what) -> int:
        self.made.append(what)
        place[0] = len(self.made) - 1
        return 0

    def cublasLtCreate(self, place) -> int:
        return self._new(place)

    def cublasLtMatmulDescCreate(self, place, compute, scale) -> int:
        return self._new(place, compute=compute, scale=scale)

    def cublasLtMatmulPreferenceCreate(self, place) -> int:
        return self._new(place)

    def cublasLtMatrixLayoutCreate(self, place, kind, rows, columns, leading) -> int:
        return self._new(place, kind=kind, shape=(columns, leading), rows=rows)

    def cublasLtMatmulDescSetAttribute(self, description, attribute, value, size) -> int:
        self.made[description][attribute] = int.from_bytes(ctypes.string_at(value, size), "little")
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(self, handle, description, a, b, c, d, preference, most, results, count) -> int:
        assert self.made[preference] == {1: 32 << 20} and most == 32
        found = cast(results, POINTER(Heuristic))
        for place, number in enumerate((7, 9, 11, 7)):
            found[place].algorithm.data[0] = number
            found[place].state = 15 if place == 3 else 0
        count[0] = 4
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm, attribute, value, size, written) -> int:
        if attribute == cublaslt.CONFIG["split"]:
            return 7
        cast(value, POINTER(c_uint32))[0] = cast(algorithm, POINTER(c_uint32))[0]
        return 0

    def cublasLtMatmul(
        self, handle, description, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, *_
    ) -> int:
        number = cast(algorithm, POINTER(c_uint32))[0]
        if number == 11:
            return 15
        described, scales = self.made[description], [cast(each, POINTER(c_float))[0] for each in (alpha, beta)]
        assert (described["compute"], described[3], scales) == (68, 1, [1.0, 0.0])
        weight, x, out = (self._matrix(place, layout) for place, layout in ((a, of_a), (b, of_b), (d, of_d)))
        out[:] = x @ weight.T
        if described.get(7) == 4 and number == 7:
            out += np.ctypeslib.as_array(cast(c_void_p(described[8]), POINTER(c_float)), (len(weight),))
        return 0

    def _matrix(self, place: int, layout: int) -> np.ndarray:
        made = self.made[layout]
        assert made["kind"] == 0 and made["rows"] == made["shape"][1]
        return np.ctypeslib.as_array(cast(c_void_p(place), POINTER(c_float)), made["shape"])


def test_the_library_is_told_what_to_multiply():
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    products = Products(Library().functions, x, weight, bias, torch.float32)
    first, second, third = products.algorithms()
    torch.testing.assert_close(products.run(first, x, weight), torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(products.run(second, x, weight), x @ weight.T)
    assert products.in_words(first) == "tile 7 swizzle 7 custom 7 stages 7 cluster 7"
    with pytest.raises(RuntimeError, match="cublasLtMatmul gave status 15"):
        products.run(third, x, weight)


def test_a_proposal_is_as_large_as_the_librarys():
    assert (ctypes.sizeof(Heuristic), Heuristic.workspace_bytes.offset, Heuristic.state.offset) == (96, 64, 72)


def test_wrong_and_refused_algorithms_are_told_and_right_ones_measured(capsys):
    report = bench_joules.Report("trial.joules", "")
    shape = cublaslt.Shape("prefill.qkv", 5, 3, 8, True)
    with GpuPower([]) as power:
        repeater = Repeater(power, torch.device("cpu"), 0.0, 0.0)
        cublaslt.compare([shape], False, torch.float32, Library().functions, repeater, report)
    printed = capsys.readouterr().out
    assert "1: tile 9 swizzle 9 custom 9 stages 9 cluster 9: WRONG" in printed
    assert "refused, cublasLtMatmul gave status 15" in printed
    assert "of 1 algorithms" in printed and "\n0: tile 7" in printed and "\ntorch" in printed


def test_the_shapes_are_those_of_internvl3_8b():
    from tessera.checkpoint.config import read_config

    found = cublaslt.shapes(read_config(bench_joules.SHAPE), bench_joules.Sizes())
    assert [(each.name, each.m, each.n, each.k) for each in found] == [
        ("prefill.qkv", 8192, 4608, 3584),
        ("prefill.output", 8192, 3584, 3584),
        ("prefill.gate_up", 8192, 37888, 3584),
        ("prefill.down", 8192, 3584, 18944),
        ("vision.qkv", 32800, 3072, 1024),
        ("vision.output", 32800, 1024, 1024),
        ("vision.fc1", 32800, 4096, 1024),
        ("vision.fc2", 32800, 1024, 4096),
    ]
    assert found[0].bias and not found[1].bias
