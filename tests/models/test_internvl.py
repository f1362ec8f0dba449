"""What InternVL makes of pictures: plans, their wire form, their pixels, and what a checkpoint may not state."""

from __future__ import annotations

from pathlib import Path

import checkpoint_folders as folders
import numpy as np
import pytest

from tessera.errors import CheckpointError, InvalidRequest
from tessera.models.family import ModelFamily, View
from tessera.models.registry import family_for, read_config
from tessera.models.tile_policy import TilePolicy


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> ModelFamily:
    return family_for(read_config(folders.write_hf_folder(tmp_path_factory.mktemp("hf"), folders.byte_level())))


def test_a_plan(family: ModelFamily) -> None:
    plan = family.plan(1344, 896, TilePolicy())
    assert (plan.tokens, plan.cost, plan.wire) == (7 * 256, 7, (7, 2, 3))
    grid, thumbnail = plan.views
    assert grid == View(1344, 896, (2, 448, 3, 448, 3), (0, 2, 1, 3, 4))
    assert thumbnail == View(448, 448, (1, 448, 1, 448, 3), (0, 2, 1, 3, 4))
    assert (grid.grid, thumbnail.grid) == ((2, 3), (1, 1))
    assert plan.pixel_bytes == 7 * np.prod(family.unit_shape)
    assert family.placeholder_tokens(plan) == (("<img>", 1), ("<IMG_CONTEXT>", 7 * 256), ("</img>", 1))
    assert family.positions(5, np.zeros((0, 2), np.int32), []) is None


@pytest.mark.parametrize(
    "wire", [(0, 0, 0), (2, 0, 2), (1, -1, -1), (5, 2, 3), (8, 2, 3), (-6, 2, -3), (448, 448, 448)]
)
def test_what_can_be_no_plan_is_refused(family: ModelFamily, wire: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{wire[0]} tiles are not a grid of {wire[2]}x{wire[1]}"):
        family.plan_of(wire)


def test_a_policy_is_held_to_the_servers_limit_where_a_request_states_it(family: ModelFamily) -> None:
    usual = family.policy({}, max_cost=8)
    assert usual.max_tiles == 12  # the checkpoint's own: what a picture really costs decides
    assert family.policy({"tile_policy": {"max_tiles": 8}}, usual, max_cost=8).max_tiles == 8
    with pytest.raises(InvalidRequest, match="max_tiles 9 is above this server's limit of 8 tiles"):
        family.policy({"tile_policy": {"max_tiles": 9}}, usual, max_cost=8)
    with pytest.raises(InvalidRequest, match=r"max_tiles 10{19} is above"):  # a message stays short
        family.policy({"tile_policy": {"max_tiles": 10**410}}, usual, max_cost=8)
    with pytest.raises(InvalidRequest, match="token_budget 255"):
        family.policy({"tile_policy": {"token_budget": 255}}, usual)
    with pytest.raises(InvalidRequest, match=r"max_pixels means nothing to this model \(what does: tile_policy\)"):
        family.policy({"max_pixels": 784}, usual)


def test_contradictory_token_count_is_refused(tmp_path: Path) -> None:
    folders.write_hf_folder(tmp_path, folders.byte_level())
    folders.write(tmp_path, "processor_config.json", {"image_seq_length": 64})
    with pytest.raises(CheckpointError, match=r"64.*256"):
        family_for(read_config(tmp_path))
