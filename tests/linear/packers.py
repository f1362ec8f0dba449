"""Quantizes the text model of a tiny checkpoint folder, in every format that is read, with code that is not ours.

compressed-tensors' formats are packed by its own compressors, AutoAWQ's and GPTQ's by a few lines here, the others are
nothing but casts. A packer turns one weight into the stored tensors of a module, and into the W that they mean.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

LINEAR = re.compile(
    r"(.*language_model.*|model\.)layers\.\d+\.(self_attn|attention|mlp|feed_forward)\."
    r"(experts\.\d+\.)?(?![qk]_norm|gate\.)\w+\.weight"
)
FP8 = torch.float8_e4m3fn
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format:
    """``settings``: its quantization_config; ``pack(weight)``: stored tensors by leaf, and W in float32.

    ``inputs(x)``: what a product takes for x, in float32.
    """

    settings: dict[str, Any]
    pack: Callable[[torch.Tensor], Packed]
    inputs: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    @property
    def ignore(self) -> str:
        """What its configuration calls the list of modules left as they are."""
        return "ignore" if "ignore" in self.settings else "modules_to_not_convert"


INPUT_SCALE = 0.01


def by_token(x):
    scales = x.abs().amax(-1, keepdim=True) / 448
    return (x / scales).to(FP8).float() * scales


def by_columns(x):
    """Each token's, 128 at a time."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    return by_token(padded).flatten(1)[:, : x.shape[1]]


def by_scale(x):
    return (x / INPUT_SCALE).clamp(-448, 448).to(FP8).float() * INPUT_SCALE


def quantized(weight, group, symmetric, order=None):
    """Rounded to nearest: codes 0..15 [N, K], zeros and fp16 scales [N, groups], W. ``order``: a column's group."""
    n, k = weight.shape
    group = k if group == -1 else group
    of = torch.arange(k) // group if order is None else order
    codes, zeros, scales = torch.zeros(n, k, dtype=torch.int64), [], []
    for number in range(k // group):
        part = weight[:, of == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = (part.abs().amax(1) / 7.5 if symmetric else (high - low) / 15).half()
        zero = torch.full((n,), 8) if symmetric else (-low / scale.float()).round().clamp(0, 15).long()
        codes[:, of == number] = ((part / scale.float()[:, None]).round() + zero[:, None]).clamp(0, 15).long()
        zeros.append(zero), scales.append(scale)
    zeros, scales = torch.stack(zeros, 1), torch.stack(scales, 1)
    return codes, zeros, scales, (codes - zeros[:, of]).float() * scales[:, of].float()


def words(values, order=range(8)):
    """[n, m] of 0..15 -> int32 [n, m / 8]: column order[i] of each eight becomes nibble i."""
    packed = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        packed |= values[:, column::8] << (4 * place)
    return packed.where(packed < 2**31, packed - 2**32).int()


def awq(group):
    def pack(weight):
        codes, zeros, scales, w = quantized(weight, group, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": words(codes.T, order), "qzeros": words(zeros.T, order), "scales": scales.T}, w

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Format(settings, pack)


def gptq(group, symmetric, label="gptq", stored_version=None, desc_act=False):
    version = stored_version or {"gptq": 1, "gptq_v2": 2}[label]

    def pack(weight):
        k = weight.shape[1]
        size = k if group == -1 else group
        order = torch.arange(k) // size
        if desc_act:
            order = order[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        codes, zeros, scales, w = quantized(weight, group, symmetric, order)
        stored = zeros if version == 2 else (zeros - 1) % 16
        qweight, qzeros = words(codes).T, words(stored.T)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T, "g_idx": order.int()}, w

    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": desc_act}
    return Format(settings | {"checkpoint_format": label, "damp_percent": 0.01, "true_sequential": True}, pack)


def compressed(kind, weights, inputs=None):
    """Packed by compressed-tensors itself; W is what its own decompression says."""
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    compressor = BaseCompressor.get_value_from_registry(kind)

    def pack(weight):
        state = {"weight": weight, **scales_of(weight, weights)}
        tensors = compressor.compress(state, scheme)
        if inputs is not None and not inputs["dynamic"]:
            tensors["input_scale"] = torch.tensor([INPUT_SCALE])
        found = compressor.decompress(tensors, scheme)["weight"].float()
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, found

    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    settings = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"],
    }
    seen = {None: Format.inputs, "token": by_token, "group": by_columns, "tensor": by_scale}
    return Format(settings, pack, seen[inputs and inputs["strategy"]])


def scales_of(weight, args):
    """weight_scale, and weight_zero_point where there is one, from the extremes."""
    if args["type"] == "float":
        if args["strategy"] == "block":
            return {"weight_scale": blocks_amax(weight) / 448}
        amax = weight.abs().amax() if args["strategy"] == "tensor" else weight.abs().amax(1, keepdim=True)
        return {"weight_scale": (amax / 448).reshape(-1, *([1] if args["strategy"] == "channel" else []))}
    _, zeros, scales, _ = quantized(weight, args.get("group_size") or -1, args["symmetric"])
    found = {"weight_scale": scales.float()}
    return found if args["symmetric"] else found | {"weight_zero_point": (zeros - 8).to(torch.int8)}


def blocks_amax(weight):
    """[ceil(N / 128), ceil(K / 128)]."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % 128, 0, -n % 128)).abs()
    return padded.view(-(-n // 128), 128, -(-k // 128), 128).amax((1, 3))


def fp8_blocks():
    def pack(weight):
        scales = blocks_amax(weight) / 448
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        values = (weight / wide).to(FP8)
        return {"weight": values, "weight_scale_inv": scales}, values.float() * wide

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return Format(settings, pack, by_columns)


def modelopt():
    def pack(weight):
        scale = weight.abs().amax() / 448
        values = (weight / scale).to(FP8)
        tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(INPUT_SCALE)}
        return tensors, values.float() * scale

    settings = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "ignore": ["lm_head"]}
    return Format(settings, pack, by_scale)


def int4(**changes):
    # The observer says how the file was made, as all that are published say.
    form = {"num_bits": 4, "type": "int", "symmetric": True, "observer": "minmax"}
    return form | {"strategy": "group", "group_size": 32} | changes


def float8(strategy, **changes):
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | changes


FORMATS = {
    "awq 32": awq(32),
    "awq 64": awq(64),
    "gptq sym": gptq(32, True),
    "gptq asym": gptq(32, False),
    "gptq desc_act": gptq(32, False, desc_act=True),
    "gptq a row": gptq(-1, True),
    "gptq v2 asym desc_act": gptq(32, False, "gptq_v2", desc_act=True),
    "packed sym": compressed("pack-quantized", int4()),
    "packed asym": compressed("pack-quantized", int4(symmetric=False)),
    "packed channel": compressed("pack-quantized", int4(strategy="channel", group_size=-1)),
    "float channel dynamic": compressed("float-quantized", float8("channel"), float8("token", dynamic=True)),
    "float tensor static": compressed("float-quantized", float8("tensor"), float8("tensor", dynamic=False)),
    "float blocks": compressed(
        "float-quantized", float8("block", block_structure=[128, 128]), float8("group", group_size=128, dynamic=True)
    ),
    "fp8 blocks": fp8_blocks(),
    "modelopt": modelopt(),
}


def quantize_folder(folder, form, modules=LINEAR, at=None):
    """Rewrites the folder in place -> W of each stored module.

    ``at``: the section of config.json that gets the quantization_config, None for its root.
    """
    path = folder / "model.safetensors"
    tensors, expected = load_file(path), {}
    for name in [name for name, tensor in tensors.items() if modules.fullmatch(name) and tensor.dim() == 2]:
        module = name.removesuffix(".weight")
        packed, expected[module] = form.pack(tensors.pop(name))
        tensors |= {f"{module}.{leaf}": tensor.contiguous() for leaf, tensor in packed.items()}
    save_file(tensors, path)
    change_config(
        folder, lambda config: (config if at is None else config[at]).update(quantization_config=form.settings)
    )
    return expected


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
