"""Pictures without their equal groups of patches: which are left out, where the others stand, and what transformers
makes of these."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.conformance import TOKENS, logprobs
from models.tiny_families import write_paddleocr_vl, write_qwen2_vl, write_qwen3_vl
from PIL import Image
from tiny_qwen2_vl import GROUP, QWEN2_5_VL, QWEN2_VL, Kind, write_folder
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from tessera.checkpoint.normalization import CLIP_MEAN, CLIP_STD
from tessera.errors import ConfigError, InvalidRequest
from tessera.kernels.tower_layers import PLAIN
from tessera.models.family import KIND_ENCODED, KIND_PIXELS, KIND_PRUNED, ImagePlan, units_of
from tessera.models.registry import family_for, read_config
from tessera.models.tower import load_tower
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.settings.stages import EngineConfig
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem, pictures_of

DEFAULT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
EQUAL = {"prune": "equal"}
IN_PARTS = EngineConfig(block_size=4, max_sequences=4, max_batched_tokens=16)
INKED = (0, 5, 6, 13, 20, 21, 29)  # of 6 x 5 groups


def page(down: int = 6, across: int = 5, inked: tuple[int, ...] = INKED, side: int = 28, seed: int = 0) -> np.ndarray:
    """White but for some groups of noise, the last of which are alike."""
    noise = np.random.default_rng(seed).integers(0, 256, (len(inked), side, side, 3), np.uint8)
    noise[-2:] = noise[-1]
    cells = np.full((down * across, side, side, 3), 255, np.uint8)
    cells[list(inked)] = noise
    return cells.reshape(down, across, side, side, 3).swapaxes(1, 2).reshape(down * side, across * side, 3)


def file(pixels: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def asked(*files: bytes, **more: Any) -> PreprocessRequest:
    return PreprocessRequest(text="<image>".join(("See ", *[" and "] * (len(files) - 1), "?")), images=files, **more)


PAGES = asked(file(page()), file(page(3, 9, (4, 11, 12, 26), seed=1)), tile_policy=EQUAL)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Preprocessor:
    folder = write_folder(tmp_path_factory.mktemp("qwen2_vl"), min_pixels=4 * GROUP, max_pixels=1280 * GROUP)
    return Preprocessor.from_checkpoint(folder)


def masks(found: Prepared) -> Iterator[np.ndarray]:
    for plan in found.plans:
        rows, columns = plan.views[0].grid
        yield np.ones(rows * columns, bool) if plan.kept is None else units_of(plan.kept, rows * columns)


def test_a_group_that_equals_an_earlier_one_is_left_out(ours: Preprocessor) -> None:
    """Groups of three kinds: a byte is all that two of them differ by."""
    kinds = [2, 2, 0, 2, 1, 0, 0, 1, 2]
    units = np.zeros((len(kinds), 12), np.uint8)
    units[:, 7] = kinds
    expected = [kind not in kinds[:place] for place, kind in enumerate(kinds)]
    assert ours.family.distinct(units).tolist() == expected


def test_what_is_kept_stands_where_it_stood(ours: Preprocessor) -> None:
    whole, pruned = ours(replace(PAGES, tile_policy=None)), ours(PAGES)
    groups = np.split(whole.pixels.reshape(-1, GROUP * 3), [whole.plans[0].cost])
    start, places = 0, np.zeros(len(whole.input_ids), bool) | (whole.input_ids != ours.family.image_token_id)
    for mask, each, (begin, length), (_, left) in zip(masks(pruned), groups, whole.spans, pruned.spans, strict=True):
        places[begin : begin + length] = mask
        bits = np.packbits(mask)
        assert 0 < left == mask.sum() < len(mask)
        end = start + len(bits) + left * GROUP * 3
        assert np.array_equal(pruned.pixels[start:end], np.concatenate((bits, each[mask].ravel())))
        start = end
    assert start == len(pruned.pixels) and pruned.plan[::4].tolist() == [KIND_PRUNED] * 2
    assert np.array_equal(pruned.input_ids, whole.input_ids[places])
    assert np.array_equal(pruned.positions, whole.positions[:, places])
    assert not np.intersect1d(pruned.digest, whole.digest).size


@pytest.mark.parametrize("form", [{}, {"form": "JPEG", "quality": 90}], ids=["png", "jpeg"])
def test_a_picture_without_equal_groups_is_as_it_was(ours: Preprocessor, form: dict[str, Any]) -> None:
    noise = file(page(inked=tuple(range(30)))[:140], **form)  # without the two groups that are alike
    found, expected = ours(asked(noise, tile_policy=EQUAL)), ours(asked(noise))
    assert found.plans == expected.plans
    for name in ("pixels", "plan", "digest", "input_ids", "spans", "positions"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_noise_that_a_file_adds_makes_groups_distinct(ours: Preprocessor) -> None:
    """What counts is what is decoded: flat white survives JPEG, grain does not."""
    white = np.full((168, 140, 3), 255, np.uint8)
    grain = white - np.random.default_rng(0).integers(0, 6, white.shape, np.uint8)
    for pixels, tokens in ((white, 1), (grain, 30)):
        found = ours(asked(file(pixels, "JPEG", quality=90), tile_policy=EQUAL))
        assert found.plans[0].tokens == found.spans[0, 1] == tokens


def test_pictures_that_travel_encoded(ours: Preprocessor) -> None:
    """Where groups are left out the pixels travel: the GPU's decoder would cut them all."""
    settings = PreprocessSettings(gpu_pixels=1)
    encoded = Preprocessor(ours.family, ours.prompts, ours.checkpoint, settings)
    noise = page(inked=tuple(range(30)))[:140]
    for pixels, kind in ((noise, KIND_ENCODED), (page(20, 20), KIND_PRUNED)):
        picture = file(pixels, "JPEG", quality=90)
        assert encoded(asked(picture, tile_policy=EQUAL)).plan[0] == kind
    assert encoded(asked(file(page()))).plan[0] == KIND_PIXELS


@torch.inference_mode()
def theirs(model: Any, kind: Kind, whole: Prepared, pruned: Prepared) -> torch.Tensor:
    """The rows that transformers' tower makes of the kept groups, each with its true place, and its own windows."""
    pixels = torch.from_numpy(whole.pixels).view(-1, 14, 14, 3).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    values = ((pixels - mean) / std)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
    grids = torch.tensor([plan.wire for plan in whole.plans])
    kept = torch.from_numpy(np.concatenate([*masks(pruned)]))
    patches = kept.repeat_interleave(4)

    def ends(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)

    known: dict[str, Any] = {
        "position_ids": get_vision_position_ids(grids, 2)[patches],
        "cu_seqlens": ends([4 * plan.tokens for plan in pruned.plans]),
    }
    if kind is QWEN2_5_VL:
        index, window_ends = get_vision_window_index(grids, 2, 112, 14)
        windows = [[int(g) for g in part if kept[g]] for part in index.split((window_ends.diff() // 4).tolist())]
        place = kept.cumsum(0) - 1
        known["window_index"] = place[torch.tensor([group for window in windows for group in window])]
        known["cu_window_seqlens"] = ends([4 * len(window) for window in windows if window])
    return model.model.visual(values[patches], grid_thw=grids, **known).pooler_output


@torch.inference_mode()
def greedy(model: Any, pruned: Prepared, rows: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The log probabilities of each step of the answer that transformers' model gives to so pruned a prompt."""
    ids, positions = torch.from_numpy(pruned.input_ids).long(), torch.from_numpy(pruned.positions).long()
    embed, found = model.get_input_embeddings(), list[torch.Tensor]()
    values = embed(ids)
    values[ids == model.config.image_token_id] = rows
    for _ in range(count):
        found.append(model(inputs_embeds=values[None], position_ids=positions[:, None]).logits[0, -1].log_softmax(-1))
        values = torch.cat((values, embed(found[-1].argmax()[None])))
        positions = torch.cat((positions, (positions.max() + 1).expand(3, 1)), dim=1)
    return found


@pytest.mark.parametrize("kind", [QWEN2_VL, QWEN2_5_VL], ids=str)
@torch.inference_mode()
def test_rows_and_log_probabilities_are_those_of_transformers(tmp_path: Path, kind: Kind) -> None:
    model = write_qwen2_vl(tmp_path, kind=kind)
    preprocess = Preprocessor.from_checkpoint(tmp_path)
    pruned = preprocess(PAGES)
    rows = theirs(model, kind, preprocess(replace(PAGES, tile_policy=None)), pruned)
    (found,) = VisionEncoder.from_checkpoint(tmp_path).encode([VisionItem(pruned.pixels, pruned.plan, pruned.digest)])
    torch.testing.assert_close(found, rows, atol=1e-4, rtol=0)
    for step, expected in zip(logprobs(tmp_path, pruned, IN_PARTS), greedy(model, pruned, rows, TOKENS), strict=True):
        assert [value for _, value in step] == pytest.approx([expected[token].item() for token, _ in step], abs=1e-3)
        assert step[0][0] == int(expected.argmax())


@pytest.mark.parametrize("write", [write_qwen2_vl, write_paddleocr_vl, write_qwen3_vl])
@torch.inference_mode()
def test_the_kept_groups_see_each_other_where_they_are(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    """As in the whole picture, whose towers are transformers', if there what is kept and what is not were two."""
    write(tmp_path)
    config = read_config(tmp_path)
    tower, side = load_tower(config), 2 * config.vision.patch_size
    whole, pruned = (
        Preprocessor.from_checkpoint(tmp_path)(asked(file(page(side=side)), tile_policy=policy))
        for policy in (None, EQUAL)
    )
    (mask,) = masks(pruned)
    order = torch.from_numpy(np.concatenate((np.flatnonzero(mask), np.flatnonzero(~mask))))
    patches = (4 * order[:, None] + torch.arange(4)).flatten()
    pixels = torch.from_numpy(whole.pixels).view(-1, *family_for(config).unit_shape)
    places = [each[..., patches, :] for each in tower.places([whole.plans[0].told], torch.device("cpu"))]
    apart = PLAIN.attend_within([4 * int(mask.sum()), 4 * int((~mask).sum())], torch.device("cpu"))
    expected = tower.rows(pixels[order], places, [apart], PLAIN)[: mask.sum()]
    found = tower(pixels[torch.from_numpy(mask)], [pruned.plans[0].told])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_deployment_may_prune_and_a_request_take_it_back(ours: Preprocessor) -> None:
    settings = PreprocessSettings(tile_policy=EQUAL)
    deployed = Preprocessor(ours.family, ours.prompts, ours.checkpoint, settings)
    picture = file(page(20, 20))
    by_default, by_request = deployed(asked(picture)), ours(asked(picture, tile_policy=EQUAL))
    assert np.array_equal(by_default.pixels, by_request.pixels)
    assert deployed(asked(picture, tile_policy={"prune": "never"})).plans == ours(asked(picture)).plans
    low = {"role": "user", "content": [{"type": "image", "detail": "low"}]}
    plan: ImagePlan = deployed(PreprocessRequest(messages=[low], images=[picture])).plans[0]
    assert plan.views[0].grid == (18, 18) and plan.kept is not None


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"prune": "similar"}, r"tile policy: prune must be one of \('never', 'equal'\), not 'similar'"),
        ({"prune": ["equal"]}, r"prune must be one of"),
        ({"pruned": "equal"}, "unknown key 'pruned'; this model's are min_pixels, max_pixels, prune"),
    ],
)
def test_what_it_does_not_know_is_refused(ours: Preprocessor, policy: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        ours(replace(PAGES, tile_policy=policy))
    with pytest.raises(ConfigError, match=words):
        Preprocessor(ours.family, ours.prompts, ours.checkpoint, PreprocessSettings(tile_policy=policy))


def test_limits_count_all_groups(ours: Preprocessor) -> None:
    """They are judged before anything is decoded."""
    limited = Preprocessor(ours.family, ours.prompts, ours.checkpoint, PreprocessSettings(max_cost=56))
    with pytest.raises(InvalidRequest, match="2 images make 57 image tokens; the limit is 56"):
        limited(PAGES)
    damaged = file(page())[:-40]
    with pytest.raises(InvalidRequest, match="image 1 .*damaged|truncated"):
        ours(asked(file(page()), damaged, tile_policy=EQUAL))


def test_tiles_are_never_pruned() -> None:
    tiles = Preprocessor.from_checkpoint(DEFAULT)
    with pytest.raises(InvalidRequest, match="unknown key 'prune'"):
        tiles(replace(PAGES, tile_policy=EQUAL))
    plan = np.array([KIND_PRUNED, 1, 1, 1], np.int32)
    with pytest.raises(InvalidRequest, match="picture 0: this model takes whole pictures, with all their tiles"):
        pictures_of(VisionItem(np.ones(1, np.uint8), plan, np.zeros(2, np.int64)), tiles.family)


@pytest.mark.parametrize(
    ("kept", "groups", "words"),
    [
        (b"", 0, "of 9 groups of patches 0 bytes do not say which are kept"),
        (b"\x80", 0, "1 bytes do not say"),
        (b"\0\0", 0, "2 bytes do not say"),  # none is
        (b"\x80\x40", 1, "2 bytes do not say"),  # there is no tenth
        (b"\x81\x80", 2, r"PIXELS has \d+ bytes; the plan needs"),
    ],
)
def test_what_cannot_be_kept_is_refused(ours: Preprocessor, kept: bytes, groups: int, words: str) -> None:
    pixels = np.frombuffer(kept + bytes(groups * GROUP * 3), np.uint8)
    given = VisionItem(pixels, np.array([KIND_PRUNED, 1, 6, 6], np.int32), np.zeros(2, np.int64))
    with pytest.raises(InvalidRequest, match=words):
        pictures_of(given, ours.family)
