"""Documents read by MinerU's own client over a Tessera server: ``tessera parse``, and its two halves for programs.

::

    from tessera_documents import TesseraVlmClient, mineru_client

    with TesseraVlmClient("localhost:8001") as vlm:
        blocks = mineru_client(vlm).two_step_extract(picture)

Layout, crops, prompts and post-processing are mineru-vl-utils'; here are the way to the server, the pages that go in,
the edges of boxes that cut letters, and the files that come out.
"""

try:
    import mineru_vl_utils  # noqa: F401
    import pypdfium2  # noqa: F401
except ImportError as error:
    how = "pip install '.[documents]' in Tessera's source"  # another's package has the name tessera on PyPI
    raise ImportError(f"{error.name} is not installed; documents need it: {how}") from error

from tessera_documents.edges import clear_of_letters
from tessera_documents.vlm_client import TesseraVlmClient, mineru_client

__all__ = ["TesseraVlmClient", "clear_of_letters", "mineru_client"]
