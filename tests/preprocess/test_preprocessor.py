"""Whole requests: pixels, plans, digests, prompts, limits, and errors that name the image."""

import base64
from pathlib import Path
from typing import Any

import encoded_pictures as pictures
import numpy as np
import pytest
from PIL import Image

from tessera.errors import ConfigError, InvalidRequest
from tessera.models.tile_policy import THUMBNAIL_RULES, TILE_POLICIES
from tessera.preprocess.decode import decode
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest, PreprocessSettings

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"
JPEG = pictures.jpeg(480, 320)


@pytest.fixture(scope="module")
def preprocessor() -> Preprocessor:
    return Preprocessor.from_checkpoint(CHECKPOINT)


def ask(preprocessor: Preprocessor, *images: bytes, text: str | None = "Is there a socket?", **more: Any) -> Prepared:
    return preprocessor(PreprocessRequest(text=text, images=images, **more))


def test_shapes_and_types(preprocessor: Preprocessor) -> None:
    found = ask(preprocessor, JPEG, pictures.jpeg(100, 100))
    assert found.pixels.dtype == np.uint8 and found.pixels.shape == ((7 + 1) * 448 * 448 * 3,)
    assert found.plan.dtype == np.int32 and found.plan.tolist() == [0, 7, 2, 3, 0, 1, 1, 1]
    assert found.digest.dtype == np.int64 and found.digest.shape == (4,)
    assert found.input_ids.dtype == np.int32 and found.input_ids.ndim == 1
    assert found.spans.dtype == np.int32 and found.spans[:, 1].tolist() == [7 * 64, 64]


def test_rotated_pictures_are_planned_upright(preprocessor: Preprocessor) -> None:
    wide = Image.fromarray(pictures.smooth(896, 448))
    rotated = pictures.saved(wide, "JPEG", exif=pictures.exif(6))
    found = ask(preprocessor, rotated, tile_policy={"thumbnail": "never"})
    tiles = found.pixels.reshape(-1, 448, 448, 3)
    assert found.plans[0].wire == (2, 2, 1)
    assert np.array_equal(np.concatenate(list(tiles)), decode(rotated))


def test_policies_of_deployment_and_request() -> None:
    deployment = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(tile_policy={"max_tiles": 1}))
    assert ask(deployment, JPEG).plan.tolist() == [0, 1, 1, 1]
    assert ask(deployment, JPEG, tile_policy="two-tile").plan.tolist() == [0, 2, 1, 2]
    assert ask(deployment, JPEG, tile_policy={"name": "dense"}).plan.tolist() == [0, 13, 3, 4]
    native = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(tile_policy='{"name": "native"}'))
    assert ask(native, JPEG).plan.tolist() == [0, 1, 1, 1]
    assert ask(native, JPEG, tile_policy="reference").plan.tolist() == [0, 7, 2, 3]
    assert ask(native, JPEG, tile_policy={"thumbnail": "always"}).plan.tolist() == [0, 2, 1, 1]


@pytest.mark.parametrize(
    ("policy", "words"),
    [("mosaic", "mosaic"), ('{"token_budget": 63}', "63 is less than the 64"), ('{"max_tiles": "x"}', "max_tiles")],
)
def test_a_wrong_policy_of_the_deployment_ends_the_start(policy: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"preprocess: tile policy.*{words}"):
        Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(tile_policy=policy))


def test_plan_tokens_pixels_and_digest_agree_under_every_policy(preprocessor: Preprocessor) -> None:
    """Different plans, different digests; the same plan by another name, the same digest (and its cached rows)."""
    policies: list[Any] = [{"name": name, "thumbnail": rule} for name in TILE_POLICIES for rule in THUMBNAIL_RULES]
    policies += [{"name": "budget", "token_budget": tokens} for tokens in (64, 192, 320, 512)]
    digests = {}
    for policy in policies:
        found = ask(preprocessor, JPEG, tile_policy=policy)
        (plan,) = found.plans
        assert found.pixels.size == plan.cost * 448 * 448 * 3
        assert found.spans[:, 1].tolist() == [plan.cost * 64] == [plan.tokens]
        digests.setdefault(plan, set()).add(tuple(found.digest))
    assert len(digests) == 8  # 1x1, 2x1, 3x2 and 4x3, each with and without the thumbnail
    assert all(len(of_plan) == 1 for of_plan in digests.values())
    assert len(set.union(*digests.values())) == len(digests)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_mark_behind_the_last_byte_changes_the_digest_alone(preprocessor: Preprocessor, kind: str) -> None:
    """`tessera plan` sends pictures that no cache knows in this way."""
    data = pictures.saved(Image.fromarray(pictures.smooth(300, 200)), kind)
    assert np.array_equal(ask(preprocessor, data).digest, ask(preprocessor, base64.b64encode(data), text="?").digest)
    bare, marked = ask(preprocessor, data), ask(preprocessor, data + b"4e1f native,max_tiles=6")
    assert np.array_equal(bare.pixels, marked.pixels)
    assert not np.array_equal(bare.digest, marked.digest)


def test_messages_with_data_urls_and_next_images(preprocessor: Preprocessor) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(JPEG).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image"}, {"type": "text", "text": "Alike?"}]
    messages = [{"role": "user", "content": parts}]
    found = ask(preprocessor, pictures.jpeg(100, 100), text=None, messages=messages)
    assert found.plan.tolist() == [0, 7, 2, 3, 0, 1, 1, 1]
    assert np.array_equal(found.digest[:2], ask(preprocessor, JPEG).digest)


def test_a_picture_in_low_detail_is_one_tile_whatever_the_policy(preprocessor: Preprocessor) -> None:
    parts = [{"type": "image", "detail": detail} for detail in ("low", "high", "auto", "low")]
    found = ask(preprocessor, *[JPEG] * 4, text=None, messages=[{"role": "user", "content": parts}])
    assert found.plan.tolist() == [0, 1, 1, 1, 0, 7, 2, 3, 0, 7, 2, 3, 0, 1, 1, 1]
    asked = {"text": None, "messages": [{"role": "user", "content": parts[:1]}]}
    for policy in ({"name": "dense", "thumbnail": "always"}, "two-tile"):
        assert ask(preprocessor, JPEG, tile_policy=policy, **asked).plan.tolist() == [0, 1, 1, 1]


def test_limits_say_both_numbers(preprocessor: Preprocessor) -> None:
    small = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(max_cost=20, max_request_bytes=len(JPEG) + 100))
    with pytest.raises(InvalidRequest, match="9 images; the limit is 8"):
        ask(preprocessor, *[JPEG] * 9)
    with pytest.raises(InvalidRequest, match=r"3 images make 21 tiles; the limit is 20.*tile_policy"):
        ask(Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(max_cost=20)), *[JPEG] * 3)
    with pytest.raises(InvalidRequest, match="bytes; the limit is"):
        ask(small, JPEG, JPEG)
    with pytest.raises(InvalidRequest, match="max_tiles 21 is above .* 20"):
        ask(small, JPEG, tile_policy={"max_tiles": 21})


@pytest.mark.parametrize(
    ("image", "word"),
    [
        (b"", "empty"),
        (b"http://example.com/cat.jpg", "http"),
        (b"no picture", "not a JPEG"),
        (JPEG[:-400], "truncated"),
        (pictures.png_of_size(9000, 9000), "megapixels"),
    ],
)
def test_errors_name_the_image_and_nothing_of_the_server(preprocessor: Preprocessor, image: bytes, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^image 1 .*{word}") as caught:
        ask(preprocessor, JPEG, image)
    assert "/" not in str(caught.value).replace("image/jpeg", "")
    assert len(str(caught.value)) < 300


def test_resize_modes_give_other_pixels_under_other_digests(preprocessor: Preprocessor) -> None:
    fast = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(resize="fast"))
    data = pictures.jpeg(2000, 1500)
    one, other = ask(preprocessor, data), ask(fast, data)
    assert one.plans == other.plans and np.array_equal(one.input_ids, other.input_ids)
    assert not np.array_equal(one.digest, other.digest)
    difference = np.abs(one.pixels.astype(int) - other.pixels)
    assert 0 < difference.mean() < 1
