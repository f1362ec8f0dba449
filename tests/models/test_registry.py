"""The one table of families: a family of another package is served like ours, and what is not known is named."""

import subprocess
import sys
from pathlib import Path

import pytest
from models.checkpoint_folders import byte_level, write, write_hf_folder

from tessera.errors import CheckpointError, ConfigError
from tessera.models import registry
from tessera.models.registry import MODELS, family_for, model_class, models, read_config, vision_tensors
from tessera.models.text.config import BODIES
from tessera.models.tower import tower_class

# A family that reads config.json as InternVL does, under names of its own, with a body of its own, whose sections, rows
# and switch of biases are none of ours.
STAND_IN = """
from dataclasses import replace
from tessera.models.registry import MODELS
from tessera.models.text.config import BODIES
BODY = replace(BODIES[0], architecture="StandInForCausalLM", model_type="stand_in", biases=("use_bias", False))
SPEC = replace(
    MODELS[0], names=("StandInForConditionalGeneration",), mps_priority=2, processor=__name__ + ":Processor",
    read_config=__name__ + ":read", text_bodies=(BODY,),
)
def read(folder, raw):
    from tessera.models.internvl import config
    from tessera.models.text.config import assemble
    theirs = config.read(folder, raw | {"architectures": ["InternVLForConditionalGeneration"]})
    rope = {"mrope_section": [8, 4, 4], "mrope_interleaved": True, "rope_type": "default"}
    text = {"architectures": ["StandInForCausalLM"], "use_bias": True, "rope_scaling": rope, **SIZES}
    return assemble(folder, raw, text, mrope_section=[1], bodies=(BODY,), mrope_interleaved=True, row_depth=3,
                    vision_names=(), layout="mine", vision=theirs.vision, pictures=theirs.pictures, image_token_id=1)
SIZES = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, vocab_size=9)
def __getattr__(name):
    from tessera.models.internvl.processor import InternVL
    return type("Processor", (InternVL,), {"cost_unit": "stand-ins"})
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a distribution with an entry point of group tessera.models on the path."""

    def do(value: str, code: str = STAND_IN) -> None:
        (tmp_path / "a_family.py").write_text(code)
        about = tmp_path / "a_family-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[tessera.models]\na_family = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)
        models.cache_clear()

    yield do
    models.cache_clear()
    sys.modules.pop("a_family", None)


def test_a_family_comes_from_another_package(install, tmp_path: Path) -> None:
    install("a_family:SPEC")
    folder = write_hf_folder(tmp_path / "checkpoint", byte_level())
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("InternVLFor", "StandInFor"))
    config = read_config(folder)
    assert family_for(config).cost_unit == "stand-ins"
    assert tower_class(config).__name__ == "InternViT"
    assert models()[config.architecture].mps_priority == 2
    text = config.text
    assert (text.attention_bias, text.row_size, text.mrope_section) == (True, 192, (8, 4, 4)) and text.mrope_interleaved
    assert model_class("StandInForCausalLM") is model_class("Qwen2ForCausalLM")
    assert vision_tensors(folder) == MODELS[0].vision_tensors


@pytest.mark.parametrize(
    ("value", "code", "complaint"),
    [
        ("a_family:SPEC", "1 / 0", r"a_family \(a_family:SPEC\) cannot be loaded: ZeroDivisionError"),
        ("a_family:MISSING", "", "cannot be loaded: AttributeError"),
        ("a_family:SPEC", STAND_IN + 'SPEC = MODELS[1]', "claims Qwen2VLForConditionalGeneration, qwen2_vl, which"),
    ],
    ids=["fails", "is not there", "is another's"],
)  # fmt: skip
def test_an_entry_point_that_cannot_be_used_is_named(install, value: str, code: str, complaint: str) -> None:
    install(value, code)
    with pytest.raises(ConfigError, match=complaint):
        models()


def test_a_family_that_is_not_known_is_refused_with_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "a_relative"})
    with pytest.raises(CheckpointError, match=r"'a_relative' is not supported; supported are .*internvl"):
        read_config(tmp_path)
    assert vision_tensors(tmp_path) == vision_tensors(tmp_path / "none") == "(?!)"


def test_every_import_path_leads_somewhere() -> None:
    """And the table itself loads none of them."""
    program = (
        "import sys, tessera.models.registry as r; r.models(); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    for spec in MODELS:
        for path in (spec.read_config, spec.processor, spec.vision_tower):
            assert callable(registry.resolve_name(path))
    for body in BODIES:
        assert model_class(body.architecture).__name__ + "ForCausalLM" in (body.architecture, "Qwen2ForCausalLM")
