"""Qwen3 as the language model of Qwen3-VL: behind each of its first layers a picture's next rows are added.

Source: transformers ``modeling_qwen3_vl.py``.
"""

from itertools import zip_longest

import torch

from tessera.attention.backend import AttentionBackend, AttentionStep
from tessera.models.text.decoder import Qwen2, Qwen3Layer, Stream
from tessera.models.text.qwen3_moe import Qwen3MoeLayer


class Deepstack(Qwen2):
    """A body of any layers whose pictures have rows of several depths."""

    def forward_layers(
        self, x: torch.Tensor, attention: AttentionBackend, step: AttentionStep, last_step: AttentionStep
    ) -> torch.Tensor:
        """Of tokens [n, row size]; in a step of decoding [n, hidden], as none is of a picture."""
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
