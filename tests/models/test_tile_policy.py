"""The tiling rule against the references', policies by name and by key, plans and their token counts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import checkpoint_folders as folders
import pytest
from grid_oracle import ORDERS, expected_grid, expected_native_grid, random_sizes, reference_order
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from tessera.errors import InvalidRequest
from tessera.models.family import ModelFamily
from tessera.models.internvl.processor import InternVL, best_grid, candidate_grids
from tessera.models.registry import family_for, read_config
from tessera.models.tile_policy import THUMBNAIL_RULES, TILE_POLICIES, TilePolicy


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 6), (1, 2), (7, 12), (2, 2), (3, 40)])
def test_order_of_candidates(order: str, least: int, most: int) -> None:
    assert list(candidate_grids(order, least, most)) == reference_order(order, least, most)


def test_hf_native_grids_are_those_of_transformers() -> None:
    for width, height in random_sizes(2400):
        for least, most in ((1, 12), (2, 7)):
            expected = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
            assert best_grid("columns", width, height, 448, least, most) == expected


def test_the_two_orders_differ_somewhere() -> None:
    """Else the tests above could not tell the layouts apart. 5:4 lies halfway between one and two tiles a row."""
    ranges = [(least, most) for least in range(1, 13) for most in range(least, 13)]
    orders = {order: [candidate_grids(order, *bounds) for bounds in ranges] for order in ORDERS}
    assert orders["columns"] != orders["set"]
    middles = {
        Fraction(a[0] * b[1] + b[0] * a[1], 2 * a[1] * b[1])
        for a in candidate_grids("columns", 1, 12)
        for b in candidate_grids("columns", 1, 12)
    }
    differing = [
        (middle, bounds)
        for middle in middles
        for bounds in ranges
        for size in [(middle.numerator * 64, middle.denominator * 64)]
        if best_grid("columns", *size, 448, *bounds) != best_grid("set", *size, 448, *bounds)
    ]
    assert differing


@pytest.fixture(scope="module", params=["hf_native", "internvl_chat"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFamily:
    folder = tmp_path_factory.mktemp("policy")
    if request.param == "hf_native":
        folders.write_hf_folder(folder, folders.byte_level())
    else:
        folders.write_chat_folder(folder, "internlm2-chat")
    return family_for(read_config(folder))


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
        columns, rows = expected(family, name, size, thumbnail, budget)
        tiles = columns * rows + {"never": 0, "always": 1, "auto": int(columns * rows > 1)}[thumbnail]
        if (plan.wire, plan.cost, plan.tokens) != ((tiles, rows, columns), tiles, 256 * tiles):
            wrong.append((size, budget, plan))
        assert budget is None or plan.tokens <= budget
    assert not wrong


def expected(
    family: ModelFamily, name: str, size: tuple[int, int], thumbnail: str, budget: int | None
) -> tuple[int, int]:
    """The grid by a policy's description, its bounds found by trying all."""
    least, most = {"dense": (7, 12), "two-tile": (2, 2)}.get(name, (1, 12))
    costs = {n: 256 * (n + (thumbnail == "always" or (thumbnail == "auto" and n > 1))) for n in range(least, most + 1)}
    most = max(n for n, cost in costs.items() if budget is None or cost <= budget)
    if name == "native":
        return expected_native_grid(*size, least, most)
    assert isinstance(family, InternVL)
    return expected_grid(family.order, *size, least, most)


def test_token_counts_of_480x320_by_name(family: ModelFamily) -> None:
    """As tile_policy.py's table has them."""
    tokens = {name: family.plan(480, 320, policy).tokens for name, policy in TILE_POLICIES.items()}
    assert tokens == {"reference": 1792, "dense": 3328, "two-tile": 512, "budget": 256, "native": 256}
    one_tile_and_thumbnail = TilePolicy.parse({"max_tiles": 1, "thumbnail": "always"}, TilePolicy())
    assert family.plan(480, 320, one_tile_and_thumbnail).tokens == 512


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"token_budget": 255}, r"255 is less than the 256 tokens .*\(1 tiles\)"),
        ({"token_budget": 511, "thumbnail": "always"}, r"511 is less than the 512 .* and a thumbnail"),
        ({"name": "dense", "token_budget": 2047}, r"2047 is less than the 2048 .*\(7 tiles and a thumbnail"),
    ],
)
def test_a_budget_too_small_for_any_grid_is_refused(family: ModelFamily, keys: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        family.plan(480, 320, TilePolicy.parse(keys, TilePolicy()))


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
