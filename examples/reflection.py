"""Calls any method knowing nothing but its name, as grpcurl does: the router describes its own API (server reflection).

python -m examples.reflection ROUTER                                                        lists services and methods
python -m examples.reflection ROUTER pdmesh.v1.Mesh/Generate '{"text": "Once upon a time"}'  calls one
"""

import sys
from collections.abc import Iterator

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def describe(service: ServiceDescriptor) -> Iterator[str]:
    """One line for each method."""
    for method in service.methods:
        streams = ("stream " * method.client_streaming, "stream " * method.server_streaming)
        types = (method.input_type.full_name, method.output_type.full_name)
        yield f"{service.full_name}/{method.name}({streams[0]}{types[0]}) returns ({streams[1]}{types[1]})"


def call(channel: grpc.Channel, method: MethodDescriptor, body: str) -> Iterator[Message]:
    """The answers to a request in JSON. Fields may be written as in the .proto file."""
    request = json_format.Parse(body, GetMessageClass(method.input_type)())
    path = f"/{method.containing_service.full_name}/{method.name}"
    response = GetMessageClass(method.output_type)
    if method.server_streaming:
        stream = channel.unary_stream(path, request_serializer=_serialized, response_deserializer=response.FromString)
        yield from stream(request, timeout=60)
    else:
        unary = channel.unary_unary(path, request_serializer=_serialized, response_deserializer=response.FromString)
        yield unary(request, timeout=60)


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def main(router: str, name: str, body: str) -> None:
    """Lists, or calls `name`."""
    with grpc.insecure_channel(router) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        if not name:
            services = sorted(database.get_services())
            print(*(line for service in services for line in describe(pool.FindServiceByName(service))), sep="\n")
            return
        service, _, method = name.rpartition("/")
        known = pool.FindServiceByName(service).methods_by_name if service in database.get_services() else {}
        if method not in known:
            raise SystemExit(f"{name!r} is not served here; without a method all are listed, such as pdmesh.v1.Mesh/Tokenize")
        for message in call(channel, known[method], body):
            print(json_format.MessageToJson(message, indent=None, preserving_proto_field_name=True), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "", sys.argv[3] if len(sys.argv) > 3 else "{}")
