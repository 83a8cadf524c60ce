"""An `optimizer.pt` of another program or another model is refused with an error of one line."""

from __future__ import annotations

import copy
import pickle
import zipfile

import pytest
import torch
from learner_fakes import step
from test_snapshot import learner_of
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.errors import ConfigError


class Hostile:
    def __reduce__(self):
        return (print, ("ran",))


def packed(path, state) -> None:
    torch.save({**state, "zeros": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as entries:
        files = [(name, entries.read(name)) for name in entries.namelist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as entries:
        for name, data in files:
            entries.writestr(name, data)


def huge(state: dict) -> dict:
    """Moments of a few bytes on disk that would be terabytes: a tensor whose rows are all the same one."""
    adam = copy.deepcopy(state["optimizer"]["adam"])
    adam["state"][0]["exp_avg"] = torch.zeros(1).expand(10**12)
    return {**state, "optimizer": {**state["optimizer"], "adam": adam}}


FOREIGN = {
    "random bytes": lambda path, state: path.write_bytes(b"\x80\x02not a pickle" * 100),
    "an empty file": lambda path, state: path.write_bytes(b""),
    "no file": lambda path, state: path.unlink(),
    "half a file": lambda path, state: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "code": lambda path, state: torch.save({"optimizer": Hostile()}, path),
    "a bare pickle": lambda path, state: path.write_bytes(pickle.dumps(Hostile())),
    "a list": lambda path, state: torch.save([1, 2], path),
    "torch's own AdamW": lambda path, state: torch.save(state["optimizer"]["adam"], path),
    "other keys": lambda path, state: torch.save({**state, "optimizer": {"param_groups": []}}, path),
    "no number": lambda path, state: torch.save({**state, "done": "x"}, path),
    "packed entries": packed,
    "a tensor without end": lambda path, state: torch.save(huge(state), path),
}


@pytest.fixture(scope="module")
def written(tiny_llama, tmp_path_factory):
    learner, algorithm = learner_of(copy.deepcopy(tiny_llama), reference=False)
    step(learner, algorithm, 0)
    folder = tmp_path_factory.mktemp("checkpoint")
    learner.snapshot().write(folder)
    return folder


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_refused_in_one_line(kind, written, tiny_llama, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model").symlink_to(written / "model")
    path = folder / "optimizer.pt"
    path.write_bytes((written / "optimizer.pt").read_bytes())
    FOREIGN[kind](path, torch.load(written / "optimizer.pt", weights_only=True))
    learner, _ = learner_of(copy.deepcopy(tiny_llama), reference=False)
    with pytest.raises(ConfigError) as caught:
        learner.load(folder)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 200 + 2 * len(str(path)) + 250
    assert "ran" not in capsys.readouterr().out


def test_the_state_of_another_model_is_refused(written, tmp_path):
    other = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    learner, algorithm = learner_of(other, reference=False)
    step(learner, algorithm, 0)
    learner.snapshot().write(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes((written / "optimizer.pt").read_bytes())
    with pytest.raises(ConfigError, match="for another model"):
        learner.load(tmp_path)
