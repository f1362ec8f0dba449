"""A graph written for TensorRT, made to run in onnxruntime on the CPU with the same roundings.

onnxruntime has no bfloat16 arithmetic on the CPU and hands out no bfloat16. So the rows leave as the float32 that is in
the graph anyway, and in a bfloat16 graph every change of type becomes a rounding to bfloat16 and back to float32.
"""

from __future__ import annotations

from copy import deepcopy

import onnx
from onnx import TensorProto, helper, numpy_helper

TILES, ROWS = "tiles", "embeddings"  # what the graph of the CPU vision stage calls them


def for_cpu(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with uint8 "tiles" in and float32 "embeddings" out; one that has them already is returned as it is."""
    (given,), (output,) = model.graph.input, model.graph.output
    if (given.name, output.name) == (TILES, ROWS):
        return model
    changed = deepcopy(model)
    graph = changed.graph
    narrow = any(constant.data_type == TensorProto.BFLOAT16 for constant in graph.initializer)
    nodes = []
    for node in graph.node:
        if list(node.output) == ["EMBEDDINGS"]:
            continue
        node.input[:] = [TILES if name == "TILES" else name for name in node.input]
        if narrow and node.op_type == "Cast":
            rounded = f"{node.output[0]}_rounded"
            nodes.append(helper.make_node("Cast", node.input, [rounded], f"{node.name}_round", to=TensorProto.BFLOAT16))
            nodes.append(helper.make_node("Cast", [rounded], node.output, node.name, to=TensorProto.FLOAT))
        else:
            nodes.append(node)
    for constant in graph.initializer:
        if constant.data_type == TensorProto.BFLOAT16:
            wide = numpy_helper.to_array(constant).astype("float32")
            constant.CopyFrom(numpy_helper.from_array(wide, constant.name))
    graph.input[0].name, graph.output[0].name = TILES, ROWS
    graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.node[:]
    graph.node.extend(nodes)
    return changed
