"""Functions in processes of their own: results in order, failures named, and no process stays behind."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
from processes import in_processes


def test_results_come_in_the_order_of_the_tasks():
    first, second = in_processes([(os.getpid,), (int, "7")], timeout=60)
    assert first != os.getpid() and second == 7


@pytest.mark.parametrize(
    ("task", "timeout", "error", "why"),
    [
        ((os._exit, 3), 60, RuntimeError, "_exit failed: it died"),
        ((int, "seven"), 60, RuntimeError, "int failed: ValueError: invalid literal"),
        ((time.sleep, 600), 0.5, TimeoutError, "not done after 0.5 s"),
    ],
)
def test_no_process_stays_behind(task, timeout, error, why):
    with pytest.raises(error, match=why):
        in_processes([task, (time.sleep, 600)], timeout)
    assert multiprocessing.active_children() == []
