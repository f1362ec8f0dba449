"""What only a GPU can show of the vision stage: order of streams, rows that outlive later forwards, admitted memory."""

from __future__ import annotations

import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from bench.parity import CHECKPOINT

from tessera.settings.stages import VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import DeviceStreams, EmbeddingCache
from tessera.vision.pictures import VisionItem, joined
from tessera.vision.scheduler import VisionScheduler

SIDE = 448


def item(seed: int, tiles: int) -> VisionItem:
    pixels = np.random.default_rng(seed).integers(0, 256, tiles * SIDE * SIDE * 3, dtype=np.uint8)
    return VisionItem(pixels, np.array([0, tiles, 1, tiles], np.int32), np.array([seed, tiles], np.int64))


def encoder(**settings) -> VisionEncoder:
    given = {"runner": "torch", "device": "cuda", "dtype": "bfloat16", "cache_bytes": 0} | settings
    return VisionEncoder.from_checkpoint(CHECKPOINT, VisionSettings(**given))


class Job:
    deadline_ns = since_ns = 0

    def __init__(self, item: VisionItem, priority: int = 0) -> None:
        self.item, self.outcome, self.priority, self.ended = item, None, priority, threading.Event()

    def begin(self):
        pass

    def answer(self, rows):
        # As the Python backend does: a copy on the default stream, not waited for.
        self.outcome = rows.clone()
        self.ended.set()

    def fail(self, error):
        self.outcome = error
        self.ended.set()


def test_a_forward_waits_for_the_one_before_it_and_other_work_does_not():
    lane = DeviceStreams("cuda")
    sleep = partial(torch.cuda._sleep, 400_000_000)  # about a fifth of a second
    _, first = lane.forward(sleep)
    _, beside = lane.launch(sleep)
    assert not first._event.query()
    _, second = lane.forward(sleep)
    assert first._event.query() and not second._event.query()
    beside.wait()  # for itself alone
    assert not second._event.query()
    lane.wait_idle()
    assert second._event.query()


def test_a_forward_beside_another_waits_for_none_but_its_own_kind():
    lane = DeviceStreams("cuda")
    sleep, ones = partial(torch.cuda._sleep, 400_000_000), partial(torch.ones, 8, device="cuda")
    lane.beside(ones)  # a kernel's first launch loads it, for which the device must be idle
    _, first = lane.forward(sleep)
    rows, beside = lane.beside(ones)
    beside.wait(rows)
    assert not first.done and not lane.free
    _, last = lane.beside(sleep)  # begins later than the first, so it ends later
    lane.wait_idle()
    assert first.done and last.done and lane.free


def test_what_follows_a_forward_beside_another_has_its_rows_and_their_memory():
    """They are dropped at once, and the second stream takes new memory while the first still waits to read them."""
    lane, kept = DeviceStreams("cuda"), torch.zeros(64, 1 << 16, device="cuda")
    torch.cuda.synchronize()
    lane.forward(partial(torch.cuda._sleep, 400_000_000))

    def forward(number: int) -> None:
        torch.cuda._sleep(1_000_000)
        rows = torch.full((1 << 16,), float(number), device="cuda")
        lane.in_order(partial(kept[number].copy_, rows), rows)

    for number in range(len(kept)):
        lane.beside(partial(forward, number))
    assert not lane.free
    _, last = lane.launch(lambda: None)
    last.wait()
    assert torch.equal(kept, torch.arange(64.0, device="cuda")[:, None].expand_as(kept))


def test_small_forwards_beside_large_ones_give_the_rows_of_each_alone():
    """Bit for bit, while a small cache takes the rows of both and gives some back."""
    largest, rounds, dice = 48, 300, random.Random(5)
    jobs = [item(3000 + number, largest) for number in range(3)]
    questions = [item(4000 + number, 1 + number % 4) for number in range(24)]
    # Rows of one job and some questions: a job's are forgotten before it comes again.
    stage = encoder(runner="graph", infer_batch_size=largest, cache_bytes=0)
    alone = {id(each): stage.encode([each])[0].clone() for each in [*jobs, *questions]}
    torch.cuda.synchronize()
    rows = alone[id(jobs[0])]
    stage.cache = EmbeddingCache(rows.nbytes * 5 // 4, rows.shape[1], rows.dtype, "cuda")
    wrong, beside, earlier, known = [], 0, 0, 0
    for number in range(rounds):
        job, asked = jobs[number % 3], dice.sample(questions, 3)
        stage.lane.launch(partial(torch.cuda._sleep, 20_000_000))  # or this tower's largest forward is too soon done
        launched = [(job, next(stage.launch([job])))]
        for question in asked:
            goes = stage.fit_beside([question]) == 1
            known += stage.pictures(question)[0].key in stage.cache
            beside += goes
            launched.append((question, next(stage.launch([question], beside=goes))))
        for of, pending in reversed(launched):
            with pending.rows() as rows:
                earlier += of is not job and not stage.lane._forward.done
                copy = rows.clone()
            del rows, pending
            wrong += [] if torch.equal(copy, alone[id(of)]) else [(number, of.digest.tolist())]
    assert not wrong
    assert beside > rounds // 2 and known > rounds // 20
    assert earlier > rounds // 20  # they did run at the same time


def test_joined_pixels_are_where_the_gpu_fetches_them_itself():
    parts = [np.full((2, 4, 4, 3), number, np.uint8) for number in range(3)]
    whole = joined(parts, pinned=True)
    assert whole.is_pinned() and np.array_equal(whole.numpy(), np.concatenate(parts))


@pytest.mark.parametrize("infer", [1, 8, 32])
def test_rows_of_many_requests_are_those_of_each_alone(infer):
    stage = encoder(infer_batch_size=infer, cache_bytes=1 << 20)
    items = [item(seed, 1 + seed % 5) for seed in range(40)]
    jobs = [Job(each, priority=-number % 4) for number, each in enumerate(items)]
    dispatcher = VisionScheduler(stage)
    for start in range(0, len(jobs), 10):
        dispatcher.encode(jobs[start : start + 10])
    dispatcher.close()
    alone = encoder(infer_batch_size=32)
    for job in jobs:
        (expected,) = alone.encode([job.item])
        assert job.outcome.shape == expected.shape
        assert torch.nn.functional.cosine_similarity(job.outcome.float(), expected.float(), dim=1).min() > 0.999


def test_the_stage_stays_within_its_share():
    share, cache = 192 << 20, 16 << 20
    before = torch.cuda.memory_allocated()
    stage = encoder(infer_batch_size=8, cache_bytes=cache, memory_bytes=share)
    warm_up = VisionScheduler(stage)  # on a thread as below, for the matrix library has a workspace for each
    warm_up.encode([Job(item(1000, 8))])
    warm_up.close()
    torch.cuda.synchronize()
    # Workspaces of the matrix library count as the process's own, not the stage's.
    weights = stage.runner.tower.weight_bytes
    libraries = max(0, torch.cuda.memory_allocated() - before - weights - cache)
    torch.cuda.reset_peak_memory_stats()
    jobs = [Job(item(seed, 1 + seed % 13)) for seed in range(120)]
    dispatcher = VisionScheduler(stage)
    dispatcher.encode(jobs)
    dispatcher.close()
    assert all(isinstance(job.outcome, torch.Tensor) for job in jobs)
    answers = sum(job.outcome.nbytes for job in jobs)  # which this test keeps, not the stage
    assert torch.cuda.max_memory_allocated() - before - libraries - answers <= share
