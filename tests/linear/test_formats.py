"""Every format that is read, in every layout and body: W = (q - z) * s to the last bit; of the newer families in
tests/models/test_conformance.py."""

import pytest
import torch
from packers import FORMATS, quantize_folder
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from tiny_qwen2_vl import flatten, write_model

from tessera.engine.execution.model_runner import load_model
from tessera.models.registry import read_config
from tessera.settings.stages import EngineConfig

# Wider than a block of 128, and a feed-forward layer that ends within one.
SHAPE = dict(text_hidden=256, head_dim=64, text_heads=4, text_kv_heads=2, text_mlp=320, text_layers=1, vision_layers=1)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def internlm2(tmp_path):
    return as_internvl_chat(hf_native(tmp_path / "llama", Shape(text="llama", **SHAPE)), tmp_path / "internlm2")


def in_chat(text):
    def build(tmp_path):
        native = hf_native(tmp_path / text, Shape(text=text, **SHAPE))
        return as_internvl_chat(native, tmp_path / "chat", text=text)

    return build


def native(text, **options):
    return lambda tmp_path: hf_native(tmp_path / text, Shape(text=text, **SHAPE), **options)


def qwen2_vl(tmp_path):
    sizes = dict(hidden_size=256, num_attention_heads=4, intermediate_size=320, num_hidden_layers=1)
    write_model(tmp_path, sizes)
    return flatten(tmp_path)


def separate(found):
    """q, k and v, and gate and up, of one layer's W by module: as Qwen2, Qwen3 and Llama store them."""
    qkv = [found[f"self_attn.{part}_proj"] for part in "qkv"]
    gate_up = [found[f"mlp.{part}_proj"] for part in ("gate", "up")]
    return torch.cat(qkv), found["self_attn.o_proj"], torch.cat(gate_up), found["mlp.down_proj"]


def grouped(found):
    """InternLM2: rows of wqkv are grouped by key head."""
    groups = found["attention.wqkv"].view(KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM, -1)
    qkv = [groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)]
    gate_up = [found[f"feed_forward.{name}"] for name in ("w1", "w3")]
    return torch.cat(qkv), found["attention.wo"], torch.cat(gate_up), found["feed_forward.w2"]


def of_experts(found):
    """Qwen3-MoE: each expert's gate and up, one expert after the other, and so the downs."""
    experts = [[found[f"mlp.experts.{number}.{part}_proj"] for part in ("gate", "up", "down")] for number in range(8)]
    qkv = [found[f"self_attn.{part}_proj"] for part in "qkv"]
    gate_up, down = [each for gate, up, _ in experts for each in (gate, up)], [down for _, _, down in experts]
    return torch.cat(qkv), found["self_attn.o_proj"], torch.cat(gate_up), torch.cat(down)


def as_stored(found):
    """Phi-3: q, k and v are one matrix, gate and up another, in our order."""
    return found["self_attn.qkv_proj"], found["self_attn.o_proj"], found["mlp.gate_up_proj"], found["mlp.down_proj"]


# (what writes the folder, what its modules are in our fused layers)
BODIES = {
    "qwen2": (native("qwen2"), separate),
    "qwen2, names of transformers 4.52": (native("qwen2", prefix="model."), separate),
    "phi3, original layout": (in_chat("phi3"), as_stored),
    "qwen2_vl, as published": (qwen2_vl, separate),
    "internlm2, original layout": (internlm2, grouped),
    "qwen3_moe, original layout": (in_chat("qwen3_moe"), of_experts),
}


def load(folder):
    return load_model(read_config(folder), EngineConfig(threads=1, max_sequences=2))


# Of the other bodies one of each size of an element: what is read has one form whatever was stored.
SOME = {
    "qwen2": FORMATS,
    "qwen3_moe, original layout": ("awq 32", "packed asym", "float channel dynamic", "fp8 blocks"),
}
CASES = [
    (body, form)
    for body in BODIES
    for form in {**dict.fromkeys(SOME.get(body, ())), **dict.fromkeys(("gptq desc_act", "modelopt"))}
]


@pytest.mark.parametrize(("body", "form"), CASES)
def test_w_is_exact(tmp_path, body, form):
    build, fused = BODIES[body]
    folder = build(tmp_path)
    expected = quantize_folder(folder, FORMATS[form])
    layer = load(folder).layers[0]
    found = {module.split("layers.0.")[1]: w for module, w in expected.items() if ".layers.0." in module}
    for linear, w in zip((layer.qkv, layer.output, layer.gate_up, layer.down), fused(found), strict=True):
        assert torch.equal(linear.weight, w)
