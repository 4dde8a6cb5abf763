"""`make bench-observability`: what following a mesh costs, and whether what it says of the time is true.

`overhead.py` puts a mesh that nobody watches beside meshes that are watched. `spans.py` looks at traces that arrived from a mesh
with failpoints (tests/support/traced_mesh.py), as tests/mesh/test_traces.py does of a tiny model.
"""
