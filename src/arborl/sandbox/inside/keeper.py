"""Starts one guest, and ends it with everything it started: when it leaves, or when the host lets go of descriptor 0.

The guest's folder is made and removed here too, so it lasts as long as this process and no longer.

It is the reaper of all that comes from the guest, so nothing outlives it, and it is single-threaded, so signals tied to
a parent's death are tied to this process and not to a thread of the host.
"""

from __future__ import annotations

import _signal
import marshal
import os
import select
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confine
import guest
import memory_group
import mounts
from clear import remove

LIFELINE, CONTROL = 0, guest.CONTROL
KILLED = 9
OUT_OF_MEMORY = 250
"""Exit code where the kernel ended the guest, or a process of it, at the limit of its memory group."""


def main() -> None:
    plan = marshal.loads(bytes.fromhex(sys.argv[1]))
    given = int(sys.argv[2])
    os.dup2(given, CONTROL)
    if given != CONTROL:
        os.close(given)
    confine.prctl(confine.SET_SUBREAPER, 1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # a host may have been started by somebody who ignores it
    try:
        os.mkdir(plan["root"], 0o700)
    except OSError as error:
        refuse(error)
    group = memory_group.make(os.path.basename(plan["root"]), plan["memory"] + plan["disk"] + memory_group.SLACK)
    plan["group"] = memory_group.entry(group) if group else -1
    try:
        child = START[plan["level"]](plan)
    except OSError as error:
        memory_group.remove(group)
        remove(plan["root"])
        refuse(error)
    if group:
        os.close(plan["group"])
    os.close(CONTROL)
    code = keep(child)
    if group and memory_group.exhausted(group) and code == 128 + KILLED:
        code = OUT_OF_MEMORY
    memory_group.remove(group)
    remove(plan["root"])
    os._exit(code)


def refuse(error: OSError) -> None:
    """No guest: the host is told why."""
    guest.send(guest.GREETING, guest.FAILED, f"{error.strerror or error}")
    os._exit(1)


def start_bubblewrap(plan: dict) -> int:
    """`bwrap` makes the name spaces and executes the guest. Root stays in its user name space, to leave it for good."""
    folder = os.path.dirname(os.path.abspath(__file__))
    root = os.getuid() == 0
    plan["uid"] = own_uid() if root else 0
    command = [plan["bubblewrap"], "--die-with-parent", "--unshare-ipc", "--unshare-pid"]
    command += ["--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if root:
        command += [part for name in ("SETUID", "SETGID", "SETPCAP") for part in ("--cap-add", f"CAP_{name}")]
    else:
        command += ["--unshare-user"]
    command += ["--ro-bind", folder, "/inside"]
    command += ["--perms", "0755", "--dir", "/packages"]
    for path, place in zip(plan["packages"], mounts.places(plan), strict=True):
        command += ["--ro-bind", path, place]
    shown: set[str] = set()
    for path in plan["readable"]:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path) and not any(path.startswith(f"{other}/") for other in shown):
            parts = path.split("/")
            for end in range(2, len(parts)):  # bwrap would copy the mode of the host's folder, and a home is closed
                command += ["--perms", "0755", "--dir", "/".join(parts[:end])]
            command += ["--ro-bind", path, path]
            shown.add(path)
    command += ["--proc", "/proc", "--dev", "/dev", "--dev-bind", f"/dev/{mounts.DEVICES['zero']}", "/dev/zero"]
    command += ["--perms", "1777", "--size", str(plan["disk"])]
    command += ["--tmpfs", plan["home"], "--remount-ro", "/dev"]
    command += [] if any(path.startswith("/tmp/") for path in shown) else ["--symlink", plan["home"], "/tmp"]
    command += ["--remount-ro", "/", "--chdir", plan["home"], plan["python"], "-I", "-S", "/inside/guest.py"]
    child = os.fork()
    if child == 0:
        leave_host(plan)
        told = marshal.dumps({**plan, "packages": mounts.places(plan)}).hex()
        os.execve(command[0], [*command, told], environment(plan))
    return child


def start_namespaces(plan: dict) -> int:
    """Two forks: the first process of a name space only waits and reaps, the second is the guest."""
    ready, told = os.pipe()
    root = mounts.leave()
    uid = own_uid() if root else 1000
    first = os.fork()
    if first:
        os.close(told)
        trouble = os.read(ready, 4096)
        os.close(ready)
        if trouble:
            os.waitpid(first, 0)
            raise OSError(0, trouble.decode())
        return first
    try:
        os.close(ready)
        mounts.furnish(plan["root"], plan, uid)
        confine.prctl(confine.SET_PARENT_DEATH_SIGNAL, KILLED)
        second = os.fork()
        if second == 0:
            leave_host(plan)
            confine.limit(plan)
            if root:
                confine.drop_user(uid)
            confine.drop_capabilities()
            fences = confine.seal(plan)
            os.close(told)
            greet({**plan, "packages": mounts.places(plan)}, fences)
    except BaseException as error:
        os.write(told, str(getattr(error, "strerror", None) or error).encode())
        os._exit(1)
    os.closerange(0, max(told, CONTROL, plan["group"]) + 1)
    os._exit(reap_until(second))


def start_rlimits(plan: dict) -> int:
    """A plain child in a folder of its own, alone: it can start and signal no other process, and has no rights."""
    uid = 0
    if os.getuid() == 0:
        uid = confine.other_user(own_uid(), [os.path.dirname(os.__file__), *plan["packages"]], plan["home"])
    confine.prctl(confine.SET_DUMPABLE, 0)  # the keeper's memory is nobody's to look into
    child = os.fork()
    if child == 0:
        try:
            confine.prctl(confine.SET_DUMPABLE, 1)
            leave_host(plan)
            os.chdir(plan["home"])
            if uid in (0, confine.NOBODY):  # the limit is the whole user's
                plan["processes"] += sum(name.isdigit() for name in os.listdir("/proc"))
            confine.limit(plan)
            if uid:
                confine.drop_user(uid)
            confine.drop_capabilities()
            confine.prctl(confine.SET_PARENT_DEATH_SIGNAL, KILLED)  # last: a change of user takes it off
            greet(plan, [*(["user"] if uid else []), *confine.seal(plan)])
        except BaseException as error:
            guest.send(guest.GREETING, guest.FAILED, str(getattr(error, "strerror", None) or error))
            os._exit(1)
    return child


START = {"bubblewrap": start_bubblewrap, "namespaces": start_namespaces, "rlimits": start_rlimits}


def greet(plan: dict, fences: list[str]) -> None:
    """The rest of the guest's life."""
    os.environ.clear()
    os.environ.update(environment(plan))
    try:
        guest.serve(plan, fences)
    finally:
        os._exit(0)


def environment(plan: dict) -> dict[str, str]:
    """All that a guest is told."""
    return {"PATH": "/usr/bin:/bin", "HOME": plan["home"], "TMPDIR": plan["home"], "LANG": "C.UTF-8"}


def leave_host(plan: dict) -> None:
    """Out of the keeper's session, without its lifeline, in a memory group of its own where there is one, and first to
    go when memory runs out."""
    os.setsid()
    if plan["group"] >= 0:
        try:
            os.write(plan["group"], b"0")
            plan["fences"] = ["cgroup"]
        except OSError:
            pass
        os.close(plan["group"])
    empty = os.open("/dev/null", os.O_RDONLY)
    os.dup2(empty, LIFELINE)
    os.close(empty)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def own_uid() -> int:
    """A user number of this guest's own, above all that systems hand out."""
    return 0x70000000 + os.getpid()


def reap_until(last: int) -> int:
    """Wait for every child until `last` is gone; its end is the end of the name space."""
    while True:
        child, status = os.waitpid(-1, 0)
        if child == last:
            return code_of(status)


def keep(child: int) -> int:
    """Wait for the guest or for the host to let go; leave nothing behind."""
    watched = os.pidfd_open(child)
    select.select([LIFELINE, watched], [], [])
    os.kill(child, KILLED)
    code = code_of(os.waitpid(child, 0)[1])
    own = os.getpid()
    while True:  # orphans come to the reaper only when their parent is gone, so look again after each round
        try:
            with open(f"/proc/{own}/task/{own}/children") as file:
                for left in file.read().split():
                    os.kill(int(left), KILLED)
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        except (FileNotFoundError, ProcessLookupError):
            continue


def code_of(status: int) -> int:
    """As a shell says it: 128 and the signal."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    main()
