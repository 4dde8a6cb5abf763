"""Names a LoRA adapter: its name and what it contains. Workers and routers agree on it without loading anything."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple

ROOT_BYTES = 16
MAX_NAME_CHARS = 128
MAX_RANK = 256
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")


class AdapterId(NamedTuple):
    """Identify an adapter: two with one name and other weights are different ones."""

    name: str
    digest: str  # SHA-256 (hex) of its configuration and weights

    def root(self, cache_root: bytes) -> bytes:
        """Return the root of the block hashes of prompts that this adapter computes: they are never those of the base model, nor
        of another adapter."""
        digest = blake2b(cache_root, digest_size=ROOT_BYTES, person=b"pdmesh.adapter")
        for field in self:
            digest.update(len(field).to_bytes(4, "little") + field.encode())
        return digest.digest()


def check_adapter_name(name: str) -> None:
    """Raise ValueError unless a model may be asked for by this name."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"{name[:80]!r} is not 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 . _ : / - that begin with a letter or digit")


def named_folder(text: str) -> tuple[str, str]:
    """Return name and folder of `NAME=FOLDER`. Raises ValueError."""
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise ValueError(f"{text!r} is not NAME=FOLDER; give a name to ask for, and the folder that PEFT saved")
    check_adapter_name(name)
    return name, folder
