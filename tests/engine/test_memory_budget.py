"""The shares of a card, without a card."""

from __future__ import annotations

import pytest

from tessera.engine.config import EngineConfig
from tessera.engine.execution.memory_budget import engine_share
from tessera.errors import ConfigError

GIB = 1 << 30
OTHERS = {"vision_memory_bytes": 8 * GIB, "embedding_pool_bytes": 4 * GIB, "server_memory_bytes": 5 * GIB}


def test_the_engine_gets_what_all_others_leave():
    assert engine_share(EngineConfig(**OTHERS), 140 * GIB) == 123 * GIB
    assert engine_share(EngineConfig(memory_bytes=20 * GIB, **OTHERS), 140 * GIB) == 20 * GIB


@pytest.mark.parametrize(("memory", "total"), [(0, 17), (4, 20)])
def test_shares_that_exceed_the_card_are_named(memory, total):
    with pytest.raises(ConfigError, match=r"8.0 GiB .* 4.0 GiB .* 5.0 GiB for the server .* exceed the card's"):
        engine_share(EngineConfig(memory_bytes=memory * GIB, **OTHERS), total * GIB)
