"""Starts one sandboxed process ("guest"), and ends it with everything that it started.

The end comes when the guest exits or the host closes descriptor 0. The guest's folder exists as long as this process.
This process is a child subreaper, so that no descendant of the guest outlives it. It is single-threaded: a parent-death
signal refers to the thread that forked.
"""

from __future__ import annotations

import _signal
import marshal
import os
import select
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import guest_resources
import interpreter
import mounts
import restrictions

HOST_PIPE, CONTROL = 0, interpreter.CONTROL
SIGKILL = 9
OUT_OF_MEMORY = 250  # exit code when the kernel killed a process of the guest at the cgroup's memory limit


def main() -> None:
    plan = marshal.loads(bytes.fromhex(sys.argv[1]))
    control = int(sys.argv[2])
    os.dup2(control, CONTROL)
    if control != CONTROL:
        os.close(control)
    restrictions.prctl(restrictions.SET_SUBREAPER, 1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # it may be inherited as ignored
    try:
        os.mkdir(plan["root"], 0o700)
    except OSError as error:
        report_failure(error)
    group = guest_resources.make_cgroup(
        os.path.basename(plan["root"]), plan["memory"] + plan["disk"] + guest_resources.MEMORY_OVERHEAD
    )
    plan["group"] = guest_resources.open_cgroup(group) if group else -1
    try:
        child = START[plan["level"]](plan)
    except OSError as error:
        guest_resources.remove_cgroup(group)
        guest_resources.remove_folder(plan["root"])
        report_failure(error)
    if group:
        os.close(plan["group"])
    os.close(CONTROL)
    code = wait_and_kill(child)
    if group and guest_resources.is_out_of_memory(group) and code == 128 + SIGKILL:
        code = OUT_OF_MEMORY
    guest_resources.remove_cgroup(group)
    guest_resources.remove_folder(plan["root"])
    os._exit(code)


def report_failure(error: OSError) -> None:
    interpreter.send(interpreter.GREETING, interpreter.FAILED, f"{error.strerror or error}")
    os._exit(1)


def start_bubblewrap(plan: dict) -> int:
    """`bwrap` creates the name spaces and executes the guest. Root keeps its user name space and drops its rights."""
    folder = os.path.dirname(os.path.abspath(__file__))
    root = os.getuid() == 0
    plan["uid"] = unused_uid() if root else 0
    command = [plan["bubblewrap"], "--die-with-parent", "--unshare-ipc", "--unshare-pid"]
    command += ["--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if root:
        command += [part for name in ("SETUID", "SETGID", "SETPCAP") for part in ("--cap-add", f"CAP_{name}")]
    else:
        command += ["--unshare-user"]
    command += ["--ro-bind", folder, "/guest_process"]
    command += ["--perms", "0755", "--dir", "/packages"]
    for path, target in zip(plan["packages"], mounts.package_paths(plan), strict=True):
        command += ["--ro-bind", path, target]
    bound: set[str] = set()
    for path in plan["readable"]:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path) and not any(path.startswith(f"{other}/") for other in bound):
            parts = path.split("/")
            for end in range(2, len(parts)):  # bwrap would copy the mode of a private home folder
                command += ["--perms", "0755", "--dir", "/".join(parts[:end])]
            command += ["--ro-bind", path, path]
            bound.add(path)
    command += ["--proc", "/proc", "--dev", "/dev", "--dev-bind", f"/dev/{mounts.DEVICES['zero']}", "/dev/zero"]
    command += ["--perms", "1777", "--size", str(plan["disk"])]
    command += ["--tmpfs", plan["home"], "--remount-ro", "/dev"]
    command += [] if any(path.startswith("/tmp/") for path in bound) else ["--symlink", plan["home"], "/tmp"]
    command += ["--remount-ro", "/", "--chdir", plan["home"]]
    command += [plan["python"], "-I", "-S", "/guest_process/interpreter.py"]
    child = os.fork()
    if child == 0:
        detach_from_host(plan)
        guest_plan = marshal.dumps({**plan, "packages": mounts.package_paths(plan)}).hex()
        os.execve(command[0], [*command, guest_plan], environment(plan))
    return child


def start_namespaces(plan: dict) -> int:
    """Two forks: the first process of the name space reaps, the second is the guest."""
    reading, writing = os.pipe()
    root = mounts.unshare_namespaces()
    uid = unused_uid() if root else 1000
    first = os.fork()
    if first:
        os.close(writing)
        failure = os.read(reading, 4096)
        os.close(reading)
        if failure:
            os.waitpid(first, 0)
            raise OSError(0, failure.decode())
        return first
    try:
        os.close(reading)
        mounts.mount_root(plan["root"], plan, uid)
        restrictions.prctl(restrictions.SET_PARENT_DEATH_SIGNAL, SIGKILL)
        second = os.fork()
        if second == 0:
            detach_from_host(plan)
            restrictions.set_limits(plan)
            if root:
                restrictions.drop_user(uid)
            restrictions.drop_capabilities()
            applied = restrictions.apply_final(plan)
            os.close(writing)
            run_interpreter({**plan, "packages": mounts.package_paths(plan)}, applied)
    except BaseException as error:
        os.write(writing, str(getattr(error, "strerror", None) or error).encode())
        os._exit(1)
    os.closerange(0, max(writing, CONTROL, plan["group"]) + 1)
    os._exit(reap_until(second))


def start_rlimits(plan: dict) -> int:
    """A plain child in its own folder, without rights to start or signal other processes."""
    uid = 0
    if os.getuid() == 0:
        uid = restrictions.choose_user(unused_uid(), [os.path.dirname(os.__file__), *plan["packages"]], plan["home"])
    restrictions.prctl(restrictions.SET_DUMPABLE, 0)  # no other process may read this process's memory
    child = os.fork()
    if child == 0:
        try:
            restrictions.prctl(restrictions.SET_DUMPABLE, 1)
            detach_from_host(plan)
            os.chdir(plan["home"])
            if uid in (0, restrictions.OVERFLOW_UID):  # the limit counts all processes of the user
                plan["processes"] += sum(name.isdigit() for name in os.listdir("/proc"))
            restrictions.set_limits(plan)
            if uid:
                restrictions.drop_user(uid)
            restrictions.drop_capabilities()
            restrictions.prctl(restrictions.SET_PARENT_DEATH_SIGNAL, SIGKILL)  # last: a change of user resets it
            run_interpreter(plan, [*(["user"] if uid else []), *restrictions.apply_final(plan)])
        except BaseException as error:
            interpreter.send(interpreter.GREETING, interpreter.FAILED, str(getattr(error, "strerror", None) or error))
            os._exit(1)
    return child


START = {"bubblewrap": start_bubblewrap, "namespaces": start_namespaces, "rlimits": start_rlimits}


def run_interpreter(plan: dict, applied: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment(plan))
    try:
        interpreter.serve(plan, applied)
    finally:
        os._exit(0)


def environment(plan: dict) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": plan["home"], "TMPDIR": plan["home"], "LANG": "C.UTF-8"}


def detach_from_host(plan: dict) -> None:
    """Leave the session, enter the memory cgroup, close the pipe to the host, and become the first OOM victim."""
    os.setsid()
    if plan["group"] >= 0:
        try:
            os.write(plan["group"], b"0")
            plan["restrictions"] = ["cgroup"]
        except OSError:
            pass
        os.close(plan["group"])
    empty = os.open("/dev/null", os.O_RDONLY)
    os.dup2(empty, HOST_PIPE)
    os.close(empty)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def unused_uid() -> int:
    """A user id of this guest alone, above all ids in use."""
    return 0x70000000 + os.getpid()


def reap_until(last: int) -> int:
    """Reap children until `last` ends; that ends the name space."""
    while True:
        child, status = os.waitpid(-1, 0)
        if child == last:
            return exit_code(status)


def wait_and_kill(child: int) -> int:
    """Wait for the end of the guest or of the host's pipe, then kill all descendants."""
    pidfd = os.pidfd_open(child)
    select.select([HOST_PIPE, pidfd], [], [])
    os.kill(child, SIGKILL)
    code = exit_code(os.waitpid(child, 0)[1])
    pid = os.getpid()
    while True:  # orphans are adopted when their parent ends: repeat
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                for left in file.read().split():
                    os.kill(int(left), SIGKILL)
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        except (FileNotFoundError, ProcessLookupError):
            continue


def exit_code(status: int) -> int:
    """Exit code; 128 + signal for a signal, as in a shell."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    main()
