"""Triton's names for kernels on the disk, made the same in every process.

Triton (3.6, `DependenciesFinder._update_hash`) puts the global constants of a called function into the caller's key only if that
function's own key is known by then. So a kernel's key would depend on which kernels a process launched before it, and what one
process has compiled another would compile again. A module settles the keys of all its functions when it is imported: those of
modules that it imports are settled before, its own follow in the order in which they stand.
"""

from __future__ import annotations

from collections.abc import Mapping

from triton.runtime.jit import JITFunction


def settle_keys(namespace: Mapping[str, object]) -> None:
    """`namespace`: the module's, when all its functions and constants are defined. Nothing where kernels are interpreted."""
    for value in list(namespace.values()):
        if isinstance(value, JITFunction):
            _ = value.cache_key  # is computed once, and kept
