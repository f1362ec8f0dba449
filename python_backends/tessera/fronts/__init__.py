"""Thin models in front of the ensemble, for clients it cannot serve itself.

They reach the ensemble as any client does, over gRPC on this machine, with the project's own client. Calls between
models from Python (BLS) are not used: in tritonserver 2.51 a decoupled one, with several under way in one process,
corrupts that process's memory or blocks the language model's responses for ever.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("tessera_client") is None:
    # Run from a checkout without being installed: a stage's process has the server's folder on its path, no more.
    sys.path.append(str(Path(__file__).resolve().parents[3] / "clients"))
