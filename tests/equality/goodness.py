"""Goodness of fit: are the tokens that the mesh draws distributed as the model's softmax says?"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

CHOICES = 16
PARALLEL = 16


async def draw_first_tokens(folder: Path, prompt: Sequence[int], num_draws: int) -> list[int]:
    """First tokens of `num_draws` choices over requests of 16 choices with seeds 0, 1, 2, …; temperature 1."""
    requests = -(-num_draws // CHOICES)
    places = asyncio.Semaphore(PARALLEL)
    tokens: list[int] = []
    config = LocalMeshConfig(model=str(folder), port=0, worker_args=("--dtype", "float32", "--max-num-seqs", "512"))
    async with LocalMesh(config) as mesh, AsyncClient(mesh.router_addresses) as client:

        async def one(seed: int) -> None:
            async with places:
                answer = await client.generate(list(prompt), n=CHOICES, seed=seed, max_tokens=1, temperature=1.0, timeout=300)
            tokens.extend(choice.token_ids[0] for choice in answer.choices)

        await asyncio.gather(*(one(seed) for seed in range(requests)))
    return tokens[:num_draws]


def softmax_of_next(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """[vocab] float64: probabilities of the next token by transformers in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([list(prompt)])).logits[0, -1]
    return torch.softmax(logits.double(), dim=-1)


def chi_square_p(draws: Sequence[int], probabilities: torch.Tensor, min_expected: float = 5.0) -> float:
    """p-value of Pearson's chi-square; tokens expected fewer than `min_expected` times are one cell together."""
    from scipy.stats import chisquare

    counts, expected = Counter(draws), probabilities * len(draws)
    cells = [token for token in range(len(expected)) if float(expected[token]) >= min_expected]
    observed = [float(counts[token]) for token in cells]
    wanted = [float(expected[token]) for token in cells]
    observed.append(len(draws) - sum(observed))
    wanted.append(len(draws) - sum(wanted))
    return float(chisquare(observed, wanted).pvalue)
