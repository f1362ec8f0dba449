"""What stands where in a decoder layer: which stored modules read which input, and what comes before each input.

Names are those of ``tessera.checkpoint.names``: the same for every layout, one set for each body.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.errors import CheckpointError

#: the linear layers of the engine's DecoderLayer, in the order in which a token meets them
INPUTS = ("qkv", "output", "gate_up", "down")
#: a stored module -> the linear layer that it is, or is a part of
LINEARS = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.qkv_proj": "qkv",
    "attention.wqkv": "qkv",
    "self_attn.o_proj": "output",
    "attention.wo": "output",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.gate_up_proj": "gate_up",
    "feed_forward.w1": "gate_up",
    "feed_forward.w3": "gate_up",
    "mlp.down_proj": "down",
    "feed_forward.w2": "down",
}
#: a norm -> the linear layer whose input it gives, and gives to nothing else
NORMS = {
    "input_layernorm": "qkv",
    "attention_norm": "qkv",
    "post_attention_layernorm": "gate_up",
    "ffn_norm": "gate_up",
}
#: a module whose outputs are, one for one, factors of a linear layer's inputs
FACTORS = {"self_attn.v_proj": "output", "mlp.up_proj": "down", "feed_forward.w3": "down"}
#: attention scores multiply these two: clipping each for its own error would do harm (AWQ leaves them out as well)
UNCLIPPED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.qkv_proj", "attention.wqkv")


@dataclass
class LayerModules:
    """The modules of one decoder layer, by the linear layer that reads them."""

    members: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in INPUTS})
    norms: dict[str, str] = field(default_factory=dict)
    factors: dict[str, str] = field(default_factory=dict)


def layer_modules(shapes: dict[str, tuple[int, ...]]) -> LayerModules:
    """Sorts the tensors of a layer, by our names without ``model.layers.N.``, with their shapes.

    Raises CheckpointError for a matrix that is none of LINEARS.
    """
    found = LayerModules()
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight":
            continue
        if module in LINEARS:
            found.members[LINEARS[module]].append(module)
        elif module in NORMS:
            found.norms[NORMS[module]] = module
        elif len(shape) > 1:
            raise CheckpointError(f"tessera quantize does not know what the matrix {name!r} of a layer does")
    for factor, target in FACTORS.items():
        members = found.members[target]
        # With fewer key heads than heads, a value feeds several inputs of the output projection.
        if members and f"{factor}.weight" in shapes and shapes[f"{factor}.weight"][0] == _inputs(shapes, members):
            found.factors[target] = factor
    return found


def _inputs(shapes: dict[str, tuple[int, ...]], members: list[str]) -> int:
    return shapes[f"{members[0]}.weight"][1]
