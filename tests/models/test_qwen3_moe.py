"""What Qwen3-MoE's configuration may state, what its file may hold, and what of it is quantized or counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from linear.packers import FORMATS, quantize_folder
from models.tiny_families import NEW
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Shape, hf_native, join_experts, split_experts
from transformers import Qwen3MoeConfig

from tessera.checkpoint.config import ExpertsConfig
from tessera.engine.execution.model_runner import load_model
from tessera.errors import CheckpointError
from tessera.linear.experts import Experts
from tessera.models.registry import read_config
from tessera.settings.stages import EngineConfig

SHAPE = Shape(text="qwen3_moe", text_layers=2, experts=(("num_experts", 4), ("num_experts_per_tok", 2)))
CONFIG = EngineConfig(threads=1, max_sequences=2)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_native(tmp_path_factory.mktemp("moe"), SHAPE)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((written / name).read_text())
    (tmp_path / "model.safetensors").write_bytes((written / "model.safetensors").read_bytes())
    return tmp_path


def change(folder: Path, **settings: Any) -> None:
    """Of the text model; ... takes a setting away."""
    raw = json.loads((folder / "config.json").read_text())
    section = {name: value for name, value in {**raw["text_config"], **settings}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw | {"text_config": section}))


def test_what_a_file_leaves_out_is_transformers_default(folder: Path) -> None:
    theirs = Qwen3MoeConfig()
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    others = ("vocab_size", "max_position_embeddings", "rms_norm_eps", "head_dim")
    change(folder, **dict.fromkeys((*names, *sizes, *others, "rope_parameters", "mlp_only_layers"), ...))
    text = read_config(folder).text
    assert text.experts == ExpertsConfig(*(getattr(theirs, name) for name in names), mlp_only_layers=())
    assert [getattr(text, name) for name in (*sizes, *others[:-1])] == [
        getattr(theirs, name) for name in (*sizes, *others[:-1])
    ]
    # As its attention has it: the class states none.
    assert not hasattr(theirs, "head_dim") and text.head_dim == theirs.hidden_size // theirs.num_attention_heads


def test_the_number_of_experts_by_either_name(folder: Path) -> None:
    """transformers 5 saves it as num_local_experts; published files say num_experts."""
    change(folder, num_experts=..., num_local_experts=4)
    assert read_config(folder).text.experts.num_experts == 4
    change(folder, num_experts=4, num_local_experts=4, router_aux_loss_coef=0.0, output_router_logits=False)
    assert read_config(folder).text.experts.num_experts == 4
    change(folder, num_experts=8)
    with pytest.raises(CheckpointError, match="num_experts and num_local_experts differ: 8, 4"):
        read_config(folder)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5 of 4 experts"),
        ({"num_experts": 0}, "num_experts must be a positive whole number, not 0"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be a positive whole number, not None"),
        ({"moe_intermediate_size": 2.5}, "moe_intermediate_size must be a positive whole number"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob 'yes' is not supported"),
        ({"mlp_only_layers": [2]}, r"mlp_only_layers must be numbers of its 2 layers, not \[2\]"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be numbers of its 2 layers, not 1"),
        ({"n_shared_experts": 1}, "setting 'n_shared_experts' is not supported"),
        ({"scoring_func": "sigmoid"}, "setting 'scoring_func' is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention: use_sliding_window True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}, "mixtures of experts of another kind"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "setting 'moe_intermediate_size' is not"),
    ],
)
def test_what_is_not_done_is_refused_by_name(folder: Path, settings: dict[str, Any], complaint: str) -> None:
    change(folder, **settings)
    with pytest.raises(CheckpointError, match=complaint):
        read_config(folder)


@pytest.mark.parametrize("together", [False, True])
def test_missing_and_left_over_weights_are_named(folder: Path, together: bool) -> None:
    if together:
        join_experts(folder)
    file, layer = folder / "model.safetensors", "language_model.model.layers.1.mlp."
    stored = load_file(file)
    expert = "experts.down_proj" if together else "experts.3.down_proj.weight"
    for name in (f"{layer}gate.weight", layer + expert):
        save_file({other: tensor for other, tensor in stored.items() if other != name}, file)
        missing = f"{layer}experts.0.down_proj.weight: missing" if "experts.down" in name else f"{name}: missing"
        with pytest.raises(CheckpointError, match=missing.replace(".", r"\.")):
            load_model(read_config(folder), CONFIG)
    more = {f"{layer}experts.4.down_proj.weight": torch.zeros(64, 48)}
    for extra, why in ((more, r"experts\.4\.down_proj\.weight: left over"), ({f"{layer}gate.bias": more}, "not known")):
        tensors = {
            name: tensor if isinstance(tensor, torch.Tensor) else torch.zeros(4) for name, tensor in extra.items()
        }
        save_file(stored | tensors, file)
        with pytest.raises(CheckpointError, match=why):
            load_model(read_config(folder), CONFIG)


def test_a_quantized_router_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    name = "language_model.model.layers.0.mlp.gate.weight"
    save_file(
        {key: each.to(torch.float8_e4m3fn) if key == name else each for key, each in load_file(file).items()}, file
    )
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight: is stored as torch\.float8_e4m3fn"):
        load_model(read_config(folder), CONFIG)


def test_an_expert_that_is_not_quantized_as_the_others_is_named(folder: Path) -> None:
    """As where a calibration never saw it."""
    file, module = folder / "model.safetensors", "language_model.model.layers.1.mlp.experts.2.up_proj"
    plain = load_file(file)
    quantize_folder(folder, FORMATS["float channel dynamic"])
    load_model(read_config(folder), CONFIG)
    stored = {name: each for name, each in load_file(file).items() if name.rpartition(".")[0] != module}
    save_file(stored | {f"{module}.weight": plain[f"{module}.weight"]}, file)
    told = r"are not: \S*experts\.0\.gate_proj: compressed-tensors, group 0, \S*experts\.2\.up_proj: not quantized$"
    with pytest.raises(CheckpointError, match=told):
        load_model(read_config(folder), CONFIG)


def wide_qwen3_vl(folder: Path, inner: int) -> dict[str, torch.Tensor]:
    """A checkpoint with each expert's matrices by themselves in blocks of FP8; gives W by module."""
    family = NEW["qwen3_vl, experts"]
    family.write(folder, text={**family.wide["text"], "moe_intermediate_size": inner})
    split_experts(folder)
    return quantize_folder(folder, FORMATS["fp8 blocks"])


@pytest.mark.parametrize("transposed", [False, True])
def test_all_experts_in_blocks_of_fp8_in_one_tensor(tmp_path: Path, transposed: bool) -> None:
    """Scales lie as the weights do. As vLLM reads published files of Qwen3-VL (pull request 50727)."""
    expected = wide_qwen3_vl(tmp_path, 384)
    join_experts(tmp_path, transposed)
    model = load_model(read_config(tmp_path), CONFIG)
    assert isinstance(model.layers[0].gate_up, Experts) and isinstance(model.layers[2].gate_up, Experts)
    for layer in (model.layers[0], model.layers[2]):
        for linear in (layer.gate_up, layer.down):
            w = [expected[module.replace("model.", "model.language_model.", 1)] for module in linear.sizes]
            assert torch.equal(linear.weight, torch.cat(w))
    load_model(read_config(tmp_path), CONFIG, headers=True)
    file, whole = tmp_path / "model.safetensors", "model.language_model.layers.2.mlp.experts.down_proj"
    stored = load_file(file)
    save_file(stored | {f"{whole}_scale_inv": stored[f"{whole}_scale_inv"].mT.contiguous()}, file)
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.mlp\.experts\.down_proj_scale_inv: has shape \[6, 3, 2\], exp"
    ):
        load_model(read_config(tmp_path), CONFIG)
    save_file({name: each for name, each in stored.items() if name != f"{whole}_scale_inv"}, file)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.down_proj: left over"):
        load_model(read_config(tmp_path), CONFIG)


def test_a_block_that_is_part_of_a_gate_and_of_an_up_is_refused(tmp_path: Path) -> None:
    wide_qwen3_vl(tmp_path, 192)
    load_model(read_config(tmp_path), CONFIG)  # each by itself
    file, place = tmp_path / "model.safetensors", "model.language_model.layers.0.mlp.experts.gate_up_proj_scale_inv"
    join_experts(tmp_path)
    save_file(load_file(file) | {place: torch.ones(6, 3, 2)}, file)
    with pytest.raises(CheckpointError, match=rf"{place}: has blocks of 128 rows, and a matrix of 192 ends within one"):
        load_model(read_config(tmp_path), CONFIG)


def test_places_and_counts(folder: Path) -> None:
    """All experts' bytes count, and of their products those that a token sees. Quantized on load, the router stays."""
    change(folder, mlp_only_layers=[0])
    file = folder / "model.safetensors"
    dense = {name: tensor for name, tensor in load_file(file).items() if "layers.0.mlp" not in name}
    dense |= {f"language_model.model.layers.0.mlp.{part}_proj.weight": torch.zeros(96, 64) for part in ("gate", "up")}
    dense["language_model.model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 96)
    save_file(dense, file)
    model = load_model(read_config(folder), EngineConfig(threads=1, max_sequences=2, quantization="fp8"))
    first, second = (layer.places() for layer in model.layers)
    assert list(first.values()) == ["qkv", "output", "gate_up", "down"]
    assert list(second.values()) == ["qkv", "output", "experts", "experts"]
    attention = 64 * (4 + 2 * 2) * 16 + 64 * 64
    assert model.products_a_token == 2 * attention + 3 * 64 * 96 + 2 * 3 * 64 * 48
    held = sum(layer.weight.numel() for layer in second if isinstance(layer, Experts))
    assert held == 4 * 3 * 64 * 48
    assert model.describe_weights() == "fp8"
    router = model.layers[1].router
    assert torch.equal(router.weight, load_file(file)["language_model.model.layers.1.mlp.gate.weight"])
