"""What stands where in a decoder layer: which stored modules read which input, and what comes before each input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera.engine.models.qwen2 import LayerNames

#: the linear layers of the engine's DecoderLayer, in the order in which a token meets them
INPUTS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True)
class LayerModules:
    """Stored modules by the linear layer that they are or are a part of: ``members``.

    ``norms``: what gives a linear layer its input, and gives it to nothing else. ``factors``: a module whose outputs
    are, one for one, factors of a linear layer's inputs. ``unclipped``: attention scores multiply these two, so that
    clipping each for its own error would do harm (AWQ leaves them out as well).
    """

    members: Mapping[str, tuple[str, ...]]
    norms: Mapping[str, str]
    factors: Mapping[str, str]
    unclipped: tuple[str, ...]


def layer_modules(names: LayerNames, shapes: Mapping[str, tuple[int, ...]]) -> LayerModules:
    """The modules that a body calls by ``names``; ``shapes`` of the layer's tensors."""
    members = {"qkv": names.qkv, "output": (names.output,), "gate_up": names.gate_up, "down": (names.down,)}
    factors = {}
    # Where matrices are stored as one, their rows stay together: nothing is folded into a part of them.
    if len(names.gate_up) == 2:
        factors["down"] = names.gate_up[1]
    if len(names.qkv) == 3 and shapes[f"{names.qkv[2]}.weight"][0] == shapes[f"{names.output}.weight"][1]:
        factors["output"] = names.qkv[2]  # with fewer key heads than heads, a value feeds several inputs
    norms = {"qkv": names.input_norm, "gate_up": names.post_norm}
    return LayerModules(members, norms, factors, names.qkv[:2])
