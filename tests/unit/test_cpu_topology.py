"""The topology of a node by lstopo's XML of versions 1 and 2, and by the files of sysfs."""

import pytest

from paceline.core.affinity import core_list, parse_core_list
from paceline.launch.budget.topology import (
    ROOT,
    CpuTopology,
    PhysicalCore,
    parse_lstopo,
    read_sysfs,
    read_topology,
)

# Two sockets of two NUMA nodes with one core of two hardware threads each, as hwloc 2 writes them:
# a NUMA node is a leaf inside the group of what belongs to it.
HWLOC_2 = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x000000ff">
  <object type="Package" os_index="0" cpuset="0x00000033">
   <object type="Group" cpuset="0x00000011">
    <object type="NUMANode" os_index="0" cpuset="0x00000011"/>
    <object type="L3Cache" cpuset="0x00000011"><object type="L2Cache" cpuset="0x00000011">
     <object type="L1iCache" cpuset="0x00000011">
     <object type="Core" os_index="0" cpuset="0x00000011">
      <object type="PU" os_index="0" cpuset="0x00000001"/>
      <object type="PU" os_index="4" cpuset="0x00000010"/>
     </object></object></object></object>
   </object>
   <object type="Group" cpuset="0x00000022">
    <object type="NUMANode" os_index="1" cpuset="0x00000022"/>
    <object type="L3Cache" cpuset="0x00000022">
     <object type="Core" os_index="1" cpuset="0x00000022">
      <object type="PU" os_index="1" cpuset="0x00000002"/>
      <object type="PU" os_index="5" cpuset="0x00000020"/>
     </object></object>
   </object>
  </object>
  <object type="Package" os_index="1" cpuset="0x000000cc">
   <object type="NUMANode" os_index="2" cpuset="0x000000cc"/>
   <object type="L3Cache" cpuset="0x000000cc">
    <object type="Core" os_index="0" cpuset="0x00000044">
     <object type="PU" os_index="2" cpuset="0x00000004"/>
     <object type="PU" os_index="6" cpuset="0x00000040"/>
    </object>
    <object type="Core" os_index="1" cpuset="0x00000088">
     <object type="PU" os_index="3" cpuset="0x00000008"/>
     <object type="PU" os_index="7" cpuset="0x00000080"/>
    </object>
   </object>
  </object>
 </object>
</topology>
"""

# The same of version 1: sockets, caches with a depth, NUMA nodes around what belongs to them.
HWLOC_1 = """<?xml version="1.0" encoding="UTF-8"?>
<topology>
 <object type="Machine" os_index="0" cpuset="0x0000000f">
  <object type="NUMANode" os_index="0" cpuset="0x00000003">
   <object type="Socket" os_index="0" cpuset="0x00000003">
    <object type="Cache" cpuset="0x00000003" depth="3" cache_type="0">
     <object type="Cache" cpuset="0x00000001" depth="1" cache_type="2">
      <object type="Core" os_index="0" cpuset="0x00000001">
       <object type="PU" os_index="0" cpuset="0x00000001"/></object></object>
     <object type="Core" os_index="1" cpuset="0x00000002">
      <object type="PU" os_index="1" cpuset="0x00000002"/></object>
    </object>
   </object>
  </object>
  <object type="NUMANode" os_index="1" cpuset="0x0000000c">
   <object type="Socket" os_index="1" cpuset="0x0000000c">
    <object type="Core" os_index="0" cpuset="0x00000004">
     <object type="PU" os_index="2" cpuset="0x00000004"/></object>
    <object type="Core" os_index="1" cpuset="0x00000008">
     <object type="PU" os_index="3" cpuset="0x00000008"/></object>
   </object>
  </object>
 </object>
</topology>
"""


def core(package, node, cache, *threads):
    return PhysicalCore(package=package, node=node, cache=cache, threads=threads)


def test_hwloc_2():
    assert parse_lstopo(HWLOC_2) == CpuTopology(
        source="lstopo",
        cores=(core(0, 0, 0, 0, 4), core(0, 1, 1, 1, 5), core(1, 2, 2, 2, 6), core(1, 2, 2, 3, 7)),
    )


def test_hwloc_1():
    assert parse_lstopo(HWLOC_1) == CpuTopology(
        source="lstopo",
        cores=(core(0, 0, 0, 0), core(0, 0, 0, 1), core(1, 1, 2, 2), core(1, 1, 3, 3)),
    )


@pytest.mark.parametrize("text", ["", "<topology>", "<topology/>", "lstopo: no display"])
def test_what_is_no_topology_is_none(text):
    assert parse_lstopo(text) is None


def test_words_of_a_long_set_come_highest_first():
    text = (
        '<topology><object type="Core" cpuset="0x00000002,,0x00000000">'
        '<object type="PU" os_index="65"/></object></topology>'
    )
    found = parse_lstopo(text)
    assert found is not None
    assert found.cores == (core(0, 0, 65, 65),)


def write_sysfs(root, *, packages, cores, smt, cache_cores, name="core_cpus_list"):
    """Write the tree of a node: hardware thread t of core c is c + t * (cores of the node)."""
    total = packages * cores
    cpus, nodes = root / "sys/devices/system/cpu", root / "sys/devices/system/node"
    for number in range(total * smt):
        folder = cpus / f"cpu{number}"
        place = number % total
        siblings = core_list(place + thread * total for thread in range(smt))
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / name).write_text(siblings + "\n")
        (folder / "topology/physical_package_id").write_text(f"{place // cores}\n")
        first = place - place % cache_cores
        group = core_list(
            first + offset + thread * total
            for offset in range(cache_cores)
            for thread in range(smt)
        )
        for index, level, shared in ((0, 1, siblings), (3, 3, group)):
            (folder / f"cache/index{index}").mkdir(parents=True)
            (folder / f"cache/index{index}/level").write_text(f"{level}\n")
            (folder / f"cache/index{index}/shared_cpu_list").write_text(shared + "\n")
    (cpus / "online").write_text(f"0-{total * smt - 1}\n")
    for node in range(packages):
        (nodes / f"node{node}").mkdir(parents=True)
        own = core_list(
            node * cores + place + thread * total for place in range(cores) for thread in range(smt)
        )
        (nodes / f"node{node}/cpulist").write_text(own + "\n")


def test_sysfs_of_two_sockets_of_24_cores_with_two_hardware_threads(tmp_path):
    write_sysfs(tmp_path, packages=2, cores=24, smt=2, cache_cores=8)
    found = read_sysfs(tmp_path)
    assert found is not None
    assert [cpu.threads for cpu in found.cores] == [(place, place + 48) for place in range(48)]
    assert [cpu.node for cpu in found.cores] == [0] * 24 + [1] * 24
    assert [cpu.package for cpu in found.cores] == [0] * 24 + [1] * 24
    assert [cpu.cache for cpu in found.cores] == [place - place % 8 for place in range(48)]
    assert read_topology(tmp_path) == found


def test_sysfs_of_an_older_kernel(tmp_path):
    write_sysfs(tmp_path, packages=1, cores=2, smt=2, cache_cores=2, name="thread_siblings_list")
    found = read_sysfs(tmp_path)
    assert found is not None
    assert [cpu.threads for cpu in found.cores] == [(0, 2), (1, 3)]


def test_without_sysfs_each_hardware_thread_is_a_core(tmp_path):
    assert read_sysfs(tmp_path) is None
    found = read_topology(tmp_path)
    assert found.source == "none"
    assert all(len(cpu.threads) == 1 for cpu in found.cores)


def test_a_mask_leaves_parts_of_cores():
    topology = parse_lstopo(HWLOC_2)
    assert topology is not None
    left = topology.restricted({1, 4, 2, 6, 99})
    assert [cpu.threads for cpu in left.cores] == [(4,), (99,), (1,), (2, 6)]
    assert [cpu.threads for cpu in left.split().cores] == [(4,), (99,), (1,), (2,), (6,)]


def test_this_node_says_the_same_by_both():
    by_files = read_sysfs(ROOT)
    if by_files is None:
        pytest.skip("no /sys/devices/system/cpu here")
    assert {cpu.threads for cpu in read_topology().cores} == {cpu.threads for cpu in by_files.cores}


@pytest.mark.parametrize("text", ["3-1", "-1", "a", "1--2"])
def test_what_is_no_list_of_cores_is_refused(text):
    with pytest.raises(ValueError, match=r"range|int"):
        parse_core_list(text)
