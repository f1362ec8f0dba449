"""Odd files from another project beside good ones, whole: answers stay as they are and nothing is restarted."""

from __future__ import annotations

import pytest
from bench import poison

pytestmark = [pytest.mark.clients, pytest.mark.server]


def test_odd_files_change_nothing_for_the_good_ones() -> None:
    odd = poison.odd_files(50)
    with poison.served() as (address, health):
        result = poison.run(address, health, poison.good_requests(950), odd)
    assert result.fine, result
    assert result.odd.total() == 50 and result.odd["200"] and result.odd["400 invalid_request"]
    assert result.kinds > 20
