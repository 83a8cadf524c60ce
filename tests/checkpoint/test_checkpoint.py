"""A kill at any moment leaves a good checkpoint to resume from."""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from arborl.checkpoint import (
    DamagedCheckpoint,
    check_model,
    checkpoint,
    complete_checkpoints,
    find,
    load_state,
    manifest,
    resolve_path,
    rewind,
    save,
)
from arborl.errors import ConfigError, DiskWriteError


def writer(text="weights"):
    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_text(text)
        (folder / "optimizer.pt").write_bytes(b"\0" * 1000)

    return write


def steps(root):
    return [int(folder.name[5:]) for folder in complete_checkpoints(root)]


def test_a_checkpoint_has_its_files_its_state_and_a_manifest_of_both(tmp_path):
    folder = save(tmp_path, 12, writer(), {"step": 12, "lr": 0.1}, keep=2)
    assert folder == tmp_path / "step-000012"
    assert load_state(find(tmp_path, "latest")) == {"step": 12, "lr": 0.1}
    manifest = json.loads((folder / "MANIFEST").read_text())
    assert manifest["step"] == 12
    assert sorted(manifest["files"]) == ["model/model.safetensors", "optimizer.pt", "state.json"]
    assert manifest["files"]["optimizer.pt"][0] == 1000


def full(folder):
    """As on a full disk: the device says so at every write."""
    writer()(folder)
    (folder / "more").symlink_to("/dev/full")
    with (folder / "more").open("w") as file:
        file.write("x")


def unwritable(folder):
    from safetensors import SafetensorError

    raise SafetensorError("Error while serializing: I/O error: Read-only file system (os error 30)")


def full_for_torch(folder):
    import torch

    (folder / "optimizer.pt").symlink_to("/dev/full")
    torch.save({"a": torch.zeros(1000)}, folder / "optimizer.pt")


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (full, "No space left on device"),
        (full_for_torch, "the file could not be written completely"),
        (unwritable, "Read-only file system"),
    ],
)
def test_a_disk_that_refuses_is_one_sentence_and_the_former_checkpoint_is_intact(tmp_path, write, why):
    save(tmp_path, 1, writer(), {}, keep=1)
    with pytest.raises(
        DiskWriteError, match=rf"step-000002: cannot be written: {why}\. .*existing files are unchanged"
    ) as raised:
        save(tmp_path, 2, write, {}, keep=1)
    assert "\n" not in str(raised.value)
    assert find(tmp_path, "latest").name == "step-000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("flip", [False, True])
def test_a_model_in_a_checkpoint_is_compared_with_what_was_written(tmp_path, flip):
    folder = save(tmp_path, 3, writer(), {}, keep=3)
    (folder / "optimizer.pt").unlink()  # not needed for evaluation
    if flip:
        (folder / "model" / "model.safetensors").write_text("weighty")
        with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors has the right size, but not the content"):
            check_model(folder / "model")
    else:
        assert check_model(folder / "model") == folder / "model"
    assert check_model(tmp_path) == tmp_path  # a model of its own


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, '{"step": 1}', "\ufeff{}"])
def test_a_state_of_another_shape_is_one_sentence(tmp_path, text):
    folder = save(tmp_path, 3, writer(), {}, keep=3)
    (folder / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(DamagedCheckpoint, match=r"state\.json") as raised:
        load_state(folder)["before"]
    assert "\n" not in str(raised.value)


def test_a_state_that_is_not_json_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        save(tmp_path, 2, writer(), {"model": object()}, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_while_writing_leaves_the_previous_checkpoint_as_latest(tmp_path):
    save(tmp_path, 1, writer(), {}, keep=2)
    program = """
        import sys, time
        from pathlib import Path
        from arborl.checkpoint import save

        def slow(folder):
            (folder / "half").write_text("half")
            print("writing", flush=True)
            time.sleep(60)

        save(Path(sys.argv[1]), 2, slow, {}, keep=2)
    """
    running = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "writing\n"
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert find(tmp_path, "latest").name == "step-000001"
    save(tmp_path, 2, writer(), {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("deadly", range(4))
def test_replacing_a_step_is_safe_wherever_it_is_killed(tmp_path, monkeypatch, deadly):
    """Dies before the n-th rename or deletion; one of the two versions must be there, whole."""
    save(tmp_path, 5, writer("old"), {"version": "old"}, keep=1)
    count = 0

    def dies_in(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count > deadly:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Path, "rename", dies_in(checkpoint.Path.rename))
        patch.setattr(checkpoint.shutil, "rmtree", dies_in(checkpoint.shutil.rmtree))
        try:
            save(tmp_path, 5, writer("new"), {"version": "new"}, keep=1)
        except Killed:
            assert deadly < 3
    found = find(tmp_path, "latest")
    expected = "old" if deadly < 2 else "new"
    assert load_state(found) == {"version": expected}
    assert (found / "model" / "model.safetensors").read_text() == expected
    save(tmp_path, 6, writer(), {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]


def test_a_truncated_checkpoint_is_skipped_for_latest_and_reported_when_requested(tmp_path, caplog):
    save(tmp_path, 1, writer(), {}, keep=3)
    newest = save(tmp_path, 2, writer(), {}, keep=3)
    os.truncate(newest / "optimizer.pt", 10)
    with caplog.at_level(logging.WARNING):
        assert find(tmp_path, "latest").name == "step-000001"
    assert "step-000002" in caplog.text
    assert "optimizer.pt has 10 bytes, and 1000 were written" in caplog.text
    with pytest.raises(DamagedCheckpoint, match=r"optimizer\.pt has 10 bytes.*has steps 1; write"):
        find(tmp_path, "2")


def as_version_1(folder):
    """The manifest as Arbor wrote it once: each file hashed in one go."""
    path = folder / "MANIFEST"
    manifest = json.loads(path.read_text()) | {"version": 1}
    for name, entry in manifest["files"].items():
        entry[1] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))


def test_a_checkpoint_of_the_first_version_is_read_and_compared_as_then(tmp_path):
    folder = save(tmp_path, 3, writer(), {"a": 1}, keep=3)
    as_version_1(folder)
    assert find(tmp_path, "latest") == folder
    (folder / "model" / "model.safetensors").write_text("weighty")
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors has the right size, but not the content"):
        find(tmp_path, "3")


@pytest.mark.parametrize("place", [0, 99, 100, 199, 250])
def test_a_byte_changed_in_any_piece_of_a_file_is_found(tmp_path, monkeypatch, place):
    monkeypatch.setattr(manifest, "PIECE", 100)
    folder = save(tmp_path, 3, lambda to: (to / "big").write_bytes(bytes(251)), {}, keep=3)
    assert find(tmp_path, "3") == folder
    data = bytearray(251)
    data[place] = 1
    (folder / "big").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="big has the right size, but not the content"):
        find(tmp_path, "3")


@pytest.mark.parametrize("name", ["MANIFEST", "state.json", "model/model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = save(tmp_path, 3, writer(), {}, keep=3)
    (folder / name).unlink()
    assert complete_checkpoints(tmp_path) == []
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing"):
        find(tmp_path, str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 3}', "version 3"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"version": 1}', "files"),
        ('{"version": 1, "files": {"../../x": [1, "a"]}}', "'../../x' is not a file of the checkpoint"),
        ('{"version": 1, "files": {"/etc/passwd": [1, "a"]}}', "is not a file of the checkpoint"),
        ('{"version": 1, "files": {"a": ["many", "a"]}}', "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_read_says_why(tmp_path, text, message):
    folder = save(tmp_path, 3, writer(), {}, keep=3)
    (folder / "MANIFEST").write_text(text)
    with pytest.raises(DamagedCheckpoint, match=message):
        find(tmp_path, "3")


def test_the_newest_are_kept_and_the_one_just_written_always(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, writer(), {}, keep=2)
    assert steps(tmp_path) == [20, 30]
    save(tmp_path, 5, writer(), {}, keep=2)
    assert steps(tmp_path) == [5, 20, 30]


def test_a_damaged_checkpoint_does_not_count_among_the_kept(tmp_path):
    save(tmp_path, 1, writer(), {}, keep=2)
    damaged = save(tmp_path, 2, writer(), {}, keep=2)
    (damaged / "MANIFEST").unlink()
    save(tmp_path, 3, writer(), {}, keep=2)
    assert steps(tmp_path) == [1, 3]


def test_rewinding_removes_the_line_that_was_left(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, writer(), {}, keep=3)
    rewind(tmp_path, 10)
    assert steps(tmp_path) == [10]


def test_a_checkpoint_is_found_by_number_name_and_path(tmp_path):
    folder = save(tmp_path, 7, writer(), {}, keep=3)
    assert find(tmp_path, "7") == find(tmp_path, "step-000007") == find(tmp_path / "x", str(folder)) == folder


def test_asking_for_what_is_not_there_says_what_is(tmp_path):
    with pytest.raises(ConfigError, match="There is none"):
        find(tmp_path / "nowhere", "latest")
    for step in (10, 20):
        save(tmp_path, step, writer(), {}, keep=3)
    for which in ("15", "some/where"):
        with pytest.raises(ConfigError, match="has steps 10, 20; write 'latest'"):
            find(tmp_path, which)


@pytest.mark.parametrize("name", ["final", "step_4", "step-4", "checkpoints/final", "checkpoints/step_4"])
def test_short_names_in_a_run_folder_are_its_checkpoints(tmp_path, name):
    root = tmp_path / "checkpoints"
    for step in (2, 4):
        save(root, step, writer(), {}, keep=3)
    assert resolve_path(tmp_path / name) == root / "step-000004"
    assert find(root, name.removeprefix("checkpoints/")) == root / "step-000004"


def test_other_paths_and_folders_of_such_names_stay_as_they_are(tmp_path):
    save(tmp_path / "checkpoints", 2, writer(), {}, keep=3)
    (tmp_path / "final").mkdir()
    for name in ("final", "other", "model", "elsewhere/final"):
        assert resolve_path(tmp_path / name) == tmp_path / name
    with pytest.raises(ConfigError, match="has steps 2"):
        resolve_path(tmp_path / "step_9")


def test_steps_past_a_million_keep_their_order(tmp_path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step, writer(), {}, keep=3)
    assert find(tmp_path, "latest").name == "step-1000000"


def test_the_package_imports_without_torch():
    program = "import sys, arborl.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
