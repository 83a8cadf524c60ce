"""A snapshot is what the learner was, whatever the learner does while it is written."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from learner_fakes import SAMPLING, Fake, assert_equal, leaves, step
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.learner.core import offload
from arborl.learner.core.checkpoint_files import checkpoint_tensors
from arborl.learner.core.learner import Learner
from arborl.learner.core.offload import HostCopier
from arborl.models.attention import ATTENTION_NAME
from arborl.models.lora import add_lora

CPU = torch.device("cpu")


def learner_of(model, kind="clip", reference=True, **more) -> tuple[Learner, Fake]:
    algorithm = Fake(kind, reference=reference)
    return Learner(model, LearnerConfig(lr=1e-2, decay="none", **more), SAMPLING, algorithm.needs), algorithm


@pytest.mark.parametrize(
    ("dtype", "critic", "adapters"),
    [("float32", "shared", False), ("bfloat16", "separate", False), ("bfloat16", "auto", True)],
)
def test_what_is_written_is_the_moment_of_the_snapshot_though_the_learner_goes_on(
    tiny_llama, tmp_path, dtype, critic, adapters
):
    model = copy.deepcopy(tiny_llama).to(getattr(torch, dtype))
    if adapters:
        add_lora(model, LoraConfig(rank=2))
    start = copy.deepcopy(model)
    kind = "clip" if critic == "auto" else "value"
    learner, algorithm = learner_of(model, kind, critic=critic)
    for seed in range(2):
        step(learner, algorithm, seed)
    then = copy.deepcopy(checkpoint_tensors(learner))
    snapshot = learner.snapshot()
    writing = threading.Thread(target=lambda: [snapshot.write(tmp_path / str(n)) for n in range(5)])
    for n in range(5):
        (tmp_path / str(n)).mkdir()
    writing.start()
    for seed in range(2, 8):
        step(learner, algorithm, seed)
    learner.update_reference()
    writing.join()
    now = leaves(checkpoint_tensors(learner)["state"]["optimizer"])
    before = leaves(then["state"]["optimizer"])
    assert not all(torch.equal(now[name], before[name]) for name in before)  # it has really moved
    for n in range(5):
        resumed, _ = learner_of(copy.deepcopy(start), kind, critic=critic)
        resumed.load(tmp_path / str(n))
        assert_equal(checkpoint_tensors(resumed), then)
        assert resumed.done == 2


@pytest.mark.parametrize("slab", [64, 2**30])
def test_tensors_of_every_kind_are_copied_exactly(monkeypatch, slab):
    monkeypatch.setattr(offload, "SLAB_BYTES", slab)
    wide = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    tree = {
        "bf16": torch.randn(3, 5).bfloat16(), "bool": torch.tensor([True, False]), "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3), "turned": wide.t(), "rows": wide[1:3], "same": wide, "again": wide,
        "int": torch.tensor([2**40]), "half": torch.ones(7, dtype=torch.float16), "large": torch.randn(100),
    }  # fmt: skip
    made = HostCopier(CPU).copy(tree).tree
    assert_equal(made, tree)
    assert all(made[name].shape == tree[name].shape and made[name].dtype == tree[name].dtype for name in tree)
    assert made["same"].data_ptr() == made["again"].data_ptr()
    storages = {name: made[name].untyped_storage().data_ptr() for name in tree if name not in ("again", "empty")}
    assert len(set(storages.values())) == len(storages)
    assert all(made[name].untyped_storage().nbytes() == made[name].nbytes for name in tree)


def test_memory_is_taken_once_and_again_only_for_other_sizes():
    copies, tree = HostCopier(CPU), {"a": torch.ones(1000), "b": torch.ones(10)}
    copies.reserve(copies.tensor_sizes(tree))
    places = [copies.copy(tree).tree["a"].data_ptr() for _ in range(3)]
    assert len(set(places)) == 1
    slab = copies.slabs[0].data_ptr()
    assert places[0] == slab
    larger = copies.copy(tree | {"c": torch.ones(5)}).tree
    assert larger["c"].tolist() == [1.0] * 5


def test_without_host_memory_for_a_copy_the_tensors_themselves_are_written(tiny_llama, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(offload, "free_memory", lambda: 1000)
    learner, algorithm = learner_of(copy.deepcopy(tiny_llama))
    step(learner, algorithm, 0)
    snapshot = learner.snapshot()
    assert snapshot.live
    assert "training waits" in caplog.text
    snapshot.write(tmp_path)
    resumed, _ = learner_of(copy.deepcopy(tiny_llama))
    resumed.load(tmp_path)
    assert_equal(checkpoint_tensors(resumed), checkpoint_tensors(learner))


def test_tied_and_joined_weights_are_written_once_each(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    learner, algorithm = learner_of(model, reference=False)
    step(learner, algorithm, 0)
    learner.save(tmp_path)
    names = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in names
    assert sum(t.nbytes for t in names.values()) == sum(p.nbytes for p in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_a_checkpoint_of_adapters_holds_and_copies_them_alone(tiny_llama, tmp_path):
    model = copy.deepcopy(tiny_llama)
    add_lora(model, LoraConfig(rank=2))
    learner = Learner(model, LearnerConfig(), SAMPLING, AlgorithmNeeds(reference=True))
    learner.save(tmp_path)
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert sum(learner.copier.sizes) < 3 * adapters + 1000  # the present ones and the reference's


def test_numbers_that_are_no_tensors_are_taken_by_value_too():
    state = {"done": 3, "scale": {"value": [1.0]}, "list": [torch.ones(2)]}
    copied = HostCopier(CPU).copy(state).tree
    state["scale"]["value"][0], state["list"][0][0], state["done"] = 2.0, 5.0, 4
    assert copied["scale"] == {"value": [1.0]}
    assert copied["done"] == 3
    assert copied["list"][0].tolist() == [1.0, 1.0]
