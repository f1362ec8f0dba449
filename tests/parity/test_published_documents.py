"""MinerU2.5-Pro and Qianfan-OCR: twins of what public code says of their files are read as transformers reads them, or
refused in words (docs/checkpoints.md cites each source)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen2_vl
import torch
from checkpoints import StillInternVL
from models.conformance import one_picture
from published_sizes import BODIES, TOWERS
from tiny_checkpoints import CHAT_TEMPLATE, QIANFAN_TEMPLATE, Shape, as_qianfan, hf_native, qianfan_processor
from tiny_qwen2_vl import picture
from tiny_tokenizers import write_json
from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration, Qwen2VLForConditionalGeneration

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import CheckpointError
from tessera.models.internvl.config import TileRule
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.registry import family_for, read_config
from tessera.models.tower import unfilled_tower
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest

# Beside Qwen2-VL's own: what MinerU's layouts are written in.
LAYOUT_TOKENS = ["<|ref_start|>", "<|ref_end|>", "<|rotate_up|>", "<|rotate_left|>", "<|txt_contd|>"]
PROMPTS = ("Layout Detection:", "Text Recognition:", "Table Recognition:", "Formula Recognition:", "Image Analysis:")
MINERU_PRO = {
    "text_config": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "tie_word_embeddings": True,  # stated here alone
    },
    "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 896},
}
PIXELS = {"min_pixels": 50176, "max_pixels": 1605632, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}


BODY = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "rms_norm_eps", "max_position_embeddings"),
)


def check_shape(config: CheckpointConfig, theirs: Any, tower: Sequence[str], parameters: float) -> None:
    """The sizes of the body and the ``tower`` are those of transformers' model of the folder, which has as many
    parameters as the authors say."""
    for ours, other, names in (
        (config.text, theirs.config.text_config, BODY),
        (config.vision, theirs.config.vision_config, tower),
    ):
        assert {name: getattr(ours, name) for name in names} == {name: getattr(other, name) for name in names}
    assert theirs.num_parameters() == pytest.approx(parameters, rel=0.02)


def both(ours: Preprocessor, processor: Any, messages: list[Any], pictures: list[Any]) -> tuple[list[int], list[int]]:
    """The token ids of a chat about pictures, (encoded, Pillow's) each, and transformers'."""
    found = ours(PreprocessRequest(messages=messages, images=[data for data, _ in pictures]))
    chat = processor.apply_chat_template(messages, add_generation_prompt=True)
    expected = processor(images=[image for _, image in pictures], text=chat, return_tensors="pt")
    return found.input_ids.tolist(), expected["input_ids"][0].tolist()


@pytest.fixture
def mineru(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As Qwen2-VL's folder, with Qwen2's words and MinerU's tokens, in the full shape."""
    monkeypatch.setattr(tiny_qwen2_vl, "TOKENS", [*tiny_qwen2_vl.TOKENS, *LAYOUT_TOKENS])
    folder = tiny_qwen2_vl.write_folder(tmp_path, **PIXELS)
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})
    return tiny_qwen2_vl.edit(folder, **MINERU_PRO)


def test_mineru_pro_is_qwen2_vl_of_another_shape(mineru: Path) -> None:
    config = read_config(mineru)
    assert (config.layout, config.text.architecture, config.text.head_dim) == ("qwen2_vl", "Qwen2ForCausalLM", 64)
    assert config.text.tie_word_embeddings and config.text.mrope_section == (8, 12, 12)
    assert unfilled_tower(config).row_shape == (1, 896)
    assert config.pictures == PixelRange(50176, 1605632)
    assert config.eos_token_ids == (2, 0)
    with torch.device("meta"):
        theirs = Qwen2VLForConditionalGeneration(Qwen2VLForConditionalGeneration.config_class.from_pretrained(mineru))
    check_shape(config, theirs, ("depth", "embed_dim", "num_heads", "mlp_ratio", "hidden_act"), 1.16e9)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_mineru_pros_prompts_are_those_of_transformers(mineru: Path, prompt: str) -> None:
    """The layout's picture among them, and the tokens that layouts are made of stay text where a user writes them."""
    processor = tiny_qwen2_vl.reference_processor(mineru, PIXELS["min_pixels"], PIXELS["max_pixels"])
    image = picture(300, 200, seed=1)
    ours = Preprocessor.from_checkpoint(mineru)
    for text in (f"\n{prompt}", f"\n{prompt} <|rotate_up|>"):
        found, expected = both(ours, processor, one_picture(text), [image])
        assert (found == expected) == (text == f"\n{prompt}")


def qianfan(**changes: Any) -> dict[str, Any]:
    body, tower = BODIES["Qwen3-4B"].config(), TOWERS["300M"]
    text = {name: value for name, value in body.items() if name not in ("architectures", "model_type")}
    vision = {name: tower[name] for name in tower if name not in ("qkv_bias", "qk_normalization")}
    raw = {
        "architectures": ["QianfanOCRForConditionalGeneration"],
        "model_type": "qianfan_ocr",
        "text_config": text | {"tie_word_embeddings": False},
        "vision_config": vision | {"drop_path_rate": 0.1},
        "image_token_id": 151671,
    }
    return raw | changes


def test_qianfan_ocr_is_internvl_of_qwen3(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", qianfan(ps_version="v2", force_image_size=448, max_dynamic_patch=12))
    config = read_config(tmp_path)
    assert (config.layout, config.text.architecture) == ("qianfan_ocr", "Qwen3ForCausalLM")
    assert unfilled_tower(config).row_shape == (256, 2560)
    assert config.pictures == TileRule(1, 12, "auto", "columns") and config.image_token_id == 151671
    with torch.device("meta"):
        theirs = QianfanOCRForConditionalGeneration(QianfanOCRConfig.from_pretrained(tmp_path))
    tower = ("hidden_size", "num_hidden_layers", "attention_bias", "use_qk_norm", "norm_type", "layer_norm_eps")
    check_shape(config, theirs, tower, 4.73e9)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ps_version", "v1", "ps_version 'v1' is not supported; supported are v2"),
        ("max_dynamic_patch", 16, "max_dynamic_patch 16 is not supported; supported are 12"),
        ("use_thumbnail", False, "use_thumbnail False is not supported"),
    ],
)
def test_what_transformers_passes_over_in_qianfan_ocr_is_refused(
    tmp_path: Path, name: str, value: object, words: str
) -> None:
    write_json(tmp_path / "config.json", qianfan(**{name: value}))
    with pytest.raises(CheckpointError, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize("template", [QIANFAN_TEMPLATE, CHAT_TEMPLATE], ids=["a placeholder", "the image token"])
def test_either_template_of_qianfan_ocr(tmp_path: Path, template: str) -> None:
    """Of its own processor, and of InternVL's, which its first files name; past answers lose their thoughts."""
    folder = as_qianfan(hf_native(tmp_path / "native", Shape(text="qwen3")), tmp_path / "q", template)
    processor = qianfan_processor(folder)
    if template == CHAT_TEMPLATE:
        parts = processor.image_processor, processor.tokenizer, None
        processor = StillInternVL(*parts, image_seq_length=processor.image_seq_length, chat_template=template)
    thought = "<think>\na table\n</think>\n\nOne."
    messages = [*one_picture("How many?"), {"role": "assistant", "content": thought}, *one_picture(" And\nhere? ")]
    pictures = [picture(60, 90, seed=4), picture(1000, 448, seed=5)]
    found, expected = both(Preprocessor.from_checkpoint(folder), processor, messages, pictures)
    assert found == expected


def test_a_placeholder_in_a_users_text_is_text(tmp_path: Path) -> None:
    """Where the request's pictures have places of their own; transformers would put the first picture there."""
    folder = as_qianfan(hf_native(tmp_path / "native", Shape(text="qwen3")), tmp_path / "q", QIANFAN_TEMPLATE)
    family = family_for(read_config(folder))
    assert family.template_image == "<image>"
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "image"}]}]
    ours = Preprocessor.from_checkpoint(folder)
    plain = ours(PreprocessRequest(messages=messages, images=[picture(60, 90, seed=4)[0]]))
    messages[0]["content"].insert(0, {"type": "text", "text": "<img> <image>"})  # type: ignore[attr-defined]
    typed = ours(PreprocessRequest(messages=messages, images=[picture(60, 90, seed=4)[0]]))
    assert len(plain.spans) == len(typed.spans) == 1 and typed.spans[0][0] > plain.spans[0][0]


def test_the_names_that_transformers_5_17_saves_are_refused_by_name(tmp_path: Path) -> None:
    """It calls the body's layers ``encoder.layers`` on the way back, which no reader but itself knows."""
    from safetensors.torch import load_file, save_file

    from tessera.checkpoint.weights import split_names

    folder = as_qianfan(hf_native(tmp_path / "native", Shape(text="qwen3")), tmp_path / "q", QIANFAN_TEMPLATE)
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.layers.", "model.encoder.layers."): value for name, value in stored.items()}
    save_file(renamed, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weights are not known to .*language_model.model.encoder.layers.0"):
        split_names(renamed, read_config(folder))
