"""The compiler takes every kernel for Hopper, from the arguments of real launches: what runs in the interpreter may still be
refused there. And it puts nothing away in local memory that an innermost loop would miss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from pdmesh.engine.kernels.triton.experts.product import Tile
from pdmesh.engine.kernels.triton.linear import dense
from pdmesh.engine.kernels.triton.linear.weight_product import ProductShape
from pdmesh.engine.kernels.triton.tiles import LatentTiles, shared_bound
from tests.engine.kernels.triton.arrivals import lacking
from tests.engine.kernels.triton.cubins import count_spills
from tests.engine.kernels.triton.launches import GROUPS

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
HAS_TOOLS = all(os.access(TOOLS / tool, os.X_OK) for tool in ("ptxas", "cuobjdump", "nvdisasm"))
needs_tools = pytest.mark.skipif(not HAS_TOOLS, reason="Triton came without an assembler that can be run")
# Bytes of a thread's stack; what lies there is stored and loaded outside of innermost loops. Others: none.
STACKS = {("split_kernel", 64): 128, ("split_kernel", 96): 400, ("split_kernel", 128): 400, ("split_kernel", 256): 1100}
STACKS |= {("split_kernel", 0): 32, ("walk_kernel", 0): 32}  # float32
STACKS |= {("walk_kernel", 64): 64, ("walk_kernel", 96): 64, ("walk_kernel", 128): 64, ("walk_kernel", 256): 640}
STACKS |= {("capped split_kernel", 128): 400, ("capped split_kernel", 256): 1100}  # with a softcap
STACKS |= {("capped walk_kernel", 128): 96, ("capped walk_kernel", 256): 640}
STACKS |= {("latent_kernel", 0): 400}
BITS = {"plain": 0, "int4": 4, "int8": 8, "fp8": 8}
# Instructions in a loop that the assembler chose to spill for.
INNER = {"capped split_kernel": 1}


def spoken(module: str, *arguments: str) -> list[dict[str, Any]]:
    """What a program of this folder prints, run where kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.engine.kernels.triton.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def one_of_each() -> list[dict[str, Any]]:
    return spoken("hopper", "one_of_each")


@pytest.mark.timeout(900)
@needs_tools
def test_every_kernel_compiles_for_hopper_and_spills_in_no_inner_loop(one_of_each: list[dict[str, Any]]) -> None:
    assert {kernel["kernel"] for kernel in one_of_each} >= {
        *("product_kernel", "split_kernel", "walk_kernel"),
        *("router_kernel", "route_kernel", "sort_kernel", "gate_up_kernel", "down_kernel", "sum_kernel"),
        *("lora_shrink_kernel", "lora_expand_kernel", "latent_kernel", "latent_store_kernel"),
    }
    _check(one_of_each)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@needs_tools
@pytest.mark.parametrize("group", [group for group in GROUPS if group != "on_older_gpus"])
def test_so_does_every_variant(group: str) -> None:
    kernels = spoken("hopper", group)
    assert kernels
    _check(kernels)


def _check(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        name = f"capped {kernel['kernel']}" if kernel.get("HAS_CAP") else kernel["kernel"]
        head_dim = 0 if kernel.get("BLOCK_M") == 16 else kernel.get("DIM", 0)
        assert kernel["stack"] <= STACKS.get((name, head_dim), 0), kernel
        assert kernel["inner_spills"] <= INNER.get(name, 0), kernel
        assert kernel["shared"] <= bound(kernel), kernel


@pytest.mark.thorough
@pytest.mark.timeout(900)
@needs_tools
@pytest.mark.parametrize("capability", ["80", "89"])
def test_tiles_take_as_much_memory_on_older_gpus(capability: str) -> None:
    """Ampere's and Ada's matrix units have another layout."""
    for kernel in spoken("hopper", "on_older_gpus", capability):
        assert kernel["shared"] <= bound(kernel), kernel


@pytest.mark.timeout(900)
@needs_tools
def test_no_draw_waits_for_a_compiler_once_the_sampler_is_prepared() -> None:
    [counted] = spoken("variants")
    names = ["adjust_kernel", "count_kernel", "greedy_kernel", "limits_kernel", "pick_kernel", "scores_kernel"]
    assert counted == {"prepared": names, "later": []}


@needs_tools
def test_what_is_stored_in_float8_is_divided_as_ieee_says(one_of_each: list[dict[str, Any]]) -> None:
    """The interpreter divides exactly whatever the compiler is told."""
    stores = [kernel for kernel in one_of_each if kernel.get("HAS_SCALES") and "store" in kernel["kernel"]]
    stores += [kernel for kernel in one_of_each if kernel["kernel"] == "round_rows_kernel"]
    assert {kernel["kernel"] for kernel in stores} == {
        *("store_kernel", "rope_store_kernel", "latent_store_kernel", "round_rows_kernel")
    }
    assert [kernel for kernel in stores if kernel["approximate_divisions"]] == []


@needs_tools
def test_the_last_program_reads_what_the_others_wrote(one_of_each: list[dict[str, Any]]) -> None:
    """And a thread what other threads of its program wrote, between the two halves of limits_kernel."""
    arriving = {
        each["kernel"]: each for each in one_of_each if each["kernel"] in ("greedy_kernel", "product_kernel", "dense_tile_kernel")
    }
    assert len(arriving) == 3 and all(each.get("SPLITS", 2) > 1 for each in arriving.values())
    assert {name: each["lacking"] for name, each in arriving.items() if each["lacking"]} == {}
    [limits] = [each for each in one_of_each if each["kernel"] == "limits_kernel"]
    assert limits["barriers"] == 1


def test_what_an_arrival_lacks_is_named() -> None:
    whole = ["st.global.b32 [%rd9], %r27;", "bar.sync 0;", "@%p28 atom.global.gpu.acq_rel.add.u32 %r29, [%rd21], 1;"]
    whole += ["bar.sync 0;", "st.global.b32 [%rd21], 0;", "ld.global.cg.b32 %r160, [%rd22];", "ld.global.b32 %r1, [%rd5];"]
    assert lacking("\n".join(whole)) == []
    assert lacking("\n".join(whole[:1] + whole[2:])) == ["a barrier behind the stores"]
    assert lacking("\n".join(whole).replace("acq_rel", "relaxed")) == ["acq_rel"]
    assert lacking("\n".join(whole).replace(".cg", "")) == ["loads past the first cache"]
    assert lacking("\n".join(whole[:2])) == ["0 arrivals"]


def bound(kernel: dict[str, Any]) -> int:
    """What the launchers count with when they choose tiles."""
    if kernel["kernel"] == "product_kernel":
        shape = ProductShape(kernel["BLOCK_M"], kernel["CHUNK"], kernel["num_stages"], 4, kernel["AHEAD"], 1)
        return shape.shared_bound(BITS[kernel["FORMAT"]])
    if kernel["kernel"] == "dense_tile_kernel":
        return dense.shared_bound(kernel["BLOCK_N"], kernel["BLOCK_M"], kernel["num_stages"])
    if kernel["kernel"] in ("gate_up_kernel", "down_kernel"):
        return Tile(kernel["BLOCK_M"], kernel["COLUMNS"], kernel["num_stages"]).shared_bound(BITS[kernel["FORMAT"]])
    if kernel["kernel"] == "latent_kernel":
        item_size = 4 if kernel["num_stages"] == 1 else 2
        return LatentTiles.of(2 * kernel["HALF"], item_size).shared_bound(item_size)
    if "BLOCK_N" not in kernel or kernel["kernel"] in ("lora_expand_kernel", "dense_vector_kernel"):
        return 48 * 1024
    item_size = 4 if kernel["num_stages"] == 1 else 2
    return shared_bound(kernel["BLOCK_N"], kernel["BLOCK_M"], kernel["DIM_PAD"], item_size, kernel["num_stages"])


def test_spills_are_counted_by_loops() -> None:
    code = """
        /*0000*/ STL [R1], R2 ;
.L_x_0:
        /*0010*/ LDL R2, [R1] ;
.L_x_1:
        /*0020*/ LDL.LU R3, [R1+0x4] ;
        /*0030*/ @P0 BRA `(.L_x_1) ;
        /*0040*/ @P1 BRA `(.L_x_0) ;
        /*0050*/ @P2 BRA `(.L_x_2) ;
        /*0060*/ STL [R1], R2 ;
.L_x_2:
        /*0070*/ EXIT ;
    """
    assert count_spills(code) == (4, 1)
