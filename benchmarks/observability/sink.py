"""`python -m benchmarks.observability.sink`: a collector that costs as little as one can: it takes whatever comes, unread.

Prints its address; each line that it is sent is answered with the number of calls so far.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc


class Sink(grpc.GenericRpcHandler):
    """Every method of every service."""

    num_calls = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(self._take)

    def _take(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.num_calls += 1
        return b""  # any message without a field


def main() -> None:
    sink = Sink()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[sink], options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"num_calls": sink.num_calls}), flush=True)
    server.stop(None).wait()


if __name__ == "__main__":
    main()
