"""Importing this makes `tessera_client` importable in a stage that talks to a server itself.

Run from a checkout without being installed, a stage's process has the server's folder on its path and no more.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("tessera_client") is None:
    sys.path.append(str(Path(__file__).resolve().parents[3] / "clients"))
