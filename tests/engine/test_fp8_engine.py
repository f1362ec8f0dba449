"""A model quantized to FP8 while it is read answers as the fake-quantized torch model, whichever its products are."""

import numpy as np
import pytest
import torch
from engine_fakes import TextEngine, make_request, run, tiny_config, tiny_engine, tiny_model, tokens_of

from tessera.kernels import reference
from tessera.kernels.fp8_rows import Fp8Rows, quantize_rows, quantize_weight
from tessera.kernels.operands import DeferredProduct
from tessera.linear.formats.fp8 import Fp8, Fp8OnLoad
from tessera.linear.quantization import scheme_selector
from tessera.linear.scheme import Linear
from tessera.linear.unquantized import Unquantized
from tessera.models.registry import model_class
from tessera.models.text.decoder import DecoderLayer, Qwen2

CHANGES = dict(tie_word_embeddings=False, head_dim=16)


class FakeQuantized(Unquantized):
    """Weights and activations are rounded to e4m3 and back, and multiplied by torch."""

    def finish(self, layer: Linear) -> None:
        values, scales = quantize_weight(layer.weight)
        layer.weight = values.float() * scales[:, None]

    def apply_deferred(self, layer: Linear, x: torch.Tensor | Fp8Rows) -> torch.Tensor | DeferredProduct:
        assert isinstance(x, torch.Tensor)
        return super().apply_deferred(layer, quantize_rows(x).dequantized())


def linears(model: Qwen2) -> list[Linear]:
    """Those of the decoder layers."""
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    return [module for layer in layers for module in layer.modules() if isinstance(module, Linear)]


def copied(original: Qwen2, schemes) -> Qwen2:
    """A model with the weights of ``original``, which go through ``schemes`` as those of a checkpoint do."""
    config = tiny_config(**CHANGES)
    model = model_class(config.architecture)(config, schemes, torch.float32, torch.device("cpu"))
    tensors = {}
    for name, module in original.named_modules():
        if isinstance(module, Linear):
            for stored, rows in module._rows.items():
                tensors |= {f"{stored}.{leaf}": buffer[rows] for leaf, buffer in module.named_buffers()}
        elif module is not original.rotary:
            for leaf, buffer in module.named_buffers(recurse=False):
                model.get_submodule(name).get_buffer(leaf).copy_(buffer)
    for name, target in model.targets(set(tensors)).items():
        if name in tensors:
            target(tensors.pop(name))
    assert not tensors
    return model


def answers(model: Qwen2, **settings) -> list[list[int]]:
    return answers_of(tiny_engine(model, **settings))


def answers_of(engine: TextEngine, count: int = 6, tokens: int = 12) -> list[list[int]]:
    for number in range(count):
        prompt = [7, 8, 9] * 3 + [20 + number, 30 - number] * (1 + 3 * number)
        engine.submit(make_request(np.array(prompt, np.int32), str(number), max_tokens=tokens, ignore_eos=True))
    events = run(engine)
    return [tokens_of(events, str(number)) for number in range(count)]


@pytest.fixture(scope="module")
def original() -> Qwen2:
    return tiny_model(**CHANGES)


@pytest.fixture(scope="module")
def expected(original) -> list[list[int]]:
    fakes = lambda modules: Unquantized() if "lm_head" in modules else FakeQuantized()  # noqa: E731
    return answers(copied(original, fakes))


def test_on_the_cpu(original, expected):
    assert answers(original) != expected
    model = copied(original, scheme_selector(None, None, "fp8"))
    assert all(type(linear.scheme) is Fp8OnLoad for linear in linears(model))
    assert answers(model) == expected


@pytest.mark.parametrize("product", ["skinny", "rescaled", "rows"])
@pytest.mark.parametrize("steps", [dict(), dict(max_batched_tokens=17, max_sequences=8)], ids=["whole", "pieces"])
def test_as_a_gpu_runs_it(monkeypatch, original, expected, product, steps):
    """The twins of the kernels, with rows handed over quantized."""
    handed_over = []

    def counted(kernel, given):
        def call(*arguments, **options):
            handed_over.append(given)
            return kernel(*arguments, **options)

        return call

    monkeypatch.setattr(Fp8, "_has_units", lambda scheme, layer: True)
    monkeypatch.setattr("tessera.linear.scheme.FP8_K_MULTIPLE", 16)
    monkeypatch.setattr("tessera.linear.formats.fp8.quantize_rows", counted(quantize_rows, "by the product"))
    monkeypatch.setattr(reference, "quantize_rows", counted(reference.quantize_rows, "by the kernel in front"))
    model = copied(original, scheme_selector(None, None, "fp8"))
    for linear in linears(model):
        linear.scheme.ways = ((1000, product),)
    assert answers(model, **steps) == expected
    # Of a layer's four products only the one behind the attention quantizes for itself.
    assert handed_over.count("by the kernel in front") == 3 * handed_over.count("by the product")


def test_in_graphs_of_prompts(monkeypatch, original, expected):
    """Whether the layers leave a product's scales to the last one may differ from size to size."""
    pytest.importorskip("triton", reason="the attention that graphs need is written in triton")
    monkeypatch.setattr(Fp8, "_has_units", lambda scheme, layer: True)
    model = copied(original, scheme_selector(None, None, "fp8"))
    for linear in linears(model):
        linear.scheme.ways = (20, "rescaled"), (1000, "rows")
    engine = tiny_engine(model, attention="triton", block_size=16, max_batched_tokens=40)
    engine._runner.capture_graphs([], [16, 40], 16)
    assert answers_of(engine, count=3, tokens=3) == [answer[:3] for answer in expected[:3]]
    assert engine.metrics.graph_steps == engine.metrics.steps
