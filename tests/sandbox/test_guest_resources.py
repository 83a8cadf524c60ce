import os
import time
from pathlib import Path

import pytest
from working_levels import guest_module

from arborl.sandbox import Sandbox, SandboxLimits, try_level


@pytest.fixture(scope="module")
def group():
    return guest_module("guest_resources")


class FakeGroups:
    """A cgroup file system in a folder: a new folder has the files that the kernel puts into a new group."""

    def __init__(self, root: Path, monkeypatch, files: dict[str, str]):
        self.root, self.own = root / "cgroup", root / "own"
        made = os.mkdir

        def mkdir(path: str, *mode: int) -> None:
            made(path, *mode)
            for name, text in files.items():
                (Path(path) / name).write_text(text)

        monkeypatch.setattr(os, "mkdir", mkdir)


def test_version_1_is_a_limited_group_below_the_hosts_own(group, tmp_path, monkeypatch):
    fake = FakeGroups(tmp_path, monkeypatch, {"memory.limit_in_bytes": "", "memory.oom_control": "oom_kill 0\n"})
    (fake.root / "memory/job").mkdir(parents=True)
    fake.own.write_text("5:cpu:/\n4:memory:/job\n0::/\n")
    folder = group.make_cgroup("arborl-box-1", 1000, str(fake.root), str(fake.own))
    assert folder == f"{fake.root}/memory/job/arborl-box-1"
    assert (Path(folder) / "memory.limit_in_bytes").read_text() == "1000"
    assert not group.is_out_of_memory(folder)
    (Path(folder) / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert group.is_out_of_memory(folder)


@pytest.mark.parametrize(("delegated", "controllers"), [(b"1", "cpu memory"), (b"", "cpu memory"), (b"1", "cpu")])
def test_version_2_is_a_sibling_where_systemd_delegated_the_group_above(
    group, tmp_path, monkeypatch, delegated, controllers
):
    fake = FakeGroups(tmp_path, monkeypatch, {"memory.max": "max", "memory.swap.max": "max"})
    (fake.root / "unit/host").mkdir(parents=True)
    (fake.root / "unit/cgroup.subtree_control").write_text(controllers)
    fake.own.write_text("0::/unit/host\n")
    monkeypatch.setattr(os, "getxattr", lambda path, name: delegated)
    folder = group.make_cgroup("arborl-box-1", 1000, str(fake.root), str(fake.own))
    if (delegated, controllers) != (b"1", "cpu memory"):
        assert folder == ""
        return
    assert folder == f"{fake.root}/unit/arborl-box-1"
    assert [(Path(folder) / name).read_text() for name in ("memory.max", "memory.swap.max")] == ["1000", "0"]


def test_there_is_no_group_where_none_may_be_made(group, tmp_path):
    assert group.make_cgroup("arborl-box-1", 1000, str(tmp_path), str(tmp_path / "missing")) == ""
    (tmp_path / "own").write_text("4:memory:/elsewhere\n")
    assert group.make_cgroup("arborl-box-1", 1000, str(tmp_path), str(tmp_path / "own")) == ""


def test_groups_that_were_left_are_removed_and_young_ones_are_not(group, tmp_path):
    for name, age in (("arborl-box-old", 100), ("arborl-box-new", 0), ("other", 100)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    group.remove_old_cgroups(str(tmp_path), "arborl-box")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arborl-box-new", "other"]


@pytest.mark.skipif("cgroup" not in try_level("rlimits"), reason="no memory cgroup can be made here")
def test_a_sandbox_has_a_memory_cgroup_that_is_removed_with_it():
    with Sandbox(SandboxLimits(memory_mb=64), "rlimits") as box:
        (found,) = Path("/sys/fs/cgroup").rglob(os.path.basename(box._folder))
        limit = next(found.glob("memory.max"), found / "memory.limit_in_bytes")
        assert int(limit.read_text()) == (64 + box.limits.disk_mb + 64) * 2**20
        assert (found / "cgroup.procs").read_text().split()
        assert box.run_sync("6 * 7").value == "42"
    assert not found.exists()


@pytest.mark.skipif("cgroup" not in try_level("rlimits"), reason="no memory cgroup can be made here")
def test_a_kill_by_the_kernel_at_the_cgroup_limit_is_reported_as_memory():
    with Sandbox(SandboxLimits(memory_mb=128), "rlimits") as box:
        (found,) = Path("/sys/fs/cgroup").rglob(os.path.basename(box._folder))
        limit = next(found.glob("memory.max"), found / "memory.limit_in_bytes")
        limit.write_text(str(24 * 2**20))  # below what the host watches for
        outcome = box.run_sync("x = bytearray(60 * 2**20); x[::4096] = x[::4096].replace(b'\\0', b'1'); len(x)")
    assert (outcome.ok, outcome.stopped) == (False, "memory")
