"""A question beside a job, through the real server: it passes the job at every queue, whatever door it comes by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import cv2
import numpy as np
import pytest

from tessera_client import Client, Models

pytestmark = pytest.mark.server

JOB = 192
QUESTION = "Is there an exposed wire?"


def picture(number: int, side: int = 448) -> bytes:
    """One that no other number gives."""
    pixels = np.random.default_rng(number + JOB).integers(0, 255, (14, 14, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", cv2.resize(pixels, (side, side)))[1])


@contextmanager
def job(url: str, pictures: list[bytes]) -> Iterator[Callable[[], int]]:
    """A job of JOB pictures under way; how many of them have their answer."""
    done = threading.Semaphore(0)
    answered: list[Any] = []

    def ask(picture: bytes) -> None:
        answered.append(client.ask(picture, QUESTION, max_tokens=4, max_tiles=1, ignore_eos=True, priority=10))
        done.release()

    with Client(url, timeout=300) as client, ThreadPoolExecutor(JOB) as pool:
        asked = [pool.submit(ask, picture) for picture in pictures]
        for _ in range(3):
            assert done.acquire(timeout=120)
        yield lambda: len(answered)
        for each in asked:
            each.result()


def passed_by(server: Any, pictures: list[bytes], *questions: dict[str, Any]) -> list[int]:
    """How many of one job's answers came before that of each question; the first is asked after the job's first three.

    A question's ``url`` and ``models`` say at which door, the rest how it is asked.
    """
    waited = []
    with job(server.grpc_url, pictures) as done:
        for number, options in enumerate(questions, 1):
            with Client(options.pop("url", server.grpc_url), models=options.pop("models", Models())) as client:
                client.ask(None, QUESTION, max_tokens=1)  # so that the connection is there
                before = done()
                client.ask(picture(-number), QUESTION, max_tokens=4, **options)
                waited.append(done() - before)
        assert done() < JOB or waited[-1], "the job was over before the last question was asked"
    return waited


def test_a_question_waits_for_what_is_under_way_by_every_door(server):
    unary = {"url": server.http_url}
    doors = {}, {"models": Models(vlm="vlm_stream")}, unary, {"priority": 10}
    *waited, equal = passed_by(server, [picture(JOB + each) for each in range(JOB)], *doors)
    assert max(waited) < JOB / 8 and equal > JOB / 6, (waited, equal)


def test_a_question_passes_large_pictures_that_wait_to_be_decoded(server):
    """All the same one, so that nothing but decoding takes time."""
    waited, equal = passed_by(server, [picture(9 * JOB, side=4000)] * JOB, {}, {"priority": 10})
    assert waited < JOB / 8 and equal > JOB / 6, (waited, equal)
