import sys
from pathlib import Path

# The builders of tiny checkpoints live beside the parity tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
