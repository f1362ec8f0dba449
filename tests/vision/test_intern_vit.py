"""Rules of the tower that no transformers checkpoint shows: resized positions, folded constants, strict loading."""

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Shape, as_internvl_chat, hf_native

from tessera.models.registry import read_config
from tessera.models.tower import load_tower

SMALL = dict(image_size=56, patch_size=14)


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_positions_of_another_grid_are_resized_as_the_reference_does(tmp_path):
    chat = as_internvl_chat(hf_native(tmp_path / "a", Shape(text="llama", **SMALL)), tmp_path / "b")
    stored = torch.randn(1, 1 + 6 * 6, 32, generator=torch.Generator().manual_seed(3))
    key = "vision_model.embeddings.position_embedding"
    change_weights(chat, lambda tensors: tensors.update({key: stored}))
    tower = load_tower(read_config(chat))
    square = stored[:, 1:].reshape(1, 6, 6, 32).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(square, size=(4, 4), mode="bicubic", align_corners=False)
    expected = resized.permute(0, 2, 3, 1).reshape(16, 32)
    assert torch.equal(tower.position_embedding[0, 0], stored[0, 0])
    torch.testing.assert_close(tower.position_embedding[0, 1:], tower.in_patch_order(expected))
