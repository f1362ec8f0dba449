"""Pictures that travel encoded: frames that lie are refused, decoding happens once and late, a bad one stands alone.

What follows the decoding on the GPU, here on the CPU: orientation, resize and cut, against the CPU's way."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from vision_fakes import SIDE, TileDecoder, TileFamily, encoder, flat, frame, item, tiles_of

from tessera.errors import ConfigError, InvalidRequest
from tessera.models.family import FRAME, EncodedPicture, View
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.vision.pictures import GpuDecoder, VisionItem, bytes_of, joined, pictures_of, pixels_of


def answers_of(vision, items):
    """The tiles of each item, or the error in their place, as they are given out, and pictures decoded by then."""
    for pending in vision.launch(items):
        try:
            with pending.rows() as rows:
                yield pending.index, tiles_of(rows), vision.decoder.count
        except (InvalidRequest, RuntimeError) as error:
            yield pending.index, str(error), vision.decoder.count


def with_decoder(cache=0):
    return encoder(3, cache, decoder=TileDecoder())


GOOD = frame(1, 2).tobytes()


@pytest.mark.parametrize(
    ("pixels", "complaint"),
    [
        (GOOD[:-1], "states 2 bytes; PIXELS has 1 after it"),
        (GOOD[:7], "PIXELS ends 13 bytes inside its frame of 20"),
        (GOOD + b"x", "PIXELS has 23 bytes; the plan needs 22"),
        (FRAME.pack(2**64 - 1, 640, 480, 1) + b"xx", f"states {2**64 - 1} bytes"),
        (FRAME.pack(0, 640, 480, 1), "states 0 bytes"),
        (FRAME.pack(2, 0, 480, 1) + b"xx", "0x480 pixels"),
        (FRAME.pack(2, 640, 2**31, 1) + b"xx", "640x2147483648 pixels"),
        (FRAME.pack(2, 640, 480, 9) + b"xx", "orientation 9"),
    ],
)
def test_frames_that_cannot_be_right_are_refused(pixels, complaint):
    given = VisionItem(np.frombuffer(pixels, np.uint8), np.array([1, 2, 1, 2], np.int32), np.zeros(2, np.int64))
    with pytest.raises(InvalidRequest, match=complaint):
        pictures_of(given, TileFamily(), TileDecoder())


def test_encoded_and_cut_pictures_share_forwards():
    vision = with_decoder()
    rows = vision.encode(
        [item([1, 2], [3], encoded=[True, False]), item([4, 5]), item(), item([6, 7, 8], encoded=True)]
    )
    assert [tiles_of(row) for row in rows] == [[1, 2, 3], [4, 5], None, [6, 7, 8]]
    assert vision.runner.batches == [3, 3, 2]


def test_a_picture_is_decoded_once_and_never_when_its_rows_are_known():
    vision = with_decoder(cache=100)
    for requests in ([[[1, 2]], [[1, 2]], [[3], [1, 2]]], [[[1, 2]]]):
        rows = vision.encode([item(*pictures, encoded=True) for pictures in requests])
        assert tiles_of(rows[-1])[-2:] == [1, 2] and vision.decoder.count == 2


def test_pictures_are_decoded_when_a_forward_needs_them_and_others_with_them():
    """Forwards of three tiles, two pictures decoded at once: the third waits for the forward that it is in."""
    items = [item(tiles, encoded=tiles != [8]) for tiles in ([1, 2, 3], [4], [5, 6, 7], [8], [9])]
    seen = [(index, decoded) for index, _, decoded in answers_of(with_decoder(), items)]
    assert seen == [(0, 2), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ([[8], [9, 0]], "the picture of 640x480 pixels cannot be decoded: damaged"),
        ([[255], [8]], "the decoder itself failed"),
    ],
)
def test_a_damaged_picture_fails_its_own_request_alone(place, bad, complaint):
    pictures = [[[1, 2]], [[3], [4]], [[5, 6, 7]]]
    expected = [flat(each) for each in pictures]
    pictures.insert(place, bad)
    expected.insert(place, complaint)
    answers = answers_of(with_decoder(cache=100), [item(*each, encoded=True) for each in pictures])
    assert sorted((index, found) for index, found, _ in answers) == list(enumerate(expected))


def test_a_damaged_picture_alone_is_answered():
    with pytest.raises(InvalidRequest, match="damaged"):
        with_decoder().encode([item([0], encoded=True)])


def test_joined_tiles_are_where_the_decoded_ones_are():
    tiles = np.zeros((2, SIDE, SIDE, 3), np.uint8)
    assert joined([tiles]) is tiles
    assert isinstance(joined([tiles, tiles]), np.ndarray)
    mixed = joined([tiles, torch.ones(1, SIDE, SIDE, 3, dtype=torch.uint8)])
    assert isinstance(mixed, torch.Tensor) and mixed[:, 0, 0, 0].tolist() == [0, 0, 1]


def test_memory_is_known_before_and_bounds_what_is_decoded_at_once():
    def undecoded(side):
        return EncodedPicture(np.ones(9, np.uint8), side, side), (View(100, 100, (), ()),)

    small, large = (bytes_of([undecoded(side)]) for side in (100, 1000))
    assert 100 * 100 * 3 < small < large / 30
    assert large < bytes_of([undecoded(1000)] * 2) < 2 * large
    decoder = GpuDecoder("cuda", capacity=large)
    decoder.check(undecoded(1000))
    with pytest.raises(InvalidRequest, match=rf"1001x1001 pixels takes \d+ bytes .* keeps {large} .*gpu_pixels"):
        decoder.check(undecoded(1001))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    with pytest.raises(ConfigError, match="needs the packages nvidia-nvimgcodec-cu13 and nvidia-nvjpeg"):
        GpuDecoder("cuda", 1 << 30).pixels([(EncodedPicture(np.ones(9, np.uint8), 8, 8), ())])


CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("policy", [{"max_tiles": 6}, {"max_tiles": 2, "thumbnail": "never"}, {"max_tiles": 1}])
def test_tiles_are_those_that_preprocess_cuts(orientation: int, policy: dict) -> None:
    """Noise of black and white clips between the passes of the resize, so that a wrong order shows."""
    tags, stream = Image.Exif(), io.BytesIO()
    tags[0x0112] = orientation
    dice = np.random.default_rng(orientation)
    picture = Image.fromarray(dice.integers(0, 2, (250, 611, 3), dtype=np.uint8) * 255)
    picture.save(stream, "JPEG", exif=tags.tobytes())
    stage = Preprocessor.from_checkpoint(CHECKPOINT)
    expected = stage(PreprocessRequest(text="?", images=[stream.getvalue()], tile_policy=policy))
    stored = torch.from_numpy(np.array(Image.open(stream))).permute(2, 0, 1)
    found = pixels_of(stored, orientation, expected.plans[0].views)
    assert found.dtype == torch.uint8 and found.shape == expected.pixels.shape
    difference = np.abs(found.int().numpy() - expected.pixels)
    assert difference.mean() <= 0.1 and difference.max() <= 2
