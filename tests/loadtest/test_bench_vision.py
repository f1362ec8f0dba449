"""The vision bench: transformers with the same weights, the work of a forward in numbers, and a trial run."""

from __future__ import annotations

import json

import pytest
import torch
from bench import vision as bench_vision
from bench.vision_peer import load_peer
from tiny_checkpoints import Shape, hf_native

from tessera.models.tower import load_tower


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return hf_native(tmp_path_factory.mktemp("tiny"), Shape(image_size=56, patch_size=14))


@pytest.fixture
def bare(checkpoint, tmp_path):
    """The same checkpoint without weights."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for file in checkpoint.glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    return folder


def test_random_weights_are_the_same_on_both_sides(bare, tmp_path):
    peer, config = load_peer(bare, tmp_path)
    tiles = torch.from_numpy(bench_vision.sample_tiles(3, 56))
    with torch.inference_mode():
        ours = load_tower(config)(tiles).view(3, -1, config.text.hidden_size)
    assert ours.std() > 0
    torch.testing.assert_close(peer.rows_of(tiles), ours, atol=1e-5, rtol=1e-5)
    assert bench_vision.least_cosine(ours, peer.rows_of(tiles)) > 0.99999


def test_a_trial_run_gives_every_figure(checkpoint, capsys):
    bench_vision.main(["--device", "cpu", "--tiles", "3", "--quick", "--checkpoint", str(checkpoint)])
    figures = {line["metric"]: line["value"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(figures) == {
        f"trial.vision.{name}"
        for name in (
            *("tiles3.ms", "tiles3.over_transformers", "b1.ms", "b1.over_transformers", "cosine_bf16", "cosine_fp32"),
            *("fp8.tiles3.ms", "fp8.tiles1.ms", "fp8.cosine"),
        )
    }
    assert figures["trial.vision.cosine_fp32"] > 0.99999 and figures["trial.vision.cosine_bf16"] > 0.999
    assert 0.99 < figures["trial.vision.fp8.cosine"] < 0.9999
