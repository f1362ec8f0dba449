"""Pictures that travel encoded: frames that lie are refused, decoding happens once and late, a bad one stands alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tessera.errors import ConfigError, InvalidRequest
from tessera.models.family import FRAME, EncodedPicture, View
from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import EmbeddingCache
from tessera.vision.pictures import GpuDecoder, Undecoded, VisionItem, bytes_of, joined, pictures_of

SIDE = 2


class Family:
    """Tiles of SIDE pixels; the wire is (tiles, rows, columns)."""

    cost_unit, unit_shape = "tiles", (SIDE, SIDE, 3)

    def plan_of(self, wire: tuple[int, int, int]) -> SimpleNamespace:
        tiles, rows, columns = wire
        if rows < 1 or tiles - rows * columns not in (0, 1):
            raise InvalidRequest(f"{tiles} tiles are not a grid of {columns}x{rows}")
        views = (View(columns * SIDE, rows * SIDE, (), ()),)
        return SimpleNamespace(tokens=tiles, cost=tiles, views=views, pixel_bytes=tiles * SIDE * SIDE * 3)


class Decoder:
    """A file's bytes are its tiles' numbers; a zero is damage. Takes two pictures at once."""

    def __init__(self) -> None:
        self.decoded: list[EncodedPicture] = []

    def check(self, undecoded: Undecoded) -> None:
        pass

    def pixels(self, line: list[Undecoded]) -> list[torch.Tensor | Exception]:
        if 255 in line[0][0].data:
            raise RuntimeError("the decoder itself failed")
        self.decoded += [picture for picture, _ in line[:2]]
        return [
            torch.from_numpy(picture.data.copy())[:, None].expand(-1, SIDE * SIDE * 3).flatten()
            if picture.data.all()
            else InvalidRequest("damaged")
            for picture, _ in line[:2]
            if 255 not in picture.data
        ]


class Runner:
    """One row a tile: its first byte."""

    tower = SimpleNamespace(splits=True)

    def run(self, tiles: np.ndarray | torch.Tensor, wires: object) -> torch.Tensor:
        return torch.as_tensor(tiles)[:, 0, 0, :1].float()


def frame(*tiles: int) -> np.ndarray:
    return EncodedPicture(np.array(tiles, np.uint8), 640, 480, 6).framed()


def item(*pictures: tuple[int, ...], kinds: str = "") -> VisionItem:
    """Each picture is its tiles' numbers in one row, encoded (e, the default) or as pixels (p)."""
    kinds = kinds or "e" * len(pictures)
    pixels, plan = [np.empty(0, np.uint8)], []
    for tiles, kind in zip(pictures, kinds, strict=True):
        encoded = kind == "e"
        pixels.append(frame(*tiles) if encoded else np.repeat(np.array(tiles, np.uint8), SIDE * SIDE * 3))
        plan += [int(encoded), len(tiles), 1, len(tiles)]
    digest = [number for tiles in pictures for number in (hash(tiles), 0)]
    return VisionItem(np.concatenate(pixels), np.array(plan, np.int32), np.array(digest, np.int64))


def encoder(cache: int = 0) -> VisionEncoder:
    return VisionEncoder(Runner(), Family(), infer_batch_size=3, cache=EmbeddingCache(cache), decoder=Decoder())


def test_a_frame_comes_back() -> None:
    pixels = np.concatenate([frame(1, 2, 3), frame(4)])
    given = VisionItem(pixels, np.array([1, 3, 1, 2, 1, 1, 1, 1]), np.arange(4))
    first, second = pictures_of(given, Family(), Decoder())
    assert first.encoded[0].data.tolist() == [1, 2, 3]
    assert (first.plan.cost, first.wire, second.plan.cost, second.wire) == (3, (3, 1, 2), 1, (1, 1, 1))
    picture, views = second.encoded
    assert (picture.width, picture.height, picture.orientation, picture.data.tolist()) == (640, 480, 6, [4])
    assert second.pixels is None and views == second.plan.views


def answers_of(vision, items):
    """(index, rows or the error in their place) as they are given out."""
    for pending in vision.launch(items):
        try:
            with pending.rows() as rows:
                yield pending.index, rows
        except (InvalidRequest, RuntimeError) as error:
            yield pending.index, error


GOOD = frame(1, 2)


@pytest.mark.parametrize(
    ("pixels", "plan", "complaint"),
    [
        (GOOD, (1, 4, 1, 2), "picture 0: 4 tiles are not a grid of 2x1"),
        (GOOD, (1, 0, 0, 0), "0 tiles are not a grid"),
        (GOOD, (1, 1, -1, -1), "not a grid of -1x-1"),
        (GOOD[:-1], (1, 2, 1, 2), "states 2 bytes; PIXELS has 1 after it"),
        (GOOD[:7], (1, 2, 1, 2), "PIXELS ends 13 bytes inside its frame of 20"),
        (np.concatenate([GOOD, GOOD[:1]]), (1, 2, 1, 2), "PIXELS has 23 bytes; the plan needs 22"),
        (FRAME.pack(2**64 - 1, 640, 480, 1) + b"xx", (1, 2, 1, 2), f"states {2**64 - 1} bytes"),
        (FRAME.pack(0, 640, 480, 1), (1, 2, 1, 2), "states 0 bytes"),
        (FRAME.pack(2, 0, 480, 1) + b"xx", (1, 2, 1, 2), "0x480 pixels"),
        (FRAME.pack(2, 640, 2**31, 1) + b"xx", (1, 2, 1, 2), "640x2147483648 pixels"),
        (FRAME.pack(2, 640, 480, 9) + b"xx", (1, 2, 1, 2), "orientation 9"),
    ],
)
def test_frames_that_cannot_be_right_are_refused(pixels: object, plan: tuple[int, ...], complaint: str) -> None:
    data = np.frombuffer(pixels, np.uint8) if isinstance(pixels, bytes) else pixels
    with pytest.raises(InvalidRequest, match=complaint):
        pictures_of(VisionItem(data, np.array(plan, np.int32), np.zeros(2, np.int64)), Family(), Decoder())


def test_a_stage_without_a_decoder_says_what_to_set() -> None:
    with pytest.raises(InvalidRequest, match="set gpu_pixels for both stages or neither"):
        pictures_of(item((1,)), Family())


def test_encoded_and_cut_pictures_share_forwards() -> None:
    vision = encoder()
    rows = vision.encode([item((1, 2), (3,), kinds="ep"), item((4, 5), kinds="p"), item(), item((6, 7, 8))])
    assert [row if row is None else row.flatten().tolist() for row in rows] == [[1, 2, 3], [4, 5], None, [6, 7, 8]]


def test_a_picture_is_decoded_once_and_never_when_its_rows_are_known() -> None:
    vision = encoder(cache=1 << 20)
    vision.encode([item((1, 2)), item((1, 2)), item((3,), (1, 2))])
    assert len(vision.decoder.decoded) == 2
    assert vision.encode([item((1, 2))])[0].flatten().tolist() == [1, 2]
    assert len(vision.decoder.decoded) == 2


def test_pictures_are_decoded_when_a_forward_needs_them_and_others_with_them() -> None:
    """Forwards of three tiles, two pictures decoded at once: the third waits for the forward that it is in."""
    vision = encoder()
    answers = answers_of(vision, [item((1, 2, 3)), item((4,)), item((5, 6, 7)), item((8,), kinds="p"), item((9,))])
    seen = [(index, len(vision.decoder.decoded)) for index, _ in answers]
    assert seen == [(0, 2), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("place", range(4))
def test_a_damaged_picture_fails_its_own_request_alone(place: int) -> None:
    items = [item((1, 2)), item((3,), (4,)), item((5, 6, 7))]
    items.insert(place, item((8,), (9, 0)))
    answers = dict(answers_of(encoder(cache=1 << 20), items))
    assert "the picture of 640x480 pixels cannot be decoded: damaged" in str(answers.pop(place))
    assert [answers[index].flatten().tolist() for index in sorted(answers)] == [[1, 2], [3, 4], [5, 6, 7]]


def test_a_failing_decoder_fails_that_request_alone() -> None:
    answers = dict(answers_of(encoder(), [item((1, 2)), item((255,), (3,)), item((4,))]))
    assert str(answers.pop(1)) == "the decoder itself failed"
    assert [answers[index].flatten().tolist() for index in sorted(answers)] == [[1, 2], [4]]


def test_a_damaged_picture_alone_is_answered() -> None:
    with pytest.raises(InvalidRequest, match="damaged"):
        encoder().encode([item((0,))])


def test_a_picture_too_large_to_decode_is_refused_with_numbers() -> None:
    vision = encoder()
    vision.decoder = GpuDecoder("cuda", 1000)
    with pytest.raises(InvalidRequest, match=r"640x480 pixels takes \d+ bytes .* keeps 1000 .*gpu_pixels"):
        vision.pictures(item((1,)))


def test_joined_tiles_are_where_the_decoded_ones_are() -> None:
    tiles = np.zeros((2, SIDE, SIDE, 3), np.uint8)
    assert joined([tiles]) is tiles
    assert isinstance(joined([tiles, tiles]), np.ndarray)
    mixed = joined([tiles, torch.ones(1, SIDE, SIDE, 3, dtype=torch.uint8)])
    assert isinstance(mixed, torch.Tensor) and mixed[:, 0, 0, 0].tolist() == [0, 0, 1]


def test_memory_is_known_before_and_bounds_what_is_decoded_at_once() -> None:
    def undecoded(side: int) -> Undecoded:
        return EncodedPicture(np.ones(9, np.uint8), side, side), (View(100, 100, (), ()),)

    small, large = (bytes_of([undecoded(side)]) for side in (100, 1000))
    assert 100 * 100 * 3 < small < large / 30
    assert large < bytes_of([undecoded(1000)] * 2) < 2 * large
    decoder = GpuDecoder("cuda", capacity=large)
    decoder.check(undecoded(1000))
    with pytest.raises(InvalidRequest, match=rf"1001x1001 pixels takes \d+ bytes .* keeps {large} .*gpu_pixels"):
        decoder.check(undecoded(1001))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    with pytest.raises(ConfigError, match="needs the packages nvidia-nvimgcodec-cu13 and nvidia-nvjpeg"):
        GpuDecoder("cuda", 1 << 30).pixels([(EncodedPicture(np.ones(9, np.uint8), 8, 8), ())])
