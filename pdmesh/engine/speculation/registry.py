"""The registry of proposers, by the name that `--speculation` takes.

A new proposer is one module, with a function that makes it from the parts of an engine (`pdmesh.engine.speculation.setup.Parts`),
and one line here. The table holds "module:function" instead of the functions, because processes that never import torch
check settings.
"""

PROPOSERS: dict[str, str] = {
    "prompt_lookup": "pdmesh.engine.speculation.ngrams.prompt_lookup:make",
    "retrieval": "pdmesh.engine.speculation.ngrams.retrieval:make",
    "lookahead": "pdmesh.engine.speculation.ngrams.lookahead:make",
    "heads": "pdmesh.engine.speculation.setup:make_heads",
    "draft_model": "pdmesh.engine.speculation.setup:make_draft_model",
    "self_draft": "pdmesh.engine.speculation.setup:make_self_draft",
}
