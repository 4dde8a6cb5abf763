"""`make bench-observability`: what following a mesh costs, and whether what it says of the time is true.

`overhead.py` puts a mesh that nobody watches beside meshes that are watched (`ways.py`: how each is set up and who looks;
`turns.py`: the load and what a turn took). `parts.py`, `delays.py` and `spans.py` look at traces that arrived
(`otlp_receiver.py`, `traces.py`) from a mesh with failpoints (`traced.py`), as tests/mesh/test_traces.py does of a tiny model.
"""
