"""The checkpoint's language model in torch with room for one decoder layer at a time, so that a large one fits.

It is the engine's own model of one layer: whatever body the engine runs, its layers run here unchanged.

What stands where in a decoder layer: which stored modules read which input, and what comes before each input.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tessera.attention.backend import AttentionStep, KvStorage, SpanTable, create_backend
from tessera.checkpoint.config import BodyNames, CheckpointConfig
from tessera.checkpoint.weights import SafetensorsFolder, TensorError, fill, split_names
from tessera.errors import CheckpointError
from tessera.kernels.operands import DeferredProduct, GroupedOperands, Routing, finished
from tessera.linear.experts import Experts
from tessera.linear.scheme import Linear
from tessera.linear.unquantized import Unquantized
from tessera.models.registry import model_class
from tessera.models.text.decoder import DecoderLayer
from tessera_quantize.methods import InputStatistics, rounded_rows

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BLOCK = 16


class Watched(Unquantized):
    """Plain weights; ``see`` hears of every input, and ``fp8`` rounds each as an FP8 product would."""

    see: Callable[[torch.Tensor, Routing | None], None] | None = None
    fp8 = False

    def apply_deferred(self, layer: Linear, x: Any) -> torch.Tensor | DeferredProduct:
        return super().apply_deferred(layer, self._seen(x))

    def grouped(self, layer: Linear, x: torch.Tensor, routing: Routing | None = None) -> GroupedOperands:
        return super().grouped(layer, self._seen(x, routing), routing)

    def _seen(self, x: torch.Tensor, routing: Routing | None = None) -> torch.Tensor:
        if self.see is not None:
            self.see(x, routing)
        return rounded_rows(x) if self.fp8 else x


def _watched(modules: Collection[str]) -> Watched:
    return Watched()


class Body:
    """``dtype`` and ``device`` are those it computes in; tensors of the checkpoint stay on the CPU as stored."""

    def __init__(self, config: CheckpointConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.source = SafetensorsFolder(config.folder)
        self.stored = {ours: stored for stored, ours in split_names(self.source.names(), config)["text"].items()}
        text = replace(config.text, num_hidden_layers=1)
        self._model = model_class(text.architecture)(text, _watched, dtype, device)
        ends = {ours: self.source.get(name) for ours, name in self.stored.items() if not _LAYER.fullmatch(ours)}
        targets = self._model.targets(set(ends))
        ends_of = {name: target for name, target in targets.items() if not _LAYER.fullmatch(name)}
        fill("the text model", ends_of, ends.items(), self.stored)
        self._dtype = dtype
        self._layer = self._empty_layer(experts=True)

    @property
    def layers(self) -> int:
        return self.config.text.num_hidden_layers

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """Those of a layer as stored, by our names without ``model.layers.N.``; each expert's by itself."""
        found = {}
        for ours, stored in self.stored.items():
            match = _LAYER.fullmatch(ours)
            if match and int(match[1]) == index:
                found[match[2]] = self.source.get(stored)
        layer = self._empty_layer(experts=True)
        for linear in layer.places():
            if isinstance(linear, Experts) and (name := linear.whole.removeprefix(layer.prefix)) in found:
                try:
                    split = linear.split({"weight": found[name]})
                except TensorError as error:
                    name = self.stored[f"model.layers.{index}.{name}"]
                    raise CheckpointError(f"weights of a layer: {name}: {error}") from None
                apart = {module.removeprefix(layer.prefix): weight for module, weight in split.items()}
                if not apart.keys() & found.keys():  # stored twice they are refused by load
                    del found[name]
                    found |= apart
        return found

    def stored_name(self, index: int, name: str) -> str:
        """What the checkpoint calls a tensor of a layer, or would: whatever its last part, its module has a weight, or
        is an expert's whose weights are stored with the others'."""
        prefix, (module, _, leaf) = f"model.layers.{index}.", name.rpartition(".")
        if stored := self.stored.get(f"{prefix}{module}.weight"):
            return stored.removesuffix("weight") + leaf
        begin = prefix + EXPERTS
        ours, stored = next((ours, stored) for ours, stored in self.stored.items() if ours.startswith(begin))
        return stored.removesuffix(ours.removeprefix(begin)) + name.removeprefix(EXPERTS)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes ``tensors``, by names as :meth:`tensors` gives them, the one layer."""
        self._layer = self._empty_layer(any(name.startswith(EXPERTS) for name in tensors))
        named = {self._layer.prefix + name: tensor for name, tensor in tensors.items()}
        fill("a layer", self._layer.targets(set(named)), named.items())

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor, places: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor:
        """ids int64 [n]; ``rows`` [r, row size] stand at ``places`` int64 [r] -> [n, row size] on the CPU."""
        weight = self._model.embedding.get_buffer("weight")
        placed = (None, None) if rows is None or places is None else (places.to(self.device), rows.to(weight))
        return self._model.embedding(ids.to(self.device), *placed).cpu()

    @torch.inference_mode()
    def run(self, hidden: torch.Tensor, positions: torch.Tensor, fp8: bool = False) -> torch.Tensor:
        """The layer on one sequence: hidden [n, hidden] and positions int64 [axes, n] -> [n, hidden], on the CPU.

        Of rows of several depths the next ones are added behind the layer, and those left go on beside the sum.
        """
        for scheme in self._schemes().values():
            scheme.fp8 = fp8
        count, shape, size = len(hidden), self._model.heads, self.config.text.hidden_size
        x = hidden[:, :size].to(self.device, copy=True).contiguous()  # the layer may work in place
        blocks = -(-count // _BLOCK)
        storage = KvStorage(1, (blocks, _BLOCK, shape.kv_heads, shape.head_dim), x.dtype, self.device)
        attention = create_backend("sdpa", shape, storage)
        one = np.array([count])
        plan = attention.plan(SpanTable(np.zeros(1, np.int64), one, one, np.arange(blocks)[None]))
        lengths = torch.full((count,), count, device=self.device)
        cos, sin = self._model.rotary.angles(positions.to(self.device), lengths)
        step = AttentionStep(cos, sin, torch.arange(count, device=self.device), None, plan)
        update, residual = self._layer(x, None, attention, step)
        behind, added, left = (finished(update) + residual).cpu(), hidden[:, size : 2 * size], hidden[:, 2 * size :]
        return torch.cat((behind + added, left), dim=1) if added.shape[1] else behind

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer's hidden rows [n, hidden] -> float32 [n, vocabulary], on the CPU."""
        return self._model.logits(self._model.norm(hidden.to(self.device, copy=True), None)[0]).float().cpu()

    def watch(
        self, names: Iterable[str], sequences: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> dict[str, InputStatistics]:
        """Runs ``sequences`` (hidden, positions, weights) and gathers the inputs of the linear layers ``names``."""
        schemes = self._schemes()
        found = {name: InputStatistics(getattr(self._layer, name).in_features, self.device) for name in names}
        for hidden, positions, weights in sequences:
            there = weights.to(self.device)
            for name, statistics in found.items():
                schemes[name].see = partial(_add, statistics, there)
            self.run(hidden, positions)
        for scheme in schemes.values():
            scheme.see = None
        return found

    def _empty_layer(self, experts: bool) -> DecoderLayer:
        """``experts``: whether it has them, in a body that has any."""
        text = self._model.config
        if text.experts is not None:
            dense = () if experts else (0,)
            text = replace(text, experts=replace(text.experts, decoder_sparse_step=1, mlp_only_layers=dense))
        return self._model.layer_class(text, 0, _watched, self._dtype, self.device)

    def _schemes(self) -> dict[str, Watched]:
        return {name: getattr(self._layer, name).scheme for name in INPUTS}


def _add(statistics: InputStatistics, weights: torch.Tensor, x: torch.Tensor, routing: Routing | None) -> None:
    """Of a token's experts each row counts as the square of its share, as its error does."""
    if routing is not None:
        pairs = routing.pairs
        weights = weights[pairs // routing.weights.shape[1]] * routing.weights.float().flatten()[pairs] ** 2
    statistics.add(x, weights)


#: how the names of experts' tensors begin in a layer
EXPERTS = "mlp.experts."
#: the linear layers of the engine's DecoderLayer, in the order in which a token meets them
INPUTS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True)
class LayerModules:
    """Stored modules by the linear layer that they are or are a part of: ``members``.

    ``norms``: what gives a linear layer its input, and gives it to nothing else. ``factors``: modules whose outputs
    are, one for one, factors of a linear layer's inputs. ``unclipped``: attention scores multiply these two, so that
    clipping each for its own error would do harm (AWQ leaves them out as well).
    """

    members: Mapping[str, tuple[str, ...]]
    norms: Mapping[str, str]
    factors: Mapping[str, tuple[str, ...]]
    unclipped: tuple[str, ...]


def layer_modules(names: BodyNames, shapes: Mapping[str, tuple[int, ...]]) -> LayerModules:
    """The modules that a body calls by ``names``; ``shapes`` of the layer's tensors."""
    members = {"qkv": names.qkv, "output": (names.output,), "gate_up": names.gate_up, "down": (names.down,)}
    norms, factors = {"qkv": names.input_norm, "gate_up": names.post_norm}, {}
    experts = sorted(name.removesuffix(".weight") for name in shapes if name.startswith(EXPERTS))
    if experts:  # calibrated together; their norm gives its rows to the router too
        members["gate_up"] = tuple(name for name in experts if not name.endswith("down_proj"))
        members["down"] = tuple(name for name in experts if name.endswith("down_proj"))
        factors["down"] = tuple(name for name in experts if name.endswith("up_proj"))
        del norms["gate_up"]
    # Where matrices are stored as one, their rows stay together: nothing is folded into a part of them.
    elif len(names.gate_up) == 2:
        factors["down"] = names.gate_up[1:]
    if len(names.qkv) == 3 and shapes[f"{names.qkv[2]}.weight"][0] == shapes[f"{names.output}.weight"][1]:
        factors["output"] = names.qkv[2:]  # with fewer key heads than heads, a value feeds several inputs
    return LayerModules(members, norms, factors, names.qkv[:2])
