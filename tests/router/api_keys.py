"""API keys for tests, with known secrets."""

from pathlib import Path

from router.auth import api_keys
from router.auth.api_keys import ApiKey, KeyTable, hash_of


def add_key(path: Path, secret: str, *, tenant: str = "", admin: bool = False, expires: int | None = None) -> ApiKey:
    """Write it into the file, under the secret as its name."""
    key = ApiKey(hash_of(secret), secret, tenant, created=1, expires=expires, admin=admin)
    api_keys.update(path, lambda table: KeyTable([*table, key]))
    return key


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)
