"""Reading safetensors and copying strictly: what is missing, left over or misshapen is named."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import hf_native

from tessera.checkpoint.weights import SafetensorsFolder, copy_whole, fill, split_names
from tessera.errors import CheckpointError
from tessera.models.registry import read_config


def shard(folder, parts=2):
    """Rewrite model.safetensors as shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        file_name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({name: tensors[name] for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_one_file_and_shards_give_the_same_tensors(tmp_path):
    folder = hf_native(tmp_path)
    names = SafetensorsFolder(folder).names()
    tensors = shard(folder)
    source = SafetensorsFolder(folder)
    assert source.names() == names == sorted(tensors)
    assert all(torch.equal(source.get(name), tensors[name]) for name in names)


def test_a_shard_that_is_missing_or_disagrees(tmp_path):
    folder = hf_native(tmp_path)
    shard(folder)
    index = folder / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    moved = dict(written["weight_map"], **{"no.such.weight": "model-00001-of-00002.safetensors"})
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match=r"no\.such\.weight"):
        SafetensorsFolder(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside"):
        SafetensorsFolder(folder)
    index.write_text(json.dumps(written))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors, which is missing"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"not even opened")
    with pytest.raises(CheckpointError, match=f"{name}.*never loaded"):
        SafetensorsFolder(tmp_path)


def test_a_damaged_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_weights_has_no_names(tmp_path):
    source = SafetensorsFolder(tmp_path)
    assert source.names() == []
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        source.get("lm_head.weight")


def test_unknown_and_double_names(tmp_path):
    config = read_config(hf_native(tmp_path))
    with pytest.raises(CheckpointError, match=r"1 weights.*vision_tower\.encoder\.layer\.0\.attention\.q_proj\.scale"):
        split_names(["vision_tower.encoder.layer.0.attention.q_proj.scale"], config)
    # The last part of a name is not enough: the vision tower's fc1 is nothing in the text model.
    with pytest.raises(CheckpointError, match="not known"):
        split_names(["language_model.model.layers.0.mlp.fc1.weight"], config)
    with pytest.raises(CheckpointError, match="same weight"):
        split_names(["lm_head.weight", "language_model.lm_head.weight"], config)


def targets(module):
    return {name: partial(copy_whole, value) for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([], "weights of it: bias: missing"),
        ([("bias", torch.ones(4)), ("more", torch.ones(1))], "more: left over"),
        ([("bias", torch.ones(5))], r"bias: has shape \[5\], expected \[4\]"),
        ([("bias", torch.ones(4)), ("bias", torch.ones(4))], "bias: given twice"),
        ([("bias", torch.ones(4).to(torch.float8_e4m3fn))], "bias: is stored as torch.float8_e4m3fn"),
        ([("bias", torch.ones(4).int())], "bias: is stored as torch.int32"),
    ],
)
def test_fill_names_what_does_not_fit(tensors, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        fill("it", targets(torch.nn.Linear(3, 4)), [("weight", torch.ones(4, 3)), *tensors])
