"""Triton's keys of kernels in its disk cache, made the same in every process.

Triton (3.6, `DependenciesFinder._update_hash`) puts the global constants of a called function into the caller's key only if that
function's own key is known by then. So a kernel's key would depend on which kernels a process launched before it, and what one
process has compiled another would compile again. A module settles the keys of all its functions when it is imported: those of
modules that it imports are settled before, its own follow in their order in the module.
"""

from __future__ import annotations

from collections.abc import Mapping

from triton.runtime.jit import JITFunction


def settle_keys(namespace: Mapping[str, object]) -> None:
    """Settle the keys of `namespace`, the module's, once all its functions and constants are defined. No-op in the
    interpreter."""
    for value in list(namespace.values()):
        if isinstance(value, JITFunction):
            _ = value.cache_key  # computed once and kept
