"""InternVL's published sizes as their model cards describe them: body, tower, tokenizer, template.

No published file was read here: the numbers are those that the bodies' own model cards name.
"""

from dataclasses import dataclass
from typing import Any

INTERNLM2, LLAMA, QWEN2 = "InternLM2ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"
PHI3, QWEN3, QWEN3_MOE = "Phi3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


@dataclass(frozen=True)
class Body:
    """A language model."""

    architecture: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def model_type(self) -> str:
        return self.architecture.removesuffix("ForCausalLM").lower().replace("moe", "_moe")

    def config(self) -> dict[str, Any]:
        """Its section of config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "rope_theta": 1e6,
            **dict(self.more),
        }


_DYNAMIC = (("rope_scaling", {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}),)
_NO_BIAS = (*_DYNAMIC, ("bias", False))
_SU = {"type": "su", "short_factor": [1.05] * 48, "long_factor": [1.03 + i for i in range(48)]}
_128K = (
    ("max_position_embeddings", 131072),
    ("original_max_position_embeddings", 4096),
    ("sliding_window", 262144),
    ("rope_scaling", _SU),
    ("rope_theta", 10000.0),
)
# As THUDM/slime's scripts/models/qwen3-30B-A3B.sh and qwen3-235B-A22B.sh name them, with every layer of experts.
_EXPERTS = (
    ("head_dim", 128),
    ("num_experts", 128),
    ("num_experts_per_tok", 8),
    ("norm_topk_prob", True),
    ("decoder_sparse_step", 1),
    ("mlp_only_layers", []),
    ("output_router_logits", False),
    ("router_aux_loss_coef", 0.001),
)
BODIES = {
    "Qwen2-0.5B": Body(QWEN2, 896, 4864, 24, 14, 2, 151655, _DYNAMIC),
    "Qwen2.5-0.5B": Body(QWEN2, 896, 4864, 24, 14, 2, 151674, _DYNAMIC),
    "Qwen2.5-1.5B": Body(QWEN2, 1536, 8960, 28, 12, 2, 151674, _DYNAMIC),
    "Qwen2.5-3B": Body(QWEN2, 2048, 11008, 36, 16, 2, 151674, _DYNAMIC),
    "Qwen2.5-7B": Body(QWEN2, 3584, 18944, 28, 28, 4, 151674, _DYNAMIC),
    "Qwen2.5-14B": Body(QWEN2, 5120, 13824, 48, 40, 8, 151674, _DYNAMIC),
    "Qwen2.5-32B": Body(QWEN2, 5120, 27648, 64, 40, 8, 151674, _DYNAMIC),
    "Qwen2.5-72B": Body(QWEN2, 8192, 29568, 80, 64, 8, 151674, _DYNAMIC),
    "Qwen3-0.6B": Body(QWEN3, 1024, 3072, 28, 16, 8, 151936, (("head_dim", 128),)),
    "Qwen3-1.7B": Body(QWEN3, 2048, 6144, 28, 16, 8, 151936, (("head_dim", 128),)),
    "Qwen3-4B": Body(QWEN3, 2560, 9728, 36, 32, 8, 151936, (("head_dim", 128),)),
    "Qwen3-8B": Body(QWEN3, 4096, 12288, 36, 32, 8, 151936, (("head_dim", 128),)),
    "Qwen3-14B": Body(QWEN3, 5120, 17408, 40, 40, 8, 151936, (("head_dim", 128),)),
    "Qwen3-32B": Body(QWEN3, 5120, 25600, 64, 64, 8, 151936, (("head_dim", 128),)),
    "Qwen3-30B-A3B": Body(QWEN3_MOE, 2048, 6144, 48, 32, 4, 151936, (*_EXPERTS, ("moe_intermediate_size", 768))),
    "Qwen3-235B-A22B": Body(QWEN3_MOE, 4096, 12288, 94, 64, 4, 151936, (*_EXPERTS, ("moe_intermediate_size", 1536))),
    "InternLM2-1.8B": Body(INTERNLM2, 2048, 8192, 24, 16, 8, 92553, _NO_BIAS),
    "InternLM2.5-7B": Body(INTERNLM2, 4096, 14336, 32, 32, 8, 92553, _NO_BIAS),
    "InternLM2-20B": Body(INTERNLM2, 6144, 16384, 48, 48, 8, 92553, _NO_BIAS),
    "Phi-3-mini-128k": Body(PHI3, 3072, 8192, 32, 32, 32, 32020, _128K),
    "Yi-34B": Body(LLAMA, 7168, 20480, 60, 56, 8, 64000),
    "Llama-3-70B": Body(LLAMA, 8192, 28672, 80, 64, 8, 128256),
}


@dataclass(frozen=True)
class Size:
    """A published size: its body, the tokenizer's class, the conversation template, the tower."""

    name: str
    body: str
    tokenizer: str
    template: str
    tower: str = "300M"

    @property
    def architecture(self) -> str:
        return BODIES[self.body].architecture


_QWEN2, _INTERNLM2 = ("Qwen2Tokenizer", "internvl2_5"), ("InternLM2Tokenizer", "internlm2-chat")
_INTERNLM25 = ("InternLM2Tokenizer", "internvl2_5")
SIZES = [
    Size("InternVL2-1B", "Qwen2-0.5B", "Qwen2Tokenizer", "Hermes-2"),
    Size("InternVL2-2B", "InternLM2-1.8B", *_INTERNLM2),
    Size("InternVL2-4B", "Phi-3-mini-128k", "LlamaTokenizer", "phi3-chat"),
    Size("InternVL2-8B", "InternLM2.5-7B", *_INTERNLM2),
    Size("InternVL2-26B", "InternLM2-20B", *_INTERNLM2, "6B"),
    Size("InternVL2-40B", "Yi-34B", "LlamaTokenizer", "Hermes-2", "6B"),
    Size("InternVL2-Llama3-76B", "Llama-3-70B", "PreTrainedTokenizerFast", "internlm2-chat", "6B"),
    Size("InternVL2.5-1B", "Qwen2.5-0.5B", *_QWEN2),
    Size("InternVL2.5-2B", "InternLM2-1.8B", *_INTERNLM25),
    Size("InternVL2.5-4B", "Qwen2.5-3B", *_QWEN2),
    Size("InternVL2.5-8B", "InternLM2.5-7B", *_INTERNLM25),
    Size("InternVL2.5-26B", "InternLM2-20B", *_INTERNLM25, "6B"),
    Size("InternVL2.5-38B", "Qwen2.5-32B", *_QWEN2, "6B"),
    Size("InternVL2.5-78B", "Qwen2.5-72B", *_QWEN2, "6B"),
    Size("InternVL3-1B", "Qwen2.5-0.5B", *_QWEN2),
    Size("InternVL3-2B", "Qwen2.5-1.5B", *_QWEN2),
    Size("InternVL3-8B", "Qwen2.5-7B", *_QWEN2),
    Size("InternVL3-14B", "Qwen2.5-14B", *_QWEN2),
    Size("InternVL3-38B", "Qwen2.5-32B", *_QWEN2, "6B"),
    Size("InternVL3-78B", "Qwen2.5-72B", *_QWEN2, "6B"),
    Size("InternVL3.5-1B", "Qwen3-0.6B", *_QWEN2),
    Size("InternVL3.5-2B", "Qwen3-1.7B", *_QWEN2),
    Size("InternVL3.5-4B", "Qwen3-4B", *_QWEN2),
    Size("InternVL3.5-8B", "Qwen3-8B", *_QWEN2),
    Size("InternVL3.5-14B", "Qwen3-14B", *_QWEN2),
    Size("InternVL3.5-38B", "Qwen3-32B", *_QWEN2, "6B"),
    Size("InternVL3.5-30B-A3B", "Qwen3-30B-A3B", *_QWEN2),
    Size("InternVL3.5-241B-A28B", "Qwen3-235B-A22B", *_QWEN2, "6B"),
]
#: (size, class of the body, its model type, template, why it is refused)
REFUSED = [
    ("InternVL3-9B", "InternLM3ForCausalLM", "internlm3", "internvl2_5", "code that comes with the checkpoint"),
    ("InternVL3.5-GPT-OSS-20B", "GptOssForCausalLM", "gpt_oss", "internvl3_5_gpt_oss", "mixtures of experts"),
]

_VIT = {"image_size": 448, "patch_size": 14}
#: vision_config in the original layout; the 6B has no biases, norms of queries and keys, RMSNorm, 25 heads of 128
TOWERS: dict[str, dict[str, Any]] = {
    "300M": {**_VIT, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "norm_type": "layer_norm", "qkv_bias": True, "qk_normalization": False},
    "6B": {**_VIT, "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25,
        "norm_type": "rms_norm", "qkv_bias": False, "qk_normalization": True},
}  # fmt: skip
NATIVE_NAMES = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
