from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from bench import cascade, cascade_rows
from bench.cascade_rows import DESCRIBES, DTYPE, FIRST_RIGHT, FULL_RIGHT, SAME


def rows(size: int, lost: int, seed: int = 0) -> np.ndarray:
    """Margins of 4 nats on average; of the ``lost`` with the smallest, the first cut is wrong."""
    found = np.zeros(size, DTYPE)
    found["margin"] = np.sort(np.random.default_rng(seed).exponential(4, size))
    found["tiles"], found["flags"] = 13, SAME | FIRST_RIGHT | FULL_RIGHT
    found["flags"][:lost] = FULL_RIGHT
    found["flags"][-1] = SAME | DESCRIBES
    return found


def test_a_threshold_on_the_whole_set() -> None:
    table = rows(100, 10)
    known = cascade.pairs(table)
    margin = float(table["margin"][4])
    found = cascade.on_all(known, margin)
    assert {key: round(value, 6) for key, value in found.items()} == {
        "differ": 0.06,
        "escalated": 0.04,
        "recall": round(93 / 99, 6),
        "recall_full": 1.0,
        "tokens": 64 + 0.04 * 13 * 64,
        "tokens_full": 13 * 64,
    }


def test_the_program(emitted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sets = {"rooms": rows(500, 20), "small": rows(500, 60, 1)}
    shifts = {name: rows(200, 80, 2) for name in ("dark", "blurred", "jpeg30")}
    monkeypatch.setattr(cascade, "ROWS", tmp_path / "rows.npz")
    np.savez_compressed(tmp_path / "rows.npz", **sets, **shifts)
    figures = emitted(cascade, "--draws", "2", "--plot", str(tmp_path / "plot.svg"))
    assert figures["cascade.bound_broken_pct"]["value"] in (0, 50, 100)
    assert figures["cascade.bound.small.1pct.broken_pct"]["differ_without"] == 0.12
    assert figures["cascade.alarm_requests"]["value"] < 5000
    assert figures["cascade.shift.dark.alarm_requests"]["differ"] > 0
    assert {"cascade.audit_over_bound", "cascade.audit_requests.1pct", "cascade.false_alarms_per_100k"} < set(figures)
    assert "small: 500 pictures" in (tmp_path / "plot.svg").read_text()


def test_small_things_are_small_and_their_questions_even() -> None:
    cases = list(islice(cascade_rows.small(), 2))
    assert [case.answer for case in cases] == ["yes", "no"]
    for case in cases:
        picture = cv2.imdecode(np.frombuffer(case.jpeg, np.uint8), cv2.IMREAD_COLOR)
        assert max(picture.shape) >= 1280 and case.kind == "presence"
