"""Rules of the tower that no transformers checkpoint shows: resized positions, folded constants, strict loading."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Shape, as_internvl_chat, hf_native

from tessera.models.internvl.vision import InternViT
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


def test_patches_are_taken_in_blocks_of_the_pixel_shuffle(tmp_path):
    config = read_config(hf_native(tmp_path, Shape(**SMALL)))
    order = InternViT(config).in_patch_order(torch.arange(16)).tolist()
    assert order == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    # The patch at row 1, column 2 is the fifth block's... third block row-major: position 6 of the order above.
    tower = load_tower(config)
    black, lit = torch.zeros(2, 1, 56, 56, 3, dtype=torch.uint8)
    lit[0, 14:28, 28:42] = 255
    changed = (tower.embed(lit) - tower.embed(black)).abs().amax(-1)[0].nonzero().flatten().tolist()
    assert changed == [1 + order.index(6)]
