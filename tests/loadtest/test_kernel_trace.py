"""What is read from a profiler's trace: the share of time with a kernel, gaps, totals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.kernel_trace import Kernel, Trace, read_kernels


def test_only_kernels_are_read_and_times_become_seconds():
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1e6, "dur": 500.0},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1e6, "dur": 500.0},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1e6, "dur": 5.0},
            {"ph": "s", "cat": "kernel", "name": "an arrow", "ts": 1e6},
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert read_kernels(trace) == [Kernel("gemm", 1.0, pytest.approx(1.0005))]


def test_a_finished_profile_is_judged_by_what_it_exports():
    class Profile:
        def export_chrome_trace(self, path):
            runs = [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": at, "dur": 1e6} for at in (0.0, 3e6)]
            Path(path).write_text(json.dumps({"traceEvents": runs}))

    assert Trace.of_profile(Profile(), trim=0.5).gaps() == [(2.0, "gemm", "gemm")]


def test_overlapping_kernels_count_once():
    trace = Trace([Kernel("a", 0.0, 4.0), Kernel("b", 1.0, 2.0), Kernel("c", 3.0, 6.0), Kernel("d", 8.0, 10.0)])
    assert trace.seconds == 10.0
    assert trace.busy == pytest.approx(0.8)
    assert trace.gaps() == [(2.0, "c", "d")]


def test_the_ends_are_left_out_and_kernels_cut_there():
    trace = Trace([Kernel("d", 9.0, 10.0), Kernel("a", 0.0, 2.0), Kernel("b", 3.0, 4.0)], trim=1.0)
    assert (trace.start, trace.end) == (1.0, 9.0)
    assert trace.kernels == [("a", 1.0, 2.0), ("b", 3.0, 4.0)]
    assert trace.busy == pytest.approx(2 / 8)
    assert trace.gaps() == [(5.0, "b", "(end)"), (1.0, "a", "b")]


def test_totals_add_up_runs_of_one_name_and_the_report_shows_them():
    trace = Trace([Kernel("a", 0.0, 1.0), Kernel("long", 1.0, 4.0), Kernel("a", 4.0, 5.0)])
    assert trace.totals() == [("long", 1, 3.0), ("a", 2, 2.0)]
    report = trace.report(kernels=1)
    assert "100.00% of 5.000 s (3 runs)" in report
    assert "long" in report and "\na " not in report


@pytest.mark.parametrize(("kernels", "why"), [([], "no kernel"), ([Kernel("a", 0.0, 1.0)], "shorter")])
def test_nothing_to_judge_is_an_error(kernels, why):
    with pytest.raises(ValueError, match=why):
        Trace(kernels, trim=2.0)
