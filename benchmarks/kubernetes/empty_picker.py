"""What no picker can beat here: a server of the same messages on grpc.aio that answers at once, and looks at nothing.

    python -m benchmarks.kubernetes.empty_picker

The first line out is JSON with its address; it ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import grpc.aio

from pdmesh.third_party.envoy import ext_proc_pb2 as pb
from router.endpoint_picker.service import DESTINATION, SERVED_NAMESPACE, SERVICE
from router.main import spare_collector


def head() -> bytes:
    """Return an answer to headers that has an endpoint in it."""
    answer = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
    header = pb.HeaderValueOption(header=pb.HeaderValue(key=DESTINATION, raw_value=b"10.0.0.1:8000"))
    answer.request_headers.response.header_mutation.set_headers.append(header)
    answer.dynamic_metadata.get_or_create_struct(SERVED_NAMESPACE)[DESTINATION] = "10.0.0.1:8000"
    return answer.SerializeToString()


HEAD = head()
RESPONSE_HEADERS = pb.ProcessingResponse(response_headers=pb.HeadersResponse()).SerializeToString()


async def process(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    """Send the body back as the protocol wants it: its bytes are looked at by protobuf alone."""
    del context
    number = 0
    async for message in requests:
        number += 1
        if number == 2:
            body = pb.ProcessingRequest.FromString(message).request_body.body
            streamed = pb.StreamedBodyResponse(body=body, end_of_stream=True)
            same = pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))
            yield HEAD
            yield pb.ProcessingResponse(request_body=same).SerializeToString()
        elif number == 3:
            yield RESPONSE_HEADERS


async def serve() -> None:
    """Serve until the input ends."""
    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(process)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    spare_collector()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve())
