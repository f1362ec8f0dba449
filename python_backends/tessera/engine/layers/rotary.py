"""Rotary position embedding (half rotation) and its scalings.

Source of the rules: transformers ``modeling_rope_utils.py``; M-RoPE sections: ``modeling_qwen2_vl.py``. Dynamic NTK
is computed per token from its own sequence's length, never kept as state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera.errors import CheckpointError


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
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / theta**exponents
        self._dynamic: tuple[float, int] | None = None
        try:
            if kind == "linear":
                frequencies = frequencies / float(scaling["factor"])
            elif kind == "llama3":
                frequencies = _llama3(frequencies, scaling)
            elif kind == "dynamic":
                self._dynamic = (float(scaling["factor"]), max_positions)
            elif kind not in ("default", "mrope"):
                raise CheckpointError(
                    f"rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3 and mrope"
                )
        except KeyError as error:
            raise CheckpointError(f"rope type {kind!r} needs the setting {error}") from error
        self._head_dim = head_dim
        self._theta = theta
        self._exponents = exponents.to(device)
        self._frequencies = frequencies.to(device)
        self._axis = _axis_of_frequency(sections, head_dim, device)
        self.axes = len(sections or (1,))

    def salt(self, prompt_length: int) -> int:
        """What prompts must share, besides their tokens, for equal keys: the length if that rules their rotation."""
        return prompt_length if self._dynamic and prompt_length > self._dynamic[1] else 0

    def angles(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [axes, n], lengths int64 [n] of the sequences -> cos, sin float32 [n, head_dim / 2]."""
        frequencies = self._frequencies
        if self._dynamic is not None:
            frequencies = self._dynamic_frequencies(lengths)
        if self._axis is None:
            angles = positions[0].float()[:, None] * frequencies
        else:
            axes = positions.expand(self.axes, -1)
            angles = axes.T.index_select(1, self._axis).float() * frequencies
        return angles.cos(), angles.sin()

    def _dynamic_frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        """float32 [n, head_dim / 2]; up to the trained length the base is theta itself."""
        factor, trained = self._dynamic or (1.0, 1)
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


def _axis_of_frequency(sections: Sequence[int] | None, head_dim: int, device: torch.device) -> torch.Tensor | None:
    """M-RoPE: which axis of the positions each frequency follows, int64 [head_dim / 2]; None for one axis."""
    if sections is None:
        return None
    if sum(sections) != head_dim // 2:
        raise CheckpointError(f"mrope_section {list(sections)} must sum to half the head size, {head_dim // 2}")
    return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections)).to(device)
