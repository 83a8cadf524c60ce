"""A critic that starts from a reward model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_fakes import Fake, batch_of, forest_of, random_groups
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from arborl.config.load_config import load
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.models.attention import ATTENTION_NAME
from arborl.models.model_files import resolve
from arborl.models.output_heads import load_critic_init
from arborl.types import Sampling

SIZES = {
    "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip


def saved(folder: Path, kind=LlamaForSequenceClassification, vocabulary: int = 50, **more) -> Path:
    """A random model, of another size than the policy."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=3, **SIZES, **{"num_labels": 1, **more}
    )
    model = kind(config)
    if hasattr(model, "score"):
        torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, **SIZES)).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("judge") / "model")


def learner_from(policy, folder: Path) -> Learner:
    origin = load_critic_init(folder, policy, folder)
    return Learner(
        policy, LearnerConfig(critic_from=str(folder), lr=1e-2), Sampling(), Fake("value").needs, origin=origin
    )


def test_the_initial_values_are_the_scores_of_the_reward_model(policy, judge):
    groups = random_groups(0)
    trees, terms = forest_of(groups)
    found = learner_from(policy, judge).score_terms(trees, terms, Fake("value").needs).value
    model = LlamaForSequenceClassification.from_pretrained(judge).eval()
    expected = []
    for call in (c for group in groups for e in group.episodes for c in e.calls):
        for size in range(len(call.completion.tokens)):
            shown = torch.tensor([[*call.prompt, *call.completion.tokens[:size]]])
            with torch.no_grad():
                expected.append(float(model(input_ids=shown).logits[0, 0]))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.std(expected) > 0.1


def test_a_model_without_a_score_head_starts_with_value_0(policy, tmp_path):
    folder = saved(tmp_path / "plain", LlamaForCausalLM)
    learner = learner_from(policy, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(
        learner.critic.trunk.model.layers[2].mlp.up_proj.weight, theirs.model.layers[2].mlp.up_proj.weight
    )
    trees, terms = forest_of(random_groups(0))
    assert not learner.score_terms(trees, terms, Fake("value").needs).value.any()


def test_it_is_trained_and_resumes_from_a_checkpoint(policy, judge, tmp_path):
    algorithm = Fake("value")
    learner = learner_from(policy, judge)
    before = learner.critic.trunk.model.layers[0].mlp.up_proj.weight.detach().clone()
    forest, terms = batch_of(random_groups(0), algorithm)
    terms = algorithm.credit(random_groups(0), learner.score_terms(forest.trees, terms, algorithm.needs))
    learner.update(forest.trees, terms, algorithm)
    assert not torch.equal(learner.critic.trunk.model.layers[0].mlp.up_proj.weight, before)
    learner.save(tmp_path)
    again = learner_from(policy, judge)
    again.load(tmp_path)
    for name, parameter in learner.critic.trained_parameters().items():
        assert torch.equal(again.critic.trained_parameters()[name], parameter), name


def test_models_that_cannot_be_a_critic_are_refused(policy, judge, tmp_path):
    with pytest.raises(ConfigError, match="its head has 3 labels"):
        load_critic_init(saved(tmp_path / "three", num_labels=3), policy, judge)
    with pytest.raises(ConfigError, match="has 40 tokens, and the policy's 50"):
        load_critic_init(saved(tmp_path / "small", vocabulary=40), policy, judge)
    other = saved(tmp_path / "other")
    shutil.copyfile(resolve("seedling") / "tokenizer.json", other / "tokenizer.json")
    text = (other / "tokenizer.json").read_text()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "tokenizer.json").write_text(text.replace('"vocab": {', '"vocab": {"never heard": 9999, ', 1))
    with pytest.raises(ConfigError, match="its tokenizer differs"):
        load_critic_init(other, policy, mine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=grpo", "learner.critic_from=seedling"], "needs no values"),
        (["algorithm=ppo", "learner.critic_from=seedling", "learner.critic=shared"], "for a separate critic"),
    ],
)
def test_settings_without_such_a_critic_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load(None, settings)
