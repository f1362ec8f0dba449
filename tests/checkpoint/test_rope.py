"""rope_scaling, rope_parameters and what stands beside them, against what transformers' own classes make of them."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from tiny_qwen2_vl import flatten, write_folder
from transformers import LlamaConfig, Phi3Config, Qwen2Config, Qwen2VLConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding

from tessera.checkpoint.config import TextConfig
from tessera.checkpoint.rope import TRAINED, Rope, RopeReader
from tessera.errors import CheckpointError
from tessera.models.registry import read_config
from tessera.models.text.config import BODIES

SIZES = {"hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
MROPE = {"mrope_section": [20, 22, 22]}
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
    "llama": (LlamaConfig, LlamaRotaryEmbedding),
    "phi3": (Phi3Config, Phi3RotaryEmbedding),
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLRotaryEmbedding),
    "qwen3_vl": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding),
}
#: where positions have axes: their sections, the base where none is stated, and whether they are interleaved
AXES = {"qwen2_vl": ([16, 24, 24], 1e6, False), "qwen3_vl": ([24, 20, 20], 5e5, True)}
SECTIONS: list[Any] = [
    None,
    {},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 5e5},
    {"type": "default", "rope_theta": 10000},
    {"rope_type": "default", "rope_theta": None},
    {"rope_type": None},
    {"rope_theta": 1e6},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    {"rope_type": "default", "type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "type": "dynamic", "factor": 2},
    {"type": "dynamic"},
    {"type": "yarn", "factor": 4.0},
    {"type": "yarn", **FACTORS},
    {"type": "nonsense", "factor": 4.0},
    {**LLAMA3, TRAINED: 2048},
    LLAMA3,
    {"type": "su", **FACTORS},
    {"type": "su", TRAINED: 4096, **FACTORS},
    {"type": "longrope", **FACTORS},
    {"rope_type": "longrope", TRAINED: 2048, **FACTORS},
    {"rope_type": "longrope", "factor": None, "attention_factor": 1.25, **FACTORS},
    {"rope_type": "longrope", "short_factor": [1.0] * 63, "long_factor": [2.0] * 64},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}},
    {"full_attention": None, "rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"type": "mrope", **MROPE},
    {"rope_type": "default", "rope_theta": 5e5, **MROPE},
    {"type": "linear", "factor": 2.0, **MROPE},
    "linear",
]
BESIDE = [{}, {"rope_theta": 5e5}, {"rope_theta": None}, {"partial_rotary_factor": 0.5}, {TRAINED: 2048}]


def ours(family: str, section: dict[str, Any]) -> Rope:
    body = next((body for body in BODIES if body.model_type == family), BODIES[0])
    axes, theta, interleaved = AXES.get(family, (None, 10000.0, False))
    section = {"rope_theta": theta} | section if axes else section
    return RopeReader(body.ropes, 128, 4096, "config.json", axes, body.rope_sections, interleaved).read(section, {})


def theirs(family: str, section: dict[str, Any]) -> dict[str, Any]:
    """What transformers computes with. Raises whatever it raises, of the configuration or of its use."""
    make_config, make_rotary = FAMILIES[family]
    stated = json.loads(json.dumps({**SIZES, "head_dim": 128, **section}))  # transformers writes into what it is given
    config = make_config(**stated)
    config = getattr(config, "text_config", config)
    rotary = make_rotary(config)
    rope = {name: value for name, value in config.rope_parameters.items() if value is not None}
    for name in ("type", "partial_rotary_factor", "mrope_interleaved"):
        rope.pop(name, None)
    return rope | ({"mrope_section": tuple(rotary.mrope_section)} if family in AXES else {})


def as_one(rope: Rope) -> dict[str, Any]:
    axes = {"mrope_section": rope.mrope_section} if rope.mrope_section else {}
    return {"rope_type": "default", **(rope.rope_scaling or {}), "rope_theta": rope.rope_theta, **axes}


#: how many of them load
READ = {"qwen2": 125, "qwen3": 125, "llama": 125, "phi3": 103, "qwen2_vl": 92, "qwen3_vl": 81}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_rope_is_read_otherwise_than_by_transformers(family: str) -> None:
    """Of both sections in every combination, each loads as there or is refused, and what fails there is refused."""
    read = 0
    pairs = [
        {"rope_scaling": scaling, "rope_parameters": parameters} for scaling, parameters in product(SECTIONS, repeat=2)
    ]
    alone = [
        {name: settings} | beside
        for name in ("rope_scaling", "rope_parameters")
        for settings in SECTIONS
        for beside in BESIDE
    ]
    for section in pairs + alone:
        try:
            mine = as_one(ours(family, section))
        except CheckpointError:
            continue
        assert mine == theirs(family, section), section
        read += 1
    assert read == READ[family]


SAVED = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "phi3", "internlm2", "qwen2_vl"])
@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        # what a user adds to a config.json that transformers 5 saved
        (
            {"rope_parameters": SAVED, "rope_scaling": {"type": "linear", "factor": 2.0}},
            r"state two ropes that differ, .*'linear'.*'factor': 2.0.* and .*1000000.0|rope type 'linear'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "'full_attention' is no set"),
        ({"rope_parameters": "linear"}, "rope_parameters must be an object, not 'linear'"),
        ({"rope_theta": None}, "rope_theta must be a positive number, not None"),
    ],
)
def test_these_are_refused_by_name(family: str, section: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        ours(family, section)


@pytest.mark.parametrize(
    ("family", "section", "complaint"),
    [
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' .* default, longrope"),
        ("phi3", {"rope_scaling": {"type": "su", **FACTORS}}, f"needs the setting '{TRAINED}'"),
        ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS, "long_factor": [1.0]}}, "long_factor must be 64 num"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive number, not '2'"),
        ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor 1.0 must be greater"),
        ("llama", {"rope_scaling": {**LLAMA3, TRAINED: 2048}, TRAINED: 1024}, f"{TRAINED} 2048 is not supported"),
        ("internlm2", {"rope_scaling": LLAMA3}, "rope type 'llama3' .* default, linear, dynamic"),
        ("internlm2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "two ropes that differ"),
    ],
)
def test_what_a_family_may_not_ask_for(family: str, section: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        ours(family, section)


def read_edited(folder: Path, place: str | None, **settings: Any) -> TextConfig:
    raw = json.loads((folder / "config.json").read_text())
    (raw[place] if place else raw).update(settings)
    (folder / "config.json").write_text(json.dumps(raw))
    return read_config(folder).text


SCALED = {"rope_scaling": {"type": "linear", "factor": 2.0}}
SCALED_AXES = {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [2, 3, 3]}}


def test_a_scaling_added_to_a_saved_config_is_not_passed_over(tmp_path: Path) -> None:
    """In the section, or in config.json beside it, where transformers would not look."""
    native = hf_native(tmp_path / "native", Shape(text="llama"))
    chat = as_internvl_chat(hf_native(tmp_path / "llama", Shape(text="llama")), tmp_path / "chat")
    nested, flat = write_folder(tmp_path / "nested"), flatten(write_folder(tmp_path / "flat"))
    for folder, place in ((native, None), (native, "text_config"), (chat, None), (nested, None), (flat, None)):
        saved = (folder / "config.json").read_text()
        read_config(folder)
        with pytest.raises(CheckpointError, match="two ropes that differ|rope type 'linear'|beside mrope_section"):
            read_edited(folder, place, **(SCALED_AXES if folder in (nested, flat) else SCALED))
        (folder / "config.json").write_text(saved)
    in_its_code = read_edited(chat, "llm_config", **SCALED)
    assert in_its_code.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_a_rope_stated_twice_alike_loads(tmp_path: Path) -> None:
    """As transformers 4.52 saved Qwen2-VL: in config.json and in text_config."""
    folder = write_folder(tmp_path)
    again = json.loads((folder / "config.json").read_text())["text_config"]["rope_scaling"]
    assert read_edited(folder, None, rope_scaling=again, rope_theta=1e6).mrope_section == (2, 3, 3)
