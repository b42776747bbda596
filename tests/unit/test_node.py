"""What the kernel's files say, version 1 and version 2 of control groups, and neither."""

import pytest

from paceline.core.node import (
    Limits,
    cache_bytes,
    cpu_name,
    memory_bytes,
    mount_of,
    oom_kills,
    parse_groups,
    parse_mounts,
    read_limits,
)

V1_MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""
V2_MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""


def make_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_mounts_with_optional_fields_and_escapes():
    text = (
        "36 35 98:0 / /mnt/a\\040b rw shared:1 master:2 - lustre host:/fs rw,flock\nbroken line\n"
    )
    (mount,) = parse_mounts(text)
    assert (mount.point, mount.kind, mount.options) == ("/mnt/a b", "lustre", ("rw", "flock"))


def test_groups_of_both_versions():
    groups = parse_groups("4:memory:/jobs/7\n2:cpu,cpuacct:/\n0::/user.slice\n")
    assert groups == {"memory": "/jobs/7", "cpu": "/", "cpuacct": "/", "": "/user.slice"}


def test_the_innermost_and_last_mount_holds_a_path():
    mounts = parse_mounts(
        "1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / /data rw - nfs4 b rw\n"
        "3 1 0:3 / /data rw - lustre c rw\n"
    )
    assert mount_of("/data/x", mounts).kind == "lustre"
    assert mount_of("/database", mounts).kind == "ext4"
    assert mount_of("/anything", []) is None


def test_version_1_reads_the_process_own_path(tmp_path):
    root = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/jobs/7\n2:cpu,cpuacct:/jobs/7\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "proc/meminfo": "MemTotal:       8388608 kB\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "4294967296\n",
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        },
    )
    # The parent's limit holds, although the process's own group has none.
    assert read_limits(root) == Limits(version=1, memory_bytes=4 << 30, cores=1.5)
    assert memory_bytes(root) == 4 << 30


def test_version_1_inside_a_container(tmp_path):
    mounts = "35 31 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    root = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/ab\n",
            "proc/self/mountinfo": mounts,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
        },
    )
    assert read_limits(root).memory_bytes == 1 << 30
    assert memory_bytes(root) == 1 << 30


def test_version_2_takes_the_least_limit_on_the_way(tmp_path):
    root = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/job.scope\n",
            "proc/self/mountinfo": V2_MOUNTS,
            "sys/fs/cgroup/system.slice/memory.max": "2147483648\n",
            "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/system.slice/job.scope/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/job.scope/cpu.max": "50000 100000\n",
        },
    )
    assert read_limits(root) == Limits(version=2, memory_bytes=2 << 30, cores=0.5)


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "", "proc/self/mountinfo": ""}])
def test_no_groups_no_limits(tmp_path, files):
    root = make_tree(tmp_path, files)
    assert read_limits(root) == Limits(version=0)
    assert memory_bytes(root) == 0
    assert cpu_name(root) == "cpu"
    assert cache_bytes(root) is None


def test_cpu_and_last_level_cache(tmp_path):
    cache = "sys/devices/system/cpu/cpu0/cache"
    root = make_tree(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: A Fine CPU\n",
            f"{cache}/index0/size": "48K\n",
            f"{cache}/index3/size": "32M\n",
            f"{cache}/index4/size": "odd\n",
        },
    )
    assert cpu_name(root) == "A Fine CPU"
    assert cache_bytes(root) == 32 << 20


@pytest.mark.parametrize(
    ("mounts", "groups", "file", "text"),
    [
        (
            V1_MOUNTS,
            "4:memory:/job\n",
            "memory/job/memory.oom_control",
            "under_oom 0\noom_kill 3\n",
        ),
        (V2_MOUNTS, "0::/job\n", "job/memory.events", "max 9\noom 4\noom_kill 3\n"),
    ],
)
def test_kills_of_the_control_group_are_counted(tmp_path, mounts, groups, file, text):
    files = {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups}
    make_tree(tmp_path, files)
    assert oom_kills(tmp_path) == 0
    make_tree(tmp_path, {f"sys/fs/cgroup/{file}": text})
    assert oom_kills(tmp_path) == 3
