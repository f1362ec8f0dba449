"""A linear layer between its neighbours: the kernels that the engine runs there, and the same numbers."""

from array import array

import pytest
import torch
import torch.nn.functional as F
from engine_fakes import make_request, tiny_config

from tessera.engine.execution.model_runner import ModelRunner
from tessera.engine.scheduling.scheduler import ScheduledBatch, ScheduledSpan
from tessera.engine.sequence import Sequence
from tessera.kernels import reference
from tessera.kernels.fp8_rows import Fp8Sums
from tessera.kernels.operands import EARLY_ROWS, NormedRows, Partials
from tessera.linear.formats import int4
from tessera.linear.formats.fp8 import Fp8, Fp8OnLoad
from tessera.linear.formats.gptq import Awq
from tessera.linear.formats.int4 import Int4
from tessera.linear.scheme import Linear, LinearShape
from tessera.linear.tuning import InPlace
from tessera.linear.unquantized import CUBLAS, EARLY, FEW_ROWS, Unquantized
from tessera.models.registry import model_class
from tessera.settings.stages import EngineConfig

CPU, HIDDEN, INNER = torch.device("cpu"), 128, 256
SHAPES = {"qkv": (192, HIDDEN), "output": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}


class Recorder:
    """The twins of the kernels, which says which of them ran, and what they were to quantize or to rescale."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def add_rms_norm(self, x, residual, weight, eps, fp8=False):
        self._add("norm", fp8, isinstance(x, Fp8Sums))
        return reference.add_rms_norm(x, residual, weight, eps, fp8)

    def silu_and_multiply(self, gate_up, fp8=False, scales=None):
        self._add("activation", fp8, scales is not None)
        return reference.silu_and_multiply(gate_up, fp8, scales)

    def rotate_and_store(self, qkv, *given):
        self._add("rotation", False, isinstance(qkv, Fp8Sums))
        return reference.rotate_and_store(qkv, *given)

    def _add(self, name, fp8, scales):
        self.calls.append(name + " fp8" * fp8 + " scales" * scales)

    def take(self) -> list[str]:
        taken, self.calls = self.calls, []
        return taken


@pytest.fixture
def kernels(monkeypatch):
    recorder = Recorder()
    for module in ("scheme", "tuning", "formats.int4"):
        monkeypatch.setattr(f"tessera.linear.{module}.layer_kernels", lambda device: recorder)
    monkeypatch.setattr("tessera.linear.unquantized.layer_kernels", lambda device: recorder)
    monkeypatch.setattr(Fp8, "_has_units", lambda scheme, layer: True)
    return recorder


def layer_in(place, scheme):
    n, k = SHAPES.get(place, (64, HIDDEN))
    layer = Linear(k, {"w": slice(0, n)}, place == "qkv", lambda names: scheme, torch.float32, CPU)
    layer.randomize(torch.Generator().manual_seed(1))
    return layer, LinearShape(n, k, place == "qkv", place, torch.float32)


@pytest.mark.parametrize(
    ("place", "plain", "fp8"),
    [
        ("qkv", ["norm", "rotation"], ["norm fp8", "rotation scales"]),
        ("output", ["norm"], ["norm scales"]),  # it quantizes what the attention leaves
        ("gate_up", ["norm", "activation"], ["norm fp8", "activation fp8 scales"]),
        ("down", ["activation", "norm"], ["activation fp8", "norm scales"]),
        ("alone", [], []),
    ],
)
def test_weights_are_measured_between_the_neighbours_of_a_decoder_layer(kernels, place, plain, fp8):
    for scheme, run in ((Unquantized(), plain), (Fp8OnLoad(), fp8)):
        if run is fp8:
            scheme.ways = ((8, "rescaled"),)
        layer, shape = layer_in(place, scheme)
        InPlace(shape, 3, CPU).run(layer)
        assert kernels.take() == run


def int4_with_copy(monkeypatch):
    monkeypatch.setattr(Int4, "_packs", lambda scheme, layer: True)
    monkeypatch.setattr(int4, "has_units", lambda layer: True)
    monkeypatch.setattr(int4, "_half_is_free", lambda device: True)
    return Awq(128)


def model_of(architecture, make_scheme):
    """A model, and its linear layers."""
    config = tiny_config(architecture=architecture, hidden_size=HIDDEN, intermediate_size=INNER, head_dim=32)
    model = model_class(architecture)(config, lambda modules: make_scheme(), torch.float32, CPU)
    model.randomize(5)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    for linear in linears:
        if linear.bias is not None:
            linear.bias.mul_(20)  # of the product's size
    return model, linears


def logits_of(model, attention):
    """Of a step of one token behind one of eleven."""
    if attention == "triton":
        pytest.importorskip("triton", reason="the kernels are written in triton")
        if torch.cuda.is_available():
            pytest.skip("compiled kernels take no tensors of the CPU; tests/kernels and tests/gpu run them on a GPU")
    sequence = Sequence(make_request(list(range(12)), max_tokens=1))
    sequence.block_table = array("q", [0])
    runner = ModelRunner.of_model(model, EngineConfig(block_size=16, attention=attention, max_sequences=1), 16)
    runner.logits(ScheduledBatch([ScheduledSpan(sequence, 0, 11, False)]))
    return runner.logits(ScheduledBatch([ScheduledSpan(sequence, 11, 12, True)]))


EVERY_DECODER = pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        ("Qwen2ForCausalLM", "sdpa"),
        ("Qwen2ForCausalLM", "triton"),
        ("Qwen3ForCausalLM", "sdpa"),
        ("InternLM2ForCausalLM", "sdpa"),
        ("Phi3ForCausalLM", "sdpa"),
    ],
)


@EVERY_DECODER
def test_what_split_products_leave_is_added_by_what_comes_next(monkeypatch, architecture, attention):
    model, linears = model_of(architecture, Unquantized)
    expected, left = logits_of(model, attention), []
    make = Partials.__new__
    monkeypatch.setattr(Partials, "__new__", lambda cls, *given: (left.append(cls), make(cls, *given))[1])
    for linear in linears:
        linear.scheme.ways = ((64, FEW_ROWS),)
    torch.testing.assert_close(logits_of(model, attention), expected)
    # q, k and v, output and down of both steps; in the first the last layer's two latter have no row to compute.
    assert len(left) == 2 * 3 * len(model.layers) - 2


@EVERY_DECODER
def test_early_products_norm_what_they_read_and_add_to_what_they_write(monkeypatch, architecture, attention):
    """Alone, and beside products of other ways."""
    model, linears = model_of(architecture, Unquantized)
    expected, norms = logits_of(model, attention), []
    make = NormedRows.__new__
    monkeypatch.setattr(NormedRows, "__new__", lambda cls, *given: (norms.append(cls), make(cls, *given))[1])
    for linear in linears:
        linear.scheme.ways = ((EARLY_ROWS, EARLY),)
    torch.testing.assert_close(logits_of(model, attention), expected)
    # Of both norms in both steps, but for the last layer's second one in the first step, which has no row.
    assert len(norms) == 2 * 2 * len(model.layers) - 1
    for turn in range(3):
        for index, linear in enumerate(linears):
            linear.scheme.ways = ((EARLY_ROWS, (EARLY, FEW_ROWS, CUBLAS)[(turn + index) % 3]),)
        torch.testing.assert_close(logits_of(model, attention), expected)


@EVERY_DECODER
def test_layers_that_choose_otherwise_than_their_neighbours_answer_alike(monkeypatch, architecture, attention):
    model, linears = model_of(architecture, lambda: int4_with_copy(monkeypatch))

    def logits(choose):
        for index, linear in enumerate(linears):
            ways = linear.scheme.possible(linear, LinearShape(0, 0, False, "alone", torch.float32), 11)
            linear.scheme.ways = (1, choose(ways, index)), (11, choose(ways, index + 1))
        return logits_of(model, attention)

    expected = logits(lambda ways, index: int4.DEQUANTIZED)
    for turn in range(6):
        found = logits(lambda ways, index, turn=turn: ways[(turn + index) % len(ways)])
        assert F.cosine_similarity(found, expected) > 0.99
