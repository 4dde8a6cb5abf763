"""Tests over NIXL run where its package is."""

import pytest

from kvtransfer.transports.nixl.agent import is_installed

NEEDS_NIXL = pytest.mark.skipif(not is_installed(), reason="needs the package: pip install --no-deps nixl nixl-cu12")
NIXL, NIXL_TLS, NIXL_DEVICE = (pytest.param(name, marks=NEEDS_NIXL) for name in ("nixl", "nixl+tls", "nixl+device"))
