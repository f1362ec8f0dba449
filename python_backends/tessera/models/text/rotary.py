"""Rotary position embedding (half rotation) and its scalings.

Source of the rules: transformers ``modeling_rope_utils.py``; M-RoPE sections: ``modeling_qwen2_vl.py``. What depends on
a sequence's length (dynamic NTK, longrope) is decided per token by its own sequence, never kept as state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera.errors import CheckpointError

_KINDS = ("default", "linear", "dynamic", "llama3", "longrope", "mrope")


class Rotary:
    """Angles for positions; ``scaling`` None or a dict whose ``rope_type`` names the rule.

    Raises CheckpointError for a rope type that is not supported, or one that lacks a setting.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_positions: int,
        device: torch.device,
        sections: Sequence[int] | None = None,
    ) -> None:
        """``sections`` (M-RoPE): how many of the head's frequencies follow each axis of the positions."""
        scaling = scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in _KINDS:
            raise CheckpointError(f"rope type {kind!r} is not supported; supported are {', '.join(_KINDS)}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / theta**exponents
        long = frequencies
        #: up to which length a sequence is rotated as a short one; None where the length means nothing
        self._trained: int | None = None
        self._factor: float | None = None
        self._scale = 1.0
        try:
            if kind == "linear":
                frequencies = frequencies / float(scaling["factor"])
            elif kind == "llama3":
                frequencies = _llama3(frequencies, scaling)
            elif kind == "dynamic":
                self._factor, self._trained = float(scaling["factor"]), max_positions
            elif kind == "longrope":
                self._trained = int(scaling["original_max_position_embeddings"])
                self._scale = _longrope_scale(scaling, max_positions)
                long = frequencies / _factors(scaling, "long_factor", head_dim)
                frequencies = frequencies / _factors(scaling, "short_factor", head_dim)
        except KeyError as error:
            raise CheckpointError(f"rope type {kind!r} needs the setting {error}") from error
        self._head_dim = head_dim
        self._theta = theta
        self._exponents = exponents.to(device)
        self._frequencies = frequencies.to(device)
        self._long = long.to(device)
        self._axis = _axis_of_frequency(sections, head_dim, device)
        self.axes = len(sections or (1,))

    def salt(self, prompt_length: int) -> int:
        """What prompts must share, besides their tokens, for equal keys; 0 for those of usual length.

        With dynamic NTK a long prompt's length, which rules its rotation; longrope rotates all long ones alike.
        """
        if self._trained is None or prompt_length <= self._trained:
            return 0
        return 1 if self._factor is None else prompt_length

    def angles(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [axes, n], lengths int64 [n] of the sequences -> cos, sin float32 [n, head_dim / 2]."""
        frequencies = self._frequencies
        if self._factor is not None:
            frequencies = self._dynamic_frequencies(lengths)
        elif self._trained is not None:
            frequencies = torch.where(lengths[:, None] > self._trained, self._long, self._frequencies)
        if self._axis is None:
            angles = positions[0].float()[:, None] * frequencies
        else:
            axes = positions.expand(self.axes, -1)
            angles = axes.T.index_select(1, self._axis).float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self._scale == 1 else (cos * self._scale, sin * self._scale)

    def _dynamic_frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        """float32 [n, head_dim / 2]; up to the trained length the base is theta itself."""
        factor, trained = self._factor or 1.0, self._trained or 1
        stretch = factor * lengths.clamp(min=trained).double() / trained - (factor - 1)
        base = self._theta * stretch ** (self._head_dim / (self._head_dim - 2))
        return 1.0 / base.float()[:, None] ** self._exponents


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(scaling["original_max_position_embeddings"])
    waves = 2 * math.pi / frequencies
    blend = ((trained / waves - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _longrope_scale(scaling: Mapping[str, Any], max_positions: int) -> float:
    """What cos and sin are multiplied by, so that attention over a longer context stays as sharp."""
    trained = int(scaling["original_max_position_embeddings"])
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = float(scaling.get("factor") or max_positions / trained)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))


def _factors(scaling: Mapping[str, Any], name: str, head_dim: int) -> torch.Tensor:
    """Longrope's divisors of the frequencies, float32 [head_dim / 2]."""
    factors = scaling[name]
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        raise CheckpointError(f"rope's {name} must be {head_dim // 2} numbers, half the head size")
    return torch.tensor(factors, dtype=torch.float32)


def _axis_of_frequency(sections: Sequence[int] | None, head_dim: int, device: torch.device) -> torch.Tensor | None:
    """M-RoPE: which axis of the positions each frequency follows, int64 [head_dim / 2]; None for one axis."""
    if sections is None:
        return None
    if sum(sections) != head_dim // 2:
        raise CheckpointError(f"mrope_section {list(sections)} must sum to half the head size, {head_dim // 2}")
    return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections)).to(device)
