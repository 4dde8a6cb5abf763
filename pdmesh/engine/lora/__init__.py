"""LoRA adapters (Hu et al., 2021) beside the base model, several in one step: y = W x + B A x for the rows of each adapter.

    folder.py     a folder of PEFT's, checked against the model, becomes an `Adapter`: A and B of each map, float32, scale in B
    registry.py   the adapters of an engine: slots 0 to max_loras - 1, requests that use them, loading and unloading
    torch_maps.py the torch backend: each linear map of the layers gets an `AdaptedLinear` around it

A step has a slot for each of its rows (-1: the base alone). A map with adapters has the A of all loaded ones joined to one matrix
[sum of ranks, in] and the B to one [out, sum of ranks], each packed once at load. So two more products serve all rows whatever
mix they are:

    x [M, in] ──A──► h [M, ranks of slot 0 | ranks of slot 1 | ...] ──each row's foreign columns are 0──► ──B──► + y [M, out]

Zeros add nothing, so a row's bits depend neither on the other rows nor on the slot (tests/engine/lora/test_torch_maps.py). Maps
that are one product of the engine (query, key and value; gate and up) have a B whose blocks lie at the rows of each part. The
products are in float32 whatever the model's dtype, as PEFT keeps adapters. A step whose rows have no adapter computes exactly
what it did before, at the cost of one comparison for each map.
"""
