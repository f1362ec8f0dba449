"""Reading safetensors and copying strictly: what is missing, left over or misshapen is named."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Shape, as_internvl_chat, hf_native

from tessera.checkpoint.weights import SafetensorsFolder, copy_whole, fill, split_names
from tessera.errors import CheckpointError
from tessera.models.registry import read_config
from tessera.models.tower import tower_class


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


@pytest.mark.parametrize("text", ["qwen2", "llama"])
def test_names_with_and_without_the_leading_model_mean_the_same(tmp_path, text):
    new = hf_native(tmp_path / "new", Shape(text=text))
    old = hf_native(tmp_path / "old", Shape(text=text), prefix="model.")
    config = read_config(new)
    splits = [split_names(SafetensorsFolder(folder).names(), config) for folder in (new, old)]
    for part in ("vision", "text"):
        assert sorted(splits[0][part].values()) == sorted(splits[1][part].values())
        assert set(splits[0][part]) != set(splits[1][part])
    assert "model.layers.1.self_attn.q_proj.weight" in splits[0]["text"].values()
    assert "lm_head.weight" in splits[0]["text"].values()


def test_internlm2_keeps_its_own_names(tmp_path):
    chat = as_internvl_chat(hf_native(tmp_path / "a", Shape(text="llama")), tmp_path / "b")
    split = split_names(SafetensorsFolder(chat).names(), read_config(chat))
    assert split["text"]["language_model.model.layers.0.attention.wqkv.weight"] == (
        "model.layers.0.attention.wqkv.weight"
    )
    assert split["text"]["language_model.output.weight"] == "output.weight"
    assert split["vision"]["mlp1.3.bias"] == "projector.linear2.bias"


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


def test_fill_converts_to_each_weight_s_dtype():
    module = torch.nn.Linear(3, 4)
    fill("it", targets(module), [("weight", torch.ones(4, 3).half()), ("bias", torch.arange(4.0).double())])
    assert module.weight[:, 0].tolist() == [1] * 4
    assert module.bias.tolist() == [0, 1, 2, 3]
    assert module.bias.dtype == torch.float32


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


@pytest.mark.parametrize(("layout", "stored"), [("chat", "qkv"), ("hf", "q_proj")])
def test_a_tower_takes_q_k_and_v_as_one_matrix_or_as_three(tmp_path, layout, stored):
    folder = hf_native(tmp_path / "hf", Shape(text="llama"))
    folder = folder if layout == "hf" else as_internvl_chat(folder, tmp_path / "chat")
    config, source = read_config(folder), SafetensorsFolder(folder)
    names = split_names(source.names(), config)["vision"]
    tensors = {ours: source.get(name) for name, ours in names.items()}
    tower = tower_class(config)(config)
    fill("it", tower.targets(set(tensors)), tensors.items())
    name = f"layers.1.attention.{stored}.weight"
    assert torch.equal(tower.layers[1].attention.qkv.weight[: len(tensors[name])], tensors[name])
    missing = name.replace("q_proj", "k_proj")
    del tensors[missing]
    with pytest.raises(CheckpointError, match=f"{missing}: missing"):
        fill("it", tower.targets(set(tensors)), tensors.items())
    tensors[missing] = tensors["layers.1.attention.wrong.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=rf"wrong.weight: left over; |{missing}: has shape"):
        fill("it", tower.targets(set(tensors)), tensors.items())
