"""Digests: equal inputs, equal names; any difference, another name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.models.family import ImagePlan, View, checkpoint_id, cut_otherwise, digest

PLAN = ImagePlan(768, 3, (3, 1, 2), (View(896, 448, (1, 448, 2, 448, 3), (0, 2, 1, 3, 4)),))


def test_every_part_counts() -> None:
    base = digest(b"picture", 0, PLAN, "settings", b"id")
    assert base.dtype == np.int64 and base.shape == (2,)
    assert np.array_equal(base, digest(b"picture", 0, PLAN, "settings", b"id"))
    others = [
        digest(b"picturf", 0, PLAN, "settings", b"id"),
        digest(b"picture", 1, PLAN, "settings", b"id"),
        digest(b"picture", 0, replace(PLAN, wire=(3, 2, 1)), "settings", b"id"),
        digest(b"picture", 0, replace(PLAN, views=(replace(PLAN.views[0], order=(2, 0, 1, 3, 4)),)), "settings", b"id"),
        digest(b"picture", 0, PLAN, "setting", b"sid"),
        digest(b"picture", 0, PLAN, "settings", b"iD"),
    ]
    assert len({tuple(value) for value in [base, *others]}) == 7


def test_from_one_cuts_digest_follows_anothers_of_the_same_picture_alone() -> None:
    other = replace(PLAN, tokens=256, cost=1, wire=(1, 1, 1))
    named, others = digest(b"picture", 0, PLAN, "settings", b"id"), digest(b"picture", 0, other, "settings", b"id")
    assert np.array_equal(cut_otherwise(named, 0, PLAN, other), others)
    assert np.array_equal(cut_otherwise(others, 0, other, PLAN), named) and not np.array_equal(named, others)
    assert not np.array_equal(cut_otherwise(named, 1, PLAN, other), digest(b"picture", 1, other, "settings", b"id"))
    assert not np.array_equal(cut_otherwise(named, 0, PLAN, other), digest(b"picturf", 0, other, "settings", b"id"))


@pytest.mark.parametrize("count", [2, 80])
def test_checkpoint_id_knows_one_tensor_of_many_and_the_words_beside_them(tmp_path: Path, count: int) -> None:
    """Of a file that is read whole, and of one too large for that."""

    def write(name: str, changed: int = -1, template: str = "{{ messages }}") -> bytes:
        folder, size = tmp_path / name, 1 << 20
        folder.mkdir()
        tensors = {
            str(n): {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]} for n in range(count)
        }
        header = json.dumps(tensors).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for number in range(count):
                file.write((b"\1" if number == changed else b"\0") * size)
        (folder / "config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text(template)
        return checkpoint_id(folder)

    first = write("a")
    assert write("b") == first
    assert (
        len(
            {
                first,
                write("c", changed=count // 2),
                write("d", changed=count // 2 - 1),
                write("e", template="{{ bos }}"),
            }
        )
        == 4
    )
