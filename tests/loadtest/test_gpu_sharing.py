"""How the two sides hand tiles over, how their pace is judged. No GPU here."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gpu_sharing
import pytest
import torch
from gpu_sharing import PICTURES, ROOM, TILES, HandOver
from gpu_standins import Decoder, DecoderSizes, Place, VisionTower

CPU = Place("cpu", torch.float32)


def test_neither_side_runs_ahead_of_the_other():
    queue = HandOver(threading.Semaphore)
    lock = threading.Lock()
    tiles, eaten, waiting = 0, 0, []

    def batch():
        nonlocal tiles
        with lock:
            tiles += TILES
            waiting.append(tiles - eaten)

    def step():
        nonlocal eaten
        with lock:
            eaten += PICTURES
            waiting.append(tiles - eaten)

    until = time.monotonic() + 0.5
    with ThreadPoolExecutor(2) as pool:
        vision = pool.submit(gpu_sharing.vision_side, batch, queue, until)
        language = pool.submit(gpu_sharing.language_side, step, queue, until)
        batches, steps = vision.result(), language.result()
    assert len(batches) * TILES == tiles and len(steps) * PICTURES == eaten
    assert eaten > ROOM  # so the room was given back
    assert min(waiting) >= 0 and max(waiting) <= ROOM


def test_a_side_stops_in_time_when_the_other_is_gone():
    queue = HandOver(threading.Semaphore)
    batches = gpu_sharing.vision_side(lambda: None, queue, time.monotonic() + 0.05)
    assert len(batches) == ROOM // TILES
    assert gpu_sharing.language_side(lambda: None, HandOver(threading.Semaphore), time.monotonic() + 0.05) == []


def test_the_rate_is_taken_after_settling_between_marks():
    marks = [10.0, 10.1, 10.2, 12.0, 13.0, 14.0, 15.0]
    assert gpu_sharing.rate(marks, pictures=26, settle=2.0) == pytest.approx(26.0)
    with pytest.raises(ValueError, match="only 2 of 7"):
        gpu_sharing.rate(marks, pictures=26, settle=4.0)
    with pytest.raises(ValueError, match="only 0 of 0"):
        gpu_sharing.rate([], pictures=26)


def test_decoding_keeps_pace_with_the_prompts():
    steps = [gpu_sharing.decode_steps(number) for number in range(640)]
    assert set(steps) == {1, 2}
    assert sum(steps) * gpu_sharing.DECODE_BATCH == 640 * PICTURES * gpu_sharing.DECODED


def test_the_loss_is_relative_to_the_better():
    assert gpu_sharing.loss_pct(90.0, 100.0) == pytest.approx(10.0)
    assert gpu_sharing.loss_pct(110.0, 100.0) == pytest.approx(-10.0)


def test_it_says_that_it_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_sharing.main() == 1
    assert "needs a GPU" in capsys.readouterr().err


def test_the_vision_stand_in_keeps_its_shape():
    tower = VisionTower(CPU, tiles=2, tokens=5, hidden=16, heads=2, layers=2)
    rows = tower.forward()
    assert rows.shape == (2, 5, 16)
    assert rows.isfinite().all() and not torch.equal(rows, tower.x)


def test_the_decoder_stand_in_chooses_a_token_a_prompt_and_a_sequence():
    sizes = DecoderSizes(hidden=24, inner=32, heads=6, kv_heads=2, head_dim=4, vocabulary=50, layers=3, sets=2)
    decoder = Decoder(CPU, sizes)
    for tokens in (decoder.prefill(tokens=17, prompts=3)(), decoder.decode(batch=3, context=7)()):
        assert tokens.shape == (3,)
        assert ((tokens >= 0) & (tokens < 50)).all()
