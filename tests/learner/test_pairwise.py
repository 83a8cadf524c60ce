"""Loss and gradients of pairs are those of transformers' model and the formula, however the pairs are split."""

from __future__ import annotations

import math

import pytest
import torch
from cases import slow_cases

from arborl.config.training_config import LearnerConfig
from arborl.errors import ConfigError, RunStopped
from arborl.learner.core.pairwise import PairLearner, TextPair, fit, micro_batches
from arborl.models.model_files import resolve
from arborl.models.output_heads import SequenceScorer
from arborl.seeds import generator


def some_pairs(count: int, seed: int = 0) -> list[TextPair]:
    rng = generator(seed, "pairs")
    ids = [rng.integers(3, 2000, int(rng.integers(2, 40))).tolist() for _ in range(2 * count)]
    return [TextPair(ids[2 * n], ids[2 * n + 1], weight=[1.0, 2.5][n % 2]) for n in range(count)]


def scorer(dtype: str = "float64") -> SequenceScorer:
    made = SequenceScorer(resolve("seedling"), dtype, "cpu", begin=True)
    torch.manual_seed(1)
    torch.nn.init.normal_(made.model.score.weight, std=0.02)
    return made


def by_hand(pairs: list[TextPair], dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """One sequence at a time, transformers' model, the formula written out as log(1 + e^-(better - worse))."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(resolve("seedling"), num_labels=1, dtype=dtype).eval()
    torch.manual_seed(1)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    loss = torch.zeros((), dtype=dtype)
    for pair in pairs:
        better, worse = (model(input_ids=torch.tensor([side])).logits[0, 0] for side in (pair.better, pair.worse))
        loss = loss + pair.weight * torch.log1p(torch.exp(worse - better))
    loss = loss / sum(pair.weight for pair in pairs)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "near", "tokens"),
    [
        *[("float64", 1e-9, 1), ("float64", 1e-9, 300), ("float64", 1e-9, 100_000), ("float32", 1e-6, 300)],
        *slow_cases(("float32", 1e-6, 1), ("float32", 1e-6, 100_000)),
    ],
)
def test_loss_and_gradients_are_those_of_the_formula(dtype, near, tokens, monkeypatch):
    pairs = some_pairs(9)
    learner = PairLearner(scorer(dtype), LearnerConfig(micro_batch_tokens=tokens), total_steps=0)
    monkeypatch.setattr(learner.optimizer, "step", lambda scale: {})  # leaves the gradients as they are
    loss, gradients = by_hand(pairs, getattr(torch, dtype))
    assert learner.update(pairs) == pytest.approx(loss, abs=near)
    for name, parameter in learner.scorer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=5 * near)
    assert learner.measure(pairs)[0] == pytest.approx(loss, abs=near)


def test_a_new_scorer_says_0_and_loses_log_2_and_ties_count_half():
    learner = PairLearner(SequenceScorer(resolve("seedling"), "float32", "cpu", begin=True), LearnerConfig(), 0)
    assert learner.measure(some_pairs(3)) == pytest.approx((math.log(2), 0.5))
    assert learner.scores(some_pairs(2)) == [0.0] * 4


def test_micro_batches_hold_every_pair_once_within_their_tokens():
    pairs = some_pairs(50)
    found = list(micro_batches(pairs, 200))
    assert sorted(id(pair) for some in found for pair in some) == sorted(map(id, pairs))
    assert all(len(some) == 1 or 2 * len(some) * max(pair.longest for pair in some) <= 200 for some in found)


def train(pairs: list[TextPair], held: list[TextPair], seed: int = 5):
    learner = PairLearner(SequenceScorer(resolve("seedling"), "float32", "cpu", begin=True), LearnerConfig(lr=3e-3), 12)
    rows: list[dict[str, float]] = []
    best = fit(learner, pairs, held, 3, 4, seed, lambda *_: None, rows.append)
    return learner, rows, best


def test_the_weights_are_those_of_the_epoch_with_the_least_held_out_loss():
    pairs, held = some_pairs(8), some_pairs(6, seed=9)  # noise: more training means more loss on others
    learner, rows, best = train(pairs, held)
    assert best["loss"] == min(row["loss"] for row in rows)
    assert best["epoch"] < 3
    assert learner.measure(held) == pytest.approx((best["loss"], best["accuracy"]), abs=1e-6)
    last, rows, best = train(pairs, [])
    assert best is rows[-1]
    assert set(best) == {"epoch", "train_loss"}
    assert last.measure(pairs)[0] < 0.3


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, second, third = (train(some_pairs(8), some_pairs(2, seed=9), seed=seed)[0] for seed in (5, 5, 6))
    both = zip(first.scorer.model.parameters(), second.scorer.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in both)
    assert not torch.equal(first.scorer.model.score.weight, third.scorer.model.score.weight)


def test_a_loss_that_is_no_number_ends_the_training():
    learner = PairLearner(scorer("float32"), LearnerConfig(lr=0.5), 1)
    torch.nn.init.constant_(learner.scorer.model.score.weight, math.nan)
    with pytest.raises(RunStopped, match=r"learning_rate below 0\.5"):
        fit(learner, some_pairs(4), [], 1, 4, 0, lambda *_: None, lambda row: None)


def test_a_model_of_several_labels_and_one_that_is_no_language_model_are_refused(tmp_path):
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForSequenceClassification

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForSequenceClassification(LlamaConfig(vocab_size=50, num_labels=3, **small)).save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match="3 labels"):
        SequenceScorer(tmp_path / "a", "float32", "cpu", begin=True)
    BertModel(BertConfig(vocab_size=50, **small)).save_pretrained(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"is missing|no layer called score"):
        SequenceScorer(tmp_path / "b", "float32", "cpu", begin=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ConfigError, match="cannot be read as a classifier"):
        SequenceScorer(tmp_path / "c", "float32", "cpu", begin=True)
