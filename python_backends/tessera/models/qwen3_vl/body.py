"""Qwen3 as the language model of Qwen3-VL: behind each of its first layers a picture's next rows are added.

Source: transformers ``modeling_qwen3_vl.py``.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import nn

from tessera.attention.backend import AttentionBackend, AttentionStep
from tessera.checkpoint.config import TextConfig
from tessera.linear.scheme import SchemeSelector
from tessera.linear.unquantized import Embedding
from tessera.models.text.decoder import Qwen2, Qwen3Layer, Stream
from tessera.models.text.qwen3_moe import Qwen3MoeLayer


class DeepEmbedding(Embedding):
    """``weight`` [vocabulary, hidden]; a row has ``size`` values, of which a token's embedding are the first."""

    def __init__(self, weight: torch.Tensor, size: int) -> None:
        nn.Module.__init__(self)
        self.register_buffer("weight", weight)
        self._size = size

    def forward(
        self, ids: torch.Tensor, image_index: torch.Tensor | None, image_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """ids int64 [n] -> [n, size]; ``image_rows`` [r, size] replace the rows ``image_index`` [r]."""
        weight = self.get_buffer("weight")
        rows = weight.new_zeros(len(ids), self._size)
        rows[:, : weight.shape[1]] = F.embedding(ids, weight)
        return rows if image_index is None or image_rows is None else rows.index_copy_(0, image_index, image_rows)


class Deepstack(Qwen2):
    """A body of any layers whose pictures have rows of several depths."""

    def __init__(self, config: TextConfig, schemes: SchemeSelector, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, schemes, dtype, device)
        self.embedding = DeepEmbedding(self.embedding.get_buffer("weight"), config.row_size)

    def forward(
        self,
        ids: torch.Tensor,
        image_index: torch.Tensor | None,
        image_rows: torch.Tensor | None,
        attention: AttentionBackend,
        step: AttentionStep,
        last_step: AttentionStep,
    ) -> torch.Tensor:
        """Tokens without pictures, as in every step of decoding, have nothing that is added later."""
        if image_rows is not None:
            return super().forward(ids, image_index, image_rows, attention, step, last_step)
        return self.forward_layers(F.embedding(ids, self.embedding.get_buffer("weight")), attention, step, last_step)

    def forward_layers(
        self, x: torch.Tensor, attention: AttentionBackend, step: AttentionStep, last_step: AttentionStep
    ) -> torch.Tensor:
        """Of tokens that are embedded, [n, row size], or [n, hidden] where none is of a picture."""
        first, *later = x.unflatten(1, (-1, self.config.hidden_size)).unbind(1)
        stream: Stream = first.contiguous(), None
        for layer, rows in zip_longest(self.layers[:-1], later):
            update, residual = layer(*stream, attention, step)
            stream = update, residual if rows is None else residual.add_(rows)
        return self.norm(*self.layers[-1](*stream, attention, last_step))[0]


class Qwen3VL(Deepstack):
    """Qwen3VLTextModel."""

    layer_class = Qwen3Layer


class Qwen3VLMoeLayer(Qwen3MoeLayer):
    """Published files have a tensor of all experts as [experts, in, out]; those that transformers 5 saves need not."""

    either_way = True


class Qwen3VLMoe(Deepstack):
    """Qwen3VLMoeTextModel."""

    layer_class = Qwen3VLMoeLayer
