"""The client library: `Client` and `AsyncClient`, with the same calls. Needs grpcio and protobuf only.

    with Client("127.0.0.1:8100,127.0.0.1:8101") as client:
        print(client.chat([("user", "What is the capital of France?")], temperature=0).text)
        for event in client.generate_stream("Once upon a time", max_tokens=64, timeout=30):
            if isinstance(event, Delta):
                print(event.text, end="")

The public names are these; the modules beside this one are how they are made.
"""

from pdmesh.client.client import AsyncClient, Client
from pdmesh.client.stream import RetryPolicy
from pdmesh.client.types import Completed, Delta, Embedding, Event, Generation, Message, Pooling, Started, Tool, ToolCall
from pdmesh.runtime.rpc.tls import ClientTlsConfig

__all__ = [
    "AsyncClient",
    "Client",
    "ClientTlsConfig",
    "Completed",
    "Delta",
    "Embedding",
    "Event",
    "Generation",
    "Message",
    "Pooling",
    "RetryPolicy",
    "Started",
    "Tool",
    "ToolCall",
]
