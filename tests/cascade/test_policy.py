"""What a deployment's tile policy may be, and how a policy file is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_watch import PLANNED

from tessera.cascade import Plan, Policy, read_policy
from tessera.errors import ConfigError

CASCADE = {"cascade": {"margin": 2.5, "full": {"max_tiles": 6}}}


def written(folder: Path, document: Any) -> str:
    file = folder / "policy.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(file)


def test_a_policy_a_cascade_or_a_file_of_either(tmp_path: Path) -> None:
    for alone in (None, "native", '{"max_tiles": 2}', {"max_pixels": 5}):
        assert read_policy(alone) == Policy(alone)
    assert read_policy(CASCADE) == Policy({"max_tiles": 6}, CASCADE)
    assert read_policy('{"cascade": {"margin": 1}}') == Policy(None, '{"cascade": {"margin": 1}}')
    assert read_policy(written(tmp_path, {"tile_policy": {"name": "native"}})) == Policy({"name": "native"})
    document = {"tile_policy": CASCADE, "watch": PLANNED, "evidence": {"pictures": 300}}
    planned = Policy({"max_tiles": 6}, CASCADE, Plan.read(PLANNED), 0.01, "report")
    assert read_policy(written(tmp_path, document)) == planned
    found = read_policy(written(tmp_path, document | {"audit": 0.1, "on_alarm": "escalate"}))
    assert found == planned._replace(audit=0.1, on_alarm="escalate")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "is no policy file: JSONDecodeError"),
        ([], "is no policy file: TypeError"),
        ({}, "is no policy file: KeyError"),
        ({"tile_policy": 5}, "tile policy must be a name or an object"),
        ({"tile_policy": CASCADE, "watch": {}}, "the policy file's watch cannot be read"),
        ({"tile_policy": CASCADE, "audit": 2}, "audit must be a share from 0 to 1, not 2"),
        ({"tile_policy": CASCADE, "audit": True}, "audit must be a share from 0 to 1, not True"),
        ({"tile_policy": CASCADE, "on_alarm": "ring"}, "on_alarm must be one of .*, not 'ring'"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(tmp_path: Path, document: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_policy(written(tmp_path, document))
    with pytest.raises(ConfigError, match="none.json is no policy file: FileNotFoundError"):
        read_policy("none.json")
