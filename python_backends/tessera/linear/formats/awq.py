"""AutoAWQ's "GEMM" layout.

``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [in / group, out / 8], ``scales`` [in / group, out];
W = (q - z) * s. Source: AutoAWQ ``awq/modules/linear/gemm.py`` and ``awq/utils/packing_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from tessera.linear.formats.gptq import unpack
from tessera.linear.formats.int4 import Int4
from tessera.linear.scheme import shaped
from tessera.linear.settings import Groups, Settings

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of a word's eight places each of its eight columns is."""


def read(settings: Settings) -> Groups:
    """quant_method "awq"."""
    bits = "bits" if settings.has("bits") else "w_bit"
    size = "group_size" if settings.has("group_size") else "q_group_size"
    settings.take(bits, (4,))
    settings.take("version", ("gemm", "GEMM"), "gemm")
    settings.take("zero_point", (True,), True)
    settings.take("backend", ("autoawq",), "autoawq")
    settings.drop("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")
    return [(["Linear"], partial(Awq, settings.take(size, default=128)))]


class Awq(Int4):
    def leaves(self) -> set[str]:
        return {"qweight", "qzeros", "scales"}

    def decode(
        self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
    ) -> dict[str, torch.Tensor]:
        groups, words = self.groups(in_features), -(-out_features // 8)
        qweight = shaped(tensors, "qweight", (in_features, words), torch.int32)
        qzeros = shaped(tensors, "qzeros", (groups, words), torch.int32)
        return {
            "codes": _columns(qweight)[:, :out_features].T,
            "zeros": _columns(qzeros)[:, :out_features].T.float(),
            "scales": shaped(tensors, "scales", (groups, out_features)).T.float(),
        }


def _columns(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, out / 8] -> uint8 [n, out]."""
    return unpack(words).unflatten(-1, (-1, 8))[..., _PLACES].flatten(-2)
