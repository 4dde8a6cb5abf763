"""Without the client library: grpcio, the generated stubs, and the service config that balances over routers and retries.

python -m examples.plain_grpc ROUTER,ROUTER[,…]           (or one name of many: dns:///routers.example:8100)
"""

import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pdmesh.client import service_config
from pdmesh.v1 import common_pb2, mesh_pb2, mesh_pb2_grpc


def request(resume: mesh_pb2.Resume | None = None) -> mesh_pb2.GenerateRequest:
    """What to ask; with `resume` the rest of it. The seed is drawn by the router, and named in `started`."""
    sampling = common_pb2.SamplingParams(max_tokens=16, temperature=0.8, stop=["\n\n"])
    return mesh_pb2.GenerateRequest(text="Once upon a time", sampling=sampling, resume=resume)


def answer(mesh: mesh_pb2_grpc.MeshStub) -> str:
    """The text of one answer. A stream that breaks behind its first message is continued once, at any router: before that gRPC
    tries again by itself, from then on the caller knows what it has received."""
    text, received, emitted = "", mesh_pb2.Resume(), common_pb2.EmittedChoice(index=0)
    for resume in (None, received):
        try:
            for message in mesh.Generate(request(resume), timeout=60):
                if message.HasField("started"):
                    received.seed = message.started.seed
                received.system_fingerprint = received.system_fingerprint or message.delta.system_fingerprint
                text += message.delta.text
                emitted.token_ids.extend(message.delta.token_ids)
                emitted.finish_reason = message.delta.finish_reason or emitted.finish_reason
            break
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or not received.seed or resume:
                raise
            received.emitted.append(emitted)
    return text


def explain(error: grpc.RpcError) -> str:
    """Status, message and the rich details."""
    lines = [f"{error.code().name}: {error.details()}"]
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            lines += [f"field {violation.field}" for violation in bad_request.field_violations]
        if detail.Unpack(retry):
            lines.append(f"retry in {retry.retry_delay.ToMilliseconds()} ms")
    return "\n".join(lines)


def main(routers: str) -> None:
    """Four answers, from the routers in turn; then a mistake."""
    target = routers if "://" in routers or routers.startswith(("dns:", "ipv4:")) else f"ipv4:{routers}"
    with grpc.insecure_channel(target, options=service_config.channel_options()) as channel:
        mesh = mesh_pb2_grpc.MeshStub(channel)
        for _ in range(4):
            print(repr(answer(mesh)))
        try:
            mesh.Tokenize(mesh_pb2.TokenizeRequest())
        except grpc.RpcError as error:
            print(explain(error))


if __name__ == "__main__":
    main(sys.argv[1])
