"""The shares of a card, without a card."""

from __future__ import annotations

import pytest

from tessera.engine.execution.memory_budget import engine_share
from tessera.errors import ConfigError
from tessera.settings.stages import EngineConfig

GIB = 1 << 30
POOL = {"embedding_pool_bytes": 4 * GIB}


def test_the_engine_gets_its_share_or_what_the_pool_of_rows_leaves_of_nine_tenths():
    assert engine_share(EngineConfig(**POOL), 140 * GIB) == 122 * GIB
    assert engine_share(EngineConfig(memory_bytes=20 * GIB, **POOL), 140 * GIB) == 20 * GIB


@pytest.mark.parametrize(("memory", "total"), [(0, 4), (17, 20)])
def test_shares_that_exceed_the_card_are_named(memory, total):
    with pytest.raises(ConfigError, match=r"4.0 GiB for waiting pictures .* exceed the card's .* lower gpu_memory"):
        engine_share(EngineConfig(memory_bytes=memory * GIB, **POOL), total * GIB)
