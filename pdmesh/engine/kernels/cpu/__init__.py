"""The native CPU backend: kernels in C++, compiled into one library with a plain C interface, once per instruction tier.

The instruction tiers, and which of them this processor has, are in isa.py; build.py compiles the sources at first use, into a
cache, loads the library, and builds ahead for container images (prebuilt/TIER/).
"""
