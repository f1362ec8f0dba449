"""`tessera plan --disagree` against the real server, which then follows the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import scene
from tessera.cascade import Plan
from tessera_client import Client
from tessera_command.cli import main

pytestmark = pytest.mark.server

SEEN = [(number, "Is there a crack?") for number in range(18)]
LOST = [
    (9000048, "Is there damp?"),
    (9000103, "Has the photo got a burnt socket in it?"),
    (9000249, "Home inspection: is there a fire extinguisher in the room?"),
    (9000309, "Is there an exposed wire in this picture?"),
    (9000315, "Has the photo got damp in it?"),
    (9000321, "Can you see a socket in the room?"),
]
"""What one tile does not show."""


def test_the_server_follows_what_was_planned(server: Any, client: Client, tmp_path: Path, capsys: Any) -> None:
    asked = [(tmp_path / f"{seed}.jpg", question) for seed, question in SEEN + LOST]
    for picture, _ in asked:
        picture.write_bytes(scene.encode_jpeg(scene.sample(int(picture.stem), "heldout")))
    table = ["file,question", *(f"{picture.name},{question}" for picture, question in asked)]
    (tmp_path / "labels.csv").write_text("\n".join(table))
    given = ["--disagree", "20%", "--confidence", "80%", "--choices", "no,yes", "--url", server.grpc_url]
    assert main(["plan", str(tmp_path), *given]) == 0
    policy = json.loads(capsys.readouterr().out)
    evidence = policy["evidence"]
    assert (evidence["pictures"], evidence["model"]["checkpoint"]) == (24, client.served().checkpoint)
    assert evidence["differ_without"] >= len(LOST) and evidence["differ"] <= 2 and 4 <= evidence["escalated"] < 20
    assert evidence["tokens"]["full"] > evidence["tokens"]["cascade"] > 64
    assert Plan.read(policy["watch"]).escalated.share == pytest.approx(evidence["escalated"] / 24, abs=1e-6)
    followed = [*client.ask_many(asked, choices=["no", "yes"], tile_policy=policy["tile_policy"])]
    full = [*client.ask_many(asked, choices=["no", "yes"])]
    assert sum(answer.cascade.escalated for answer in followed) == evidence["escalated"]
    assert sum(one.text != other.text for one, other in zip(followed, full)) == evidence["differ"]
