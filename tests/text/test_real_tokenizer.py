"""SmolLM2's tokenizer, as converted from its GGUF, gives the ids of the tokenizer it was published with."""

from __future__ import annotations

import pytest

from pdmesh.models.catalogue import SMOLLM2, cache_folder, is_complete
from pdmesh.text.chat_template import Message
from pdmesh.text.detokenizer import ChoiceText
from pdmesh.text.tokenizer import Tokenizer

FOLDER = cache_folder() / "models" / SMOLLM2.name
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not is_complete(FOLDER, SMOLLM2.sha256), reason="SmolLM2 is not in the cache; `make model` fetches it"),
]

# Ids that the published tokenizer gives; digits one by one, spaces and accents are where a wrong pre-tokenizer shows.
PUBLISHED = {
    "Hello world": [19556, 905],
    "The year 2024 had 365 days; 12 months.": [
        504,
        713,
        216,
        34,
        32,
        34,
        36,
        761,
        216,
        35,
        38,
        37,
        2009,
        43,
        216,
        33,
        34,
        2704,
        30,
    ],
    "  leading and   multiple   spaces  ": [216, 2899, 284, 256, 2701, 256, 5600, 256],
    "def f(n):\n    return n+1\n": [1604, 275, 24, 94, 727, 472, 1003, 304, 27, 33, 198],
    "Grüße, café!": [27302, 7170, 34878, 85, 28, 37366, 17],
    "Hello, 世界!": [19556, 28, 216, 7906, 240, 178, 239, 230, 17],
}
SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]
QUESTION = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.mark.parametrize("text", PUBLISHED)
def test_ids_are_the_published_ones(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == PUBLISHED[text]
    assert tokenizer.decode(PUBLISHED[text]) == text


def test_chat(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template([Message("user", "What is the capital of France?")]) == SYSTEM + QUESTION
    assert (tokenizer.eos_token_ids, tokenizer.vocab_size, tokenizer.max_context) == (frozenset((2,)), 49152, 8192)


def test_emoji_stream(tokenizer: Tokenizer) -> None:
    text = "👩‍👩‍👧 und 👍🏽!"
    choice = ChoiceText(tokenizer, [], tokenizer.eos_token_ids)
    pieces = [choice.push(token_id).text for token_id in [*tokenizer.encode(text), 2]]
    assert "".join(pieces) + choice.finish() == text
    assert "\ufffd" not in "".join(pieces)
