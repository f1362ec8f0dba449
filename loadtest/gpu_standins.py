"""Stand-ins for the two models on a GPU: their matrix products and attention on random data, nothing else.

Sizes are InternVL3-8B's unless told otherwise. Each forward takes and gives tensors of one size, so that it can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where random tensors are made."""

    device: str
    dtype: torch.dtype

    def weight(self, *shape: int) -> Tensor:
        return 0.02 * self.rows(*shape)

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


class VisionTower:
    """InternViT-300M over a batch of tiles, without patch embedding and projector."""

    def __init__(
        self, place: Place, tiles: int, tokens: int = 1025, hidden: int = 1024, heads: int = 16, layers: int = 24
    ) -> None:
        self.x = place.rows(tiles, tokens, hidden)
        self._heads = heads
        shapes = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
        self._layers = [[place.weight(*shape) for shape in shapes] for _ in range(layers)]

    def forward(self) -> Tensor:
        """[tiles, tokens, hidden]"""
        x = self.x
        tiles, tokens, hidden = x.shape
        for qkv, output, up, down in self._layers:
            rows = F.linear(F.layer_norm(x, (hidden,)), qkv).view(tiles, tokens, 3, self._heads, -1)
            q, k, v = rows.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(tiles, tokens, hidden)
            x = x + F.linear(attended, output)
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (hidden,)), up)), down)
        return x


@dataclass(frozen=True)
class DecoderSizes:
    """A Qwen2 decoder. ``sets``: distinct sets of weights that the layers share; together they exceed the L2."""

    hidden: int = 3584
    inner: int = 18944
    heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 151_680
    layers: int = 28
    sets: int = 4


class Decoder:
    """A decoder's prefill step and decode step."""

    def __init__(self, place: Place, sizes: DecoderSizes) -> None:
        self._place, self._sizes = place, sizes
        queries = sizes.heads * sizes.head_dim
        qkv = queries + 2 * sizes.kv_heads * sizes.head_dim
        shapes = (
            (qkv, sizes.hidden),
            (sizes.hidden, queries),
            (2 * sizes.inner, sizes.hidden),
            (sizes.hidden, sizes.inner),
        )
        self._sets = [[place.weight(*shape) for shape in shapes] for _ in range(sizes.sets)]
        self._head = place.weight(sizes.vocabulary, sizes.hidden)

    def prefill(self, tokens: int, prompts: int) -> Callable[[], Tensor]:
        """A step of ``tokens`` tokens, of which ``prompts`` equal prompts are made; a token is chosen for each."""
        sizes, x = self._sizes, self._place.rows(tokens, self._sizes.hidden)
        length = tokens // prompts
        used = length * prompts
        group = sizes.heads // sizes.kv_heads

        def attend(_: int, qkv: Tensor) -> Tensor:
            q, k, v = self._split(qkv[:used].view(prompts, length, -1))
            k, v = (rows[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for rows in (k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(used, -1)
            return F.pad(attended, (0, 0, 0, tokens - used))

        return lambda: self._run(x, attend, slice(length - 1, used, length))

    def decode(self, batch: int, context: int) -> Callable[[], Tensor]:
        """A step of one token for each of ``batch`` sequences, each with keys and values of ``context`` tokens."""
        sizes, x = self._sizes, self._place.rows(batch, self._sizes.hidden)
        cache = [
            [self._place.rows(batch, sizes.kv_heads, context, sizes.head_dim) for _ in "kv"] for _ in range(sizes.sets)
        ]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, _, _ = self._split(qkv[:, None])
            keys, values = cache[layer % sizes.sets]
            grouped = q.reshape(batch, sizes.kv_heads, -1, sizes.head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values).reshape(batch, -1)

        return lambda: self._run(x, attend, slice(None))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, length, -1] -> queries, keys and values, each [batch, heads, length, head_dim]."""
        sizes = self._sizes
        heads = qkv.unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2)
        q, k, v = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
        return q, k, v

    def _run(self, x: Tensor, attend: Callable[[int, Tensor], Tensor], sampled: slice) -> Tensor:
        """One token id for each of the rows ``sampled``."""
        hidden = (self._sizes.hidden,)
        for layer in range(self._sizes.layers):
            qkv, output, gate_up, down = self._sets[layer % self._sizes.sets]
            x = x + F.linear(attend(layer, F.linear(F.rms_norm(x, hidden), qkv)), output)
            gate, up = F.linear(F.rms_norm(x, hidden), gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x[sampled], hidden), self._head).argmax(dim=-1)


class Captured:
    """A forward as a CUDA graph, replayed on whatever stream is current."""

    def __init__(self, forward: Callable[[], Tensor]) -> None:
        # A stream of its own for each: graphs that are captured on one stream share cuBLAS's workspace, and may then
        # not run at the same time.
        stream = torch.cuda.Stream()
        self._forward = forward  # with its weights: the graph reads them, but does not keep them
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(2):
                forward()
            stream.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                self._output = forward()
        torch.cuda.synchronize()

    def replay(self) -> None:
        self._graph.replay()
