"""InternVL's tiling rule against the references', policies by name and by key, plans and their token counts, and what
none may state."""

from dataclasses import replace
from pathlib import Path

import checkpoint_folders as folders
import pytest
from grid_oracle import expected_grid, expected_native_grid, random_sizes
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from tessera.errors import CheckpointError, InvalidRequest
from tessera.models.family import ModelFamily
from tessera.models.internvl.processor import best_grid
from tessera.models.registry import family_for, read_config
from tessera.models.tile_policy import THUMBNAIL_RULES, TILE_POLICIES, TilePolicy


def test_hf_native_grids_are_those_of_transformers() -> None:
    for width, height in random_sizes(2400):
        for least, most in ((1, 12), (2, 7)):
            expected = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
            assert best_grid("columns", width, height, 448, least, most) == expected


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> ModelFamily:
    """Of the original layout, whose order of grids transformers does not have."""
    return family_for(read_config(folders.write_chat_folder(tmp_path_factory.mktemp("policy"), "internlm2-chat")))


@pytest.mark.parametrize("name", TILE_POLICIES)
@pytest.mark.parametrize("thumbnail", THUMBNAIL_RULES)
def test_every_policy_on_random_sizes(family: ModelFamily, name: str, thumbnail: str) -> None:
    wrong = []
    for index, size in enumerate(random_sizes(600)):
        budget = (None, 512, 1024, 2000, 2304, 5000)[index % 6] if name != "dense" else None
        policy = replace(TILE_POLICIES[name], thumbnail=thumbnail, token_budget=budget)
        if name == "two-tile" and budget == 512 and thumbnail != "never":
            with pytest.raises(InvalidRequest, match=r"512 is less than the 768 tokens .* \(2 tiles and a thumbnail\)"):
                family.plan(*size, policy)
            continue
        plan = family.plan(*size, policy)
        columns, rows = expected(name, size, thumbnail, budget)
        tiles = columns * rows + {"never": 0, "always": 1, "auto": int(columns * rows > 1)}[thumbnail]
        if (plan.wire, plan.cost, plan.tokens) != ((tiles, rows, columns), tiles, 256 * tiles):
            wrong.append((size, budget, plan))
        assert budget is None or plan.tokens <= budget
    assert not wrong


def expected(name: str, size: tuple[int, int], thumbnail: str, budget: int | None) -> tuple[int, int]:
    """The grid by a policy's description, its bounds found by trying all."""
    least, most = {"dense": (7, 12), "two-tile": (2, 2)}.get(name, (1, 12))
    costs = {n: 256 * (n + (thumbnail == "always" or (thumbnail == "auto" and n > 1))) for n in range(least, most + 1)}
    most = max(n for n, cost in costs.items() if budget is None or cost <= budget)
    return (expected_native_grid if name == "native" else expected_grid)(*size, least, most)


def test_token_counts_of_480x320_by_name(family: ModelFamily) -> None:
    """As tile_policy.py's table has them."""
    tokens = {name: family.plan(480, 320, policy).tokens for name, policy in TILE_POLICIES.items()}
    assert tokens == {"reference": 1792, "dense": 3328, "two-tile": 512, "budget": 256, "native": 256}
    one_tile_and_thumbnail = TilePolicy.parse({"max_tiles": 1, "thumbnail": "always"}, TilePolicy())
    assert family.plan(480, 320, one_tile_and_thumbnail).tokens == 512


def test_policy_parsing() -> None:
    default = TilePolicy("deployment", 1, 6, "never")
    parse = TilePolicy.parse
    assert parse(None, default) == default
    assert parse("two-tile", default) == TILE_POLICIES["two-tile"]
    assert parse('{"max_tiles": 4}', default) == TilePolicy("deployment", 1, 4, "never")
    assert parse({"name": "dense", "thumbnail": "never"}, default) == TilePolicy("dense", 7, 12, "never")
    assert parse({"name": "native", "max_tiles": 6}, default) == TilePolicy("native", 1, 6, "auto", None, "native")
    assert parse({"name": "budget", "token_budget": 512}, default) == TilePolicy("budget", 1, 12, "auto", 512)
    assert parse({"name": "budget", "token_budget": None}, default) == TilePolicy("budget")
    assert parse({"name": "deployment", "token_budget": 9}, default) == TilePolicy("deployment", 1, 6, "never", 9)


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
        ({"token_budget": 0}, "token_budget"),
        ({"token_budget": "1k"}, "1k"),
        ({"grid": "native"}, "unknown key 'grid'"),  # a name chooses it
        ({"name": ["a"]}, "name"),
        (7, "int"),
    ],
)
def test_wrong_policies(value: object, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        TilePolicy.parse(value, TilePolicy())  # type: ignore[arg-type]


def test_policies_stated_by_checkpoints(tmp_path: Path) -> None:
    def stated(**raw: object) -> TilePolicy:
        return family_for(read_config(folders.write_chat_folder(tmp_path, "Hermes-2", **raw))).policy({})

    assert stated() == TilePolicy("checkpoint", 1, 12, "auto")
    assert stated(max_dynamic_patch=6, use_thumbnail=False) == TilePolicy("checkpoint", 1, 6, "never")
    assert stated(dynamic_image_size=False) == TilePolicy("checkpoint", 1, 1, "auto")


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
