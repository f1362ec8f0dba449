"""The stage `preprocess`: client tensors in, pixels, plans, token ids and spans out."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera import heaps
from tessera.errors import ConfigError, InvalidRequest
from tessera.models.family import ImagePlan, ModelFamily, View
from tessera.models.registry import read_config
from tessera.preprocess.cascade import Cascade
from tessera.preprocess.decode import use_one_thread
from tessera.preprocess.preprocessor import Planned, Prepared, Preprocessor, PreprocessRequest
from tessera.prompt.grammar import grammar
from tessera.prompt.sampling import POLICY_KEYS, SamplingParameters
from tessera.settings.stages import PreprocessSettings
from tessera.tritonserver import leases, tensors
from tessera.tritonserver.failures import deadline_ns, error_response, failure
from tessera.tritonserver.settings import StageSettings


class TritonPythonModel:
    """tritonserver's interface; one picture-decoding thread, so the server runs several instances."""

    def initialize(self, args: Mapping[str, str]) -> None:
        stage = StageSettings(args)
        settings = stage.read(PreprocessSettings)
        use_one_thread(settings.resize)
        heaps.keep_freed()
        self._preprocessor = Preprocessor.from_checkpoint(stage.checkpoint, settings)
        if self._preprocessor.deployed.plan and self._preprocessor.deployed != stage.policy:
            raise ConfigError(
                f"preprocess: config.pbtxt names the policy file {settings.tile_policy}, and the language model, which "
                "is to watch it, does not see that; set TESSERA_PREPROCESS_TILE_POLICY or --set preprocess.tile_policy"
            )
        # Batch jobs go on with earlier results only where these came from the same checkpoint.
        model_type = read_config(stage.checkpoint).model_type
        self._served = json.dumps({"checkpoint": self._preprocessor.checkpoint.hex(), "model_type": model_type})
        # The config `tensorrt` has pictures leave as whole tiles.
        whole = "TILES" in stage.outputs
        self._blank_tile = _blank_tile(self._preprocessor.family, settings.gpu_pixels) if whole else None

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        received = time.monotonic_ns()
        try:
            if tensors.text(request, "PING") is not None:
                stamps = tensors.output("STAMPS", np.array([[received]], dtype=np.int64))
                return tensors.response([stamps, tensors.text_output("SERVED", self._served)])
            if leases.is_over(tensors.lease(request)):
                return failure("CANCELLED", "the client has gone")
            received = tensors.since(request) or received
            sampling = tensors.sampling(request, "sampling_parameters")
            deadline = deadline_ns(request, sampling, received)
            # The engine checks all of it again, but would refuse only after all the other work.
            parameters = SamplingParameters.parse(sampling)
            grammar(parameters)  # read; the engine compiles it
            cascade = Cascade.of(sampling, parameters, self._preprocessor.cascade)
            cuts = [self._preprocessor.plan(cut) for cut in read_request(request, sampling).cuts(cascade)]
            for cut in cuts:
                self._check_room(len(cut.prompt.input_ids), parameters.least_room)
            prepared = self._preprocessor.prepare(cuts[0])
        except Exception as error:
            return error_response("preprocess", error)
        outputs = self._outputs(prepared, deadline, parameters.priority, received)
        if "CUT" in request.requested_output_names():  # the ensemble does not
            outputs.append(tensors.text_output("CUT", cut_json(self._preprocessor.family, prepared.plans)))
        if cascade is not None and (prepared.plans or not cascade.planned):  # a plan is of pictures
            outputs.append(tensors.output("CASCADE", cascade_parts(cascade, request, *cuts)))
        return tensors.response(outputs)

    def _check_room(self, prompt: int, answer: int) -> None:
        context = self._preprocessor.prompts.context_length
        if prompt + answer > context:
            raise InvalidRequest(
                f"{prompt} prompt tokens and {answer} for the answer exceed the context of {context} tokens; "
                "shorten the prompt, use fewer or smaller images or lower max_tokens"
            )

    def _outputs(self, prepared: Prepared, deadline: int, priority: int, received: int) -> list[Any]:
        stamps = tensors.RequestTimestamps(deadline, priority, received, time.monotonic_ns())[: tensors.OF_PREPROCESS]
        outputs = [
            *self._pictures(prepared),
            # A leading 1: the vision stage batches requests along it.
            tensors.output("DIGEST", prepared.digest.reshape(1, -1)),
            tensors.output("STAMPS", np.array([stamps], dtype=np.int64)),
            tensors.output("INPUT_IDS", prepared.input_ids),
            tensors.output("SPANS", prepared.spans),
        ]
        if prepared.positions is not None:
            outputs.append(tensors.output("POSITIONS", prepared.positions))
        return outputs

    def _pictures(self, prepared: Prepared) -> list[Any]:
        if self._blank_tile is None:
            return [
                tensors.output("PIXELS", prepared.pixels.reshape(1, -1)),
                tensors.output("PLAN", prepared.plan.reshape(1, -1)),
            ]
        tiles = prepared.pixels.reshape(-1, *self._blank_tile.shape[1:])
        return [tensors.output("TILES", tiles if len(tiles) else self._blank_tile)]


def _blank_tile(family: ModelFamily, gpu_pixels: int) -> np.ndarray:
    """What a request without pictures sends where they leave as tiles."""
    if gpu_pixels:
        raise ConfigError(
            f"preprocess: where pictures leave as TILES none may travel encoded; set gpu_pixels to 0, not {gpu_pixels}"
        )
    if family.cost_unit != "tiles":
        raise ConfigError(f"preprocess: TILES does not go with pictures of {family.cost_unit}")
    return np.zeros((1, *family.unit_shape), np.uint8)


def cut_json(family: ModelFamily, plans: Sequence[ImagePlan]) -> str:
    """For people, how pictures of these plans are cut: a JSON array of what the SDK's PicturePlan holds."""

    def seen(view: View) -> dict[str, int]:
        rows, columns = view.grid
        return {"width": view.width, "height": view.height, "rows": rows, "columns": columns}

    common = {"unit": family.cost_unit, "policies": family.policy_names}
    return json.dumps([{"tokens": plan.tokens, **common, "views": [*map(seen, plan.views)]} for plan in plans])


def cascade_parts(cascade: Cascade, request: Any, first: Planned, full: Planned) -> np.ndarray:
    """What the language model needs for the full cut: JSON, the messages, the pictures. Where that is the first one
    again, or will not be asked for, the JSON alone."""
    margin = cascade.margin_of(full.question)
    about = {"margin": margin, "tile_policy": cascade.full, "planned": cascade.planned}
    parts = [json.dumps(about).encode()]
    if first.plans != full.plans and (margin or cascade.planned):
        parts += [b"".join(tensors.byte_strings(request, "messages")), *tensors.byte_strings(request, "image")]
    return np.array(parts, dtype=np.object_)


def read_request(request: Any, sampling: Mapping[str, Any]) -> PreprocessRequest:
    """The client's tensors as a PreprocessRequest; raises InvalidRequest that names the input at fault."""
    policies: dict[str, Any] = {name: sampling.get(name) for name in POLICY_KEYS}
    return PreprocessRequest(
        text=tensors.text(request, "text_input"),
        messages=tensors.json_value(request, "messages", list),
        images=tensors.byte_strings(request, "image"),
        **policies,
    )
