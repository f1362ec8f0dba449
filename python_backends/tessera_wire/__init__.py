"""What the server's stages and its clients both need to ask a tritonserver: addresses, errors, tensors, gRPC.

The lowest room of the house: it imports neither the server (``tessera``) nor the SDK (``tessera_client``). Here is what
a cascade's plan and the server that follows it both must know (docs/cascade.md).
"""

from hashlib import blake2b

__version__ = "0.1.0"  # of all of Tessera

MOST_TOKENS = 16
"""Of a cascade's answer that is no label: each token's margin counts, and nothing is told before the last."""


def question_class(question: str) -> str:
    """The class that a question is of, 16 hexadecimal digits: all with its very text, whatever its pictures."""
    return blake2b(question.encode(), digest_size=8).hexdigest()
