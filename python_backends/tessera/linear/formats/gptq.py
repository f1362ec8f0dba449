"""Eight 4-bit values in an int32: GPTQ's layout, versions 1 and 2, and AutoAWQ's "GEMM" layout.

GPTQ: ``qweight`` int32 [in / 8, out], packed along the input; ``qzeros`` int32 [in / group, out / 8]; ``scales``
[in / group, out]; ``g_idx`` int32 [in], each column's group: in order, or by activation (``desc_act``).
W = (q - z) * s. Version 1 stores z - 1, version 2 stores z. Sources: AutoGPTQ and GPTQModel.

AWQ: ``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [in / group, out / 8], ``scales`` [in / group, out];
W = (q - z) * s. Source: AutoAWQ ``awq/modules/linear/gemm.py`` and ``awq/utils/packing_utils.py``.
"""

from functools import partial

import torch

from tessera.errors import CheckpointError
from tessera.linear.formats import Groups, Settings
from tessera.linear.formats.int4 import ZERO, Int4
from tessera.linear.scheme import Tensors, has_values, shaped

_VERSIONS = {"gptq": 1, "gptq_v2": 2}
# fmt: off
_OF_THE_MAKING = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "calibration_data_min_length", "damp_auto_increment", "damp_percent", "dataset", "desc_act", "device",
    "disable_exllama", "exllama_config", "failsafe", "foem", "gptaq", "gptaq_alpha", "hessian", "hyb_act",
    "max_input_length", "meta", "mock_quantization", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "mse", "offload_to_disk",
    "offload_to_disk_path", "pack_impl", "pad_token_id", "quantizer", "static_groups", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama", "v2", "v2_alpha",
)
# fmt: on
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of a word's eight places each of its eight columns is."""


def read_gptq(settings: Settings) -> Groups:
    """quant_method "gptq". ``desc_act`` is not asked: ``g_idx`` shows it."""
    settings.take("bits", (4,))
    settings.take("is_marlin_format", (False, None))
    settings.take("pack_dtype", ("int32", None))
    settings.take("method", ("gptq", None))
    settings.take("rotation", (None, False, ""))
    settings.take("adapter", (None, {}))
    label = settings.take("checkpoint_format", default=None) or settings.take("format", default=None) or "gptq"
    settings.check("checkpoint_format", label, _VERSIONS)
    symmetric = settings.take("sym", (True, False), True)
    group_size = settings.take("group_size", default=128)
    settings.drop(*_OF_THE_MAKING)
    return [(["Linear"], partial(Gptq, group_size, _VERSIONS[label], symmetric))]


def read_awq(settings: Settings) -> Groups:
    """quant_method "awq"."""
    bits = "bits" if settings.has("bits") else "w_bit"
    size = "group_size" if settings.has("group_size") else "q_group_size"
    settings.take(bits, (4,))
    settings.take("version", ("gemm", "GEMM"), "gemm")
    settings.take("zero_point", (True,), True)
    settings.take("backend", ("autoawq",), "autoawq")
    settings.drop("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")
    return [(["Linear"], partial(Awq, settings.take(size, default=128)))]


class Gptq(Int4):
    """``version`` and ``symmetric`` are what the file's label says, which its values may contradict."""

    optional = frozenset({"g_idx", "bias"})  # AutoGPTQ gives every module a bias; where the model has none it is zero

    def __init__(self, group_size: int, version: int, symmetric: bool) -> None:
        super().__init__(group_size)
        self.version, self.symmetric = version, symmetric

    def decode(self, tensors: Tensors, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        groups = self.groups(in_features)
        qweight = shaped(tensors, "qweight", (-(-in_features // 8), out_features), torch.int32)
        qzeros = shaped(tensors, "qzeros", (groups, -(-out_features // 8)), torch.int32)
        codes = unpack(qweight.T)[:, :in_features]
        return {
            "codes": codes,
            "zeros": self._zeros(unpack(qzeros)[:, :out_features].T, codes).float(),
            "scales": shaped(tensors, "scales", (groups, out_features)).T.float(),
            "columns": self.columns(tensors, "g_idx", in_features, qweight.device),
        }

    def _zeros(self, stored: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """The zeros [out, groups] of stored ones, which the label alone does not tell: files say v1 and store v2's.

        A symmetric zero is 8, so v1 stores 7 everywhere and v2 stores 8: the values tell the version, and that is safe
        because neither number can be the other version's symmetric zero (6 and 9 are none). Zeros that are 7, or 8,
        in all of a module are symmetric whatever the label says: fitted ones vary from row to row.

        Others are read by the label, unless the weights say that it is wrong: a version too few or too many shifts
        all of a module's weights by one step, and weights have a mean of nearly 0. That is refused.
        """
        if not has_values(stored):
            return stored
        first = int(stored[0, 0])
        if first in (ZERO - 1, ZERO) and (stored == first).all():
            return torch.full_like(stored, ZERO)
        if self.symmetric:
            low, high = int(stored.min()), int(stored.max())
            raise CheckpointError(f"qzeros are {low}..{high}: symmetric ones (sym = true) are all 7 (v1) or all 8 (v2)")
        zeros = {1: (stored + 1) & 15, 2: stored}  # v1's 15 is 0 - 1 in four bits
        mean = codes.mean(dtype=torch.float32)
        steps = {version: abs(float(mean - value.mean(dtype=torch.float32))) for version, value in zeros.items()}
        other = 3 - self.version
        if steps[self.version] > 0.75 and steps[other] < 0.25:
            raise CheckpointError(
                f"qzeros do not seem to be those of version {self.version}, as quantization_config says: so read, the "
                f"weights' mean is {steps[self.version]:.2f} steps from zero, and {steps[other]:.2f} as version "
                f"{other}; if they are, set checkpoint_format accordingly"
            )
        return zeros[self.version]


class Awq(Int4):
    def decode(self, tensors: Tensors, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        groups, words = self.groups(in_features), -(-out_features // 8)
        qweight = shaped(tensors, "qweight", (in_features, words), torch.int32)
        qzeros = shaped(tensors, "qzeros", (groups, words), torch.int32)
        return {
            "codes": _awq_columns(qweight)[:, :out_features].T,
            "zeros": _awq_columns(qzeros)[:, :out_features].T.float(),
            "scales": shaped(tensors, "scales", (groups, out_features)).T.float(),
        }


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, out / 8] -> uint8 [n, out]."""
    return unpack(words).unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 8 * n]; a word's lowest bits come first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)
