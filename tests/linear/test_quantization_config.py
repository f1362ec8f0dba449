"""Which module is quantized, and how: configurations that are nested, forgetful or wrong, and files that show more."""

import copy
import json

import pytest
import torch
from packers import FORMATS, change_config, int4, quantize_folder
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Shape, as_internvl_chat, hf_native

from tessera.engine.execution.model_runner import load_model
from tessera.errors import CheckpointError
from tessera.linear.formats.fp8 import Fp8
from tessera.linear.formats.int4 import Int4
from tessera.linear.quantization import scheme_selector
from tessera.linear.unquantized import Unquantized
from tessera.models.registry import read_config
from tessera.settings.stages import EngineConfig

SHAPE = dict(text_layers=1, vision_layers=1)


@pytest.fixture
def folder(tmp_path):
    return hf_native(tmp_path / "hf", Shape(**SHAPE))


def load(folder, **settings):
    return load_model(read_config(folder), EngineConfig(threads=1, max_sequences=2, **settings))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_section_of_the_text_model_may_hold_it(folder, tmp_path):
    expected = quantize_folder(folder, FORMATS["awq 32"], at="text_config")
    assert torch.equal(load(folder).layers[0].down.weight, expected["language_model.model.layers.0.mlp.down_proj"])
    chat = as_internvl_chat(hf_native(tmp_path / "b", Shape(text="llama", **SHAPE)), tmp_path / "chat")
    expected = quantize_folder(chat, FORMATS["packed asym"], at="llm_config")
    module = "language_model.model.layers.0.feed_forward.w2"
    assert torch.equal(load(chat).layers[0].down.weight, expected[module])


def test_two_that_differ_are_refused(folder):
    quantize_folder(folder, FORMATS["awq 32"], at="text_config")
    change_config(folder, lambda config: config.update(quantization_config=FORMATS["awq 64"].settings))
    with pytest.raises(CheckpointError, match="two quantization_configs that differ"):
        load(folder)


def test_modelopt_s_own_file_is_read(folder):
    quantize_folder(folder, FORMATS["modelopt"])
    change_config(folder, lambda config: config.pop("quantization_config"))
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "vision_tower*"]}
    whole = {"producer": {"name": "modelopt", "version": "0.33"}, "quantization": settings}
    (folder / "hf_quant_config.json").write_text(json.dumps(whole))
    assert isinstance(load(folder).layers[0].qkv.scheme, Fp8)


@pytest.mark.parametrize("form", ["awq 32", "packed sym", "modelopt"])
def test_modules_that_no_list_names_are_told_by_their_tensors(folder, form):
    """down_proj, and lm_head, were not converted, and no list says so."""
    quantize_folder(folder, FORMATS[form], modules=only("qkv", "o", "gate", "up"))
    change_config(folder, lambda config: config["quantization_config"].pop("ignore", None))
    model = load(folder)
    kinds = [type(linear.scheme) for linear in (model.layers[0].down, model.head)]
    assert kinds == [Unquantized, Unquantized]
    assert isinstance(model.layers[0].qkv.scheme, Int4 | Fp8)


def test_a_head_that_is_quantized_is_told_by_its_tensors(folder):
    expected = quantize_folder(folder, FORMATS["packed sym"], modules=only("head"))
    head = load(folder).head
    count = len(expected["language_model.lm_head"])
    assert torch.equal(head.weight[:count], expected["language_model.lm_head"])
    assert not head.weight[count:].any()


def only(*parts):
    """A pattern of the weights that belong to these parts."""
    import re

    leaves = {"qkv": "[qkv]_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj", "head": "lm_head"}
    return re.compile(rf"language_model\.(model\.layers\..*\.)?({'|'.join(leaves[part] for part in parts)})\.weight")


def test_parts_of_one_layer_must_be_quantized_alike(folder):
    quantize_folder(folder, FORMATS["awq 32"], modules=only("gate", "o"))
    with pytest.raises(CheckpointError, match=r"alike.*layers\.0\.mlp\.gate_proj: awq.*layers\.0\.mlp\.up_proj: not"):
        load(folder)


Q = "language_model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.update({f"{Q}.weight": torch.ones(64, 64)}), r"q_proj holds .*qweight I32.*weight F32.*neither"),
        (lambda t: t.pop(f"{Q}.qzeros"), r"q_proj holds .*qweight I32, scales F16: neither.*qzeros"),
        (
            lambda t: t.update({f"{Q}.scales": torch.ones(1, 64)}),
            r"q_proj\.scales: has shape \[1, 64\], expected \[2, 64\]",
        ),
        (lambda t: t.update({f"{Q}.qweight": torch.ones(64, 8)}), r"q_proj\.qweight: is stored as torch.float32"),
        (lambda t: t.update({f"{Q}.k_scale": torch.ones(1)}), r"not known.*q_proj\.k_scale"),
    ],
)
def test_modules_that_are_neither_are_named(folder, change, complaint):
    quantize_folder(folder, FORMATS["awq 32"])
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=complaint):
        load(folder)


def test_quantized_tensors_without_a_configuration_are_named(folder):
    quantize_folder(folder, FORMATS["modelopt"])
    change_config(folder, lambda config: config.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"q_proj holds .*weight F8_E4M3.*no quantization_config"):
        load(folder)
    leave = ("weight", "bias")
    change_weights(
        folder, lambda t: [t.pop(name) for name in list(t) if name.rpartition(".")[2] not in leave and "lang" in name]
    )
    with pytest.raises(CheckpointError, match=r"q_proj holds bias F32, weight F8_E4M3"):
        load(folder)


def test_groups_are_found_by_name_pattern_and_class(folder):
    """As compressed-tensors does: a name goes before a pattern, and that before all linear layers."""
    settings = copy.deepcopy(FORMATS["packed sym"].settings)
    group = settings["config_groups"]["group_0"]
    asymmetric = group | {"weights": int4(symmetric=False), "targets": [r"re:.*mlp\.(gate|up)_proj$"]}
    channel = group | {"weights": int4(strategy="channel", group_size=None), "targets": [Q.replace("q_proj", "o_proj")]}
    settings["config_groups"] |= {"group_1": asymmetric, "group_2": channel}
    schemes = scheme_selector(settings)
    name = "model.layers.0."
    assert schemes([f"{name}mlp.gate_proj", f"{name}mlp.up_proj"]).symmetric is False
    assert schemes([f"{name}self_attn.o_proj"]).group_size == -1
    assert (schemes([f"{name}mlp.down_proj"]).symmetric, schemes([f"{name}mlp.down_proj"]).group_size) == (True, 32)
    assert isinstance(schemes(["lm_head"]), Unquantized)


@pytest.mark.parametrize(
    "ignored",
    [
        "model.layers.0.mlp.down_proj",
        "language_model.model.layers.0.mlp.down_proj",
        "model.language_model.layers.0.mlp.down_proj",
        "re:.*down_proj",
        r"re:model\.language_model\.layers\.0\.mlp",
        "mlp",
    ],
)
def test_ignored_modules_by_any_prefix(ignored):
    """Where there are no tensors (weights: random) the list decides."""
    schemes = scheme_selector(FORMATS["awq 32"].settings | {"modules_to_not_convert": [ignored, "vision_tower"]})
    assert isinstance(schemes(["model.layers.0.mlp.down_proj"]), Unquantized)
    assert isinstance(schemes(["model.layers.0.self_attn.o_proj"]), Int4)
    assert isinstance(schemes(["output"]), Unquantized)


def test_no_name_is_matched_by_its_end_or_beginning():
    schemes = scheme_selector(FORMATS["awq 32"].settings | {"modules_to_not_convert": ["proj", "model.layers.1", "lp"]})
    assert all(isinstance(schemes([f"model.layers.{layer}.mlp.down_proj"]), Int4) for layer in (0, 11))


def group(**changes):
    return lambda settings: settings["config_groups"]["group_0"].update(changes)


def weights(**changes):
    return lambda settings: settings["config_groups"]["group_0"]["weights"].update(changes)


def inputs(**changes):
    return lambda settings: settings["config_groups"]["group_0"]["input_activations"].update(changes)


def root(**changes):
    return lambda settings: settings.update(changes)


@pytest.mark.parametrize(
    ("form", "change", "complaint"),
    [
        ("awq 32", root(bits=3), "bits 3"),
        ("awq 32", root(version="gemv"), "version 'gemv'"),
        ("awq 32", root(something_new=[1]), r"not understood: something_new = \[1\]"),
        ("awq 32", root(group_size=0), "group_size 0 is no number of columns"),
        ("awq 32", root(group_size=None), "group_size None"),
        ("awq 32", root(quant_method="bitsandbytes"), "quant_method 'bitsandbytes'"),
        ("gptq sym", root(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        ("gptq sym", root(dynamic={"-:.*down": {}}), "not understood: dynamic"),
        ("gptq sym", root(is_marlin_format=True), "is_marlin_format True"),
        ("packed sym", root(format="marlin-24"), "format 'marlin-24'"),
        ("packed sym", root(kv_cache_scheme={"num_bits": 8}), "not understood: kv_cache_scheme"),
        ("packed sym", root(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format 'sparse-24"),
        ("packed sym", root(config_groups=None), "no config_groups"),
        ("packed sym", weights(num_bits=8), r"config_groups\.group_0\.weights: num_bits 8"),
        ("packed sym", weights(actorder="sideways"), "actorder 'sideways'"),
        ("packed sym", weights(novelty=1), "weights: not understood: novelty = 1"),
        ("packed sym", group(input_activations={"num_bits": 8}), "input_activations"),
        ("packed sym", group(output_activations={"num_bits": 8}), "output_activations"),
        ("float channel dynamic", weights(strategy="group"), "strategy 'group'"),
        ("float channel dynamic", weights(symmetric=False), "symmetric False"),
        ("float channel dynamic", inputs(strategy="tensor"), "input_activations: strategy 'tensor'"),
        ("float blocks", weights(block_structure=[64, 64]), r"block_structure \[64, 64\]"),
        ("fp8 blocks", root(weight_block_size=[64, 64]), r"weight_block_size \[64, 64\]"),
        ("fp8 blocks", root(activation_scheme="static"), "activation_scheme 'static'"),
        ("fp8 blocks", root(scale_fmt="ue8m0"), "not understood: scale_fmt"),
        ("modelopt", root(quant_algo="NVFP4"), "quant_algo 'NVFP4'"),
        ("modelopt", root(kv_cache_quant_algo="FP8"), "kv_cache_quant_algo 'FP8'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(form, change, complaint):
    settings = copy.deepcopy(FORMATS[form].settings)
    scheme_selector(settings)
    change(settings)
    with pytest.raises(CheckpointError, match=complaint):
        scheme_selector(settings)


@pytest.mark.parametrize("form", ["awq 32", "packed channel", "float tensor static", "fp8 blocks"])
def test_random_weights_of_each_kind_are_sensible(folder, form):
    (folder / "model.safetensors").unlink()
    change_config(folder, lambda config: config.update(quantization_config=FORMATS[form].settings))
    first, again = (load(folder, weights="random", seed=3) for _ in range(2))
    for linear in (first.layers[0].qkv, first.layers[0].down):
        assert isinstance(linear.scheme, Int4 | Fp8)
        assert linear.weight.std() == pytest.approx(0.02, rel=0.05)
        assert linear.weight.mean().abs() < 0.001
    assert torch.equal(first.layers[0].down.weight, again.layers[0].down.weight)
    assert not torch.equal(first.layers[0].qkv.weight[:64], first.layers[0].output.weight)
    assert isinstance(first.head.scheme, Unquantized)


@pytest.mark.parametrize(
    "form", ["awq 32", "gptq desc_act", "packed asym", "float tensor static", "fp8 blocks", "modelopt"]
)
def test_headers_alone_tell_a_format_and_its_shapes(tmp_path, form):
    """As `tessera check` looks: what only numbers tell is left to the stage."""
    folder = hf_native(tmp_path, Shape(text_mlp=128, **SHAPE))
    quantize_folder(folder, FORMATS[form])
    load_model(read_config(folder), EngineConfig(), headers=True)
    names = [name for name in load_file(folder / "model.safetensors") if name.startswith(f"{Q}.")]
    large = next(name for name in names if name.rpartition(".")[2] in ("weight", "qweight", "weight_packed"))
    change_weights(folder, lambda stored: stored.update({large: stored[large][:-8]}))
    with pytest.raises(CheckpointError, match=f"q_proj.{large.rpartition('.')[2]}: has shape"):
        load_model(read_config(folder), EngineConfig(), headers=True)
