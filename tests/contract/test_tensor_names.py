"""One contract: config.pbtxt, the stages' code and the client name the same tensors."""

import ast
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "model_repository"
ADAPTERS = ROOT / "python_backends" / "tessera" / "tritonserver"
STAGES = {"preprocess": "preprocess.py", "vision_encoder": "vision.py", "language_model": "language_model.py"}


NAMED = [None, "tensorrt"]


def config(model: str, named: str | None = None) -> model_config_pb2.ModelConfig:
    """The model's config, or the named one where the model has it."""
    file = REPOSITORY / model / "configs" / f"{named}.pbtxt"
    if not file.is_file():
        file = REPOSITORY / model / "config.pbtxt"
    return text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())


def names(tensors) -> set[str]:
    return {tensor.name for tensor in tensors}


def signature(tensors) -> dict[str, tuple]:
    return {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in tensors}


def full_signature(stage: model_config_pb2.ModelConfig, tensors) -> dict[str, tuple]:
    """With the batch dimension, which a config leaves out where it has one."""
    batch = (-1,) if stage.max_batch_size else ()
    return {name: (kind, batch + dims) for name, (kind, dims) in signature(tensors).items()}


def fits(given: tuple, wanted: tuple) -> bool:
    """Whether a tensor of one step can be another's input: the same type and rank, and no two sizes that differ."""
    sizes = zip(given[1], wanted[1])
    return given[0] == wanted[0] and len(given[1]) == len(wanted[1]) and all(a == b or -1 in (a, b) for a, b in sizes)


READERS = ("array", "text", "flag", "byte_strings", "json_value", "sampling", "timestamps", "get_input_tensor_by_name")
WRITERS = ("output", "text_output", "from_dlpack")


def tensors_named(file: Path) -> tuple[set[str], set[str]]:
    """The tensor names a stage's code reads and writes: first string arguments of the functions that do it."""
    read, written = set(), set()
    for call in ast.walk(ast.parse(file.read_text())):
        if isinstance(call, ast.Call):
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            strings = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            read |= set(strings[:1]) if function in READERS else set()
            written |= set(strings[:1]) if function in WRITERS else set()
    return read, written


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_and_writes_what_its_config_declares(stage):
    declared = [config(stage)]
    if config(stage, "tensorrt").backend == "python":  # the same code serves both
        declared.append(config(stage, "tensorrt"))
    read, written = tensors_named(ADAPTERS / STAGES[stage])
    assert read - set(declared[0].parameters) == set().union(*(names(config.input) for config in declared))
    assert written == set().union(*(names(config.output) for config in declared))


def test_the_sign_of_work_is_a_metric_that_the_stage_has():
    sign = config("vision_encoder").parameters["SIGN_OF_WORK"].string_value
    assert f'Gauge("{sign}"' in (ADAPTERS / STAGES["vision_encoder"]).read_text()


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("stage", ["vision_encoder", "language_model"])
def test_a_python_stage_with_tensors_on_the_gpu_is_warmed_up(stage, named):
    """tessera/tritonserver/gpu_pool.py says why."""
    wanted = config(stage, named)
    if wanted.backend == "python":
        (sample,) = wanted.model_warmup
        assert sample.batch_size == 1  # the server skips 0
        assert set(sample.inputs) == {"PING"} and sample.inputs["PING"].zero_data  # an empty word


@pytest.mark.parametrize("stage", ["preprocess", "language_model"])
def test_a_stage_is_the_same_by_either_config(stage):
    default, named = config(stage), config(stage, "tensorrt")
    assert set(named.parameters) - {"max_cost"} == set(default.parameters)  # a plan has its own maximum
    assert named.name == stage
    assert named.model_transaction_policy == default.model_transaction_policy


@pytest.mark.parametrize("named", NAMED)
def test_the_ensemble_connects_declared_tensors_and_leaves_none_open(named):
    ensemble = config("vlm", named)
    known = {name: signature for name, signature in signature(ensemble.input).items()}
    for step in ensemble.ensemble_scheduling.step:
        stage = config(step.model_name, named)
        inputs, outputs = full_signature(stage, stage.input), full_signature(stage, stage.output)
        assert set(step.input_map) <= set(inputs)
        assert set(step.output_map) == set(outputs) - {"CUT", "SERVED"}  # which clients ask of preprocess itself
        for name, tensor in step.input_map.items():
            assert tensor in known, f"{step.model_name} reads {tensor}, which no earlier step writes"
            assert fits(known[tensor], inputs[name]), f"{step.model_name} reads {tensor} as {inputs[name]}"
        for name, tensor in step.output_map.items():
            known[tensor] = outputs[name]
    assert signature(ensemble.input) == signature(config("vlm").input)
    for output in ensemble.output:
        assert known[output.name] == (output.data_type, tuple(output.dims))


def test_all_client_inputs_are_optional():
    # This server ends a request that lacks a required input in silence, so preprocess does the checking.
    for model in ("vlm", "vlm_unary", "vlm_stream", "preprocess", "vision_encoder", "language_model"):
        assert all(tensor.optional for tensor in config(model).input), model


@pytest.mark.parametrize("model", ["vlm_unary", "vlm_stream"])
def test_the_fronts_look_like_the_ensemble(model):
    ensemble, thin = config("vlm"), config(model)
    ping = {"PING": signature(thin.input)["PING"]}
    assert signature(thin.input) == signature(ensemble.input) | ping
    assert signature(thin.output) == signature(ensemble.output)
