"""Names, options, schemas, settings, metrics, error texts and fields of results are those of surface.json."""

import surface


def test_the_surface_is_as_it_is_written() -> None:
    found = surface.differences(surface.stored(), surface.surface())
    assert not found, "\n".join(["where that is meant: python tests/contract/surface.py --write", *found])
