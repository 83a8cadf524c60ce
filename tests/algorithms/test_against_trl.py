"""The same numbers through TRL's own code: its trainers' loss methods, called on log-probabilities that we hand them.

GRPO's and RLOO's advantages are lines inside a long method there. Of GRPO's the deviation is TRL's own function; RLOO's
(reward minus the sum of the others over their count) is written out in `test_rloo_equals_a_loop_over_the_others`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithm_batches import batch_of, episode, group, model_outputs, terms_of

from arborl.algorithms import Recipe
from arborl.algorithms.importance_weights import importance_weights, ratios
from arborl.config.algorithm_config import AlgorithmConfig

pytest.importorskip("trl")
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.utils import nanstd

LENGTHS = (3, 1, 4, 2)
LOCAL = SimpleNamespace(
    num_processes=1, device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
)


def rows_of(flat: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """One padded row an episode."""
    parts = torch.split(flat, list(LENGTHS))
    return torch.stack([torch.nn.functional.pad(part, (0, max(LENGTHS) - len(part)), value=fill) for part in parts])


def trl_grpo(new: torch.Tensor, batch, entropy: torch.Tensor, *, correction=None, **settings) -> torch.Tensor:
    mask = rows_of(torch.ones(sum(LENGTHS)).double())
    given = {"loss_type": "grpo", "beta": 0.0, "importance_sampling_level": "token", "delta": None} | settings
    args = SimpleNamespace(
        delta=given["delta"], use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.25,
        steps_per_generation=1,
    )  # fmt: skip
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (rows_of(new), rows_of(entropy), None),
        args=args, accelerator=LOCAL, model=SimpleNamespace(training=True), top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=correction is not None, vllm_importance_sampling_correction=True,
        epsilon_low=given.get("low", 0.2), epsilon_high=given.get("high", 0.2), loss_type=given["loss_type"],
        importance_sampling_level=given["importance_sampling_level"], beta=given["beta"], max_completion_length=7,
        current_gradient_accumulation_steps=1, aux_loss_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled="entropy_coef" in given, entropy_coef=given.get("entropy_coef"),
        use_adaptive_entropy=False,
    )  # fmt: skip
    trainer.accelerator.sync_gradients = True
    first = torch.tensor([sum(LENGTHS[:i]) for i in range(len(LENGTHS))])
    old = batch.old_M if correction is None else batch.proximal_M
    inputs = {
        "prompt_ids": torch.ones(4, 1), "prompt_mask": torch.ones(4, 1), "completion_ids": torch.ones_like(mask),
        "completion_mask": mask, "advantages": batch.advantage_M[first], "old_per_token_logps": rows_of(old),
        "ref_per_token_logps": rows_of(batch.reference_M), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if correction is not None:
        inputs["importance_sampling_ratio"] = rows_of(correction)
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def setting(seed: int = 0):
    groups = [group(*(episode(r, tokens=n) for r, n in zip((1.0, 0.0, 0.5, 0.2), LENGTHS, strict=True)))]
    terms = terms_of(groups, seed)
    drift = np.random.default_rng(seed + 1).normal(scale=0.4, size=len(terms))
    return groups, terms, torch.from_numpy(terms.logprob + drift).requires_grad_()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"name": "grpo"}, {"loss_type": "grpo"}),
        ({"name": "grpo", "kl": {"coef": 0.3}}, {"loss_type": "grpo", "beta": 0.3}),
        ({"name": "grpo", "args": {"dual_clip": 1.5}}, {"loss_type": "grpo", "delta": 1.5}),
        ({"name": "dapo"}, {"loss_type": "dapo", "high": 0.28}),
        ({"name": "dapo", "entropy_coef": 0.1}, {"loss_type": "dapo", "high": 0.28, "entropy_coef": 0.1}),
        ({"name": "bnpo"}, {"loss_type": "bnpo"}),
        ({"name": "dr_grpo", "args": {"fixed_length": 7}}, {"loss_type": "dr_grpo"}),
        (
            {"name": "gspo", "clip_low": 0.1, "clip_high": 0.05, "anchor": "rollout"},
            {"importance_sampling_level": "sequence", "low": 0.1, "high": 0.05},
        ),
        ({"name": "cispo", "clip_high": 0.4}, {"loss_type": "cispo", "high": 1.4}),
        (
            {"name": "sapo", "args": {"tau_negative": 1.25}},
            {"loss_type": "sapo"},
        ),  # TRL rounds its temperature to float32
    ],
    ids=str,
)
def test_policy_losses_and_their_aggregation_equal_trls(ours, theirs):
    for seed in range(3):
        groups, terms, new = setting(seed)
        algorithm = Recipe(AlgorithmConfig(**ours))
        batch = batch_of(algorithm.credit(groups, terms))
        batch = dataclasses.replace(batch, sequence_M=algorithm.prepare(new.detach(), batch))
        models = model_outputs(new)
        loss, _ = algorithm.loss(models, batch)
        found = (loss * batch.weight_M).sum()
        expected = trl_grpo(new, batch, models.entropy_M, **theirs)
        # a GSPO token's value is its sequence's; everything else agrees in value and in gradient
        assert found.item() == pytest.approx(expected.item(), abs=1e-9)
        (own,), (trl,) = torch.autograd.grad(found, new), torch.autograd.grad(expected, new)
        assert own.numpy() == pytest.approx(trl.numpy(), abs=1e-9)
        assert trl.abs().max() > 0


@pytest.mark.parametrize("kind", ["tis", "mis", "icepop"])
def test_a_guard_in_the_advantage_equals_trls_correction_of_the_loss(kind):
    groups, terms, new = setting()
    algorithm = Recipe(AlgorithmConfig(importance_weights=kind, kl={"coef": 0.3}))
    loss, _ = algorithm.loss(model_outputs(new), batch := batch_of(algorithm.credit(groups, terms)))
    plain = batch_of(Recipe(AlgorithmConfig()).credit(groups, terms))
    factor = importance_weights(
        kind, ratios(terms.proximal - terms.logprob), *algorithm.config.importance_weights.bounds
    )
    expected = trl_grpo(new, plain, torch.zeros(len(new)).double(), correction=torch.from_numpy(factor), beta=0.3)
    assert (loss * batch.weight_M).sum().item() == pytest.approx(expected.item(), abs=1e-9)


def answers(new: torch.Tensor, order: list[int]) -> SimpleNamespace:
    """What a model with TRL's fused head says about padded rows in this order, a prompt of one token before each."""
    rows = rows_of(new)[order]
    return SimpleNamespace(
        log_probs=rows,
        entropy=torch.zeros_like(rows),
        mean_logits=torch.zeros_like(rows),
        is_top1=torch.zeros_like(rows, dtype=torch.bool),
    )


def trl_inputs(order: list[int]) -> dict[str, torch.Tensor]:
    mask = rows_of(torch.ones(sum(LENGTHS)))[order]
    mask = torch.cat([torch.zeros(len(order), 1), mask], dim=1).long()
    return {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


@pytest.mark.parametrize(("name", "theirs"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_pair_losses_have_trls_gradient(name, theirs):
    groups, terms, new = setting()
    groups = [group(*groups[0].episodes[:2]), group(*groups[0].episodes[2:])]  # 0 over 1, 2 over 3
    terms = dataclasses.replace(terms, tree=(terms.episode >= 2).astype(np.int64))
    algorithm = Recipe(AlgorithmConfig(name=name, args={"beta": 0.3}))
    batch = batch_of(algorithm.credit(groups, terms))
    batch = dataclasses.replace(batch, sequence_M=algorithm.prepare(new.detach(), batch))
    loss, _ = algorithm.loss(model_outputs(new), batch)
    (own,) = torch.autograd.grad((loss * batch.weight_M).sum(), new)

    order = [0, 2, 1, 3]  # chosen, then rejected
    reference = rows_of(batch.reference_M)[order].sum(1)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=LOCAL, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[theirs], loss_weights=[1.0], beta=0.3,
        use_weighting=False, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = trl_inputs(order) | {"ref_chosen_logps": reference[:2], "ref_rejected_logps": reference[2:]}
    expected = DPOTrainer._compute_loss(trainer, lambda **_: answers(new, order), inputs, False)
    (trl,) = torch.autograd.grad(expected, new)
    assert trl.abs().max() > 0
    assert own.numpy() == pytest.approx(trl.numpy(), abs=1e-9)


def test_kto_has_trls_gradient():
    groups, terms, new = setting()
    algorithm = Recipe(AlgorithmConfig(name="kto", args={"beta": 0.3, "reward_threshold": 0.4}))
    batch = batch_of(algorithm.credit(groups, terms))
    batch = dataclasses.replace(batch, sequence_M=algorithm.prepare(new.detach(), batch))
    loss, _ = algorithm.loss(model_outputs(new), batch)
    (own,) = torch.autograd.grad((loss * batch.weight_M).sum(), new)

    reference = rows_of(batch.reference_M).sum(1)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=LOCAL, aux_loss_enabled=False, precompute_ref_logps=True,
        calculate_KL=True, loss_type="kto", beta=0.3, desirable_weight=1.0, undesirable_weight=1.0,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
        # TRL estimates the KL on mismatched pairs; ours is the group's own mean, which is handed to it here
        _compute_kl_logps=lambda model, inputs: rows_of(new.detach()).sum(1),
    )  # fmt: skip
    labels = torch.tensor([e.reward >= 0.4 for e in groups[0].episodes])
    inputs = trl_inputs([0, 1, 2, 3]) | {"label": labels, "ref_logps": reference, "ref_KL_logps": reference}
    expected = KTOTrainer._compute_loss(trainer, lambda **_: answers(new, [0, 1, 2, 3]), inputs, False)
    (trl,) = torch.autograd.grad(expected, new)
    assert trl.abs().max() > 0
    assert own.numpy() == pytest.approx(trl.numpy(), abs=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 50.0])
def test_the_default_divides_by_the_groups_deviation_as_trls_does(scale):
    """TRL adds 1e-4 to the deviation, we 1e-6, as verl does."""
    rewards = np.random.default_rng(3).normal(size=6) * scale
    groups = [group(*(episode(float(reward)) for reward in rewards))]
    terms = Recipe(AlgorithmConfig()).credit(groups, terms_of(groups))
    ours = np.array([terms.advantage[terms.episode == number][0] for number in range(6)])
    theirs = torch.from_numpy(rewards)
    deviation = float(nanstd(theirs[None], dim=1))
    expected = (theirs - theirs.mean()).numpy() / (deviation + 1e-4)
    assert ours * (deviation + 1e-6) == pytest.approx(expected * (deviation + 1e-4), rel=1e-7)
