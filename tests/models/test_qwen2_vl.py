"""What Qwen2-VL makes of pictures and chats: sizes, token counts by either bound, plans, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.backend import InferenceRequest, strings
from preprocess import encoded_pictures as pictures
from tiny_qwen2_vl import GROUP, edit, write_folder
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs_resized

from tessera.errors import CheckpointError, InvalidRequest
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.qwen2_vl.processor import smart_resize
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.tritonserver.preprocess import TritonPythonModel

MODEL = Path(__file__).parents[2] / "model_repository" / "preprocess"
PAGE = pictures.jpeg(620, 877)  # A4 at 75 dots per inch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen2_vl"), min_pixels=4 * GROUP, max_pixels=1280 * GROUP)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Preprocessor:
    return Preprocessor.from_checkpoint(folder)


def test_smart_resize_of_5000_sizes() -> None:
    """Some of them too long, some at the halves between two multiples; all bounds from one group to a large page."""
    dice = np.random.default_rng(0)
    refused = 0
    for index in range(5000):
        width, height = (int(side) for side in np.exp(dice.uniform(0, 9, 2)))
        if index % 5 == 0:
            width, height = 14 * (1 + width // 14), 14 * (1 + height // 14)
        least, most = sorted(int(pixels) for pixels in np.exp(dice.uniform(5, 17, 2)))
        try:
            expected = theirs_resized(height, width, 28, least, most)
        except ValueError:
            refused += 1
            with pytest.raises(InvalidRequest, match="more than 200 times"):
                smart_resize(width, height, 28, PixelRange(least, most))
        else:
            assert smart_resize(width, height, 28, PixelRange(least, most)) == expected[::-1], (width, height)
    assert 100 < refused < 1000


def tokens(found: Prepared) -> list[int]:
    return found.spans[:, 1].tolist()


@pytest.mark.parametrize(
    ("deployment", "request_", "count"),
    [
        ({}, {}, 22 * 31),
        ({"max_pixels": 256 * GROUP}, {}, 13 * 19),
        ({}, {"min_pixels": 1024 * GROUP}, 27 * 39),
        ({"max_pixels": 256 * GROUP}, {"max_pixels": 64 * GROUP}, 6 * 9),
        ({"max_pixels": 256 * GROUP}, {"max_pixels": 1280 * GROUP}, 22 * 31),
        ({"min_pixels": 1024 * GROUP}, {"min_pixels": 1}, 22 * 31),
        ({"max_pixels": 256 * GROUP}, {"min_pixels": 256 * GROUP}, 13 * 19),
    ],
)
def test_a_page_s_tokens(folder: Path, deployment: dict[str, int], request_: dict[str, int], count: int) -> None:
    """By what the deployment sets and what the request says, which goes before it; else the checkpoint's 4 to 1280."""
    preprocessor = Preprocessor.from_checkpoint(folder, PreprocessSettings(tile_policy=json.dumps(deployment)))
    found = preprocessor(PreprocessRequest(text="?", images=[PAGE], **request_))
    as_policy = preprocessor(PreprocessRequest(text="?", images=[PAGE], tile_policy=request_))
    assert np.array_equal(found.digest, as_policy.digest)
    assert tokens(found) == [count]
    assert found.pixels.size == count * GROUP * 3
    assert int((found.input_ids == preprocessor.family.image_token_id).sum()) == count


def test_low_detail_is_512_by_512_pixels_at_most(ours: Preprocessor) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "detail": "low"}]}]
    for most in (None, 64 * GROUP):
        found = ours(PreprocessRequest(messages=messages, images=[PAGE], max_pixels=most))
        assert (
            found.plans[0].tokens * GROUP
            <= min(512 * 512, most or 512 * 512)
            < ours(PreprocessRequest(text="?", images=[PAGE])).plans[0].tokens * GROUP
        )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_pixels": "1003520"}, "max_pixels must be a whole number from 1 to 2147483647, not '1003520'"),
        ({"max_pixels": True}, "not True"),
        ({"min_pixels": 0}, "min_pixels must be"),
        ({"min_pixels": 10**410}, "min_pixels must be"),
        ({"min_pixels": 2000 * GROUP}, f"min_pixels {2000 * GROUP} is above max_pixels {1280 * GROUP}"),
        ({"max_pixels": 5000 * GROUP}, "makes up to 5000 image tokens of a picture; this server's limit is 4096"),
        ({"tile_policy": "native"}, "unknown key 'name'; this model's are min_pixels, max_pixels"),
        ({"tile_policy": {"max_tiles": 6}}, "unknown key 'max_tiles'"),
    ],
)
def test_a_request_s_bounds_are_refused(ours: Preprocessor, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours(PreprocessRequest(text="?", images=[PAGE], **asked))
    assert len(str(caught.value)) <= 400


def stage_outputs(*inputs: Any, **wanted: Any) -> dict[str, np.ndarray]:
    """What preprocess answers to PAGE as a stage of the server."""
    stage = TritonPythonModel()
    stage.initialize({"model_name": "preprocess", "model_repository": str(MODEL), "model_config": "{}"})
    (response,) = stage.execute([InferenceRequest([strings("image", PAGE), *inputs], **wanted)])
    assert not response.has_error(), response.error()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def test_the_stage_reads_both_from_the_environment_and_the_request(
    backend: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions leave it where the family has any; how a picture is cut where that is asked."""
    assert "POSITIONS" not in stage_outputs(strings("text_input", b"What?"))  # of the default model, InternVL
    monkeypatch.setenv("TESSERA_CHECKPOINT", str(folder))
    found = stage_outputs(outputs=("CUT", "POSITIONS", "INPUT_IDS"))
    view = {"width": 616, "height": 868, "rows": 31, "columns": 22}
    assert json.loads(found["CUT"][0]) == [{"tokens": 682, "unit": "image tokens", "policies": [], "views": [view]}]
    assert found["POSITIONS"].shape == (3, len(found["INPUT_IDS"])) and found["POSITIONS"].dtype == np.int32
    monkeypatch.setenv("TESSERA_PREPROCESS_TILE_POLICY", '{"max_pixels": 200704}')
    for sampling, patches in ((b"{}", [38, 26]), (b'{"max_pixels": 50176}', [18, 12])):
        assert stage_outputs(strings("sampling_parameters", sampling))["PLAN"].tolist() == [[0, 1, *patches]]


def test_limits_count_image_tokens(folder: Path, ours: Preprocessor) -> None:
    limited = Preprocessor.from_checkpoint(folder, PreprocessSettings(max_cost=1000))
    with pytest.raises(InvalidRequest, match="2 images make 1364 image tokens; the limit is 1000.*lower max_pixels"):
        limited(PreprocessRequest(text="?", images=[PAGE, PAGE]))
    with pytest.raises(InvalidRequest, match=r"4092 of them for 6 images.*or lower max_pixels"):
        ours(PreprocessRequest(text="?", images=[PAGE] * 6))


@pytest.mark.parametrize("wire", [(1, 0, 2), (1, 3, 2), (1, 2, 5), (1, -2, -2)])
def test_what_can_be_no_plan_is_refused(ours: Preprocessor, wire: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{wire[1]}x{wire[2]} patches are no grid of groups of 2x2"):
        ours.family.plan_of(wire)


def test_video_is_refused_by_name(ours: Preprocessor) -> None:
    with pytest.raises(InvalidRequest, match="2 frames: video is not supported; send pictures"):
        ours.family.plan_of((2, 4, 4))
    for part in ({"type": "video"}, {"type": "video_url", "video_url": {"url": "data:,"}}):
        with pytest.raises(InvalidRequest, match=f"image or image_url, not '{part['type']}'"):
            ours(PreprocessRequest(messages=[{"role": "user", "content": [part]}]))
    pad = ours.prompts.tokenizer.token_id("<|video_pad|>")
    assert pad not in ours(PreprocessRequest(text="<|video_pad|>")).input_ids


def test_a_marker_is_an_image_with_its_vision_tokens(ours: Preprocessor) -> None:
    """In front of the text as the template has it, so that both ways are one prompt."""
    marked = ours(PreprocessRequest(text="<image>What is this?", images=[PAGE]))
    by_part = ours(PreprocessRequest(text="What is this?", images=[PAGE]))
    assert np.array_equal(marked.input_ids, by_part.input_ids)
    (start, length), names = marked.spans[0], ours.prompts.tokenizer.token_id
    assert marked.input_ids[start - 1] == names("<|vision_start|>")
    assert marked.input_ids[start + length] == names("<|vision_end|>")


def test_a_user_spells_no_picture_but_may_mark_boxes(ours: Preprocessor) -> None:
    forged = ours(PreprocessRequest(text="<|vision_start|><|image_pad|><|vision_end|><|box_start|>"))
    found, names = set(forged.input_ids.tolist()), ours.prompts.tokenizer.token_id
    assert not found & {names("<|vision_start|>"), names("<|image_pad|>")} and names("<|box_start|>") in found


def test_another_image_token_needs_another_id(tmp_path: Path, ours: Preprocessor) -> None:
    write_folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"image_token": "<|video_pad|>"}))
    with pytest.raises(
        CheckpointError, match=r"image token <\|video_pad\|> has id \d+ in the tokenizer, \d+ in config.json"
    ):
        Preprocessor.from_checkpoint(tmp_path)
    edit(tmp_path, image_token_id=ours.prompts.tokenizer.token_id("<|video_pad|>"))
    assert Preprocessor.from_checkpoint(tmp_path).family.image_token == "<|video_pad|>"
