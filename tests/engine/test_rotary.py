"""Angles by rules of their own; the scalings of whole models are in tests/parity."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding

from tessera.models.text.rotary import Rotary


def rotary(scaling=None, head_dim=8, theta=100.0, trained=16, sections=None, interleaved=False):
    config = SimpleNamespace(
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=trained,
        mrope_section=sections,
        mrope_interleaved=interleaved,
    )
    return Rotary(config, torch.device("cpu"))


@pytest.mark.parametrize("sections", [(24, 20, 20), (32, 16, 16), (22, 21, 21), (30, 30, 4)])
def test_interleaved_sections_are_those_of_transformers(sections):
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": list(sections), "mrope_interleaved": True}
    theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(rope_parameters=rope))
    positions = torch.randint(0, 900, (3, 40))
    cos, sin = theirs(torch.zeros(1), positions[:, None])
    ours = rotary(None, 128, 5e5, sections=sections, interleaved=True).angles(positions, torch.ones(40))
    torch.testing.assert_close(torch.stack(ours), torch.stack((cos[0, :, :64], sin[0, :, :64])))


@pytest.mark.parametrize(
    ("scaling", "salts"),
    [
        (None, {1000: 0}),
        ({"rope_type": "dynamic", "factor": 3.0}, {16: 0, 17: 17}),  # each length has a base of its own
        ({"rope_type": "longrope", "original_max_position_embeddings": 4}, {4: 0, 5: 1, 6: 1}),
    ],
)
def test_prompts_whose_angles_differ_share_nothing(scaling, salts):
    factors = {name: [1.0, 2.0, 4.0, 8.0] for name in ("short_factor", "long_factor")}
    module = rotary(scaling and {**factors, **scaling})
    assert {length: module.salt(length) for length in salts} == salts


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4,
    "short_factor": [1.0, 2.0, 4.0, 8.0],
    "long_factor": [3.0, 5.0, 7.0, 9.0],
}


@pytest.mark.parametrize(("stated", "scale"), [({"attention_factor": 1.25}, 1.25), ({"factor": 1.0}, 1.0)])
def test_longrope_s_scale_may_be_stated(stated, scale):
    cos, sin = rotary(LONGROPE | stated).angles(torch.tensor([[3]]), torch.tensor([9]))
    torch.testing.assert_close(torch.hypot(sin, cos), torch.full((1, 4), scale))
