"""Qwen2-VL's tower: against transformers in fp32, pictures of any size, alone and beside others; memory; forwards."""

import numpy as np
import pytest
import torch
from tiny_qwen2_vl_tower import PATCH, config_of, expected, groups, model_of, picture, save, values, wires

from tessera.errors import ConfigError, InvalidRequest
from tessera.models.qwen2_vl.vision import Qwen2ViT
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem
from tessera.vision.torch_runner import TorchRunner


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return model_of()


@pytest.fixture(scope="module")
def tower(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Qwen2ViT:
    folder = tmp_path_factory.mktemp("tiny")
    save(model, folder)
    return load_tower(config_of(folder))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(embed_dim=96, num_heads=8),
        dict(patch_size=8, spatial_merge_size=2, hidden_act="gelu"),
        dict(rope_parameters={"rope_type": "axial", "rope_theta": 500.0}, depth=1),
    ],
    ids=lambda sizes: "-".join(sizes),
)
def test_other_shapes(tmp_path, sizes):
    model, grids, side = model_of(**sizes), [(6, 4), (2, 8)], sizes.get("patch_size", PATCH)
    save(model, tmp_path, "visual.")  # as transformers 4 did
    tower, pixels = load_tower(config_of(tmp_path, **sizes)), [picture(grid, side=side) for grid in grids]
    with torch.inference_mode():
        rows = tower(torch.cat([groups(p, side) for p in pixels]), wires(grids))
    torch.testing.assert_close(rows, expected(model, pixels, side), atol=1e-4, rtol=0)


@pytest.mark.parametrize("grey", [None, 0, 120, 255])
def test_folded_normalisation_costs_no_more_than_rounding_the_pixels(tmp_path, grey):
    """In bfloat16, against exact sums: at most twice the reference's error, which rounds normalised pixels, or a
    thousandth of what the kernel gives white. The kernel has a mean, so that greys near the pixels' mean cancel."""
    tower = Qwen2ViT(config_of(tmp_path)).requires_grad_(False)
    kernel = torch.randn(160, 3, 2, PATCH, PATCH, generator=torch.Generator().manual_seed(5)) * 0.02 + 0.02
    kernel = kernel.bfloat16().float()
    tower.targets(set())["patch_embedding.weight"](kernel)
    tower.finish_loading()
    pixels = picture((20, 20)) if grey is None else np.full((280, 280, 3), grey, np.uint8)
    weight = kernel.flatten(1).double().T
    exact, white = values(pixels).double() @ weight, values(np.full((28, 28, 3), 255, np.uint8)).double() @ weight
    reference = values(pixels).bfloat16().double() @ weight
    error = (tower.bfloat16().embed(groups(pixels)).double() - exact).square().mean().sqrt()
    rounded = (reference.bfloat16().double() - exact).square().mean().sqrt()
    assert error <= max(2 * rounded, 1e-3 * white.abs().mean())


def item(*pixels: np.ndarray) -> VisionItem:
    plan = [(0, 1, p.shape[0] // PATCH, p.shape[1] // PATCH) for p in pixels]
    digest = [(int(p.astype(np.int64).sum()), p.size) for p in pixels]
    flat = [groups(p).numpy().ravel() for p in pixels]
    return VisionItem(np.concatenate(flat), np.array(plan, np.int32).ravel(), np.array(digest).ravel())


def test_forwards_are_filled_across_requests_by_patches(model, tmp_path):
    """A batch of 1 is 1936 patches; a larger picture, which the checkpoint allows, has a forward alone."""
    save(model, tmp_path)
    config_of(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(f'{{"max_pixels": {500 * 28**2}}}')
    settings = VisionSettings(infer_batch_size=1, memory_bytes=1 << 30, cache_bytes=0)
    vision = VisionEncoder.from_checkpoint(tmp_path, settings)
    runner = vision.runner
    assert isinstance(runner, TorchRunner) and (vision.infer_batch_size, vision.largest_picture) == (484, 500)
    requests = [[(38, 22)], [(6, 10), (10, 10)], [(18, 26), (2, 2), (24, 24)], [(40, 50)], [(2, 30)]]
    pictures = [[picture(grid, seed) for grid in grids] for seed, grids in enumerate(requests)]
    forwards = []
    runner.run = lambda pixels, wires: (forwards.append(wires), TorchRunner.run(runner, pixels, wires))[1]
    rows = vision.encode([item(*each) for each in pictures])
    sizes = [[height * width for _, height, width in wires] for wires in forwards]
    assert sizes == [[836, 60, 100, 468, 4], [576], [2000], [60]]
    for own, each in zip(rows, pictures, strict=True):
        torch.testing.assert_close(own, expected(model, each), atol=1e-4, rtol=0)


def test_memory_is_held_for_the_deployment_s_largest_picture(model, tmp_path):
    """Not for the checkpoint's 16384 tokens; a picture of the deployment's own is the most that is taken."""
    save(model, tmp_path)
    config_of(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 12845056}')

    def start(policy, memory=1 << 30):
        settings = VisionSettings(infer_batch_size=1, memory_bytes=memory, cache_bytes=0, tile_policy=policy)
        return VisionEncoder.from_checkpoint(tmp_path, settings)

    def held(vision):
        return (1 << 30) - vision.budget.capacity - sum(p.nbytes for p in vision.runner.tower.parameters())

    for policy, largest in ((None, 16384), (f'{{"max_pixels": {500 * 28**2}}}', 500), ('{"max_pixels": 3136}', 484)):
        vision = start(policy)
        assert held(vision) == vision.runner.activation_bytes(largest) + largest * 4 * 3 * PATCH**2
        vision.pictures(item(np.zeros((28, largest * 28, 3), np.uint8)))
        with pytest.raises(
            InvalidRequest, match=f"{largest + 1} image tokens; .* at most {largest} at once: lower max"
        ):
            vision.pictures(item(np.zeros((28, (largest + 1) * 28, 3), np.uint8)))
    with pytest.raises(ConfigError, match="forward of 16384 .*or lower max_pixels in preprocess.tile_policy$"):
        start(None, 64 << 20)
    start('{"max_pixels": 3136}', 64 << 20)
    with pytest.raises(ConfigError, match="vision_encoder: tile policy: unknown key 'name'"):
        start("native")


def test_square_pictures_are_cut_as_the_family_cuts(tower):
    drawn = [picture((44, 44), seed) for seed in range(2)]
    pixels, grids = tower.squares(lambda shape: torch.from_numpy(np.stack(drawn)).view(2, *shape))
    assert torch.equal(pixels, torch.cat([groups(each) for each in drawn])) and grids == [(1, 44, 44)] * 2
