"""The rows that runs of `tessera batch` are given, and what they leave."""

import json
from pathlib import Path
from typing import Any

import pytest

Capture = pytest.CaptureFixture[str]


def lines(path: Path, *texts: str) -> Path:
    path.write_text("\n".join(texts))
    return path


def write_rows(path: Path, *rows: Any) -> Path:
    return lines(path, *map(json.dumps, rows))


def questions(folder: Path, *names: str) -> Path:
    """Rows without pictures whose ids are their questions."""
    return write_rows(folder / "jobs.jsonl", *({"id": name, "image": None, "question": name} for name in names))


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(path: Path) -> list[Any]:
    return [row["id"] for row in results(path)]
