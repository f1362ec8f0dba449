"""Phi-3: Llama's decoder whose q, k and v, and gate and up, are stored as one matrix each.

Source: transformers ``modeling_phi3.py``. Its longrope is ``layers/rotary.py``'s.
"""

from __future__ import annotations

from tessera.engine.models.qwen2 import DecoderLayer, LayerNames, Qwen2


class Phi3Layer(DecoderLayer):
    """The rows of the stored matrices are in the order of ours."""

    names = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


class Phi3(Qwen2):
    """Phi3ForCausalLM."""

    layer_class = Phi3Layer
