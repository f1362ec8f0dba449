"""The version of what is installed here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("tessera")
except PackageNotFoundError:  # run from its source alone
    VERSION = "unknown"
