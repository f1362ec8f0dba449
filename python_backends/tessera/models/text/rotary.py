"""Rotary position embedding (half rotation) and its scalings.

Source of the rules: transformers ``modeling_rope_utils.py``; M-RoPE sections: ``modeling_qwen2_vl.py``. What depends on
a sequence's length (dynamic NTK, longrope) is decided per token by its own sequence, never kept as state.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from tessera.checkpoint.config import TextConfig


class Rotary:
    """Angles for positions, by the rope that ``checkpoint.rope`` has read."""

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        scaling, head_dim = config.rope_scaling or {"rope_type": "default"}, config.head_dim
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        long = frequencies
        #: up to which length a sequence is rotated as a short one; None where the length means nothing
        self._trained: int | None = None
        self._factor: float | None = None
        self._scale = 1.0
        kind = scaling["rope_type"]
        if kind == "linear":
            frequencies = frequencies / scaling["factor"]
        elif kind == "llama3":
            frequencies = _llama3(frequencies, scaling)
        elif kind == "dynamic":
            self._factor, self._trained = scaling["factor"], config.max_position_embeddings
        elif kind == "longrope":
            self._trained = scaling["original_max_position_embeddings"]
            self._scale = _longrope_scale(scaling, config.max_position_embeddings)
            long, frequencies = (frequencies / torch.tensor(scaling[f"{name}_factor"]) for name in ("long", "short"))
        self._head_dim, self._theta = head_dim, config.rope_theta
        self._exponents = exponents.to(device)
        self._frequencies = frequencies.to(device)
        self._long = long.to(device)
        sections = config.mrope_section or (head_dim // 2,)
        self.axes = len(sections)
        axis = torch.repeat_interleave(torch.arange(self.axes), torch.tensor(sections))
        if config.mrope_interleaved:  # one of each in turn, as long as its axis has some left; the first has the rest
            number = torch.arange(len(axis))
            axis = number % self.axes
            axis[number >= self.axes * torch.tensor(sections)[axis]] = 0
        #: which axis of the positions each frequency follows, int64 [head_dim / 2]
        self._axis = axis.to(device)

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
        if self.axes == 1:
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
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = scaling["original_max_position_embeddings"]
    waves = 2 * math.pi / frequencies
    blend = ((trained / waves - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _longrope_scale(scaling: Mapping[str, Any], max_positions: int) -> float:
    """What cos and sin are multiplied by, so that attention over a longer context stays as sharp."""
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    trained = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or max_positions / trained
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
