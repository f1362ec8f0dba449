"""A picture in 13 tiles down to one: what is asked, and what is written and drawn of it."""

from contextlib import nullcontext
from typing import Any
from xml.etree import ElementTree

import pytest
from bench import tiles
from bench.ladder_rungs import SHAPE
from serving import DEFAULT_CHECKPOINT, Running

from tessera.launcher.process import Server
from tessera.models.registry import family_for, read_config

FIGURE = {
    "value": 6.4, "ci95": 0.1, "turns": 6, "machine": "a GPU", "commit": "abc", "date": "2026-11-26",
    "points": [
        {"tiles": 13, "image_tokens": 3328, "in_flight": 8, "req_s": 10.0, "ci95": 0.2, "joules": 66.0},
        {"tiles": 2, "image_tokens": 512, "in_flight": 48, "req_s": 64.0, "ci95": 1.0},
    ],
}  # fmt: skip


@pytest.mark.parametrize("count", range(1, 14))
def test_the_picture_has_as_many_tiles_as_is_said(count: int):
    family, job = family_for(read_config(SHAPE)), tiles.job(count)
    assert family.plan(job.width, job.height, family.policy({"tile_policy": job.tile_policy})).tokens == 256 * count
    assert job.concurrency >= 8 and count * job.concurrency <= 104
    assert tiles.job(count, 3).concurrency == 3


def test_the_table_has_every_point_and_the_ratio():
    assert "not measured yet" in tiles.table(None)
    table = tiles.table(FIGURE)
    assert "| 13 | 3328 | 8 | 10.00 ± 0.20 | 66.0 |" in table and "| 2 | 512 | 48 | 64.00 ± 1.00 |  |" in table
    assert "in 6 turns: **6.400 ± 0.100** times the requests a second (a GPU, abc, 2026-11-26)" in table


def test_the_plot_has_an_interval_at_each_rate_and_each_recall():
    measured = tiles.recalls()
    drawn = ElementTree.fromstring(tiles.plot(FIGURE, measured))
    lines = [
        each for each in drawn.iter() if each.tag.endswith("line") and each.get("stroke") in (tiles.BLUE, tiles.GREEN)
    ]
    upright = [each for each in lines if each.get("x1") and each.get("x1") == each.get("x2")]
    assert len(upright) == 2 + len(measured)
    assert all(float(each.get("y1", 0)) > float(each.get("y2", 0)) for each in upright)


def test_the_page_holds_what_was_recorded():
    assert not tiles.update(check=True), "run: make bench NAME=tiles ARGS=--report"


@pytest.mark.server
def test_a_trial_on_a_cpu(server: Server, emitted: Any, monkeypatch: pytest.MonkeyPatch):
    """Of the server that tests share; the program's own is started as the others' are."""
    running = Running([server.grpc_url], [server.http_url], [server.metrics_url], "", 0.0)
    monkeypatch.setattr(tiles, "serve", lambda asked: nullcontext(running))
    asked = ["--gpus", "", "--checkpoint", str(DEFAULT_CHECKPOINT), "--weights", "checkpoint"]
    (figure,) = emitted(tiles, *asked, "--in-flight", "1", "--seconds", "0", "--counts", "1").values()
    assert figure["metric"] == "trial.seeds.tiles_13_to_2.ratio" and figure["turns"] == 2
    assert [(point["tiles"], point["image_tokens"]) for point in figure["points"]] == [(13, 832), (2, 128), (1, 64)]
