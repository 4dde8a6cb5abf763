"""LoRA adapters (Hu et al., 2021) beside the base model, several in one step: y = W x + B A x for the rows of each adapter.

    folder.py     a folder of PEFT's, checked against the model, becomes an `Adapter`: A and B of each map, float32, scale in B
    registry.py   the adapters of an engine: slots 0 to max_loras - 1, requests that use them, loading and unloading
    torch_maps.py the torch backend: each linear map of the layers gets an `AdaptedLinear` around it
    native_maps.py the native CPU kernels: A and B of each product, packed as their weights are (kernels/cpu/adapters.h)
    triton_maps.py the Triton kernels: places of a fixed size, filled in place (kernels/triton/lora.py)

A step has a slot for each of its sequences (-1: the base alone). Sums of products are in float32 whatever the model's dtype. A
row's bits depend neither on the other rows, nor on the slot, nor on which adapters are loaded beside its own, and a step whose
rows have no adapter computes what it did before (tests/engine/lora/test_torch_maps.py, test_native_maps.py).

On torch, around each linear map of the layers lie pages: the A of some adapters joined to one matrix, and their B to another,
each packed once at load. A page's two products serve all of its adapters:

    x [m, in] ──A──► h [m, ranks of slot 0 | of slot 1 | ...] ──each row's foreign columns become 0──► ──B──► added to y [m, out]

m: all rows of the step, or only those of the page's adapters where these are few. Zeros add nothing, and a page has at most 128
ranks (or one adapter), so that the sum over them is not cut into blocks. Maps that are one product of the engine (query, key and
value; gate and up) have one A for all parts, and a B whose blocks lie at the rows of each part.
"""
