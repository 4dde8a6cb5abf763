"""LoRA adapters (Hu et al., 2021) beside the base model, several in one step: y = W x + B A x for the rows of each adapter.

    folder.py     a folder of PEFT's, checked against the model, becomes an `Adapter`: A and B of each map, float32, scale in B
    registry.py   the adapters of an engine: slots 0 to max_loras - 1, requests that use them, loading and unloading
    torch_maps.py the torch backend: each linear map of the layers gets an `AdaptedLinear` around it

A step has a slot for each of its sequences (-1: the base alone). Around each linear map of the layers, the rows of each adapter in
the step are taken together (padded to a multiple of 4, as everywhere), go through its two thin products, and are added:

    x [M, in] ──W──► y [M, out]                               all rows, as without adapters
      └ rows of slot s [m, in] ──A──► [m, rank] ──B──► += y   once for each adapter in the step; all rows in one go where they share it

So a row's bits depend neither on the other rows nor on the slot (tests/engine/lora/test_torch_maps.py). One product with the A of all
adapters, and one with all B and zeros between, would be fewer calls, but there the bits depend on the slot: where the sum over ranks
is cut into blocks, an adapter of rank 64 lies differently in them. Maps that are one product of the engine (query, key and value; gate
and up) have one A for all parts, and a B whose blocks lie at the rows of each part. The products are in float32 whatever the model's
dtype, as PEFT keeps adapters. A step whose rows have no adapter computes exactly what it did before.
"""
