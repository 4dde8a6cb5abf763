"""Models by their name on a hub, such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`, through huggingface_hub.

That package, which transformers needs anyway, has the protocol, the cache that other tools share ($HF_HOME), resumed downloads
and the caller's token; $HF_ENDPOINT names another hub. Only safetensors, JSON and tokenizer files are fetched: nothing that could
hold code is. A revision is pinned by its commit: what is in the cache is complete for that commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pdmesh.models.catalogue import ModelError, Progress

_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)(?:@([A-Za-z0-9_./-]+))?")
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "added_tokens.json")
_OTHERS = ("original/*", "onnx/*", "openvino/*", "*/consolidated*", "consolidated*", "*training_args*", "metal/*")
PICKLES = (".bin", ".pt", ".pth")
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class HubName:
    """Name a model of a hub; `revision`: branch, tag or commit, empty: the main branch."""

    repository: str
    revision: str = ""

    @classmethod
    def of(cls, text: str) -> HubName | None:
        """Return the name that `text` is; None if it cannot be one."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(match[1], match[2] or "")

    @property
    def short(self) -> str:
        """Return the last part, under which it is served."""
        return self.repository.partition("/")[2]


def fetch(name: HubName, progress: Progress, *, offline: bool = False) -> Path:
    """Return the folder of the model in the hub's cache, downloaded if it is not there. `offline`: only from the cache. Raises
    ModelError, in one line."""
    try:
        import huggingface_hub  # noqa: F401  (installed with transformers)
    except ImportError as error:
        raise ModelError(f"{name.repository}: the package huggingface_hub is needed; install pdmesh[local]") from error
    if offline or os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return _cached(name)
    try:
        return _downloaded(name, progress)
    except ModelError:
        raise
    except Exception as error:  # the package raises its own errors, those of httpx, and of the system
        raise ModelError(_explained(name, error)) from error


def _downloaded(name: HubName, progress: Progress) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(name.repository, revision=name.revision or None, files_metadata=True, timeout=_TIMEOUT_S)
    files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    wanted = list(_wanted(name, files))
    size = sum(files[file] for file in wanted) / 1e6
    progress(f"{name.repository} at {str(info.sha)[:12]}: {len(wanted)} files, {size:,.0f} MB, licence {_licence(info)}")
    # By the name of the revision, not by its commit: so the cache knows which commit it was, for --offline.
    return Path(snapshot_download(name.repository, revision=name.revision or None, allow_patterns=wanted))


def _wanted(name: HubName, files: dict[str, int]) -> Iterator[str]:
    """Yield what is fetched. Raises ModelError for a repository without safetensors."""
    wanted = [file for file in files if _matches(file, PATTERNS) and not _matches(file, _OTHERS)]
    if any(file.endswith(".safetensors") for file in wanted):
        yield from wanted
        return
    if any(file.endswith(PICKLES) for file in files):
        raise ModelError(f"{name.repository}: it has no safetensors, only {how_to_convert(name.repository)}")
    if any(file.endswith(".gguf") for file in files):
        example = next(file for file in sorted(files) if file.endswith(".gguf"))
        raise ModelError(f"{name.repository}: it holds GGUF files; download one, such as {example}, and give its path")
    raise ModelError(f"{name.repository}: it has no safetensors; name a repository that has")


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def how_to_convert(model: str) -> str:
    """Return what is said of weights as pickles, which may run code when they are read."""
    return (
        "pickled weights (.bin, .pth), which are not read because they may hold code; convert a model that you trust: python -c "
        f"\"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{model}').save_pretrained('FOLDER')\""
    )


def _licence(info: Any) -> str:
    card = getattr(info, "card_data", None)
    stated = card.get("license") if card is not None else None
    tagged = next((tag.partition(":")[2] for tag in info.tags or [] if tag.startswith("license:")), None)
    return str(stated or tagged or "not stated, see its page")


def _cached(name: HubName) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name.repository,
            revision=name.revision or None,
            local_files_only=True,
            allow_patterns=list(PATTERNS),
            ignore_patterns=list(_OTHERS),
        )
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{_shown(name)} is not in the hub's cache, and --offline fetches nothing; run once without it, or give a folder"
        ) from error
    folder = Path(found)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} is in the hub's cache without safetensors; fetch it again without --offline")
    return folder


def _shown(name: HubName) -> str:
    return f"{name.repository}@{name.revision}" if name.revision else name.repository


def _explained(name: HubName, error: Exception) -> str:
    """Return one line for what the hub or the way there said."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return f"{name.repository} is gated: accept its licence at {hub}/{name.repository}, then log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision!r}; see {hub}/{name.repository}"
    if isinstance(error, RepositoryNotFoundError):
        return f"{name.repository} is neither a folder here nor a model at {hub} that this account sees; check the spelling"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"{hub} answered {error.response.status_code} for {_shown(name)}; try again later"
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"{_shown(name)} is no folder here, and the hub at {hub} cannot be reached ({said}); give a folder or a .gguf file, "
        "--offline for what is in the hub's cache, or HF_ENDPOINT for a mirror"
    )
