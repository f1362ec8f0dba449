"""Policies by name and by key, plans and their token counts."""

from __future__ import annotations

from pathlib import Path

import checkpoint_folders as folders
import numpy as np
import pytest

from tessera.checkpoint.config import read_config
from tessera.errors import CheckpointError, InvalidRequest
from tessera.family.family import TILE_POLICIES, ModelFamily, TilePolicy
from tessera.family.registry import family_for


@pytest.fixture(scope="module", params=["hf_native", "internvl_chat"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFamily:
    folder = tmp_path_factory.mktemp("policy")
    if request.param == "hf_native":
        folders.write_hf_folder(folder, folders.byte_level())
    else:
        folders.write_chat_folder(folder, "internlm2-chat")
    return family_for(read_config(folder))


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((448, 448), (256, 256, 256, 256)),
        ((480, 320), (256, 256, 1792, 1792)),
        ((320, 480), (256, 768, 1792, 1792)),
        ((640, 480), (256, 256, 1792, 3328)),
        ((480, 360), (256, 256, 1792, 3328)),
        ((1920, 1080), (256, 768, 768, 2304)),
    ],
)
def test_token_counts(family: ModelFamily, size: tuple[int, int], tokens: tuple[int, ...]) -> None:
    found = tuple(family.plan(*size, TilePolicy(max_tiles=most)).tokens for most in (1, 2, 6, 12))
    assert found == tokens


def test_known_token_counts_of_480x320_by_policy_name(family: ModelFamily) -> None:
    tokens = {name: family.plan(480, 320, policy).tokens for name, policy in TILE_POLICIES.items()}
    assert tokens == {"reference": 1792, "dense": 3328, "two-tile": 512}


def test_thumbnail_rules(family: ModelFamily) -> None:
    tiles = {
        rule: [family.plan(*size, TilePolicy(thumbnail=rule)).t for size in ((448, 448), (1792, 448))]
        for rule in ("auto", "never", "always")
    }
    assert tiles == {"auto": [1, 5], "never": [1, 4], "always": [2, 5]}


def test_plan_and_positions(family: ModelFamily) -> None:
    plan = family.plan(1344, 896, TilePolicy())
    assert (plan.columns, plan.rows, plan.thumbnail) == (3, 2, True)
    assert plan.pixel_shape == (7, 448, 448, 3)
    assert plan.wire() == (0, 7, 448, 448)
    assert family.placeholder(plan) == "<img>" + "<IMG_CONTEXT>" * plan.tokens + "</img>"
    assert np.array_equal(family.positions(5, [], []), [[0, 1, 2, 3, 4]])


def test_policy_parsing() -> None:
    default = TilePolicy("deployment", 1, 6, "never")
    parse = TilePolicy.parse
    assert parse(None, default) == default
    assert parse("two-tile", default) == TILE_POLICIES["two-tile"]
    assert parse('{"max_tiles": 4}', default) == TilePolicy("deployment", 1, 4, "never")
    assert parse({"name": "dense", "thumbnail": "never"}, default) == TilePolicy("dense", 7, 12, "never")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("nonsense", "nonsense"),
        ("{broken", "JSON"),
        ({"max_tile": 3}, "max_tile"),
        ({"max_tiles": 0}, "max_tiles"),
        ({"max_tiles": "many"}, "many"),
        ({"min_tiles": 4, "max_tiles": 3}, "above"),
        ({"thumbnail": True}, "thumbnail"),
        ({"name": ["a"]}, "name"),
        (7, "int"),
    ],
)
def test_wrong_policies(value: object, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        TilePolicy.parse(value, TilePolicy())  # type: ignore[arg-type]


def test_policies_stated_by_checkpoints(tmp_path: Path) -> None:
    def stated(**raw: object) -> TilePolicy:
        return family_for(read_config(folders.write_chat_folder(tmp_path, "Hermes-2", **raw))).default_policy()

    assert stated() == TilePolicy("checkpoint", 1, 12, "auto")
    assert stated(max_dynamic_patch=6, use_thumbnail=False) == TilePolicy("checkpoint", 1, 6, "never")
    assert stated(dynamic_image_size=False) == TilePolicy("checkpoint", 1, 1, "auto")


def test_contradictory_token_count_is_refused(tmp_path: Path) -> None:
    folders.write_hf_folder(tmp_path, folders.byte_level())
    folders.write(tmp_path, "processor_config.json", {"image_seq_length": 64})
    with pytest.raises(CheckpointError, match=r"64.*256"):
        family_for(read_config(tmp_path))
