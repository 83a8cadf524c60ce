"""Preference pairs and labels: loss and gradients equal TRL's.

TRL's side is its trainers' own loss methods on the same weights, in float64; its Trainer around them (arguments,
accelerator) is stood in for, and its language-model head, which rounds to float32: with that head too, losses agree to
what float32 leaves.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from cases import IS_ARM

from arborl.algorithms import Recipe
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import LearnerConfig
from arborl.data.reading.row_reader import OfflineRowReader
from arborl.learner.core.learner import Learner
from arborl.rollout.offline_episodes import ROW_KINDS, OfflineEpisodes
from arborl.trainer.training_batch import prepare_batch
from arborl.types import Sampling

pytest.importorskip("trl")
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.utils import add_fused_lm_head

PAIRS = [
    {"prompt": "What is 2 + 3?", "chosen": "<answer>5</answer>", "rejected": "Five, I think, or six."},
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say yes."}],
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": [{"role": "assistant", "content": "No."}],
    },
    {"prompt": "Who are you?", "chosen": "I am seedling, a very small model.", "rejected": "Goodbye!"},
]
LABELS = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row, side in zip([*PAIRS, PAIRS[0]], ("chosen", "rejected", "chosen", "rejected"), strict=True)
]
ALONE = SimpleNamespace(num_processes=1, device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)


def exact_norms(model):
    """The library's norm rounds to float32 on its way."""
    for parent in [*model.model.layers, model.model]:
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight.data.copy_(child.weight)
                setattr(parent, name, norm)
    return model


@pytest.fixture(scope="module")
def models(seedling):
    """A policy that has moved away from its reference, for us and for TRL."""
    reference = exact_norms(copy.deepcopy(seedling[0]).double())
    policy = copy.deepcopy(reference)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter) * parameter.abs().mean()
    theirs, their_reference = copy.deepcopy(policy), copy.deepcopy(reference)
    for model in (theirs, their_reference):
        model.set_attn_implementation("sdpa")  # the eager one takes its softmax in float32
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return SimpleNamespace(policy=policy, reference=reference, theirs=theirs, their_reference=their_reference)


class ExactHead(torch.nn.Module):
    """What TRL's head gives, in float64."""

    is_gradient_checkpointing = False

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels, **_):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        wanted = labels[:, 1:]
        found = logits.log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0] * (wanted >= 0)
        zeros = torch.zeros_like(found)
        return SimpleNamespace(log_probs=found, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def ours(models, renderer, rows, name: str, beta: float):
    """The groups, and what a learner makes of them."""
    reader = OfflineRowReader("rows", kind=ROW_KINDS[name])
    tasks = [reader.task(row, f"row {number}") for number, row in enumerate(rows)]
    groups = OfflineEpisodes(renderer, 1024, with_mismatched=name == "kto").groups(tasks)
    algorithm = Recipe(AlgorithmConfig(name=name, args={"beta": beta}), given=True)
    policy = copy.deepcopy(models.policy)
    learner = Learner(policy, LearnerConfig(), Sampling(), algorithm.needs)
    learner.reference.load_state_dict(models.reference.state_dict())
    kept, forest, terms = prepare_batch(algorithm, learner, groups)
    assert len(kept) == len(rows)
    metrics = learner.backward(forest.trees, algorithm.credit(kept, terms), algorithm)
    return groups, metrics, {name: p.grad for name, p in policy.named_parameters()}


def padded(episodes) -> dict[str, torch.Tensor]:
    """As TRL's collators pad: ids, attention mask, and what of it is the completion."""
    calls = [episode.calls[0] for episode in episodes]
    rows = [[*call.prompt, *call.completion.tokens] for call in calls]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    there = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    completion_mask = torch.tensor(
        [
            [0] * len(c.prompt) + [1] * (len(r) - len(c.prompt)) + [0] * (width - len(r))
            for c, r in zip(calls, rows, strict=True)
        ]
    )
    return {"input_ids": ids, "attention_mask": there, "completion_mask": completion_mask}


def trainer(models, head, **more) -> SimpleNamespace:
    return SimpleNamespace(
        model=head(models.theirs), ref_model=head(models.their_reference), accelerator=ALONE, aux_loss_enabled=False,
        precompute_ref_logps=False, args=SimpleNamespace(gradient_checkpointing_kwargs=None), _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)), _tp_size=1, **more,
    )  # fmt: skip


def assert_same(metrics, gradients, models, loss) -> None:
    """To 1e-9 in float64; with TRL's own head to what float32 leaves."""
    models.theirs.zero_grad()
    loss.backward()
    exact = loss.dtype == torch.float64
    assert metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-9 if exact else 5e-6 if IS_ARM else 1e-6)
    largest = max(float(p.grad.abs().max()) for p in models.theirs.parameters())
    assert largest > 0.1
    for name, parameter in models.theirs.named_parameters():
        assert float((gradients[name] - parameter.grad).abs().max()) < (1e-9 if exact else 2e-5), name


HEADS = pytest.mark.parametrize("head", [ExactHead, lambda model: model], ids=["float64", "TRL's own"])


@HEADS
@pytest.mark.parametrize(("name", "theirs"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_loss_and_gradients_of_given_pairs_equal_trls(models, seedling, name, theirs, head):
    groups, metrics, gradients = ours(models, seedling[1], PAIRS, name, beta=0.3)
    episodes = [group.episodes[side] for side in (0, 1) for group in groups]  # chosen, then rejected
    stand_in = trainer(
        models, head, ld_alpha=None, f_divergence_type="reverse_kl", loss_types=[theirs], loss_weights=[1.0], beta=0.3,
        use_weighting=False,
    )  # fmt: skip
    loss = DPOTrainer._compute_loss(stand_in, stand_in.model, padded(episodes), False)
    assert_same(metrics, gradients, models, loss)


@HEADS
def test_loss_and_gradients_of_given_labels_equal_trls_reference_point_included(models, seedling, head):
    groups, metrics, gradients = ours(models, seedling[1], LABELS, "kto", beta=0.3)
    own, mismatched = padded([g.episodes[0] for g in groups]), padded([g.episodes[1] for g in groups])
    inputs = own | {f"KL_{key}": value for key, value in mismatched.items()}
    inputs["label"] = torch.tensor([row["label"] for row in LABELS])
    stand_in = trainer(
        models, head, calculate_KL=True, loss_type="kto", beta=0.3, desirable_weight=1.0, undesirable_weight=1.0
    )
    stand_in._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(stand_in, model, batch)
    loss = KTOTrainer._compute_loss(stand_in, stand_in.model, inputs, False)
    assert_same(metrics, gradients, models, loss)


def test_kl_completions_are_those_of_the_preceding_rows_as_in_trl(seedling):
    reader = OfflineRowReader("rows", kind="labels")
    tasks = [reader.task(row, "row") for row in LABELS]
    groups = OfflineEpisodes(seedling[1], 1024, with_mismatched=True).groups(tasks)
    completions = [group.episodes[0].calls[0].completion.tokens for group in groups]
    assert [group.episodes[1].calls[0].completion.tokens for group in groups] == completions[-1:] + completions[:-1]
    assert [group.episodes[1].calls[0].prompt for group in groups] == [g.episodes[0].calls[0].prompt for g in groups]
