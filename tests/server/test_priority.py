"""A question beside a job, through the real server: it passes the job at every queue, whatever door it comes by."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest

from tessera_client import Client

pytestmark = pytest.mark.server

JOB = 192
QUESTION = "Is there an exposed wire?"


def picture(number: int) -> bytes:
    """One that no other number gives."""
    pixels = np.random.default_rng(number).integers(0, 255, (14, 14, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", cv2.resize(pixels, (448, 448)))[1])


def test_a_question_waits_for_what_is_under_way_by_every_door(server, doors):
    """How many of the job's answers come before a question's, by each door; and before one of the job's priority."""
    done, answered = threading.Semaphore(0), []
    waited = []
    with Client(server.grpc_url, timeout=300) as client, ThreadPoolExecutor(JOB) as pool:

        def ask(number: int) -> None:
            answered.append(
                client.ask(picture(number), QUESTION, max_tokens=4, max_tiles=1, ignore_eos=True, priority=10)
            )
            done.release()

        asked = [pool.submit(ask, number) for number in range(JOB)]
        for _ in range(3):
            assert done.acquire(timeout=120)
        for number, (door, priority) in enumerate([*((each, 0) for each in doors.values()), (doors["grpc"], 10)]):
            door.ask(None, QUESTION, max_tokens=1)  # so that the connection is there
            before = len(answered)
            door.ask(picture(JOB + number), QUESTION, max_tokens=4, priority=priority)
            waited.append(len(answered) - before)
        for each in asked:
            each.result()
    *questions, equal = waited
    assert max(questions) < JOB / 8 and equal > JOB / 6, waited
