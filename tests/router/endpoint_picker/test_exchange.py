"""The conversation with a proxy: each way of sending bodies, refusals, and what the gateway says beside the request."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.errors import ResourceExhausted, Unavailable
from pdmesh.third_party.envoy import ext_proc_pb2 as pb
from router.endpoint_picker.config import PickerConfig
from router.endpoint_picker.picker import Asked
from router.endpoint_picker.service import MAX_CHUNK, Exchange, HeldBytes, RefusedRequest, refusal, refused_by

CONFIG = PickerConfig(endpoints=("10.0.0.1:80",), max_body_bytes=1 << 20)
HELD = HeldBytes(3 << 20)
Mode = pb.ProtocolConfiguration
BODY = json.dumps({"model": "m", "prompt": "once upon a time " * 100}).encode()


class Picked:
    """A pick of fixed addresses, which notes what becomes of it."""

    addresses = ("10.0.0.1:80", "10.0.0.2:80")

    def __init__(self) -> None:
        self.served: list[str] = []
        self.num_ends = 0

    def answered(self, served: str = "") -> None:
        self.served.append(served)

    def end(self) -> None:
        self.num_ends += 1


class Picking:
    """Keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.picked = Picked()

    async def __call__(self, asked: Asked) -> Picked:
        self.asked.append(asked)
        return self.picked


def exchange_of(picking: Picking, priorities: dict[str, int] | None = None) -> Exchange:
    return Exchange(CONFIG, priorities or {}, picking, HELD)  # type: ignore[arg-type]


def headers(mode: int | None = Mode.FULL_DUPLEX_STREAMED, *, end: bool = False, **extra: str) -> pb.ProcessingRequest:
    listed = [pb.HeaderValue(key=":method", raw_value=b"POST")]
    listed += [pb.HeaderValue(key=name.replace("_", "-"), raw_value=value.encode()) for name, value in extra.items()]
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=listed), end_of_stream=end))
    if mode is not None:
        message.protocol_config.request_body_mode = mode  # type: ignore[assignment]
    return message


def body(content: bytes, *, end: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=content, end_of_stream=end))


def endpoint_in(answer: pb.ProcessingResponse) -> str:
    """The endpoint, which must be the same in header and metadata."""
    part = answer.request_headers if answer.WhichOneof("response") == "request_headers" else answer.request_body
    (option,) = part.response.header_mutation.set_headers
    assert option.header.key == "x-gateway-destination-endpoint"
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    value = option.header.raw_value.decode()
    assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == value  # type: ignore[index]
    return value


def body_of(answers: Sequence[pb.ProcessingResponse]) -> tuple[bytes, list[bool]]:
    parts = [each.request_body.response.body_mutation.streamed_response for each in answers if each.HasField("request_body")]
    return b"".join(part.body for part in parts), [part.end_of_stream for part in parts]


async def test_full_duplex_answers_when_the_body_is_there_and_sends_it_back() -> None:
    picking = Picking()
    exchange = exchange_of(picking)
    large = BODY + b" " * 200_000
    assert await exchange.answers(headers()) == ()
    assert await exchange.answers(body(large[:100], end=False)) == ()
    answers = await exchange.answers(body(large[100:]))
    assert endpoint_in(answers[0]) == "10.0.0.1:80,10.0.0.2:80"
    content, ends = body_of(answers)
    assert content == large
    assert ends == [False] * (len(ends) - 1) + [True]
    assert len(ends) == -(-len(large) // MAX_CHUNK)
    assert picking.asked[0].prompt.model == "m"
    assert len(picking.asked[0].prompt.blocks) == 6


async def test_full_duplex_with_trailers_ends_with_them() -> None:
    exchange = exchange_of(Picking())
    await exchange.answers(headers())
    await exchange.answers(body(BODY, end=False))
    answers = await exchange.answers(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    assert endpoint_in(answers[0])
    assert body_of(answers) == (BODY, [False])
    assert answers[-1].HasField("request_trailers")


async def test_full_duplex_with_an_empty_body() -> None:
    exchange = exchange_of(Picking())
    await exchange.answers(headers())
    answers = await exchange.answers(body(b""))
    assert endpoint_in(answers[0])
    assert body_of(answers) == (b"", [True])


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.BUFFERED_PARTIAL])
async def test_a_buffering_proxy_gets_the_endpoint_with_the_body(mode: int) -> None:
    exchange = exchange_of(Picking())
    (first,) = await exchange.answers(headers(mode))
    assert not first.request_headers.response.header_mutation.set_headers
    (answer,) = await exchange.answers(body(BODY, end=mode == Mode.BUFFERED))
    assert endpoint_in(answer)
    assert not answer.request_body.response.HasField("body_mutation")


@pytest.mark.parametrize(
    ("mode", "end"), [(Mode.NONE, False), (Mode.STREAMED, False), (Mode.FULL_DUPLEX_STREAMED, True), (None, True)]
)
async def test_without_a_body_the_endpoint_comes_with_the_headers(mode: int | None, end: bool) -> None:
    picking = Picking()
    exchange = exchange_of(picking)
    (answer,) = await exchange.answers(headers(mode, end=end))
    assert endpoint_in(answer)
    assert picking.asked[0].prompt.blocks == ()
    for late in await exchange.answers(body(BODY)):
        assert not late.request_body.response.header_mutation.set_headers


async def test_the_response_is_left_alone_and_the_served_endpoint_is_noted() -> None:
    picking = Picking()
    exchange = exchange_of(picking)
    first = headers(end=True)
    first.protocol_config.response_body_mode = Mode.FULL_DUPLEX_STREAMED
    await exchange.answers(first)
    response = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    response.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": "10.0.0.2:80"})
    (answer,) = await exchange.answers(response)
    assert answer == pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    assert picking.picked.served == ["10.0.0.2:80"]
    chunk = pb.HttpBody(body=b"data", end_of_stream=True)
    (answer,) = await exchange.answers(pb.ProcessingRequest(response_body=chunk))
    assert answer.response_body.response.body_mutation.streamed_response.body == b"data"
    (answer,) = await exchange.answers(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    assert answer.HasField("response_trailers")
    exchange.end()
    assert picking.picked.num_ends == 1


async def test_what_the_gateway_says_beside_the_request() -> None:
    picking = Picking()
    exchange = exchange_of(picking, {"gold": 1})
    first = headers(
        end=True,
        x_gateway_inference_objective="gold",
        x_gateway_inference_fairness_id="team-a",
        x_slo_ttft_ms="200",
        x_slo_tpot_ms="25.5",
    )
    subset = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    subset.get_or_create_list("x-gateway-destination-endpoint-subset").extend(["10.0.0.1:80", "[::1]:81", "nonsense"])
    await exchange.answers(first)
    (asked,) = picking.asked
    assert asked.subset == frozenset(("10.0.0.1:80", "[::1]:81"))
    assert (asked.tenant, asked.priority, asked.ttft_s, asked.tpot_s) == ("team-a", 1, 0.2, 0.0255)


async def test_a_subset_may_be_one_text_and_may_be_empty() -> None:
    for value, expected in (("10.0.0.1:80, 10.0.0.2:80", ("10.0.0.1:80", "10.0.0.2:80")), ("", ())):
        picking = Picking()
        first = headers(end=True)
        first.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"x-gateway-destination-endpoint-subset": value})
        await exchange_of(picking).answers(first)
        assert picking.asked[0].subset == frozenset(expected)


async def test_bodies_that_never_end_have_a_bound_together() -> None:
    exchanges = [exchange_of(Picking()) for _ in range(5)]
    refused = 0
    for exchange in exchanges:
        await exchange.answers(headers())
        try:
            await exchange.answers(body(b"x" * 1_000_000, end=False))
        except RefusedRequest as error:
            assert (error.status, error.code) == (429, "bodies")
            refused += 1
    assert refused == 2
    for exchange in exchanges:
        exchange.end()
        exchange.end()
    assert HELD.num_bytes == 0


async def test_a_body_that_is_too_large_is_refused() -> None:
    exchange = exchange_of(Picking())
    await exchange.answers(headers())
    with pytest.raises(RefusedRequest) as raised:
        for _ in range(3):
            await exchange.answers(body(b"x" * (1 << 19), end=False))
    answer = refusal(raised.value).immediate_response
    assert answer.status.code == 413
    assert json.loads(answer.body)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "soon", "1e99"])
async def test_an_objective_that_is_none_is_refused_by_name(value: str) -> None:
    with pytest.raises(RefusedRequest, match=r"^x-slo-ttft-ms: "):
        await exchange_of(Picking()).answers(headers(end=True, x_slo_ttft_ms=value))


def test_errors_of_picking_have_the_statuses_of_the_protocol() -> None:
    full = refusal(refused_by(ResourceExhausted("full", retry_delay_s=0.2, reason="queue_full"))).immediate_response
    assert full.status.code == 429
    sent = {each.header.key: each.header.raw_value for each in full.headers.set_headers}
    assert sent == {"content-type": b"application/json", "retry-after": b"1"}
    assert json.loads(full.body)["error"] == {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    assert refusal(refused_by(Unavailable("none"))).immediate_response.status.code == 503


# What stubs of Envoy's own files wrote (xds-protos 1.85.0).
REQUEST = (
    "12120a0e0a0c0a053a706174681a032f7631180142540a520a14656e766f792e6c622e7375627365745f68696e74123a0a380a25782d676174657761792d"
    "64657374696e6174696f6e2d656e64706f696e742d737562736574120f320d0a0b1a09312e322e332e343a354a150a016112100a0e0a01621209110000"
    "00000000f03f5a0408041002"
)
HEADERS_ANSWER = "0a120a10120c0a0a0a060a016b1a017618022801421a0a180a08656e766f792e6c62120c2a0a0a080a016b12031a0176"
BODY_ANSWER, REFUSAL = "1a0c0a0a1a081a060a0278791001", "3a0f0a0308ad031a027b7d2a0466756c6c"


def test_the_bytes_are_those_of_the_protocol() -> None:
    request = pb.ProcessingRequest.FromString(bytes.fromhex(REQUEST))
    (path,) = request.request_headers.headers.headers
    assert (path.key, path.raw_value, request.request_headers.end_of_stream) == (":path", b"/v1", True)
    assert (request.protocol_config.request_body_mode, request.protocol_config.response_body_mode) == (4, 2)
    listed = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]["x-gateway-destination-endpoint-subset"]
    assert list(listed) == ["1.2.3.4:5"]  # type: ignore[arg-type]
    answer = pb.ProcessingResponse()
    answer.request_headers.response.clear_route_cache = True
    option = pb.HeaderValueOption(
        header=pb.HeaderValue(key="k", raw_value=b"v"), append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    )
    answer.request_headers.response.header_mutation.set_headers.append(option)
    answer.dynamic_metadata.update({"envoy.lb": {"k": "v"}})
    assert answer.SerializeToString(deterministic=True).hex() == HEADERS_ANSWER
    streamed = pb.StreamedBodyResponse(body=b"xy", end_of_stream=True)
    response = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
    assert pb.ProcessingResponse(request_body=pb.BodyResponse(response=response)).SerializeToString().hex() == BODY_ANSWER
    refused = pb.ImmediateResponse(status=pb.HttpStatus(code=429), body=b"{}", details="full")
    assert pb.ProcessingResponse(immediate_response=refused).SerializeToString().hex() == REFUSAL


@given(
    st.lists(
        st.binary(max_size=60) | st.sampled_from([headers().SerializeToString(), body(BODY).SerializeToString()]), max_size=6
    )
)
async def test_any_messages_in_any_order_end_without_a_crash(raw: list[bytes]) -> None:
    picking = Picking()
    exchange = exchange_of(picking)
    for each in raw:
        try:
            message = pb.ProcessingRequest.FromString(each)
        except Exception:  # noqa: BLE001 - gRPC would refuse it
            continue
        try:
            await exchange.answers(message)
        except RefusedRequest as error:
            assert refusal(error).immediate_response.status.code in (400, 413, 500)
            break
    exchange.end()
    assert picking.picked.num_ends == (1 if picking.asked else 0)
    assert len(picking.asked) <= 2
