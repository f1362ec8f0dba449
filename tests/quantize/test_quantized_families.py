"""Checkpoints of the newer families that we quantized, experts stored in any way: the stages answer as with the
weights that the file stands for."""

import json
import shutil
from pathlib import Path

import pytest
import quantize_fakes
import tiny_qwen3_vl
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from models.conformance import encoded, logprobs
from models.tiny_families import NEW
from safetensors.torch import load_file, save_file
from tiny_checkpoints import join_experts, split_experts
from tiny_qwen2_vl import picture

from tessera.checkpoint.weights import SafetensorsFolder
from tessera.engine.execution.model_runner import load_model
from tessera.errors import CheckpointError
from tessera.models.registry import read_config
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.settings.stages import EngineConfig
from tessera_quantize.body import Body

#: family, and, where its experts are stored in one tensor by us, whether that is transposed
SOURCES = {
    **{family: (family, None) for family in NEW},
    "qwen3_vl, experts [in, out]": ("qwen3_vl, experts", True),
    "internvl, experts [out, in]": ("internvl, experts", False),
}
#: how the names of experts' modules begin in the files, and in quantization_config
EXPERTS = {
    "qwen3_vl, experts": ("model.language_model.layers.0.mlp.", "model.language_model.layers.0.mlp."),
    "internvl, experts": ("language_model.model.layers.0.mlp.", "model.language_model.layers.0.mlp."),
}


def plain_twin(folder: Path, twin: Path) -> Path:
    """The same checkpoint with each quantized weight as compressed-tensors' own code reads it."""
    shutil.copytree(folder, twin, ignore=shutil.ignore_patterns("*.safetensors*"))
    raw = json.loads((folder / "config.json").read_text())
    groups = raw.pop("quantization_config")["config_groups"]
    (twin / "config.json").write_text(json.dumps(raw))
    source, modules, tensors = SafetensorsFolder(folder), dict[str, dict[str, torch.Tensor]](), {}
    for name in source.names():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = source.get(name)
    for module, leaves in modules.items():
        if "weight_scale" in leaves:
            kind = "pack-quantized" if "weight_packed" in leaves else "float-quantized"
            (group,) = (group for group in groups.values() if group["format"] == kind)
            scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
            bias = {leaf: leaves.pop(leaf) for leaf in ("bias",) if leaf in leaves}
            weight = BaseCompressor.get_value_from_registry(kind).decompress(leaves, scheme)["weight"]
            leaves = {"weight": weight.float(), **bias}
        tensors |= {f"{module}.{leaf}" if module else leaf: tensor for leaf, tensor in leaves.items()}
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    return twin


@pytest.mark.parametrize("method", ["gptq", "fp8"])
@pytest.mark.parametrize("source", SOURCES)
def test_answers_are_those_of_the_weights_that_the_file_stands_for(tmp_path: Path, source: str, method: str) -> None:
    name, transposed = SOURCES[source]
    family = NEW[name]
    family.write(tmp_path / "source")
    if transposed is not None:
        split_experts(tmp_path / "source")
        join_experts(tmp_path / "source", transposed)
    pictures = quantize_fakes.labelled_folder(tmp_path / "pictures")
    changes = {"symmetric": True, "vision_fp8": method == "fp8"}
    job = quantize_fakes.job(tmp_path / "source", tmp_path / "out", pictures, method, **changes)
    out = quantize_fakes.made(job)
    model = load_model(read_config(out), EngineConfig(threads=1))
    assert model.describe_weights() == ("fp8" if method == "fp8" else "int4 in groups of 32")
    shown = [picture(*size, seed)[0] for seed, size in enumerate(family.pictures[:2])]
    prepared = Preprocessor.from_checkpoint(out)(PreprocessRequest(text="<image> and <image>: alike?", images=shown))
    twin = plain_twin(out, tmp_path / "twin")
    split_experts(shutil.copytree(tmp_path / "source", tmp_path / "apart"))
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "apart", twin))
    assert before.keys() == after.keys()
    for tensor, plain in before.items():
        assert (after[tensor] - plain).norm() <= (0.04 if method == "fp8" else 0.2) * plain.norm(), tensor
    found = logprobs(out, prepared)
    if method == "gptq":
        assert found == logprobs(twin, prepared)  # to the last bit
    logits = quantize_fakes.layer_by_layer(twin, prepared, encoded(out, prepared), method == "fp8")
    expected = logits[-1].log_softmax(-1)
    assert [value for _, value in found[0]] == pytest.approx(
        [expected[token].item() for token, _ in found[0]], abs=1e-5
    )
    if name in EXPERTS:
        begin, module = EXPERTS[name]
        stored = {each.removeprefix(begin) for each in SafetensorsFolder(out).names() if each.startswith(begin)}
        leaf = "weight" if method == "fp8" else "weight_packed"
        assert {f"experts.5.{part}_proj.{leaf}" for part in ("gate", "up", "down")} < stored
        assert not {"experts.gate_up_proj", "experts.down_proj"} & stored
        ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
        assert "| mlp.experts.gate_proj |" in (out / "quantization" / "report.md").read_text()
        assert f"{module}gate" in ignore and not any("experts" in each for each in ignore)


def test_experts_that_are_square_or_stored_twice_are_refused(tmp_path: Path) -> None:
    """As the stages refuse them."""
    layer = "model.language_model.layers.2.mlp.experts"
    tiny_qwen3_vl.write_model(tmp_path, tiny_qwen3_vl.EXPERTS | {"moe_intermediate_size": 32})
    with pytest.raises(CheckpointError, match=rf"{layer}\.gate_up_proj: is 64 x 64: which of them the inputs are"):
        Body(read_config(tmp_path), torch.float32, torch.device("cpu")).tensors(2)
    tiny_qwen3_vl.write_model(tmp_path, tiny_qwen3_vl.EXPERTS)
    tensors = load_file(tmp_path / "model.safetensors")
    apart = {f"{layer}.{number}.down_proj.weight": torch.zeros(64, 96) for number in range(6)}
    save_file(tensors | apart, tmp_path / "model.safetensors")
    body = Body(read_config(tmp_path), torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight: left over"):
        body.load(body.tensors(2))
