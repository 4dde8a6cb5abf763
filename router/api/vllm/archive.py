"""The model's tokenizer files as a zip archive, which a gateway fetches instead of asking a model hub."""

import hashlib
import io
import zipfile
from pathlib import Path

from pdmesh.third_party.vllm import smg_common_pb2

CHUNK_BYTES = 256 * 1024
# What tokenizers, chat templates and limits are read from; never weights.
_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "*.jinja",
    "*.tiktoken",
)
# The same bytes for the same files, whenever it is made: gateways compare the hash.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(folder: Path) -> bytes:
    """The archive of a model folder. Raises OSError."""
    names = sorted({path.name for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (folder / name).read_bytes())
    return buffer.getvalue()


def archive_chunks(folder: Path) -> list[smg_common_pb2.GetTokenizerChunk]:
    """The archive as messages, in order; the last one carries the hash of all of it. Raises OSError. Takes its time."""
    archive = pack(folder)
    starts = range(0, len(archive), CHUNK_BYTES)
    messages = [smg_common_pb2.GetTokenizerChunk(data=archive[start : start + CHUNK_BYTES]) for start in starts]
    messages[-1].sha256 = hashlib.sha256(archive).hexdigest()
    return messages
