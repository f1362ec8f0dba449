"""A deterministic server, asked one by one and again all at once, with a pool that holds a few of the prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from toy_servers import REPOSITORY, Launched
from workloads import picture

from tessera_command.cli import main

pytestmark = pytest.mark.server
ROWS = 36
WORDS = ("room", "door", "wire", "wall", "window", "red", "old", "the")


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    for number in range(ROWS):
        dice = Random(number)
        options: dict[str, Any] = {"logprobs": 5, "max_tokens": dice.choice((2, 12, 40)), "ignore_eos": True}
        options |= {"temperature": 0.8, "seed": number} if number % 3 == 0 else {}
        image = None
        if number % 4 == 0:
            image = str(folder / f"{number}.jpg")
            Path(image).write_bytes(picture(300, 200, number))
        question = " ".join(
            ["What is here?", *Random(number % 2).choices(WORDS, k=150), *dice.choices(WORDS, k=number)]
        )
        yield {"id": number, "image": image, "question": question, "options": options}


def test_no_bit_of_an_answer_depends_on_what_else_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    jobs.write_text("".join(json.dumps(row) + "\n" for row in rows(tmp_path)))
    small = ("--set", "language_model.kv_cache_bytes=2097152", "--set", "language_model.drafts=4")
    with Launched(REPOSITORY, tmp_path / "log", "--deterministic", *small) as server:
        url = ["--url", server.url("grpc")]
        assert main(["batch", str(jobs), "-o", str(out), "--concurrency", "1", *url]) == 0
        assert main(["audit", str(jobs), str(out), "--concurrency", "32", *url]) == 0
        shown = capsys.readouterr()
        assert shown.out.endswith(f"{ROWS} answers, {ROWS} of them with log probabilities: none differs\n")
        assert "not deterministic" not in shown.err
    (fingerprint,) = {json.loads(line)["fingerprint"] for line in out.read_text().splitlines()}
    assert fingerprint.endswith(".deterministic")
