"""Both ends of a cascade: what preprocess hands on, and what the language model's stage asks for, against stand-ins."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from cascade.test_watch import PLANNED
from fakes.backend import InferenceRequest, Tensor, stage_args, strings, wait_until
from test_fronts import answer_of, outputs

from tessera.cascade import Plan, Policy, Watch
from tessera.engine.sequence import TokenEvent, Usage
from tessera.errors import ConfigError
from tessera.settings.stages import EngineConfig
from tessera.tritonserver import preprocess
from tessera.tritonserver.cascade import MOST_AUDITS, FullCuts, Watching
from tessera.tritonserver.language_model import Reply, TritonPythonModel, Unsaid, read_request, watching_of
from tessera.tritonserver.responder import Outbox, Responder
from tessera_wire import errors, question_class
from tessera_wire.tensors import elements

JPEG = bytes(cv2.imencode(".jpg", np.zeros((320, 480, 3), np.uint8))[1])
MS = 1_000_000


@pytest.fixture(scope="module")
def stage() -> preprocess.TritonPythonModel:
    made = preprocess.TritonPythonModel()
    made.initialize(stage_args("preprocess"))
    return made


def prepared(stage: Any, policy: Any, *inputs: Tensor, **about: Any) -> dict[str, Any]:
    sampling = {"choices": ["a", "b"], "tile_policy": policy}
    given = strings("sampling_parameters", json.dumps(sampling).encode())
    (response,) = stage.execute([InferenceRequest([given, *inputs], **about)])
    return outputs(response)


def test_preprocess_cuts_coarsely_and_hands_on_what_the_full_cut_takes(backend: Any, stage: Any) -> None:
    asked = strings("text_input", b"?"), strings("image", JPEG)
    found = prepared(stage, {"cascade": {"margin": 2, "full": {"max_tiles": 6}}}, *asked)
    assert found["PLAN"] == [[0, 1, 1, 1]]
    about, messages, picture = found["CASCADE"]
    assert json.loads(about) == {"margin": 2, "tile_policy": {"max_tiles": 6}, "planned": False} and (
        messages,
        picture,
    ) == (b"", JPEG)
    two = prepared(stage, '{"cascade": {"margin": "inf", "first": "two-tile"}}', *asked)
    assert two["PLAN"] == [[0, 2, 1, 2]] and json.loads(two["CASCADE"][0])["margin"] == np.inf
    said = b'[{"role": "user", "content": [{"type": "image", "detail": "high"}, {"type": "text", "text": "?"}]}]'
    assert prepared(stage, {"cascade": {"margin": 2}}, strings("messages", said), asked[1])["CASCADE"][1] == said
    for kept in ({"margin": 0}, {"margin": 9, "full": {"max_tiles": 1}}):  # nothing more will be asked
        (about,) = prepared(stage, {"cascade": kept}, *asked)["CASCADE"]
        assert json.loads(about)["margin"] == kept["margin"]
    assert "CASCADE" not in prepared(stage, "native", *asked)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"cascade": {"margin": 1, "full": {"max_tiles": 105}}}, "limit of 104"),
        ({"cascade": {"margin": True}}, "margin must be a number"),
        ({"cascade": {"margin": float("nan")}}, "margin must be a number"),
        ({"cascade": {"margin": "1"}}, "margin must be a number"),
        ({"cascade": {"margin": 1}, "name": "native"}, "'name' beside cascade"),
    ],
)
def test_the_full_cut_is_judged_before_any_work(backend: Any, stage: Any, policy: Any, words: str) -> None:
    assert words in prepared(stage, policy, strings("image", b"no picture" if "limit" not in words else JPEG))["words"]


def test_both_cuts_must_fit_the_context(backend: Any, stage: Any) -> None:
    long = strings("text_input", b"room " * 7000)
    assert "PLAN" in prepared(stage, {"max_tiles": 1}, long, strings("image", JPEG))
    refused = prepared(
        stage, {"cascade": {"margin": 1, "full": {"name": "dense"}}}, long, strings("image", *[JPEG] * 2)
    )
    assert "context" in refused["words"]


def test_a_request_that_goes_on_counts_from_its_arrival(backend: Any, stage: Any) -> None:
    since = time.monotonic_ns() - 10 * MS
    found = prepared(stage, None, strings("text_input", b"?"), parameters=json.dumps({"tessera-since": str(since)}))
    assert found["STAMPS"][0][2] == since


def full_answer(text: str, reason: str = "", usage: tuple[int, ...] = (0, 0, 0)) -> Any:
    """A response of the ensemble to the full cut."""
    message = answer_of(text, reason, usage)
    place = [output.name for output in message.outputs].index("timings")
    message.outputs[place].shape[:] = [6]
    message.raw_output_contents[place] = np.array([40, 1, 2, 3, 4, 5], np.float32).tobytes()
    return message


class Line:
    """Keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[SimpleNamespace] = []
        self.error: Exception | None = None

    def send(self, model: str, name: str, inputs: Any, deliver: Callable[[Any], None], **about: Any) -> None:
        if self.error:
            raise self.error
        values = {each.name: [*elements(each.data)] if each.datatype == "BYTES" else each.data for each in inputs}
        self.asked.append(SimpleNamespace(model=model, name=name, inputs=values, deliver=deliver, **about))

    def close(self, seconds: float) -> None: ...


class House:
    """A stage's half of the language model, of a server that follows a policy file."""

    def __init__(self) -> None:
        self.line, self.outbox = Line(), Outbox("language_model", 1)
        self.watch, self.idle = Watch(Plan.read(PLANNED)), True
        self.follow(0.0)

    def follow(self, share: float, escalates: bool = False) -> None:
        watching = Watching(self.watch, share, escalates, lambda: self.idle)
        self.full_cuts = FullCuts(self.line, self.outbox, watching)  # type: ignore[arg-type]

    def ask(self, margin: float = 2.0, planned: bool = False, **about: Any) -> tuple[InferenceRequest, Reply]:
        now = time.monotonic_ns()
        told = json.dumps({"margin": margin, "tile_policy": "native", "planned": planned}).encode()
        request = InferenceRequest(
            [
                strings("CASCADE", told, b"", JPEG, JPEG),
                strings("text_input", b"Which?"),
                strings("sampling_parameters", b'{"max_tokens": 3, "timeout_us": 7, "tile_policy": {"cascade": 1}}'),
                Tensor("STAMPS", np.array([[now + 50 * MS, 4, now - 9 * MS, now - 5 * MS, now - 4 * MS, now]])),
                Tensor("INPUT_IDS", np.arange(3, dtype=np.int32)),
                Tensor("SPANS", np.zeros((0, 2), np.int32)),
                Tensor("exclude_input_in_output", np.array([True])),
            ],
            "mine",
            **{"parameters": '{"tessera-lease": "theirs", "top_k": 5}'} | about,
        )
        page: Any = SimpleNamespace(observe=lambda event: None)
        return request, Reply(request, Responder(request), page, self.full_cuts, Unsaid(""))

    def end(self, request: InferenceRequest, reply: Reply, margin: float, reason: str = "stop") -> None:
        """The first cut's answer."""
        whole, _ = read_request(request, False, None, margin=True)
        assert whole.margin and not whole.stream
        now = time.monotonic_ns()
        event = TokenEvent(whole, "yes", [1], None, reason, Usage(3, 1, 0), 0, now, now + MS, now + 3 * MS)
        object.__setattr__(event, "margin", margin)
        reply.channel.deliver([event])


@pytest.fixture
def house(backend: Any) -> Iterator[House]:
    house = House()
    yield house
    house.full_cuts.close()
    house.outbox.close()


def test_a_margin_that_is_large_enough_is_told(house: House) -> None:
    request, reply = house.ask(margin=2.0)
    house.end(request, reply, 2.0)
    (answer,) = map(outputs, request.sender.responses)
    assert request.sender.final and not house.line.asked
    assert json.loads(answer["cascade"][0]) == {"margin": 2.0, "escalated": False} and answer["text_output"] == [b"yes"]


def test_the_full_cut_is_asked_with_all_that_the_request_had(house: House) -> None:
    request, reply = house.ask(margin=2.0)
    house.end(request, reply, 1.5)
    (asked,) = house.line.asked
    assert not request.sender.responses
    assert (asked.model, asked.priority, asked.lease) == ("vlm", 3, f"theirs {asked.name}")
    sampling = json.loads(asked.inputs.pop("sampling_parameters")[0])
    assert asked.since == reply.full_cut.since < time.monotonic_ns() - 9 * MS  # type: ignore[union-attr]
    assert sampling == {"max_tokens": 3, "top_k": 5, "timeout_us": 59_000, "tile_policy": "native"}
    flags = {"stream": b"\1", "exclude_input_in_output": b"\1"}
    assert asked.inputs == {"text_input": [b"Which?"], "image": [JPEG, JPEG]} | flags
    for part in (full_answer("n"), full_answer("o", "stop", (9, 2, 4)), None):
        asked.deliver(part)
    wait_until(lambda: request.sender.final)
    first, last = map(outputs, request.sender.responses)
    assert (first["text_output"], first["usage"], "cascade" in first) == ([b"n"], [0, 0, 0], False)
    assert (last["text_output"], last["usage"]) == ([b"o"], [9, 2, 4])
    assert json.loads(last["cascade"][0]) == {"margin": 1.5, "escalated": True}
    assert house.full_cuts.leases_of("mine") == []
    assert house.full_cuts.counts() | {"cascades": 1, "escalations": 1} == house.full_cuts.counts()


def test_the_times_of_both_cuts_make_up_the_whole(house: House) -> None:
    request, reply = house.ask()
    house.end(request, reply, 0.0)
    first = reply._timings(SimpleNamespace(scheduled_ns=0, first_token_ns=0, emitted_ns=0))  # type: ignore[arg-type]
    house.line.asked[0].deliver(full_answer("no", "stop"))
    wait_until(lambda: request.sender.final)
    (answer,) = map(outputs, request.sender.responses)
    assert sum(answer["timings"]) == pytest.approx(55) and answer["timings"][2] == pytest.approx(2 + first[2])


def test_an_end_without_an_answer_decides_nothing(house: House) -> None:
    request, reply = house.ask()
    house.end(request, reply, 0.0, reason="deadline")
    (answer,) = map(outputs, request.sender.responses)
    assert request.sender.final and not house.line.asked and answer["cascade"] == [b""]
    assert house.full_cuts.counts() | {"cascades": 0, "escalations": 0} == house.full_cuts.counts()


@pytest.mark.parametrize(
    ("item", "code", "words"),
    [
        (errors.DeadlineExceeded("deadline exceeded after 5 ms"), "UNAVAILABLE", "deadline exceeded"),
        (errors.ConnectionFailed("the server is stopping"), "UNAVAILABLE", "stopping"),
        (None, "INTERNAL", "gave no answer"),
        (SimpleNamespace(outputs=5), "INTERNAL", "failed on this request"),
    ],
)
def test_what_the_full_cut_fails_with_is_the_requests_end(house: House, item: Any, code: str, words: str) -> None:
    request, reply = house.ask()
    house.end(request, reply, 0.0)
    house.line.asked[0].deliver(item)
    wait_until(lambda: request.sender.final)
    (answer,) = map(outputs, request.sender.responses)
    assert answer["code"] == code and words in answer["words"]


def test_a_line_that_is_closed_is_an_error_too(house: House) -> None:
    request, reply = house.ask()
    house.line.error = errors.TesseraClientError("this client is closed")
    house.end(request, reply, 0.0)
    assert request.sender.final and house.full_cuts.leases_of("mine") == []


def test_who_cancels_by_the_requests_id_cancels_the_full_cut(house: House) -> None:
    request, reply = house.ask(parameters="{}")
    house.end(request, reply, 0.0)
    (asked,) = house.line.asked
    ended: list[str] = []
    model = TritonPythonModel()
    model._engine = SimpleNamespace(cancel_all=ended.append)  # type: ignore[assignment]
    model._full_cuts, model._leases = house.full_cuts, SimpleNamespace(end=ended.append)  # type: ignore[assignment]
    model._cancel("another")
    model._cancel("mine")
    assert ended == ["another", "mine", asked.name] and asked.lease.split() == [asked.name]


def test_requests_by_the_plan_are_watched_and_no_others(house: House) -> None:
    for planned, margin in ((False, 0.0), (True, 5.0), (True, 0.0)):
        house.end(*house.ask(planned=planned), margin)
    assert (house.watch.requests, house.watch.escalated) == (2, 1) and len(house.line.asked) == 2
    assert house.watch.audits == 0  # a share of none


def test_what_was_not_escalated_is_audited_when_nothing_waits(house: House) -> None:
    """At the worst priority, in nobody's name; what comes of it counts where it is a whole answer."""
    house.full_cuts.close()
    house.follow(1.0)
    house.idle = False
    requests = [house.ask(planned=planned) for planned in (True, True, True, False)]
    for request, reply in requests:
        house.end(request, reply, 5.0)
    house.end(*house.ask(planned=True), 1.0)  # which is escalated
    escalated = house.line.asked.pop()
    assert all(request.sender.final for request, _ in requests) and not house.line.asked
    house.idle = True
    wait_until(lambda: len(house.line.asked) == 3)
    for asked in house.line.asked:
        sampling = json.loads(asked.inputs["sampling_parameters"][0])
        assert sampling["priority"] == asked.priority == 2**63 - 1 and sampling["timeout_us"] == 60_000_000
        assert asked.lease.split() == [asked.name] and (asked.inputs["stream"], asked.inputs["image"]) == (
            b"\0",
            [JPEG] * 2,
        )
        assert asked.inputs["exclude_input_in_output"] == b"\1" and not hasattr(asked, "since")
    assert escalated.priority == 3
    same, other, late = house.line.asked
    for asked, answer in ((same, full_answer("yes", "stop")), (other, full_answer("no", "length"))):
        asked.deliver(answer)
        asked.deliver(None)
    late.deliver(full_answer("", "deadline"))
    late.deliver(errors.DeadlineExceeded("late"))
    wait_until(lambda: house.watch.audits == 2)
    told = {"cascade_audits": 2, "cascade_disagreements": 1, "cascade_alarm": 0}
    assert house.full_cuts.counts() | told == house.full_cuts.counts()
    assert ping(house) == {"alarm": "", "cascade_audits": 2, "cascade_disagreements": 1}


def test_few_wait_to_be_audited_and_a_picture_of_one_cut_is_by_itself(house: House) -> None:
    house.full_cuts.close()
    house.follow(1.0)
    house.idle = False
    for _ in range(MOST_AUDITS + 3):
        house.end(*house.ask(planned=True), 5.0)
    request, reply = house.ask(planned=True)
    assert reply.full_cut is not None
    reply.full_cut.alike = True
    house.end(request, reply, 5.0)
    assert house.watch.audits == 1 and house.watch.disagreements == 0
    house.idle = True
    wait_until(lambda: len(house.line.asked) == MOST_AUDITS)


@pytest.mark.parametrize("escalates", [False, True])
def test_an_alarm_is_told_and_if_set_escalates_all_from_then_on(
    house: House, caplog: pytest.LogCaptureFixture, escalates: bool
) -> None:
    house.full_cuts.close()
    house.follow(0.0, escalates)
    assert ping(house)["alarm"] == "" and house.full_cuts.counts()["cascade_alarm"] == 0
    while not house.watch.alarm:
        assert house.watch.requests < 100
        house.end(*house.ask(planned=True), 0.0)
    assert caplog.text.count("the cascade's plan does not hold any more: ") == 1
    assert ping(house)["alarm"] == house.watch.alarm and house.full_cuts.counts()["cascade_alarm"] == 1
    before = len(house.line.asked)
    for planned in (True, False):
        house.end(*house.ask(planned=planned), 5.0)
    assert len(house.line.asked) - before == escalates


def ping(house: House) -> Any:
    model = TritonPythonModel()
    model._full_cuts = house.full_cuts
    request = InferenceRequest([strings("PING", b"?")])
    model.execute([request])
    (answer,) = map(outputs, request.sender.responses)
    return json.loads(answer["cascade"][0] or "{}")


def test_a_deployments_cascade_is_for_requests_that_say_nothing_of_cuts(backend: Any, monkeypatch: Any) -> None:
    """And can have a margin; questions of a class have their own. An empty policy is the deployment's full cut."""
    policy = {"margin": 2, "full": {"max_tiles": 6}, "classes": {question_class("Which?"): "inf"}}
    monkeypatch.setenv("TESSERA_PREPROCESS_TILE_POLICY", json.dumps({"cascade": policy}))
    stage = preprocess.TritonPythonModel()
    stage.initialize(stage_args("preprocess"))
    image = strings("image", JPEG)
    for text, margin in ((b"Which?", np.inf), (b"Who?", 2)):
        found = prepared(stage, None, strings("text_input", text), image)
        assert found["PLAN"] == [[0, 1, 1, 1]] and len(found["CASCADE"]) == 3
        assert json.loads(found["CASCADE"][0]) == {"margin": margin, "tile_policy": {"max_tiles": 6}, "planned": True}
    said = b'[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]'
    assert json.loads(prepared(stage, None, strings("messages", said), image)["CASCADE"][0])["margin"] == np.inf
    assert json.loads(prepared(stage, {"cascade": {"margin": 7}}, image)["CASCADE"][0])["planned"] is False
    assert "CASCADE" not in prepared(stage, None, strings("text_input", b"Which?"))  # of no picture
    for sampling in (b'{"choices": ["a", "b"], "tile_policy": {}}', b'{"max_tokens": 17}', b"{}"):
        (response,) = stage.execute([InferenceRequest([strings("sampling_parameters", sampling), image])])
        found = outputs(response)
        assert found["PLAN"] == [[0, 7, 2, 3]] and "CASCADE" not in found


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"cascade": {"margin": 1, "full": {"max_tiles": 0}}}, "max_tiles must be"),
        ({"cascade": {"margin": 1, "first": "mosaic"}}, "mosaic"),
        ({"cascade": {"margin": 1, "classes": {"a": -1}}}, r"classes\['a'\] must be a number"),
        ({"cascade": []}, "object with a margin"),
    ],
)
def test_a_deployments_cascade_that_cannot_be_ends_the_start(
    backend: Any, monkeypatch: Any, policy: Any, words: str
) -> None:
    monkeypatch.setenv("TESSERA_PREPROCESS_TILE_POLICY", json.dumps(policy))
    with pytest.raises(ConfigError, match=f"^preprocess: .*{words}"):
        preprocess.TritonPythonModel().initialize(stage_args("preprocess"))


def test_a_policy_file_must_be_seen_by_who_watches_it(backend: Any, monkeypatch: Any, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"tile_policy": {"cascade": {"margin": 1}}, "watch": PLANNED}))
    with pytest.raises(ConfigError, match="the language model, which is to watch it, does not see that"):
        preprocess.TritonPythonModel().initialize(stage_args("preprocess", tile_policy=str(file)))
    monkeypatch.setenv("TESSERA_PREPROCESS_TILE_POLICY", str(file))
    preprocess.TritonPythonModel().initialize(stage_args("preprocess"))


def test_a_deterministic_server_escalates_nothing_for_what_others_asked() -> None:
    """An alarm that is only told is no matter."""
    for on_alarm, refused in (("escalate", True), ("report", False)):
        settings: Any = SimpleNamespace(policy=Policy(None, {"cascade": {}}, Plan.read(PLANNED), on_alarm=on_alarm))
        assert watching_of(settings, EngineConfig(), lambda: True) is not None
        with pytest.raises(ConfigError, match="by on_alarm escalate") if refused else nullcontext():
            watching_of(settings, EngineConfig(deterministic=True), lambda: True)
