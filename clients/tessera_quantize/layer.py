"""One decoder layer quantized: its linear layers one after the other, each on the inputs its quantized fellows give."""

from collections.abc import Sequence

import torch

from tessera.errors import CheckpointError
from tessera_quantize import methods
from tessera_quantize.body import INPUTS, Body, layer_modules
from tessera_quantize.checkpoint import dequantized, stored_tensors
from tessera_quantize.samples import Sample


class LayerQuantizer:
    """Layer ``index`` of ``body``, calibrated on ``samples``, the layer's own inputs."""

    def __init__(self, body: Body, index: int, recipe: methods.Recipe, samples: Sequence[Sample]) -> None:
        self._body = body
        self._recipe = recipe
        self._sequences = [(sample.hidden, sample.positions, sample.weights) for sample in samples]
        self._stored = body.tensors(index)
        shapes = {name: tuple(each.shape) for name, each in self._stored.items()}
        self._modules = layer_modules(body.config.text.names, shapes)
        names = [module for members in self._modules.members.values() for module in members]
        self._weights = {name: self._stored[f"{name}.weight"].to(body.device).float() for name in names}
        for name, weight in self._weights.items() if recipe.method != "fp8" else ():
            if weight.shape[1] % recipe.group_size:
                raise CheckpointError(
                    f"groups of {recipe.group_size} do not divide the {weight.shape[1]} columns of layer {index}'s "
                    f"{name}: choose another --group-size, such as 32"
                )

    def quantize(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The layer's tensors as they will be stored, and each module's share of its outputs' squares that is error."""
        if self._recipe.method == "awq":
            self._fold_scales()
        result: dict[str, torch.Tensor] = {}
        errors: dict[str, float] = {}
        for reader in INPUTS:
            self._load()
            inputs = self._body.watch([reader], self._sequences)[reader]
            for module in self._modules.members[reader]:
                weight = self._weights[module]
                made = stored_tensors(self._quantized(module, inputs), self._recipe.symmetric)
                self._weights[module] = dequantized(made).to(weight)
                result |= {f"{module}.{leaf}": tensor for leaf, tensor in made.items()}
                difference = self._weights[module] - weight
                size, lost = (methods.output_error(each, inputs.hessian) for each in (weight, difference))
                errors[module] = lost / size if size else 0.0
        taken = {f"{module}.weight" for module in self._weights}
        return result | {name: each for name, each in self._stored.items() if name not in taken}, errors

    def _load(self) -> None:
        self._body.load(self._stored | {f"{name}.weight": weight for name, weight in self._weights.items()})

    def _quantized(self, module: str, inputs: methods.InputStatistics) -> methods.Int4Weight | methods.Fp8Weight:
        weight, recipe = self._weights[module], self._recipe
        dtype = self._stored[f"{module}.weight"].dtype
        if recipe.method == "fp8":
            return methods.to_fp8(weight, dtype)
        form = (recipe.group_size, recipe.symmetric, dtype)
        if recipe.method == "gptq":
            return methods.gptq(weight, inputs, methods.fit_grid(weight, *form), dtype)
        clipped = recipe.method == "awq" and module not in self._modules.unclipped
        grid = methods.clipped_grid(weight, inputs, *form) if clipped else methods.fit_grid(weight, *form)
        return methods.round_to(grid, weight, dtype)

    def _fold_scales(self) -> None:
        """AWQ's scales of every linear layer that has something before it to take them; the layer computes the same."""
        self._load()
        found = self._body.watch(INPUTS, self._sequences)
        for reader, inputs in found.items():
            members = self._modules.members[reader]
            norm, factors = self._modules.norms.get(reader), self._modules.factors.get(reader, ())
            if norm is None and not factors:
                continue
            dtype = self._stored[f"{members[0]}.weight"].dtype
            weights = [self._weights[module] for module in members]
            scales = methods.search_scales(weights, inputs, self._recipe.group_size, self._recipe.symmetric, dtype)
            if norm:
                scales = self._into_norm(norm, scales)
            for factor in factors:
                self._into_factor(factor, scales)
            for module in members:
                self._weights[module] = self._weights[module] * scales

    def _into_norm(self, norm: str, scales: torch.Tensor) -> torch.Tensor:
        """Divides a norm's weight; returns the scales that it took, as its weight is stored rounded."""
        old = self._stored[f"{norm}.weight"]
        new = (old.to(scales) / scales).to(old.dtype)
        self._stored[f"{norm}.weight"] = new.cpu()
        return torch.where(new == 0, torch.ones_like(scales), old.to(scales) / new.to(scales))

    def _into_factor(self, module: str, scales: torch.Tensor) -> None:
        """Divides a linear layer's outputs."""
        self._weights[module] = self._weights[module] / scales[:, None]
        if (bias := self._stored.get(f"{module}.bias")) is not None:
            self._stored[f"{module}.bias"] = (bias.to(scales) / scales).to(bias.dtype).cpu()
