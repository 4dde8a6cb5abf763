"""Frames: what goes in comes out, and nothing else gets in."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtransfer import framing
from kvtransfer.errors import FrameError, PeerClosed
from kvtransfer.framing import checksum
from kvtransfer.stream import SocketStream
from pdmesh.v1 import transfer_pb2

ABORT = transfer_pb2.TransferMessage(abort=transfer_pb2.TransferAbort(reason="r"))

messages = st.one_of(
    st.builds(transfer_pb2.TransferAbort, finished=st.booleans(), reason=st.text(max_size=50)).map(
        lambda abort: transfer_pb2.TransferMessage(abort=abort)
    ),
    st.builds(
        transfer_pb2.PartHeader,
        part_id=st.integers(0, 2**32 - 1),
        num_bytes=st.integers(0, 2**64 - 1),
        source_block_ids=st.lists(st.integers(0, 2**32 - 1), max_size=50),
    ).map(lambda part: transfer_pb2.TransferMessage(part=part)),
    st.builds(transfer_pb2.PartEnd, part_id=st.integers(0, 2**32 - 1), crc32c=st.integers(0, 2**32 - 1)).map(
        lambda end: transfer_pb2.TransferMessage(part_end=end)
    ),
    st.builds(transfer_pb2.TransferReply, code=st.integers(0, 2**32 - 1), message=st.text(max_size=50)).map(
        lambda reply: transfer_pb2.TransferMessage(hello_reply=reply)
    ),
)


@given(messages)
def test_round_trip(message: transfer_pb2.TransferMessage) -> None:
    frame = framing.encode(message)
    header, body = frame[: framing.HEADER.size], frame[framing.HEADER.size :]
    assert framing.body_length(header) == len(body)
    assert framing.decode(header, body) == message


@given(st.binary(min_size=12, max_size=12))
@example(b"PDKV\0\0\0\0\0\0\0\0")
@example(b"PDKV\xff\xff\xff\xff\0\0\0\0")
@example(b"GET / HTTP/1")
def test_any_header_is_a_bounded_length_or_an_error(header: bytes) -> None:
    try:
        length = framing.body_length(header)
    except FrameError:
        return
    assert header.startswith(framing.MAGIC) and 0 < length <= framing.MAX_FRAME_BYTES


@given(st.binary(max_size=200))
def test_any_body_is_a_message_or_an_error(body: bytes) -> None:
    header = framing.HEADER.pack(framing.MAGIC, len(body), checksum([body]))
    try:
        message = framing.decode(header, body)
    except FrameError:
        return
    assert message.WhichOneof("message") is not None


@given(messages, st.data())
def test_a_damaged_body_is_always_noticed(message: transfer_pb2.TransferMessage, data: st.DataObject) -> None:
    frame = framing.encode(message)
    header, body = frame[: framing.HEADER.size], bytearray(frame[framing.HEADER.size :])
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError, match="damaged"):
        framing.decode(header, bytes(body))


def test_what_cannot_be_sent() -> None:
    with pytest.raises(FrameError, match="without a message"):
        framing.encode(transfer_pb2.TransferMessage())
    too_long = transfer_pb2.TransferMessage(abort=transfer_pb2.TransferAbort(reason="x" * framing.MAX_FRAME_BYTES))
    with pytest.raises(FrameError, match="exceeds the bound"):
        framing.encode(too_long)


@given(st.binary(max_size=300), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_any_bytes_on_a_socket_end_in_messages_or_an_error(garbage: bytes, cuts: list[int]) -> None:
    asyncio.run(_read_all(framing.encode(ABORT) + garbage, cuts))


async def _read_all(data: bytes, cuts: list[int]) -> None:
    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as executor, near:
        near.setblocking(False)
        stream = SocketStream(far, executor, idle_timeout_s=5.0)
        reading = asyncio.create_task(_read_until_error(stream))
        index = 0
        while data:
            size = cuts[index % len(cuts)] * 7
            await asyncio.get_running_loop().sock_sendall(near, data[:size])
            data, index = data[size:], index + 1
            await asyncio.sleep(0)
        near.shutdown(socket.SHUT_WR)
        assert await reading >= 1
        stream.close()


async def _read_until_error(stream: SocketStream) -> int:
    count = 0
    try:
        while True:
            await stream.read_message()
            count += 1
    except (FrameError, PeerClosed):
        return count
