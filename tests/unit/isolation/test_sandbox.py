"""The sandbox: untrusted programs end, and take nothing with them."""

import errno
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rl.isolation.kernel import list_refused_calls
from mindspeed_rl.isolation.sandbox import SandboxLimits, _run, available_isolation, run_python

needs = {
    name: pytest.mark.skipif(name not in available_isolation(), reason=f"this machine gives no isolation of {name}")
    for name in ("network", "processes", "files", "user", "sockets")
}


def test_a_program_reads_its_input_and_writes_its_output() -> None:
    result = run_python("import sys; print(sys.stdin.read()[::-1]); print('odd', file=sys.stderr)", "天地".encode())
    assert (result.output.decode(), result.errors, result.status, result.timed_out) == ("地天\n", b"odd\n", 0, False)


def test_what_the_machine_does_not_give_is_listed() -> None:
    missing = set(run_python("").missing)
    landlock = {"files"} if "landlock" in available_isolation() else set()
    assert missing == {"network", "processes", "files", "user", "sockets"} - available_isolation() - landlock


@pytest.mark.parametrize(
    ("program", "status"),
    [("raise SystemExit(3)", 3), ("import ctypes; ctypes.string_at(0)", -11), ("1 / 0", 1), ("not python", 1)],
)
def test_the_status_tells_how_a_program_ended(program: str, status: int) -> None:
    assert run_python(program).status == status


def test_the_memory_of_the_process_that_starts_a_program_is_not_the_programs() -> None:
    limits = SandboxLimits(wall_s=0.3, memory_mib=128)
    ours = b"x" * (4 * limits.memory_mib << 20)
    result = run_python("while True: pass", limits=limits)
    assert len(ours) and result.timed_out and not result.out_of_memory


def test_a_program_that_never_ends_is_killed() -> None:
    result = run_python("while True: pass", limits=SandboxLimits(wall_s=0.3))
    assert result.timed_out and result.status == -9


def test_memory_output_and_descriptors_are_bounded() -> None:
    greedy = run_python("x = 'a' * (1 << 30)", limits=SandboxLimits(memory_mib=256))
    assert b"MemoryError" in greedy.errors or greedy.out_of_memory  # whichever limit is first
    flood = run_python("while True: print('x' * 100000)", limits=SandboxLimits(file_mib=2))
    assert flood.status != 0 and len(flood.output) == 1 << 20
    assert b"Too many open files" in run_python("files = [open('program.py') for _ in range(100)]").errors


def test_the_environment_is_not_inherited_and_the_folder_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    result = run_python("import os; print(sorted(os.environ)); print([n for n in os.listdir() if n[0] != '.'])")
    assert result.output.decode().splitlines()[0] == str(sorted(["PATH", "LANG", "HOME", "TMPDIR"]))
    assert result.output.decode().splitlines()[1] == "['program.py']"


def test_descriptors_are_not_inherited() -> None:
    ours = os.memfd_create("secret") if sys.platform == "linux" else os.dup(0)
    os.set_inheritable(ours, True)
    try:
        assert run_python(f"import os\ntry:\n os.fstat({ours})\nexcept OSError: print('closed')").output == b"closed\n"
    finally:
        os.close(ours)


@needs["network"]
def test_there_is_no_network_not_even_to_this_machine() -> None:
    program = (
        "import socket\ntry:\n socket.create_connection(('127.0.0.1', 80), 1)\nexcept OSError as error: print(error.errno)"
    )
    isolation = available_isolation() - {"sockets"}  # the filter would refuse the socket before the network is missed
    result = _run(program, b"", SandboxLimits(), isolation)
    assert result.output == b"101\n"  # ENETUNREACH: there is no interface at all


@needs["processes"]
def test_a_child_in_its_own_session_dies_with_the_program_and_others_are_not_seen() -> None:
    program = "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(1000)\nprint(os.getpid())"
    result = run_python(program)
    assert result.output == b"1\n" and not result.timed_out
    assert run_python(f"import os; print(os.path.exists('/proc/{os.getpid()}/environ'))").output == b"False\n"


@needs["files"]
def test_files_can_be_written_in_the_folder_alone(tmp_path) -> None:
    tmp_path.chmod(0o777)
    program = f"open('here', 'w').close()\ntry:\n open({str(tmp_path / 'there')!r}, 'w')\nexcept OSError: print('refused')"
    assert run_python(program).output == b"refused\n"
    assert not (tmp_path / "there").exists()


@needs["user"]
def test_a_fork_bomb_is_stopped_by_the_limit_on_processes() -> None:
    result = run_python("import os\nwhile True: os.fork()", limits=SandboxLimits(wall_s=1.0, processes=16))
    assert result.timed_out or b"Resource temporarily unavailable" in result.errors


READS = """
try:
    print(open({path!r}).read())
except OSError as error:
    print(type(error).__name__)
"""


@needs["files"]
def test_there_are_no_other_files_not_even_those_that_anybody_may_read(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("42")
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    answers.chmod(0o644)
    for path in (answers, Path(__file__), Path("/etc/passwd"), Path("/proc/self/environ"), Path("/proc/1/cmdline")):
        assert run_python(READS.format(path=str(path))).output == b"FileNotFoundError\n", path
    seen = run_python("import os; print(sorted(os.listdir('/home'))); print(os.listdir('/tmp')); print(os.path.exists('/etc'))")
    assert seen.output == b"['program.py']\n[]\nFalse\n"


@needs["files"]
def test_packages_beside_the_standard_library_are_not_there() -> None:
    program = """
import os, sysconfig
folder = os.path.join(sysconfig.get_path("stdlib"), "site-packages")
print(os.path.isdir(folder) and os.listdir(folder) or [])
"""
    assert run_python(program).output == b"[]\n"


@needs["files"]
def test_the_old_root_is_gone_and_the_interpreter_cannot_be_changed() -> None:
    program = """
import os, sys
for path in ("/..", "/home/../..", "/proc/self/root"):
    print(sorted(set(os.listdir(path)) & {"etc", "proc", "sys", "var", "work"}) if os.path.exists(path) else "absent")
for change in (lambda: open(os.__file__, "a"), lambda: os.chroot("/home"), lambda: os.mkdir("/etc")):
    try:
        change()
        print("done")
    except OSError as error:
        print("refused")
"""
    assert run_python(program).output.decode().split() == ["[]", "[]", "absent", "refused", "refused", "refused"]


@needs["sockets"]
def test_no_socket_of_any_kind_can_be_made(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "door"))
        listening.listen()
        (tmp_path / "door").chmod(0o777)
        program = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_VSOCK, socket.AF_PACKET):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind)
            print("made", family, kind)
        except OSError as error:
            assert error.errno == 1, error
try:
    socket.socketpair()
    print("made a pair")
except PermissionError:
    print("none")
"""
        assert run_python(program).output == b"none\n"


@needs["sockets"]
@pytest.mark.parametrize(
    "call",
    [
        "os.memfd_create('a')",
        "ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and (_ for _ in ()).throw(PermissionError())",
        "ctypes.CDLL(None, use_errno=True).syscall(425, 8, ctypes.create_string_buffer(120)) < 0 and _refuse()",
        "ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0) and _refuse()",
        "ctypes.CDLL(None, use_errno=True).shmget(0, 1 << 20, 0o1777) < 0 and _refuse()",
    ],
)
def test_ways_around_are_refused(call: str) -> None:
    program = f"""
import ctypes, os
def _refuse():
    assert ctypes.get_errno() == 1, ctypes.get_errno()
    raise PermissionError
try:
    {call}
    print("done")
except PermissionError:
    print("refused")
"""
    assert run_python(program).output == b"refused\n"


#: calls each system call of the kernel in its own process, with arguments that no call accepts
WALK = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for number in range(600):
    ends = os.pipe()
    if (child := os.fork()) == 0:
        libc.alarm(1)
        ctypes.set_errno(0)
        libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
        os.write(ends[1], b"%d" % ctypes.get_errno())
        os._exit(0)
    os.close(ends[1])
    os.waitpid(child, 0)
    print(number, (os.read(ends[0], 99) or b"ended").decode())
    os.close(ends[0])
"""

#: what a program of the standard library may need, by name: everything else must be refused or unknown
HARMLESS = set("""
access alarm arch_prctl brk capget capset chdir chmod chown clock_getres clock_gettime clock_nanosleep clone close close_range
copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat
fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex
futex_waitv futimesat get_mempolicy get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid
getgroups getitimer getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid gettid
gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl ioprio_get ioprio_set kill
landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listxattr llistxattr lremovexattr
lseek lsetxattr lstat madvise membarrier mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mremap msync
munlock munlockall munmap nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc
pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64 pselect6 pwrite64 pwritev pwritev2 read readahead
readlink readlinkat readv remap_file_pages removexattr rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction
rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo
sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield select sendfile
set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid setpriority setregid
setresgid setresuid setreuid setrlimit setsid setuid setxattr shmdt sigaltstack signalfd signalfd4 splice stat statfs statx
symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat
utimes vfork wait4 waitid write writev
io_cancel io_destroy io_getevents io_pgetevents
accept accept4 getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto setsockopt shutdown
""".split())  # the last lines need a context or a socket, which no program can make
#: numbers that no kernel of this century implements
GONE = set("_sysctl afs_syscall create_module get_kernel_syms getpmsg putpmsg query_module security tuxcall vserver".split())
#: uretprobe and uprobe: the kernel asks no filter, and they only return from a probe that is there
PROBES = (335, 336) if platform.machine() == "x86_64" else ()
UNISTD = Path(f"/usr/include/{platform.machine()}-linux-gnu/asm/unistd_64.h")


@needs["sockets"]
@pytest.mark.skipif(not UNISTD.is_file(), reason="the kernel's table of system calls (linux-libc-dev) is not installed")
def test_every_system_call_of_the_kernels_table_is_harmless_or_refused() -> None:
    table = {int(number): name for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", UNISTD.read_text())}
    refused = list_refused_calls(platform.machine())
    assert {number: table[number] for number in refused if number in table} == {n: refused[n] for n in refused if n in table}
    result = run_python(WALK, limits=SandboxLimits(wall_s=60.0, cpu_s=50))
    answers = {int(number): answer for number, answer in map(str.split, result.output.decode().splitlines())}
    assert len(answers) == 600, result
    for number, answer in answers.items():
        name = table.get(number, "")
        if number in PROBES:
            continue
        if number in refused:
            assert answer == str(errno.EPERM), (number, name, answer)
        elif number >= 451 or name == "clone3" or not name or name in GONE:
            assert answer == str(errno.ENOSYS) or name in refused.values(), (number, name, answer)
        else:
            assert name in HARMLESS, f"{name} ({number}) is neither refused nor known to be harmless: {answer}"


@needs["sockets"]
@pytest.mark.parametrize("flag", [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000])
def test_no_process_is_made_with_a_new_namespace(flag: int) -> None:
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    program = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
made = libc.syscall(ctypes.c_long({number}), ctypes.c_long({flag | 17}), *[ctypes.c_long(0)] * 4)
print(made, ctypes.get_errno())
"""
    assert run_python(program).output == b"-1 1\n"


@needs["processes"]
def test_processes_together_have_the_memory_of_one() -> None:
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        break
held = b"x" * (100 << 20)
time.sleep(1000)
"""
    result = run_python(program, limits=SandboxLimits(wall_s=60.0, memory_mib=256))
    assert result.out_of_memory and not result.timed_out and result.status == -9


THREAD_CHILDREN = """
import os, threading, time
def start():
    for _ in range(6):
        if os.fork() == 0:
            held = b"x" * (100 << 20)
            time.sleep(1000)
    time.sleep(1000)
threading.Thread(target=start).start()
"""
ORPHANS = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            held = b"x" * (100 << 20)
            time.sleep(1000)
        os._exit(0)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are counted on Linux only")
@pytest.mark.parametrize("program", [THREAD_CHILDREN, ORPHANS], ids=["children of a thread", "orphans in their own sessions"])
@pytest.mark.parametrize("without", [set(), {"memory group"}, {"memory group", *needs}], ids=["all", "counted", "no isolation"])
def test_no_process_escapes_the_limit_on_memory(program: str, without: set[str]) -> None:
    limits = SandboxLimits(wall_s=60.0, memory_mib=256, disk_mib=8)
    result = _run(program, b"", limits, available_isolation() - without)
    assert result.out_of_memory and not result.timed_out and result.status == -9


@pytest.mark.skipif(sys.platform != "linux", reason="the proxy is a child subreaper")
def test_a_process_that_a_program_leaves_ends_with_it_without_any_isolation() -> None:
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(1000)
    os._exit(0)
time.sleep(0.2)
"""
    result = _run(program, b"", SandboxLimits(), frozenset())
    assert result.status == 0 and not Path("/proc", result.output.decode().strip()).exists()


@needs["files"]
def test_files_together_have_a_limit() -> None:
    program = """
total = 0
try:
    for number in range(1000):
        with open(f"{number}", "wb") as file:
            total += file.write(bytes(1 << 20))
except OSError as error:
    print(error.errno, total >> 20)
"""
    result = run_python(program, limits=SandboxLimits(disk_mib=8))
    assert result.output.split()[0] == b"28" and int(result.output.split()[1]) <= 8


@pytest.mark.skipif("files" not in available_isolation(), reason="where namespaces are missing, the other tests are Landlock's")
def test_landlock_alone_keeps_other_files_closed(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text("42")
    isolation = frozenset({"landlock"})
    try:
        works = _run("open('mine', 'w').write('a'); print(open('mine').read())", b"", SandboxLimits(), isolation)
    except subprocess.SubprocessError:
        pytest.skip("this kernel has no Landlock")
    assert works.output == b"a\n" and "files" not in works.missing
    for path in (tmp_path / "answers", Path(__file__), Path("/etc/passwd"), Path(pytest.__file__)):
        assert _run(READS.format(path=str(path)), b"", SandboxLimits(), isolation).output == b"PermissionError\n", path


@needs["user"]
def test_roots_files_cannot_be_read(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o600)
    assert b"Error" in run_python(f"print(open({str(secret)!r}).read())").errors


def test_what_is_missing_can_be_asked_for_before_anything_is_scored() -> None:
    said = subprocess.run([sys.executable, "-m", "mindspeed_rl.isolation.sandbox"], capture_output=True, text=True, check=True)
    assert said.stdout.split() == list(run_python("").missing)
