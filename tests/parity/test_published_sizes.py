"""Every published size: its configuration is read and has a model and a tower, or it is refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from published_sizes import BODIES, NATIVE_NAMES, REFUSED, SIZES, TOWERS, Size
from tiny_tokenizers import write_json

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import CheckpointError
from tessera.linear.quantization import scheme_selector
from tessera.models.registry import model_class, read_config
from tessera.models.tower import unfilled_tower

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def original(folder: Path, size: Size) -> CheckpointConfig:
    sections = {"llm_config": BODIES[size.body].config(), "vision_config": TOWERS[size.tower]}
    return read(folder, {"architectures": ["InternVLChatModel"], "template": size.template, **sections})


def native(folder: Path, size: Size) -> CheckpointConfig:
    tower = {NATIVE_NAMES.get(name, name): value for name, value in TOWERS[size.tower].items()}
    body = BODIES[size.body].config()
    if (body.get("rope_scaling") or {}).get("type") == "su":  # of the original code alone
        body["rope_scaling"] = body["rope_scaling"] | {"type": "longrope"}
    sections = {"text_config": body, "vision_config": tower}
    return read(folder, {"architectures": ["InternVLForConditionalGeneration"], **sections})


def read(folder: Path, config: dict[str, Any]) -> CheckpointConfig:
    write_json(folder / "config.json", config)
    return read_config(folder)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_both_layouts_describe_the_same_model(tmp_path: Path, size: Size) -> None:
    """Which has a tower, and heads that the kernels take."""
    ours = original(tmp_path, size)
    assert ours.conversation == size.template
    assert unfilled_tower(ours).row_shape == (256, BODIES[size.body].hidden)
    if size.architecture != "InternLM2ForCausalLM":  # which transformers does not have
        twin = native(tmp_path, size)
        assert twin.text == ours.text
        assert (twin.vision.ps_version, ours.vision.ps_version) == ("v2", "v1")
        names = ("hidden_size", "num_attention_heads", "norm_type", "attention_bias", "use_qk_norm")
        assert [getattr(twin.vision, name) for name in names] == [getattr(ours.vision, name) for name in names]
    pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")
    from tessera.kernels.operands import PagedCache
    from tessera.kernels.paged_decode import check_cache

    model = model_class(ours.text.architecture)(ours.text, scheme_selector(None), torch.bfloat16, torch.device("meta"))
    heads = model.heads
    cache = torch.empty(1, 16, heads.kv_heads, heads.head_dim, device="meta")
    q = torch.empty(1, heads.heads, heads.head_dim, device="meta")
    check_cache(q, PagedCache(cache, cache), q)


@pytest.mark.parametrize(("name", "architecture", "model_type", "template", "why"), REFUSED)
def test_what_is_refused_is_refused_in_both_layouts(
    tmp_path: Path, name: str, architecture: str, model_type: str, template: str, why: str
) -> None:
    text, tower = {"architectures": [architecture]}, {"image_size": 448}
    with pytest.raises(CheckpointError, match=f"'{architecture}' is not supported: .*{why}"):
        read(tmp_path, {"architectures": ["InternVLChatModel"], "llm_config": text, "vision_config": tower})
    text = {"model_type": model_type}
    with pytest.raises(CheckpointError, match=f"'{model_type}' is not supported: .*{why}"):
        read(tmp_path, {"model_type": "internvl", "text_config": text, "vision_config": tower})


def test_the_page_has_every_size_once() -> None:
    """A row of its table: sizes, body, tower, template, ..., what happens."""
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    found = {}
    for cells in (cells for cells in rows if cells and cells[0].startswith("InternVL")):
        series = re.match(r"InternVL[\d.]+", cells[0])
        assert series is not None
        for name in cells[0].split(", "):
            found[name if name.startswith("InternVL") else f"{series[0]}-{name}"] = cells
    assert set(found) == {size.name for size in SIZES} | {refused[0] for refused in REFUSED}
    for size in SIZES:
        assert found[size.name][1:4] == [size.body, size.tower, size.template], size.name
        assert "refused" not in found[size.name][-1]
    for name, architecture, _, template, why in REFUSED:
        assert found[name][3] == template
        assert architecture in found[name][-1] and why in found[name][-1], name
