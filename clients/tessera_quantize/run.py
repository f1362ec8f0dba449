"""The whole of ``tessera quantize``: inputs, layers, checkpoint, report; each phase leaves an artefact.

What each phase leaves on disk, so that a killed run goes on where it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tessera.errors import CheckpointError, ConfigError
from tessera.models.family import checkpoint_id
from tessera.models.registry import family_for, read_config
from tessera.settings.user_cache import write_whole
from tessera_evaluation.datasets import Item
from tessera_quantize import checkpoint, methods, samples
from tessera_quantize.body import INPUTS, Body, layer_modules
from tessera_quantize.methods import Recipe
from tessera_quantize.samples import Chain, Sample

#: (what it is about, how many steps) -> a context that gives what to call after each step
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class Job:
    """What to do. ``calibration`` and ``held_out``: questions for the search, and those the report is about.

    ``compare``: also search with RTN, and with the method on words alone, for the report's table. ``policies``: names
    of tile policies, and what a request says for them, that recall is measured with.
    """

    source: Path
    out: Path
    recipe: Recipe
    calibration: Sequence[Item]
    held_out: Sequence[Item]
    device: str = "cpu"
    vision_fp8: bool = False
    compare: bool = True
    policies: tuple[tuple[str, Any], ...] = (("checkpoint's own", None),)

    @property
    def work(self) -> Path:
        """Where the artefacts lie until all is done."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def rows(self) -> dict[str, Recipe]:
        """The report's rows by name; the first is the one that is written."""
        rows = {self.recipe.method: self.recipe}
        if self.compare and self.recipe.method in ("awq", "gptq"):
            rows["rtn"] = replace(self.recipe, method="rtn")
            rows[f"{self.recipe.method}, words alone"] = replace(self.recipe, pictures=False)
        return rows

    def settings(self) -> dict[str, Any]:
        """What an artefact depends on, as JSON."""
        parts = self.calibration, self.held_out
        return {
            "checkpoint": checkpoint_id(self.source).hex(),
            "recipe": asdict(self.recipe),
            "vision_fp8": self.vision_fp8,
            "device": self.device,
            "questions": [[[item.picture.name, item.question, item.answer] for item in part] for part in parts],
        }


@dataclass(frozen=True)
class Row:
    """One line of the report. ``errors``: by layer, each module's share of its outputs' squares that is error.

    ``kl``: the mean divergence from the original in nats, over the words of held-out questions and their answers;
    ``answers_kl`` over the answers alone. ``same``: the share of those words whose likeliest token is the original's.
    ``recall``: figures by tile policy.
    """

    name: str
    recipe: Recipe | None
    bytes: int
    errors: list[dict[str, float]]
    kl: float
    answers_kl: float
    same: float
    recall: dict[str, dict[str, Any]]


def run(job: Job, progress: Progress) -> list[Row]:
    """Quantizes ``job.source`` into ``job.out``; returns the report's rows, the original first.

    Raises CheckpointError, ConfigError or, of a policy, InvalidRequest saying what does not fit. After a kill, the same
    call goes on.
    """
    if job.out.exists():
        raise ConfigError(f"{job.out} exists; name a folder that does not")
    config = read_config(job.source)
    if config.quantization is not None:
        raise ConfigError(f"{job.source} is quantized already; name the original checkpoint")
    for _, policy in job.policies:  # now, and not after hours of work
        family_for(config).policy({"tile_policy": policy})
    claim(job.work, job.settings())
    dtype = torch.float32 if job.device == "cpu" else torch.bfloat16
    body = Body(config, dtype, torch.device(job.device))
    # Pictures go through the serving stages, loaded when the first are missing.
    inputs = partial(_samples, job, body, cache(partial(Chain, config, job.device)), progress)
    held_out = inputs("held-out", job.held_out)
    original = _last_hidden(body, held_out, progress)
    rows, folders = [], {"original": job.source}
    for name, recipe in job.rows.items():
        calibration = inputs("calibration" if recipe.pictures else "words", job.calibration)
        place = job.work / name.replace(", ", "-").replace(" ", "-")
        files, errors, hidden = _quantize_layers(body, recipe, calibration, held_out, place, name, progress)
        folders[name] = place / "checkpoint"
        if not folders[name].exists():
            checkpoint.write(config, files, recipe, job.vision_fp8, folders[name])
        figures = _divergence(body, original, hidden)
        rows.append(Row(name, recipe, checkpoint.weight_bytes(folders[name]), errors, *figures, {}))
    del body, inputs  # room for the engine
    rows.insert(0, Row("original", None, checkpoint.weight_bytes(job.source), [], 0.0, 0.0, 1.0, {}))
    for name, policy in job.policies:
        requests = None
        for row in rows:
            if requests is None or job.vision_fp8:
                with progress(f"pictures: {name}", len(job.held_out)) as advance:
                    requests = samples.ask(folders[row.name], job.held_out, job.device, policy, advance)
            with progress(f"recall: {row.name}", len(job.held_out)) as advance:
                row.recall[name] = samples.figures(folders[row.name], job.held_out, requests, job.device, advance)
    return rows


def finish(job: Job) -> None:
    """Moves the checkpoint to its place and deletes the artefacts; called when the report is in it."""
    (job.work / job.recipe.method / "checkpoint").rename(job.out)
    shutil.rmtree(job.work)


_TENSORS = ("hidden", "positions", "weights")


def _samples(
    job: Job, body: Body, chain: Callable[[], Chain], progress: Progress, name: str, items: Sequence[Item]
) -> list[Sample]:
    """Samples as an artefact; "words" have no pictures."""

    def make() -> Made:
        with progress(f"inputs: {name}", len(items)) as advance:
            made = list(chain().samples(body, items, name != "words", advance))
        tensors = {f"{index}.{name}": getattr(sample, name) for index, sample in enumerate(made) for name in _TENSORS}
        return tensors, {"counts": [[sample.answer, sample.text] for sample in made]}

    tensors, facts = kept(job.work / f"inputs-{name}.safetensors", make)
    return [
        Sample(*(tensors[f"{index}.{name}"] for name in _TENSORS), answer, text)  # type: ignore[arg-type,call-arg]
        for index, (answer, text) in enumerate(facts["counts"])
    ]


def _quantize_layers(
    body: Body,
    recipe: Recipe,
    calibration: list[Sample],
    held_out: list[Sample],
    folder: Path,
    name: str,
    progress: Progress,
) -> tuple[list[Path], list[dict[str, float]], list[Sample]]:
    """The layers' files, the modules' errors, and what the held-out samples became behind the last layer."""
    files, errors, fp8 = [], [], recipe.method == "fp8"
    with progress(f"layers: {name}", body.layers) as advance:
        for index in range(body.layers):
            files.append(folder / f"layer-{index:03d}.safetensors")
            tensors, facts = kept(files[-1], lambda: _made(body, index, recipe, calibration))  # noqa: B023
            errors.append(facts["errors"])
            body.load(_plain(body, index, tensors))
            calibration, held_out = (_behind_layer(body, samples, fp8) for samples in (calibration, held_out))
            advance()
    return files, errors, held_out


def _behind_layer(body: Body, samples: list[Sample], fp8: bool = False) -> list[Sample]:
    return [sample._replace(hidden=body.run(sample.hidden, sample.positions, fp8)) for sample in samples]


def _made(body: Body, index: int, recipe: Recipe, samples: list[Sample]) -> Made:
    tensors, errors = LayerQuantizer(body, index, recipe, samples).quantize()
    return {body.stored_name(index, name): tensor for name, tensor in tensors.items()}, {"errors": errors}


def _plain(body: Body, index: int, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's tensors as its file holds them -> unquantized, by our names."""
    plain, modules = {}, dict[str, dict[str, torch.Tensor]]()
    for key, tensor in stored.items():
        module, _, leaf = key.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    for name in body.tensors(index):
        module, _, leaf = body.stored_name(index, name).rpartition(".")
        leaves = modules[module]
        plain[name] = checkpoint.dequantized(leaves) if leaf == "weight" and "weight_scale" in leaves else leaves[leaf]
    return plain


def _last_hidden(body: Body, samples: list[Sample], progress: Progress) -> list[Sample]:
    """What ``samples`` become behind the last layer of the original model."""
    with progress("layers: original", body.layers) as advance:
        for index in range(body.layers):
            body.load(body.tensors(index))
            samples = _behind_layer(body, samples)
            advance()
    return samples


def _divergence(body: Body, original: Sequence[Sample], quantized: Sequence[Sample]) -> tuple[float, float, float]:
    """A Row's ``kl``, ``answers_kl`` and ``same``, of what samples are behind the last layer."""
    words, answers, same = [], [], []
    for before, after in zip(original, quantized, strict=True):
        p, q = (body.logits(each.hidden[-each.text :]).log_softmax(-1) for each in (before, after))
        divergence = (p.exp() * (p - q)).sum(-1)
        words.append(divergence)
        answers.append(divergence[-before.answer :])
        same.append((p.argmax(-1) == q.argmax(-1)).float())
    kl, answers_kl, share = (float(torch.cat(parts).mean()) for parts in (words, answers, same))
    return kl, answers_kl, share


Made = tuple[dict[str, torch.Tensor], dict[str, Any]]


def kept(path: Path, make: Callable[[], Made]) -> Made:
    """Tensors from ``path`` (.safetensors) and facts from the JSON beside it; ``make`` makes both if it is not there.

    They are read from disk in either case: a resumed run sees what an undisturbed run sees.
    """
    beside = path.with_suffix(".json")
    if not path.exists():
        tensors, facts = make()
        write_whole(beside, lambda draft: draft.write_text(json.dumps(facts)))
        write_whole(path, lambda draft: save_file(tensors, draft, metadata={"format": "pt"}))  # last: it says "done"
    return load_file(path), json.loads(beside.read_text())


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Makes ``folder`` the place of a run with these settings. Raises ConfigError where another run's lie there."""
    path, text = folder / "settings.json", json.dumps(settings, indent=1, sort_keys=True)
    if not path.exists():
        write_whole(path, lambda draft: draft.write_text(text))
    elif path.read_text() != text:
        raise ConfigError(f"{folder} holds the artefacts of a run with other settings: finish that run or delete them")


class LayerQuantizer:
    """Layer ``index`` of ``body``, calibrated on ``samples``, the layer's own inputs: its linear layers one after the
    other, each on the inputs that its quantized fellows give."""

    def __init__(self, body: Body, index: int, recipe: Recipe, samples: Sequence[Sample]) -> None:
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
                made = checkpoint.stored_tensors(self._quantized(module, inputs), self._recipe.symmetric)
                self._weights[module] = checkpoint.dequantized(made).to(weight)
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
