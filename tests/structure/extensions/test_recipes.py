"""What the recipes of docs/structure.md say: an extension is one new file and one line of one registry, and no other place."""

import re
from dataclasses import dataclass

import pytest

from tests.structure.measure import ROOT, imports, product

HEADING = "## Recipes"


@dataclass(frozen=True)
class Recipe:
    """`new` is the file that is added; the line goes into `table` of the file `registry`. `models` are those to copy from:
    modules that product code knows through the registry alone."""

    new: str
    registry: str
    table: str
    models: tuple[str, ...]
    example: str


RECIPES = {
    "A routing policy": Recipe(
        "router/routing/policies/NAME.py",
        "router/routing/policy.py",
        "POLICIES",
        (
            "router.routing.policies.least_loaded",
            "router.routing.policies.prefix",
            "router.routing.policies.round_robin",
            "router.routing.cost_policy",
        ),
        "tests/structure/extensions/test_policy.py",
    ),
    "A KV transport": Recipe(
        "kvtransfer/transports/NAME.py",
        "kvtransfer/transports/registry.py",
        "TRANSPORTS",
        ("kvtransfer.transports.shm",),
        "tests/structure/extensions/test_transport.py",
    ),
    "A draft proposer": Recipe(
        "pdmesh/engine/speculation/NAME.py",
        "pdmesh/engine/speculation/registry.py",
        "PROPOSERS",
        ("pdmesh.engine.speculation.ngrams.retrieval", "pdmesh.engine.speculation.ngrams.lookahead"),
        "tests/structure/extensions/test_proposer.py",
    ),
    "A format of quantized weights": Recipe(
        "pdmesh/engine/loader/quantized/NAME.py",
        "pdmesh/engine/loader/quantized/registry.py",
        "FORMATS",
        (
            "pdmesh.engine.loader.quantized.gptq",
            "pdmesh.engine.loader.quantized.awq",
            "pdmesh.engine.loader.quantized.bitsandbytes",
            "pdmesh.engine.loader.quantized.mxfp4",
        ),
        "tests/structure/extensions/test_weight_format.py",
    ),
    "A command": Recipe(
        "pdmesh/commands/NAME.py",
        "pdmesh/cli.py",
        "COMMANDS",
        ("pdmesh.commands.roles", "pdmesh.commands.explain", "pdmesh.commands.keys"),
        "tests/structure/extensions/test_command.py",
    ),
    "A protocol of clients": Recipe(
        "router/api/NAME/service.py",
        "router/api/protocols.py",
        "PROTOCOLS",
        ("router.api.kserve.service", "router.api.vllm.service", "router.api.service"),
        "tests/structure/extensions/test_protocol.py",
    ),
    "A format of calls": Recipe(
        "pdmesh/text/parsers/formats/NAME.py",
        "pdmesh/text/parsers/registry.py",
        "TOOL_FORMATS",
        (
            "pdmesh.text.parsers.formats.hermes",
            "pdmesh.text.parsers.formats.glm",
            "pdmesh.text.parsers.formats.kimi",
            "pdmesh.text.parsers.formats.harmony",
        ),
        "tests/structure/extensions/test_call_format.py",
    ),
    "A model family": Recipe(
        "pdmesh/engine/models/families/dense/NAME.py",
        "pdmesh/engine/models/registry.py",
        "FAMILIES",
        (
            "pdmesh.engine.models.families.dense.gemma",
            "pdmesh.engine.models.families.experts.mixtral",
            "pdmesh.engine.models.families.latent.minicpm3",
            "pdmesh.engine.models.families.layernorm.gpt_neox",
        ),
        "tests/structure/extensions/test_family.py",
    ),
}


PARAMETER = "A sampling parameter"
PARAMETER_FILES = [
    "pdmesh/sampling_params.py",
    "protos/pdmesh/v1/common.proto",
    "pdmesh/engine/sampling/sampler.py",
    "pdmesh/engine/kernels/cpu/sampling_select.h",
    "pdmesh/engine/kernels/triton/sampling/kernels.py",
    "tests/engine/test_sampling.py",
    "pdmesh/commands/options.py",
]
"""A sampling parameter has no registry: it is a line or a few in each of these."""


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_places_of_a_recipe_are_there(recipe: Recipe) -> None:
    registry = (ROOT / recipe.registry).read_text(encoding="utf-8")
    assert re.search(rf"^{recipe.table}: dict\[str, ", registry, re.MULTILINE)
    assert (ROOT / recipe.new).parent.is_dir() or "NAME" in (ROOT / recipe.new).parent.name
    assert (ROOT / recipe.example).is_file()


def test_product_code_knows_an_extension_through_its_registry_alone() -> None:
    """So nothing else has to be changed for a new one."""
    modules = product()
    graph = imports(modules, deferred=True)
    for name, recipe in RECIPES.items():
        registry = recipe.registry.removesuffix(".py").replace("/", ".")
        for model in recipe.models:
            assert model in modules, model
            assert {importer for importer, imported in graph.items() if model in imported} <= {registry}, (name, model)


def section_of(name: str) -> tuple[str, list[str]]:
    """Return the text of a recipe, and the files of its list."""
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    recipes = page.partition(HEADING)[2].partition("\n## ")[0]
    section = recipes.partition(f"### {name}\n")[2].partition("\n### ")[0]
    return section, re.findall(r"^- `([^`]+)`", section, re.MULTILINE)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_lists_the_files_of_a_recipe(name: str) -> None:
    (section, files), recipe = section_of(name), RECIPES[name]
    assert files == [recipe.new, recipe.registry], f"{name}: the page lists {files}"
    assert recipe.example in section and f"`{recipe.table}`" in section


def test_the_page_lists_the_files_of_a_sampling_parameter() -> None:
    """Those that exist know one that is on all samplers."""
    assert section_of(PARAMETER)[1] == PARAMETER_FILES
    assert [file for file in PARAMETER_FILES if "min_p" not in (ROOT / file).read_text(encoding="utf-8")] == []
