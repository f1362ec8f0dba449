"""What every model family must hold: the tests of a ModelSpec run the checks of this file on tiny checkpoints of it, as
``test_conformance.py`` does for the families of this package.

====================  ==================================================================================
check                 what it holds
====================  ==================================================================================
check_inputs          token ids, pixels as they are cut and positions of chats, against transformers'
check_plans           a plan is known by its wire form, and is as long and as large as it says
check_strict_config   a setting that nobody reads is refused by name, in each section of config.json
check_strict_weights  so is a weight that is missing or too many
check_whole_chain     rows of each runner and log probabilities of a greedy answer, against transformers'
check_batches         pictures together, and by graphs, have the rows that each has alone
check_memory          the bound of a forward's memory
check_quantized       what the tower runs in, and which of its layers FP8 takes
check_format          a body stored in a quantized form: W, products, and modules that are left as they are
check_kernels         rows by the kernels of a GPU, in FP8 too, against torch's own
====================  ==================================================================================
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from linear.packers import LINEAR, Format, quantize_folder
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import split_names
from tessera.engine.engine import Engine
from tessera.engine.execution.model_runner import load_model
from tessera.engine.sequence import Request
from tessera.errors import CheckpointError
from tessera.kernels import tower_attention
from tessera.kernels.tower_layers import gpu_kernels
from tessera.linear.experts import Experts
from tessera.linear.unquantized import Unquantized
from tessera.models.registry import family_for, read_config
from tessera.models.tower import Wires, load_tower, unfilled_tower
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest
from tessera.prompt.sampling import SamplingParameters
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.fp8_tower import serving_tower
from tessera.vision.pictures import VisionItem
from tessera.vision.torch_runner import GraphRunner

TOKENS = 8
#: whose cache takes no time to fill with zeros
ALONE = EngineConfig(max_sequences=1)


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint. ``write`` fills a folder, weights and tokenizer included, and gives transformers' model of it.

    ``inputs``: what that model takes beside the token ids for the pictures of ``request``, once they are prepared;
    ``kinds``: whether it also takes which tokens are a picture's.
    """

    write: Callable[[Path], Any]
    request: PreprocessRequest
    inputs: Callable[[Path, Prepared], dict[str, torch.Tensor]]
    kinds: bool = False
    engine: EngineConfig = ALONE


@dataclass(frozen=True)
class Expected:
    """What transformers makes of a chat: token ids, grey levels [cost, *unit_shape], how each picture's wire form
    begins, and the positions [axes, tokens] where they are not 0 to tokens - 1."""

    ids: list[int]
    grey: np.ndarray
    wires: list[list[int]]
    positions: np.ndarray | None = None


#: (messages, pictures, what the request asks of how finely they are cut) -> Expected
Reference = Callable[[list[dict[str, Any]], list[Image.Image], Mapping[str, Any]], Expected]
TEXTS = ("Hello", " A  b\n\nc ", "\nText Recognition:", "café 中文 🙂 1234")
_AND = {"type": "text", "text": " and\n"}
TURNS = [
    {"role": "system", "content": "You inspect homes.\n"},
    {"role": "user", "content": [{"type": "text", "text": "Compare "}, {"type": "image"}, _AND, {"type": "image"}]},
    {"role": "assistant", "content": "A socket, (1,2) "},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Now? 中文 café"}]},
]


def one_picture(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def check_inputs(
    ours: Preprocessor,
    theirs: Reference,
    messages: list[dict[str, Any]],
    pictures: Sequence[tuple[bytes, Image.Image]],
    asked: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Of a picture that is resized, grey levels may differ by 0.1 in the mean and by 3."""
    found = ours(PreprocessRequest(messages=messages, images=[data for data, _ in pictures], **asked))
    expected = theirs(messages, [image for _, image in pictures], asked)
    assert found.input_ids.tolist() == expected.ids
    assert [list(plan.wire[: len(wire)]) for plan, wire in zip(found.plans, expected.wires, strict=True)] == (
        expected.wires
    )
    if pictures:
        difference = np.abs(found.pixels.reshape(expected.grey.shape) - expected.grey)
        kept = all(
            (view.width, view.height) == image.size
            for plan, (_, image) in zip(found.plans, pictures, strict=True)
            for view in plan.views
        )
        assert difference.mean() <= 0.1 and difference.max() <= (1e-2 if kept else 3.01)
    if expected.positions is None:
        assert found.positions is None
    else:
        assert found.positions.dtype == np.int32 and np.array_equal(found.positions, expected.positions)


def encoded(folder: Path, prepared: Prepared, runner: str = "torch") -> torch.Tensor:
    encoder = VisionEncoder.from_checkpoint(folder, VisionSettings(runner))
    return encoder.encode([VisionItem(prepared.pixels, prepared.plan, prepared.digest)])[0]


def logprobs(folder: Path, prepared: Prepared, config: EngineConfig = ALONE) -> list[list[tuple[int, float]]]:
    """The five likeliest tokens of each greedy step with their log probabilities."""
    engine = Engine.from_checkpoint(folder, config)
    sampling = SamplingParameters(max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    prompt = prepared.input_ids, prepared.spans, encoded(folder, prepared), prepared.digest, sampling
    engine.submit(Request("r", *prompt, positions=prepared.positions))
    steps = []
    while engine.has_work():
        steps += [list(report.top) for _, _, report in engine.step().tokens]
    assert len(steps) == TOKENS
    return steps


@torch.inference_mode()
def check_whole_chain(case: Case, folder: Path) -> None:
    """Rows within 1e-4 of transformers', and the log probabilities of a greedy answer within 1e-3, in float32."""
    model = case.write(folder)
    prepared = Preprocessor.from_checkpoint(folder)(case.request)
    inputs = case.inputs(folder, prepared)
    found = model.model.get_image_features(**inputs)
    rows = found.pooler_output
    rows = rows.flatten(0, -2) if isinstance(rows, torch.Tensor) else torch.cat(rows)
    rows = torch.cat((rows, *(getattr(found, "deepstack_features", None) or ())), dim=1)
    for runner in ("torch", "onnx"):  # which is torch again for a tower that has no graph
        torch.testing.assert_close(encoded(folder, prepared, runner), rows, atol=1e-4, rtol=0)
    ids = torch.from_numpy(prepared.input_ids.astype(np.int64))[None]
    for step in logprobs(folder, prepared, case.engine):
        kinds = {"mm_token_type_ids": (ids == model.config.image_token_id).int()} if case.kinds else {}
        expected = model(input_ids=ids, **kinds, **inputs).logits[0, -1].log_softmax(-1)
        assert [value for _, value in step] == pytest.approx([expected[token].item() for token, _ in step], abs=1e-3)
        assert step[0][0] == int(expected.argmax())
        ids = torch.cat([ids, torch.tensor([[step[0][0]]])], dim=1)


def check_plans(folder: Path, sizes: Sequence[tuple[int, int]], policies: Sequence[Any]) -> None:
    """Of pictures of these ``sizes`` a plan is known by its wire form, and is as long and as large as it says."""
    config = read_config(folder)
    family = family_for(config)
    values, (most, _) = int(np.prod(family.unit_shape)), unfilled_tower(config).row_shape
    for size in sizes:
        for policy in policies:
            plan = family.plan(*size, policy)
            assert family.plan_of(plan.wire) == plan
            assert plan.pixel_bytes == plan.cost * values and plan.tokens <= plan.cost * most
            assert (
                sum(count for token, count in family.placeholder_tokens(plan) if token == family.image_token)
                == plan.tokens
            )
            assert {token for token, _ in family.placeholder_tokens(plan)} <= set(family.control_tokens)


def check_strict_config(folder: Path) -> None:
    """A setting that nobody reads is refused by name in each section of config.json; null states nothing."""
    file = folder / "config.json"
    saved = file.read_text()
    raw = json.loads(saved)
    sections = [name for name in raw if name.endswith("_config") and isinstance(raw[name], dict)]
    assert any("vision" in name for name in sections)
    for name in sections:
        for value in (7, None):
            file.write_text(json.dumps(raw | {name: raw[name] | {"unheard_of": value}}))
            if value is None:
                read_config(folder)
                continue
            with pytest.raises(
                CheckpointError, match=r"config.json: .*setting 'unheard_of' is not supported; supported"
            ):
                read_config(folder)
    file.write_text(saved)


def check_strict_weights(folder: Path) -> None:
    """A weight of the tower that is missing, one too many, and one that nobody reads are named as the file has them."""
    config, file = read_config(folder), folder / "model.safetensors"
    stored = load_file(file)
    layers = {name for name, ours in split_names(stored, config)["vision"].items() if ours.startswith("layers.")}

    def load(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, file)
        load_tower(config)

    for name in (max(layers), min(name for name in layers if "att" in name)):
        more, unread = re.sub(r"\.\d+\.", ".99.", name, count=1), name + ".more"
        with pytest.raises(CheckpointError, match=f" {re.escape(name)}: missing"):
            load({other: tensor for other, tensor in stored.items() if other != name})
        with pytest.raises(CheckpointError, match=f" {re.escape(more)}: left over"):
            load(stored | {more: stored[name].clone()})
        with pytest.raises(CheckpointError, match=f"1 weights are not known to .*: {re.escape(unread)}"):
            load(stored | {unread: stored[name].clone()})
        with pytest.raises(CheckpointError, match=f" {re.escape(name)}: has shape"):
            load(stored | {name: stored[name][:-1].clone()})
    load(stored)


@torch.inference_mode()
def check_batches(folder: Path, prepared: Sequence[Prepared]) -> None:
    """The rows of pictures together, and by the forwards that graphs record, are those of each alone, within 1e-5, and
    of large values eight last bits: several threads add in another order where there are more rows."""
    config = read_config(folder)
    tower, family = load_tower(config), family_for(config)
    pixels = [torch.from_numpy(one.pixels.reshape(-1, *family.unit_shape)) for one in prepared]
    wires = [() if tower.splits else [plan.wire for plan in one.plans] for one in prepared]
    alone = torch.cat([tower(*arguments) for arguments in zip(pixels, wires, strict=True)])
    together = torch.cat(pixels), [wire for some in wires for wire in some]
    torch.testing.assert_close(tower(*together), alone, atol=1e-5, rtol=1e-6)
    if tower.splits:  # no graph is recorded of others for any size but by the tower itself
        torch.testing.assert_close(GraphRunner(tower, [1, 2]).run(*together), alone, atol=1e-5, rtol=1e-6)


def check_memory(
    config: CheckpointConfig, dtype: str, pixels: torch.Tensor, wires: Wires, slack: float, random_weights: bool
) -> None:
    """What a forward takes is estimated from above, at most ``slack`` times what torch's profiler sees allocated.

    Without oneDNN, which on processors with AMX takes memory of its own for products in bfloat16, and with attention
    that writes no scores, as on a GPU.
    """
    tower = load_tower(config, getattr(torch, dtype), random_weights=random_weights)
    plain, unwritten = torch.backends.mkldnn.flags(enabled=False), patch.object(tower_attention, "MOST_SCORES", 0)
    with (
        plain,
        unwritten,
        torch.inference_mode(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        tower(pixels, wires)
    held, peak = 0, 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    estimate = unfilled_tower(config).to(getattr(torch, dtype)).activation_bytes(len(pixels))
    assert peak <= estimate <= slack * peak


def check_quantized(folder: Path, quantization: str, kind: str) -> None:
    """The stage says what its tower runs in; ``fp8_linears`` names linear layers that it has."""
    settings = VisionSettings(runner="torch", quantization=quantization)
    assert VisionEncoder.from_checkpoint(folder, settings).weights[0] == kind
    linears = unfilled_tower(read_config(folder)).fp8_linears()
    assert linears and all(isinstance(linear, torch.nn.Linear) for linear in linears.values())


_LEFT = r".*\.layers\.0\.mlp\.(experts\.\d+\.)?down_proj\.weight"


@torch.inference_mode()
def check_format(folder: Path, form: Format, ignore: Sequence[str]) -> None:
    """Each linear layer of the body has W to the last bit, and multiplies by it what the format makes of its inputs.

    The first layer's downs stay as they are, which ``ignore``, the configuration's list, says; without weights it
    decides alone.
    """
    file = folder / "model.safetensors"
    plain = {name.removesuffix(".weight"): tensor for name, tensor in load_file(file).items()}
    form = replace(form, settings=form.settings | {form.ignore: list(ignore)})
    packed = quantize_folder(folder, form, re.compile(f"(?!{_LEFT}){LINEAR.pattern}"))
    config, settings = read_config(folder), EngineConfig(threads=1, max_sequences=2)
    named = split_names(load_file(file), config)["text"]
    stored = {ours.rpartition(".")[0]: name.rpartition(".")[0] for name, ours in named.items()}
    file.rename(folder / "kept")
    unfilled = load_model(config, replace(settings, weights="random"))
    (folder / "kept").rename(file)
    model, read = load_model(config, settings), list[str]()
    for linear, without in zip(model.places(), unfilled.places(), strict=True):
        names = [stored[module] for module in linear.sizes]
        left = not packed.keys() & set(names)
        assert isinstance(linear.scheme, Unquantized) == isinstance(without.scheme, Unquantized) == left
        w = torch.cat([(plain if left else packed)[name] for name in names])
        assert torch.equal(linear.weight[: len(w)], w)
        x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(len(read)))
        seen = x if left else form.inputs(x)
        if isinstance(linear, Experts):
            found, weight = linear.operands(x)
            assert torch.equal(found, seen) and torch.equal(weight.flatten(0, -2), w)
        else:
            bias = None if linear.bias is None else linear.bias[: len(w)]
            product = torch.nn.functional.linear(seen, w, bias)
            torch.testing.assert_close(
                linear(x)[:, : len(w)], product, rtol=1e-6, atol=1e-6 * float(product.abs().max())
            )
        read += names
    assert packed.keys() < set(read) and any("layers.0" in name for name in packed)


@torch.inference_mode()
def check_kernels(folder: Path, wires: Wires, device: torch.device, **chosen: Any) -> None:
    """The rows by ``gpu_kernels`` as ``chosen`` are those by torch's own, but for the order of sums and, in FP8, the
    steps of e4m3 that these decide. ``wires``: of the pictures."""
    config = read_config(folder)
    settings = VisionSettings("torch", quantization="fp8" if chosen.get("fp8") else "checkpoint")
    tower, cost = serving_tower(config, settings).to(device), sum(family_for(config).plan_of(w).cost for w in wires)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (cost, *tower.unit_shape), dtype=torch.uint8, generator=generator).to(device)
    given = (pixels, () if tower.splits else wires)
    expected, found = tower(*given), tower(*given, kernels=gpu_kernels(**chosen))
    if chosen.get("fp8"):
        assert torch.nn.functional.cosine_similarity(found.double(), expected.double(), dim=-1).min() > 0.9998
    else:
        close = 1e-3 if chosen.get("epilogue") else 2e-5  # which takes one GELU for the other
        torch.testing.assert_close(found, expected, atol=close * float(expected.abs().max()), rtol=close)
