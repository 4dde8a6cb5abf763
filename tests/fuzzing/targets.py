"""What is fuzzed: functions of the product that read bytes from others, and the errors with which they may refuse them.

Each target is made once, in the process that runs it, and called with bytes. Anything that it raises beside its refusals is a
bug, and so is a call that takes longer than `LIMIT_S`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pdmesh.third_party.kserve import grpc_service_pb2
from pdmesh.third_party.vllm import vllm_engine_pb2
from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, transfer_pb2, worker_pb2
from tests.fuzzing.mesh_calls import ROUTER_METHODS, WORKER_METHODS
from tests.fuzzing.mesh_seeds import ROUTER_SEEDS, WORKER_SEEDS

LIMIT_S = 10
MOST_BLOCK_BYTES = 1 << 16
Run = Callable[[bytes], object]
Made = tuple[Run, tuple[type[Exception], ...]]
"""A reader, and its refusals."""


@dataclass(frozen=True)
class Target:
    """A reader. `make` imports it, and returns it with its refusals; `seeds`: inputs from which the search begins."""

    name: str
    make: Callable[[], Made]
    seeds: tuple[bytes, ...] = (b"",)
    is_alone: bool = False
    """It changes its process, in which nothing else can run."""


TARGETS: dict[str, Target] = {}


def target(*seeds: bytes | str | dict[str, Any], is_alone: bool = False) -> Callable[[Callable[[], Made]], None]:
    """Add a target under the name of its maker. A seed may be a JSON object."""

    def add(make: Callable[[], Made]) -> None:
        name = make.__name__.replace("_", "-")
        TARGETS[name] = Target(name, make, tuple(map(_as_bytes, seeds)) or (b"",), is_alone)

    return add


def _as_bytes(seed: bytes | str | dict[str, Any]) -> bytes:
    if isinstance(seed, bytes):
        return seed
    return (seed if isinstance(seed, str) else json.dumps(seed)).encode()


def run_one(run: Run, refusals: tuple[type[Exception], ...], data: bytes) -> None:
    """Call a target; what it refuses is right."""
    with suppress(*refusals):
        run(data)


# HTTP

TURN = {"role": "user", "content": "What is the weather in Rome?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def _http(parse: Callable[..., object], *more: object) -> Made:
    from pdmesh.runtime.errors import MeshError
    from router.api.http.body import parse_json
    from router.api.http.errors import HttpError

    return lambda data: parse(parse_json(data), *more), (HttpError, MeshError)


def _options() -> object:
    return mesh_pb2.RequestOptions()


@target(
    {"model": "m", "messages": [TURN], "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 5},
    {"messages": [TURN, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "s"}],
     "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "logit_bias": {"5": -100}, "n": 2, "seed": 1,
     "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, "stop": ["a"]},
    {"messages": [TURN], "logprobs": True, "top_logprobs": 3, "temperature": 0.5, "top_p": 0.9, "guided_regex": "[a-z]+",
     "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "continue_final_message": True},
)  # fmt: skip
def http_chat() -> Made:
    from router.api.openai.requests import parse_chat

    return _http(parse_chat, _options())


@target(
    {"model": "m", "prompt": "a", "max_tokens": 3, "echo": True, "logprobs": 2, "best_of": 2, "suffix": "b"},
    {"prompt": [[1, 2, 3], [4]], "n": 2, "stop": "x", "min_tokens": 1, "ignore_eos": True, "prompt_logprobs": 1},
)
def http_completion() -> Made:
    from router.api.openai.requests import parse_completion

    return _http(parse_completion, _options())


@target({"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4}, {"input": [[1, 2], [3]]})
def http_embeddings() -> Made:
    from router.api.openai.embeddings import parse

    return _http(parse, _options())


@target({"prompt": "a"}, {"messages": [TURN], "tools": [TOOL], "add_generation_prompt": True})
def http_tokenize() -> Made:
    from router.api.openai.requests import parse_tokenize

    return _http(parse_tokenize)


@target({"tokens": [1, 2, 3]})
def http_detokenize() -> Made:
    from router.api.openai.requests import parse_detokenize

    return _http(parse_detokenize)


@target(
    {"model": "m", "input": "a", "instructions": "b", "stream": True, "store": False, "metadata": {"a": "b"}},
    {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
               {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
               {"type": "function_call_output", "call_id": "1", "output": "sun"}],
     "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}], "tool_choice": "required",
     "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "reasoning": {"effort": "low"}},
)  # fmt: skip
def http_responses() -> Made:
    from router.api.responses.requests import parse

    return _http(parse, _options())


ANTHROPIC = {
    "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "a"},
                 {"role": "assistant", "content": [{"type": "thinking", "thinking": "b", "signature": "c"},
                                                   {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "a"}}]},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sun"}]}],
    "tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True,
}  # fmt: skip


@target(ANTHROPIC)
def http_messages() -> Made:
    from router.api.anthropic.requests import parse_message

    return _http(parse_message, _options())


@target({key: ANTHROPIC[key] for key in ("model", "messages", "tools", "system")})
def http_count_tokens() -> Made:
    from router.api.anthropic.requests import parse_count

    return _http(parse_count, _options())


HEADERS = b"X-Request-Id: a\nX-Session-Id: b\nX-Priority: batch\nTraceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01\n"


@target(HEADERS, b"Authorization: Bearer x\nX-Timeout-S: 5\nX-SLO-TTFT-MS: 100\n")
def http_headers() -> Made:
    from pdmesh.runtime.errors import MeshError
    from pdmesh.runtime.telemetry.propagation import extract
    from router.api.http.errors import HttpError
    from router.api.http.headers import HEADER_NAMES, authorization_of, options_of, requested_time_left_s

    names = sorted(set(HEADER_NAMES.values()))

    def run(data: bytes) -> None:
        lines = (line.partition(b":") for line in data.split(b"\n"))
        headers = {name.decode("latin-1").strip().lower(): value.decode("latin-1").strip() for name, _, value in lines}
        if data and names:  # a name that is known, with any value
            headers[names[data[0] % len(names)].lower()] = data[1:].decode("latin-1")
        extract(headers.items())
        authorization_of(headers)
        requested_time_left_s(headers)
        options_of(headers, "request")

    return run, (HttpError, MeshError)


@target(b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--x--\r\n')
def http_multipart() -> Made:
    from router.api.http.errors import HttpError
    from router.api.http.multipart import MultipartParser, boundary_of

    def run(data: bytes) -> None:
        boundary_of("multipart/form-data; boundary=" + data[:80].decode("latin-1"))
        whole, cut = MultipartParser(b"x"), MultipartParser(b"x")
        at_once = list(whole.feed(data))
        in_pieces = [event for index in range(0, len(data), 3) for event in cut.feed(data[index : index + 3])]
        assert _joined(at_once) == _joined(in_pieces), "another body in pieces than whole"
        whole.finish()

    return run, (HttpError,)


def _joined(events: Sequence[object]) -> list[object]:
    """Return the events with the bytes of each part in one piece."""
    found: list[object] = []
    for event in events:
        if isinstance(event, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += event
        else:
            found.append(event)
    return found


@target({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [TURN]}})
def http_batch_line() -> Made:
    from router.api.batches.lines import LineError, parse_line

    return lambda data: parse_line(1, data, "/v1/chat/completions"), (LineError,)


# gRPC: a message that protobuf refuses never reaches the product


@cache
def _model_folder() -> Path:
    from tests.simulation.engine import CONFIG
    from tests.support.tiny_models import write_byte_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="pdmesh-fuzz-"))
    write_byte_tokenizer(folder)
    vocab = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    end = next(token["id"] for token in vocab if token["content"] == "<|im_end|>")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": end}))
    return folder


def _prepared(kind: str) -> Made:
    """Read requests of a client up to where they would be placed: limits, template, tokenizer, grammars."""
    from google.protobuf.message import DecodeError

    from pdmesh.runtime.errors import MeshError
    from router.config import RouterConfig
    from router.tokenization.prepared_request import load
    from router.tokenization.preprocessor import Preprocessor

    message = getattr(mesh_pb2, kind)
    models = load({"m": str(_model_folder())})
    core = SimpleNamespace(models=models, config=RouterConfig(), max_context=lambda model: 2048)
    preprocessor = Preprocessor(cast(Any, core))
    loop = asyncio.new_event_loop()

    async def prepare(request: Any) -> None:
        await preprocessor.prepare(preprocessor.validate(request, 30.0))

    def run(data: bytes) -> None:
        request = message.FromString(data)
        request.model = request.model and "m"
        loop.run_until_complete(prepare(request))

    return run, (DecodeError, MeshError)


SAMPLING = common_pb2.SamplingParams(temperature=0.5, top_p=0.9, max_tokens=5, n=2, stop=["a"], seed=3)
SAMPLING.constraint.json_schema = json.dumps(SCHEMA)
PLAIN = common_pb2.SamplingParams(max_tokens=5, top_k=3, min_p=0.1, repetition_penalty=1.1, logprobs=2)
OPTIONS = mesh_pb2.RequestOptions(request_id="r", tenant="t", session_id="s", priority=common_pb2.PRIORITY_BATCH)
RESUME = mesh_pb2.Resume(seed=3, emitted=[common_pb2.EmittedChoice(token_ids=[1, 2])])
WIRE_TOOL = mesh_pb2.Tool(name="weather", description="Tells it.", parameters=json.dumps(SCHEMA), strict=True)
TURNS = [
    mesh_pb2.ChatMessage(role="user", content="a"),
    mesh_pb2.ChatMessage(role="assistant", tool_calls=[mesh_pb2.ToolCall(id="1", name="weather", arguments="{}")]),
    mesh_pb2.ChatMessage(role="tool", content="sun", tool_call_id="1"),
]


@target(
    mesh_pb2.GenerateRequest(text="hello", sampling=SAMPLING, options=OPTIONS).SerializeToString(),
    mesh_pb2.GenerateRequest(model="m", text="a", sampling=PLAIN, resume=RESUME).SerializeToString(),
)
def rpc_generate() -> Made:
    return _prepared("GenerateRequest")


@target(
    mesh_pb2.ChatRequest(messages=TURNS, tools=[WIRE_TOOL], sampling=PLAIN, options=OPTIONS).SerializeToString(),
    mesh_pb2.ChatRequest(messages=TURNS[:1], sampling=SAMPLING, chat_template_kwargs='{"a": 1}').SerializeToString(),
    mesh_pb2.ChatRequest(messages=TURNS[:1], tools=[WIRE_TOOL], tool_choice=mesh_pb2.TOOL_CHOICE_REQUIRED).SerializeToString(),
)
def rpc_chat() -> Made:
    return _prepared("ChatRequest")


TEXT = grpc_service_pb2.ModelInferRequest.InferInputTensor(
    name="text_input", datatype="BYTES", shape=[1], contents=grpc_service_pb2.InferTensorContents(bytes_contents=[b"a"])
)


@target(grpc_service_pb2.ModelInferRequest(model_name="m", id="r", inputs=[TEXT]).SerializeToString())
def rpc_kserve() -> Made:
    from google.protobuf.message import DecodeError

    from pdmesh.runtime.errors import MeshError
    from router.api.kserve.requests import Ask

    return lambda data: Ask.read(grpc_service_pb2.ModelInferRequest.FromString(data), can_stream=True), (DecodeError, MeshError)


@target(vllm_engine_pb2.GenerateRequest(request_id="r", text="a").SerializeToString())
def rpc_vllm() -> Made:
    from google.protobuf.message import DecodeError

    from pdmesh.runtime.errors import MeshError
    from router.api.vllm.requests import to_mesh

    return lambda data: to_mesh(vllm_engine_pb2.GenerateRequest.FromString(data)), (DecodeError, MeshError)


SUBMIT = decode_pb2.SubmitRequest(
    request_id="r", router_id="a", attempt=1, mode=mesh_pb2.PREFILL_MODE_LOCAL, epoch=5, identity=common_pb2.Identity(model="m"),
    request=common_pb2.TokenRequest(model="m", prompt_token_ids=[1, 2], sampling=PLAIN),
)  # fmt: skip


@target(SUBMIT.SerializeToString())
def rpc_submit() -> Made:
    from google.protobuf.message import DecodeError

    from decode_service.validation import SubmitValidator
    from pdmesh.runtime.errors import MeshError

    async def translate(request: common_pb2.TokenRequest) -> Any:
        from pdmesh.engine.request import EngineRequest
        from pdmesh.sampling_params import SamplingParams

        sampling = SamplingParams(max_tokens=1, n=max(1, request.sampling.n % 8))
        return EngineRequest(request_id="r", prompt=(1,), sampling=sampling, cache_root=b"")

    validator = SubmitValidator(5, common_pb2.Identity(model="m"), translate)
    loop = asyncio.new_event_loop()

    def run(data: bytes) -> None:
        loop.run_until_complete(validator.check(decode_pb2.SubmitRequest.FromString(data), now=1.0, received_ns=1))

    return run, (DecodeError, MeshError)


# A router and a worker, with all that they remember between calls


def _mesh(methods: Sequence[str]) -> Made:
    from tests.simulation.run import prepare

    prepare()
    from tests.fuzzing.mesh_run import run

    return partial(run, methods), ()


@target(*WORKER_SEEDS, is_alone=True)
def mesh_worker() -> Made:
    return _mesh(WORKER_METHODS)


@target(*ROUTER_SEEDS, is_alone=True)
def mesh_router() -> Made:
    return _mesh(ROUTER_METHODS)


# The KV port, and Redis


HELLO = transfer_pb2.TransferHello(
    protocol_version=3, reservation_id="r.1", epoch=7, attempt=1, token=b"x",
    identity=common_pb2.Identity(model="m", num_layers=2, num_kv_heads=2, head_dim=2),
    layout=common_pb2.KVLayout(block_size=16, kv_dtype="float32", tensor_parallel_size=1, arrangement="plain"),
)  # fmt: skip


@target(transfer_pb2.TransferMessage(hello=HELLO).SerializeToString())
def kv_frame() -> Made:
    from kvtransfer import framing
    from kvtransfer.errors import FrameError, TransferRefused
    from kvtransfer.manifest import check_epoch, check_identity, check_layout, check_protocol, check_push_token, check_same_layout

    identity, layout = HELLO.identity, HELLO.layout

    def run(data: bytes) -> None:
        if len(data) >= framing.HEADER.size:
            with suppress(FrameError):
                framing.body_length(data[: framing.HEADER.size])
        header = framing.HEADER.pack(framing.MAGIC, len(data), framing.checksum([data]))
        message = framing.decode(header, data)
        hello = message.hello
        check_protocol(hello.protocol_version)
        check_layout(identity, layout, hello.layout)
        check_same_layout(layout, hello.layout)
        check_identity(identity, hello.identity)
        check_epoch(hello, 7)
        check_push_token(hello, epoch=7, token=b"x", attempt=1)

    return run, (FrameError, TransferRefused)


PARTS = (transfer_pb2.PartHeader(part_id=i, layer_start=i, layer_end=i + 1, block_end=3, num_bytes=384) for i in range(2))


BLOCK_HEADER = bytes.fromhex(
    "50444d4b56424c4b01001010000000006964656e74697479727272727272727272727272727272720000000000000000"
    "000000000000000068686868686868686868686868686868000000000000000000000000000000004000000000000000"
    "07000000222a17d2"
)
CODED_HEADER = bytes.fromhex(
    "50444d4b56424c4b02001010020000006964656e74697479727272727272727272727272727272720000000000000000"
    "000000000000000068686868686868686868686868686868000000000000000000000000000000004000000031000000"
    "0700000000000000"
)
"""The root is 16 times r, the hash 16 times h, the identity `identity`; 64 bytes follow, or 49 that stand for them. The second's
checksum is left to the target, as that of what the search makes of it."""
CODED = bytes(range(32)) + bytes.fromhex("28b52ffd2020450000103c3c010022c002")


@target(BLOCK_HEADER + bytes(64), CODED_HEADER + CODED, BLOCK_HEADER, b"")
def kv_block_file() -> Made:
    """A block's value in the disk tier or a store, as it is and with a header whose checksum is right; and a file's name."""
    from kvtransfer.framing import checksum
    from kvtransfer.tiers.backends.block_file import HEADER_BYTES, BadBlockFile, BlockHeader, name_of, relative_path
    from kvtransfer.tiers.backends.coding import BlockForm, CannotDecode
    from pdmesh.engine.kv_cache.published_blocks import BlockName

    name, num_fields = BlockName(b"r" * 16, b"p" * 16, b"h" * 16), HEADER_BYTES - 4

    def run(data: bytes) -> None:
        folder, _, file_name = data.decode("latin-1").partition("/")
        found = name_of(folder, file_name)
        assert found is None or relative_path(found) == f"{folder}/{file_name}", "a block has another path than its file"
        with suppress(BadBlockFile):
            BlockHeader.unpack(data)
        fields = data[:num_fields]
        value = memoryview(fields + checksum([fields]).to_bytes(4, "little") + data[HEADER_BYTES:])
        with suppress(BadBlockFile, CannotDecode):
            BlockForm(b"identity", 64, 2).unpack(name, value)
        header = BlockHeader.unpack(bytes(value[:HEADER_BYTES]))
        if 0 < header.num_bytes <= MOST_BLOCK_BYTES:  # a reader whose blocks are those that the header tells of
            own = BlockName(header.root, b"p", header.block_hash)
            block = BlockForm(header.identity, header.num_bytes).unpack(own, value)
            assert block.content.nbytes == header.num_bytes, "a block of another length"

    return run, (BadBlockFile, CannotDecode)


@target(b"".join(bytes([part.ByteSize()]) + part.SerializeToString() for part in PARTS))
def kv_part() -> Made:
    from google.protobuf.message import DecodeError

    from kvtransfer.errors import TransferRefused
    from kvtransfer.manifest import Manifest

    def run(data: bytes) -> None:
        manifest = Manifest(2, 0, 3, 64)
        covered = set[tuple[int, int]]()
        while data:  # each header behind its length
            part = manifest.check(transfer_pb2.PartHeader.FromString(data[1 : 1 + data[0]]))
            data = data[1 + data[0] :]
            manifest.begin(part)
            manifest.end(part)
            manifest.accept(part, num_bytes=part.num_bytes(64))
            slots = {(layer, block) for layer in part.layers for block in range(part.block_start, part.block_end)}
            assert not slots & covered, "a block of a layer was taken twice"
            covered |= slots
        manifest.check_complete(transfer_pb2.TransferCommit(num_tokens=48), 48)
        assert len(covered) == 6, "a push is complete without all blocks"

    return run, (DecodeError, TransferRefused)


@target(b"PDM1:0000000000000001:0000000000000005:10.0.0.1:80")
def redis_record() -> Made:
    from pdmesh.runtime.registry.records import InvalidRecord, decode_router, decode_worker, split

    def run(data: bytes) -> None:
        head = b"PDM1:0000000000000001:0000000000000005:"
        for decode in (decode_worker, decode_router):
            for value in (data, head + data):
                try:
                    epoch, payload = split(value)
                    decode("w", epoch, payload)
                except InvalidRecord:
                    continue

    return run, ()


@target(worker_pb2.BlockChange(epoch=5, sequence=1, stored=[1, 2], evicted=[3]).SerializeToString())
def redis_blocks() -> Made:
    from pdmesh.runtime.registry.block_stream import InvalidChange, decode_change

    return lambda data: decode_change(data, 5, 1), (InvalidChange,)


@target(bytes(60))
def redis_sealed() -> Made:
    from pdmesh.runtime.rpc.mesh_secret import open_secret, write_secret

    path = Path(tempfile.mkdtemp(prefix="pdmesh-fuzz-")) / "secret"
    secret = open_secret(write_secret(path))
    assert secret is not None
    mark = secret.seal("key", 5, b"x")[:4]
    return lambda data: secret.unseal("key", 5, mark + data), (ValueError,)


# Model folders, templates, schemas


@target(
    {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
     "vocab_size": 320, "intermediate_size": 128, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
     "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 8192}, "eos_token_id": [1, 2], "head_dim": 16},
    {"model_type": "qwen3_moe", "hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
     "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320,
     "quantization_config": {"quant_method": "awq", "bits": 4}},
    {"model_type": "gemma3_text", "hidden_size": 64, "sliding_window": 512, "layer_types": ["full_attention"], "head_dim": 16},
)  # fmt: skip
def model_config() -> Made:
    from pdmesh.engine.models.registry import model_config as read

    def run(data: bytes) -> None:
        content = json.loads(data)
        if isinstance(content, dict):
            read(content)

    return run, (ValueError, RecursionError)  # a file that is no JSON is refused by its reader


@target(b"GGUF\x03\x00\x00\x00" + bytes(16))
def model_gguf() -> Made:
    from pdmesh.engine.loader.gguf.source import GgufSource

    return _of_file(GgufSource, "model.gguf"), (ValueError, OSError)


TENSOR = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()


@target(len(TENSOR).to_bytes(8, "little") + TENSOR + bytes(4))
def model_safetensors() -> Made:
    from pdmesh.engine.loader.safetensors import _tensors_of

    return _of_file(_tensors_of, "model.safetensors"), (ValueError, OSError)


def _of_file(read: Callable[[Path], object], name: str) -> Run:
    path = Path(tempfile.mkdtemp(prefix="pdmesh-fuzz-")) / name

    def run(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return run


@target("{{ messages[0].content }}", "{% for message in messages %}{{ message['role'] }}{% endfor %}{{ tools | tojson }}")
def chat_template() -> Made:
    from pdmesh.text.chat_template import ChatTemplate, Message

    def run(data: bytes) -> None:
        template = ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>"})
        try:
            _ = template.knows_tools
        finally:
            template.render([Message("user", "a")])

    return run, (ValueError,)


def _grammar(kind: str) -> Made:
    from pdmesh.text.grammar import GrammarCompiler
    from pdmesh.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(str(_model_folder()))
    compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)

    def run(data: bytes) -> None:
        matcher = compiler.compile(kind, data.decode("utf-8", "replace")).matcher()
        matcher.allowed()

    return run, (ValueError,)


@target(SCHEMA, {"anyOf": [{"type": "null"}, {"enum": [1, "a"]}], "$defs": {"x": {"pattern": "^[a-z]{3}$"}}})
def grammar_schema() -> Made:
    return _grammar("json_schema")


@target("[a-z]+(x|y)?", r"\d{3}-\d{4}")
def grammar_regex() -> Made:
    return _grammar("regex")


@target('start: "a" | b\nb: /[0-9]+/')
def grammar_lark() -> Made:
    return _grammar("grammar")
