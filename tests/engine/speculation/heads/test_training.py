"""Heads learn what there is to learn; the whole training runs on a tiny model and leaves a file that its engine can use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pdmesh.distillation.prompts import TOPICS, requests
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.sampling.counter_rng import gumbel
from pdmesh.engine.speculation.draft_heads.reference import TorchHeads, begin_states
from pdmesh.engine.speculation.draft_heads.weights import FILE, load_heads
from pdmesh.engine.speculation.setup import heads_path, proposer_names
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model
from tools.draft_heads import __main__ as draft_heads_main
from tools.draft_heads.data import Outputs
from tools.draft_heads.evaluate import follow
from tools.draft_heads.net import Course, Net, Shape, Target, Trainer, loss_of

HIDDEN, VOCAB = 16, 40


def toy_outputs(head: torch.Tensor, seed: int, count: int = 40, length: int = 30) -> Outputs:
    """Of a model whose state is a fixed function of its last two tokens."""
    vectors = torch.randn((2, VOCAB, HIDDEN), generator=torch.Generator().manual_seed(9))
    tokens, states, temperatures = [], [], []
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        before, last = torch.randint(VOCAB, (2,), generator=generator).tolist()
        temperature = float(number % 2)
        for index in range(length):
            state = begin_states(vectors[0, before] + 2 * vectors[1, last], torch.ones(HIDDEN))
            scores = head @ state
            if temperature:
                scores = scores / temperature + gumbel(number, 0, index, torch.arange(VOCAB))
            before, last = last, int(scores.argmax())
            tokens.append(last)
            states.append(state)
        temperatures.append(temperature)
    starts = torch.arange(0, count * length + 1, length)
    return Outputs(torch.tensor(tokens), torch.stack(states).half(), starts, torch.tensor(temperatures), torch.arange(count))


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_heads_learn_a_simple_model(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    head = 2 * torch.randn((VOCAB, HIDDEN), generator=generator)
    target = Target(torch.randn((VOCAB, HIDDEN), generator=generator), head, torch.ones(HIDDEN))
    outputs, held_out = toy_outputs(head, 1), toy_outputs(head, 2)
    net = Net(Shape(kind, 3, 64), target, torch.arange(VOCAB), outputs, seed=0)
    trainer = Trainer(net, Course(200, 300, 1e-2, seed=0), outputs)
    losses = [trainer.step(step / 200) for step in range(200)]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    maths = TorchHeads(net.heads("toy"), target.embedding)
    greedy, sampled = follow(maths, held_out, greedy=True), follow(maths, held_out, greedy=False)
    assert greedy.num_drafts == sampled.num_drafts == 20 * 27
    assert greedy.accepted[0] > 0.6
    assert sampled.accepted[0] > 0.4
    assert greedy.tokens_per_draft > 0.6


def test_a_guess_does_not_reach_into_another_output() -> None:
    """The loss of two outputs together is that of both apart."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn((VOCAB, HIDDEN), generator=generator)
    target = Target(torch.randn((VOCAB, HIDDEN), generator=generator), head, torch.ones(HIDDEN))
    outputs = toy_outputs(head, 1, count=2, length=6)
    net = Net(Shape("recurrent", 3, 8), target, torch.arange(0, VOCAB, 2), outputs, seed=0)
    is_last = torch.tensor([index % 6 == 5 for index in range(12)])
    begin = outputs.states.float()
    whole = loss_of(net, begin, outputs.tokens, is_last)
    apart = [loss_of(net, begin[part], outputs.tokens[part], is_last[part]) for part in (slice(0, 6), slice(6, 12))]
    assert torch.allclose(whole, sum(apart) / 2, rtol=1e-5)  # type: ignore[arg-type]


def test_requests_are_the_same_each_time_and_held_out_topics_are_kept_out() -> None:
    def some(seed: int, held_out: bool = False) -> list[str]:
        source = requests(seed, held_out=held_out)
        return [str(next(source)).lower() for _ in range(300)]

    assert some(1) == some(1) != some(2)
    assert len(set(some(1))) > 250
    kept_out = [topic.lower() for topic in TOPICS[7::10] if len(topic) > 8]
    assert not [text for text in some(1) if any(f" {topic} " in text for topic in kept_out)]
    assert len([text for text in some(1, held_out=True) if any(topic in text for topic in kept_out)]) > 50


class TestTrainHeads:
    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")

    @pytest.mark.parametrize("kind", ["recurrent", "medusa"])
    def test_the_whole_way(self, model: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "heads.safetensors"
        flags = ["--kind", kind, "--vocabulary", "128", "--depth", "2", "--width", "32", "--small"]
        draft_heads_main.main(["--model", str(model), "--out", str(out), *flags, "--data", str(tmp_path / "data")])
        heads = load_heads(out)
        assert (heads.kind, heads.depth, len(heads.token_ids)) == (kind, 2, 128)
        loaded = load_model(EngineConfig(str(model)))
        assert heads.is_for(loaded.weights_hash)
        assert heads.why_not(loaded.config.hidden_size, VOCAB_SIZE) == ""
        greedy, sampled = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert (greedy["drawn"], sampled["drawn"]) == ("greedy", "temperature 0.8")
        assert 0 <= greedy["tokens_per_draft"] <= 2
        assert greedy["trained_on_tokens"] >= 600
        outputs = Outputs.load(tmp_path / "data" / "outputs")
        assert outputs.states.shape == (outputs.num_tokens, loaded.config.hidden_size)
        assert int(outputs.starts[-1]) == outputs.num_tokens
        assert set(outputs.temperatures.tolist()) > {0.0}

    def test_states_are_those_that_the_tokens_were_drawn_from(self, model: Path, tmp_path: Path) -> None:
        settings = draft_heads_main.parse(
            ["--model", str(model), "--out", str(tmp_path / "out"), "--small", "--data", str(tmp_path)]
        )
        draft_heads_main.train(settings)
        outputs, target = Outputs.load(tmp_path / "outputs"), draft_heads_main.target_of(model)
        greedy = [number for number in range(len(outputs)) if float(outputs.temperatures[number]) == 0.0]
        rows = torch.cat([torch.arange(int(outputs.starts[number]), int(outputs.starts[number + 1])) for number in greedy])
        drawn = (outputs.states[rows].float() @ target.head.T).argmax(-1)
        assert (drawn == outputs.tokens[rows]).float().mean() > 0.95  # the native head rounds to 8 bits

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--kind", "eagle"], "invalid choice: 'eagle'"),
            (["--minutes", "0"], "--minutes: 0.0 is not more than 0"),
            (["--depth", "-1"], "--depth: -1 is not more than 0"),
            (["--vocabulary", "0"], "--vocabulary: 0 is not more than 0"),
            (["--threads", "-1"], "--threads: -1 is less than 0"),
        ],
    )
    def test_flags_are_checked(self, model: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            draft_heads_main.parse(["--model", str(model), *flags])
        assert message in capsys.readouterr().err

    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match=r"train_heads: .*none"):
            draft_heads_main.main(["--model", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--small"])

    def test_where_nothing_can_be_written_is_said_before_anything_is_computed(self, model: Path, tmp_path: Path) -> None:
        for out, message in ((tmp_path, "is a folder; give the file"), (model / "config.json" / "heads", "cannot be")):
            with pytest.raises(SystemExit, match=f"train_heads: --out: .*{message}"):
                draft_heads_main.main(["--model", str(model), "--out", str(out), "--small", "--data", str(tmp_path / "data")])
            assert not (tmp_path / "data").exists()

    def test_the_file_is_where_an_engine_looks(self, model: Path) -> None:
        draft_heads_main.main(["--model", str(model), "--small", "--depth", "2", "--width", "32"])
        assert heads_path(EngineConfig(str(model))) == model / FILE
        assert proposer_names(EngineConfig(str(model), speculation="auto")) == ("prompt_lookup", "heads")
        (model / FILE).unlink()
