"""The clients `Client` and `AsyncClient`, with the same calls. Needs grpcio and protobuf only.

    with Client("127.0.0.1:8100,127.0.0.1:8101") as client:
        print(client.chat([("user", "What is the capital of France?")], temperature=0).text)
        for event in client.generate_stream("Once upon a time", max_tokens=64, timeout=30):
            if isinstance(event, Delta):
                print(event.text, end="")

A lost router costs a pause: the stream continues at the next address, with the same seed, after the tokens received so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, Unpack

import grpc
import grpc.aio

from pdmesh.client import wire
from pdmesh.client.channel import DEFAULT_ADDRESS, Preference, addresses, checked_key, open_aio_channel, open_channel
from pdmesh.client.stream import AsyncCall, AsyncStream, Request, Retrier, RetryPolicy, Stream, SyncCall, unasked
from pdmesh.client.types import (
    ChatOptions,
    Completed,
    Delta,
    Embedding,
    Event,
    GenerateOptions,
    Generation,
    Message,
    MessageLike,
    Model,
    Pooling,
    ReleasedSession,
    Started,
    Tokens,
    Tool,
    ToolCall,
    ToolLike,
)
from pdmesh.client.weights import Readable, files_of, messages_of
from pdmesh.errors import Cancelled, error_from_rpc
from pdmesh.runtime.rpc.tls import ClientTlsConfig, TlsConfig, open_tls
from pdmesh.runtime.telemetry.propagation import Metadata
from pdmesh.v1 import mesh_pb2, worker_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshStub

if TYPE_CHECKING:
    from pdmesh.v1.mesh_pb2_grpc import MeshAsyncStub

__all__ = [
    "AsyncClient",
    "Client",
    "ClientTlsConfig",
    "Completed",
    "Delta",
    "Event",
    "Generation",
    "Message",
    "RetryPolicy",
    "Started",
    "Tool",
    "ToolCall",
]

Q = TypeVar("Q", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class _Unary(Protocol[Q, R_co]):
    def __call__(
        self, request: Q, *, timeout: float | None = None, metadata: tuple[tuple[str, str], ...] | None = None
    ) -> R_co: ...


class _Base:
    """Hold addresses, retry settings and the router that answered last."""

    def __init__(
        self,
        routers: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        resume_timeout_s: float = 30.0,
        retry_overload: bool = False,
        tls: TlsConfig | None = None,
        api_key: str = "",
    ) -> None:
        self.routers = addresses(routers)
        self._policy = RetryPolicy(resume_timeout_s=resume_timeout_s, retry_overload=retry_overload)
        self._preference = Preference()
        self._tls = None if tls is None else open_tls(tls)
        self._metadata: Metadata = (("authorization", f"Bearer {checked_key(api_key)}"),) if api_key else ()
        self._closed = False

    def _check_open(self) -> None:
        """Raise if closed: calls that were running when the client was closed are not retried."""
        if self._closed:
            raise Cancelled("the client was closed")

    def _retrier(self, timeout: float | None) -> Retrier:
        return Retrier(self._policy, len(self.routers), self._preference.address, time.monotonic(), timeout)


class Client(_Base):
    """Call a mesh, blocking. Thread-safe; a context manager, or call `close`.

    `routers`: addresses "host:port", in a list or comma-separated, tried in turn. `resume_timeout_s`: how long to look for a
    router after the last one was lost. `retry_overload`: wait and retry when the mesh has no capacity. `tls`: certificates, for a
    mesh that encrypts: ClientTlsConfig(tls_cert=…, tls_key=…, tls_ca=…); tls_ca alone if the routers accept all clients.
    `api_key`: for routers that require one; ValueError for an invalid one. Raises pdmesh.runtime.config.ConfigError for files
    that cannot be used. Every call takes `timeout` in seconds (None: none) and raises the errors of `pdmesh.errors`."""

    def __init__(
        self,
        routers: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        resume_timeout_s: float = 30.0,
        retry_overload: bool = False,
        tls: TlsConfig | None = None,
        api_key: str = "",
    ) -> None:
        super().__init__(routers, resume_timeout_s=resume_timeout_s, retry_overload=retry_overload, tls=tls, api_key=api_key)
        self._channels = [open_channel(address, self._tls) for address in self.routers]
        self._stubs = [MeshStub(channel) for channel in self._channels]

    def generate(
        self, prompt: str | Sequence[int], *, model: str = "", timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Return the continuation of a text or token prompt. `model` may be empty while the mesh serves exactly one."""
        with self.generate_stream(prompt, model=model, timeout=timeout, **options) as stream:
            return wire.generation(stream)

    def generate_stream(
        self, prompt: str | Sequence[int], *, model: str = "", timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Return an iterator like `generate`: Started, then Deltas, last Completed. Closing it cancels the request."""
        return self._stream(wire.generate_request(prompt, model, options), timeout)

    def chat(
        self,
        messages: Iterable[MessageLike],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generation:
        """Return the next message of a conversation, oldest message first, under the model's own chat template."""
        with self.chat_stream(messages, model=model, timeout=timeout, **options) as stream:
            return wire.generation(stream)

    def chat_stream(
        self,
        messages: Iterable[MessageLike],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """Return an iterator like `chat`: Started, then Deltas, last Completed. Closing it cancels the request."""
        return self._stream(wire.chat_request(messages, model, options), timeout)

    def tokenize(
        self,
        text: str | Iterable[MessageLike],
        *,
        model: str = "",
        tools: Iterable[ToolLike] = (),
        chat_template_kwargs: Mapping[str, object] | str | None = None,
        timeout: float | None = None,
    ) -> Tokens:
        """Return the token ids of a text, or of messages rendered with the chat template, with tools as a chat shows them."""
        request = wire.tokenize_request(text, model, tools, chat_template_kwargs)
        return wire.tokens(self._unary(lambda stub: stub.Tokenize, request, timeout))

    def embed(
        self,
        inputs: Iterable[str | Sequence[int]],
        *,
        model: str = "",
        pooling: Pooling = Pooling.MEAN,
        dimensions: int = 0,
        normalize: bool = True,
        timeout: float | None = None,
    ) -> tuple[Embedding, ...]:
        """Return the embeddings of texts, or of token ids. `dimensions`: only so many of the first values; 0: all. `normalize`:
        each has the length 1."""
        request = wire.embed_request(inputs, model, pooling, dimensions, normalize=normalize)
        return wire.embeddings(self._unary(lambda stub: stub.Embed, request, timeout))

    def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """Return the models that the mesh serves."""
        return wire.models(self._unary(lambda stub: stub.ListModels, mesh_pb2.ListModelsRequest(), timeout))

    def release_session(
        self, session_id: str, *, tenant: str = "", model: str = "", timeout: float | None = None
    ) -> ReleasedSession:
        """Give up what workers retain for a session, those of `model` or all. Idempotent: an unknown session has nothing."""
        request = mesh_pb2.ReleaseSessionRequest(session_id=session_id, tenant=tenant, model=model)
        return wire.released(self._unary(lambda stub: stub.ReleaseSession, request, timeout))

    def status(self, *, timeout: float | None = None) -> mesh_pb2.GetStatusResponse:
        """Return a router's view of the mesh; its fields are documented in protos/pdmesh/v1/mesh.proto."""
        return self._unary(lambda stub: stub.GetStatus, mesh_pb2.GetStatusRequest(), timeout)

    def explain(self, request: mesh_pb2.ExplainRequest, *, timeout: float | None = None) -> mesh_pb2.ExplainResponse:
        """Return why requests were placed as they were; the fields are documented in protos/pdmesh/v1/mesh.proto."""
        return self._unary(lambda stub: stub.Explain, request, timeout)

    def load_adapter(self, name: str, folder: str, *, model: str = "", timeout: float | None = None) -> mesh_pb2.MeshAdapter:
        """Load a LoRA adapter on every worker of a model, from a folder as the workers see it."""
        request = worker_pb2.LoadAdapterRequest(model=model, name=name, folder=folder)
        return self._unary(lambda stub: stub.LoadAdapter, request, timeout)

    def unload_adapter(self, name: str, *, model: str = "", timeout: float | None = None) -> mesh_pb2.MeshAdapter:
        """Unload a LoRA adapter on every worker of a model; running requests go on to their end."""
        return self._unary(lambda stub: stub.UnloadAdapter, worker_pb2.UnloadAdapterRequest(model=model, name=name), timeout)

    def list_adapters(self, *, timeout: float | None = None) -> mesh_pb2.ListMeshAdaptersResponse:
        """Return the LoRA adapters of all models, with the workers that have them."""
        return self._unary(lambda stub: stub.ListAdapters, worker_pb2.ListAdaptersRequest(), timeout)

    def update_weights(self, folder: str, *, model: str = "", timeout: float | None = None) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Have every worker of a model compute with other weights what comes from then on, from a folder as the workers see it;
        requests end on the weights that they began with."""
        request = mesh_pb2.MeshUpdateWeightsRequest(model=model, folder=folder)
        return self._unary(lambda stub: stub.UpdateWeights, request, timeout)

    def send_weights(
        self, folder: str | PathLike[str], *, model: str = "", timeout: float | None = None
    ) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Do `update_weights` with the .safetensors files of a folder of this machine, which are sent to the workers. It is not
        tried again by itself. Raises ValueError or OSError about the folder."""
        self._check_open()
        messages = Readable(messages_of(*files_of(Path(folder)), model))
        try:
            return self._stubs[self._preference.address].SendWeights(messages, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise messages.error or error_from_rpc(error) from error

    def set_serving(
        self,
        state: str,
        *,
        finish_running: bool = False,
        finish_s: float = 30.0,
        abort_running: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> mesh_pb2.MeshSetServingResponse:
        """Have every worker of a model be "running", "paused" or "asleep". Requests wait meanwhile; those that ran go on with the
        same tokens. `finish_running`: they end first, for `finish_s` at most; `abort_running`: they end with what they have, and
        `FinishReason.ABORT`. Raises ValueError for another state."""
        request = wire.serving(state, model, finish_s if finish_running else None, abort=abort_running)
        return self._unary(lambda stub: stub.SetServing, request, timeout)

    def split_traffic(
        self, weights: Mapping[str, int], *, model: str = "", timeout: float | None = None
    ) -> mesh_pb2.TrafficSplit:
        """Split the new requests of a model between revisions of its workers by these weights; empty: no split."""
        return self._unary(lambda stub: stub.SetTrafficSplit, wire.traffic_split(model, weights), timeout).split

    def close(self) -> None:
        """Close the connections; running streams end with Cancelled."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _stream(self, request: Request, timeout: float | None) -> Stream:
        return Stream(self._open, request, self._retrier(timeout), self._preference)

    def _open(self, address: int, request: Request, timeout: float | None, trace: Metadata) -> SyncCall:
        self._check_open()
        stub, metadata = self._stubs[address], (*self._metadata, *trace)
        if isinstance(request, mesh_pb2.ChatRequest):
            return stub.Chat(request, timeout=timeout, metadata=metadata)
        return stub.Generate(request, timeout=timeout, metadata=metadata)

    def _unary(self, method: Callable[[MeshStub], _Unary[Q, R]], request: Q, timeout: float | None) -> R:
        retrier = self._retrier(timeout)
        while True:
            self._check_open()
            try:
                call = method(self._stubs[retrier.address])
                response = call(request, timeout=retrier.time_left(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(retrier.failed(unasked(error_from_rpc(error)), time.monotonic()))
                continue
            self._preference.address = retrier.address
            return response


class AsyncClient(_Base):
    """Call a mesh on asyncio: the calls of `Client`, awaited. Belongs to one event loop; `async with`, or await `close`."""

    def __init__(
        self,
        routers: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        resume_timeout_s: float = 30.0,
        retry_overload: bool = False,
        tls: TlsConfig | None = None,
        api_key: str = "",
    ) -> None:
        super().__init__(routers, resume_timeout_s=resume_timeout_s, retry_overload=retry_overload, tls=tls, api_key=api_key)
        self._channels = [open_aio_channel(address, self._tls) for address in self.routers]
        self._stubs = [MeshStub(channel) for channel in self._channels]

    async def generate(
        self, prompt: str | Sequence[int], *, model: str = "", timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """See Client.generate."""
        async with self.generate_stream(prompt, model=model, timeout=timeout, **options) as stream:
            return wire.generation([event async for event in stream])

    def generate_stream(
        self, prompt: str | Sequence[int], *, model: str = "", timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """See Client.generate_stream."""
        return self._stream(wire.generate_request(prompt, model, options), timeout)

    async def chat(
        self,
        messages: Iterable[MessageLike],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generation:
        """See Client.chat."""
        async with self.chat_stream(messages, model=model, timeout=timeout, **options) as stream:
            return wire.generation([event async for event in stream])

    def chat_stream(
        self,
        messages: Iterable[MessageLike],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """See Client.chat_stream."""
        return self._stream(wire.chat_request(messages, model, options), timeout)

    async def tokenize(
        self,
        text: str | Iterable[MessageLike],
        *,
        model: str = "",
        tools: Iterable[ToolLike] = (),
        chat_template_kwargs: Mapping[str, object] | str | None = None,
        timeout: float | None = None,
    ) -> Tokens:
        """See Client.tokenize."""
        request = wire.tokenize_request(text, model, tools, chat_template_kwargs)
        return wire.tokens(await self._unary(lambda stub: stub.Tokenize, request, timeout))

    async def embed(
        self,
        inputs: Iterable[str | Sequence[int]],
        *,
        model: str = "",
        pooling: Pooling = Pooling.MEAN,
        dimensions: int = 0,
        normalize: bool = True,
        timeout: float | None = None,
    ) -> tuple[Embedding, ...]:
        """See Client.embed."""
        request = wire.embed_request(inputs, model, pooling, dimensions, normalize=normalize)
        return wire.embeddings(await self._unary(lambda stub: stub.Embed, request, timeout))

    async def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """See Client.list_models."""
        return wire.models(await self._unary(lambda stub: stub.ListModels, mesh_pb2.ListModelsRequest(), timeout))

    async def release_session(
        self, session_id: str, *, tenant: str = "", model: str = "", timeout: float | None = None
    ) -> ReleasedSession:
        """See Client.release_session."""
        request = mesh_pb2.ReleaseSessionRequest(session_id=session_id, tenant=tenant, model=model)
        return wire.released(await self._unary(lambda stub: stub.ReleaseSession, request, timeout))

    async def status(self, *, timeout: float | None = None) -> mesh_pb2.GetStatusResponse:
        """See Client.status."""
        return await self._unary(lambda stub: stub.GetStatus, mesh_pb2.GetStatusRequest(), timeout)

    async def load_adapter(
        self, name: str, folder: str, *, model: str = "", timeout: float | None = None
    ) -> mesh_pb2.MeshAdapter:
        """See Client.load_adapter."""
        request = worker_pb2.LoadAdapterRequest(model=model, name=name, folder=folder)
        return await self._unary(lambda stub: stub.LoadAdapter, request, timeout)

    async def unload_adapter(self, name: str, *, model: str = "", timeout: float | None = None) -> mesh_pb2.MeshAdapter:
        """See Client.unload_adapter."""
        request = worker_pb2.UnloadAdapterRequest(model=model, name=name)
        return await self._unary(lambda stub: stub.UnloadAdapter, request, timeout)

    async def list_adapters(self, *, timeout: float | None = None) -> mesh_pb2.ListMeshAdaptersResponse:
        """See Client.list_adapters."""
        return await self._unary(lambda stub: stub.ListAdapters, worker_pb2.ListAdaptersRequest(), timeout)

    async def update_weights(
        self, folder: str, *, model: str = "", timeout: float | None = None
    ) -> mesh_pb2.MeshUpdateWeightsResponse:
        """See Client.update_weights."""
        request = mesh_pb2.MeshUpdateWeightsRequest(model=model, folder=folder)
        return await self._unary(lambda stub: stub.UpdateWeights, request, timeout)

    async def send_weights(
        self, folder: str | PathLike[str], *, model: str = "", timeout: float | None = None
    ) -> mesh_pb2.MeshUpdateWeightsResponse:
        """See Client.send_weights."""
        self._check_open()
        messages = Readable(messages_of(*files_of(Path(folder)), model))
        try:
            return await self._stubs[self._preference.address].SendWeights(messages, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            if messages.error is not None:
                raise messages.error from None
            raise

    async def set_serving(
        self,
        state: str,
        *,
        finish_running: bool = False,
        finish_s: float = 30.0,
        abort_running: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> mesh_pb2.MeshSetServingResponse:
        """See Client.set_serving."""
        request = wire.serving(state, model, finish_s if finish_running else None, abort=abort_running)
        return await self._unary(lambda stub: stub.SetServing, request, timeout)

    async def split_traffic(
        self, weights: Mapping[str, int], *, model: str = "", timeout: float | None = None
    ) -> mesh_pb2.TrafficSplit:
        """See Client.split_traffic."""
        return (await self._unary(lambda stub: stub.SetTrafficSplit, wire.traffic_split(model, weights), timeout)).split

    async def close(self) -> None:
        """Close the connections; running streams end with Cancelled."""
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, request: Request, timeout: float | None) -> AsyncStream:
        return AsyncStream(self._open, request, self._retrier(timeout), self._preference)

    def _open(self, address: int, request: Request, timeout: float | None, trace: Metadata) -> AsyncCall:
        self._check_open()
        stub, metadata = self._stubs[address], (*self._metadata, *trace)
        if isinstance(request, mesh_pb2.ChatRequest):
            return stub.Chat(request, timeout=timeout, metadata=metadata)
        return stub.Generate(request, timeout=timeout, metadata=metadata)

    async def _unary(self, method: Callable[[MeshAsyncStub], _Unary[Q, Awaitable[R]]], request: Q, timeout: float | None) -> R:
        retrier = self._retrier(timeout)
        while True:
            self._check_open()
            try:
                call = method(self._stubs[retrier.address])
                response = await call(request, timeout=retrier.time_left(time.monotonic()), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(retrier.failed(unasked(error_from_rpc(error)), time.monotonic()))
                continue
            self._preference.address = retrier.address
            return response
