"""What the ranks' memory allocator becomes, and what is said of it."""

import os
import subprocess
import sys

import pytest

from paceline.core.allocator import KEEP, allocator_setting

GLIBC = "glibc 2.36"


def test_freed_memory_stays_with_the_ranks():
    setting = allocator_setting("keep", {}, GLIBC)
    assert (setting.in_effect, setting.variables) == ("keep", KEEP)
    assert "MALLOC_MMAP_MAX_=0" in setting.note
    assert "--allocator system" in setting.note
    assert setting.to_json() == {"in_effect": "keep", "variables": KEEP}


def test_the_c_librarys_own_ways_need_no_variables():
    setting = allocator_setting("system", {"MALLOC_ARENA_MAX": "2"}, GLIBC)
    assert (setting.in_effect, setting.variables) == ("system", {})
    assert "defaults" in setting.note


@pytest.mark.parametrize(
    "environ",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_THRESHOLD_": "1000"},
        {"GLIBC_TUNABLES": "glibc.pthread.rseq=0:glibc.malloc.mmap_max=10"},
    ],
    ids=["variable", "threshold", "tunables"],
)
@pytest.mark.parametrize("choice", ["keep", "system"])
def test_settings_of_the_users_own_win_and_that_is_said(environ, choice):
    setting = allocator_setting(choice, environ, GLIBC)
    assert (setting.in_effect, setting.variables) == ("own", {})
    ((name, value),) = environ.items()
    assert f"{name}={value}" in setting.note


def test_a_run_within_a_run_keeps_what_it_inherits():
    assert allocator_setting("keep", dict(KEEP), GLIBC).in_effect == "keep"
    assert allocator_setting("system", dict(KEEP), GLIBC).in_effect == "own"


def test_tunables_of_other_things_do_not_hinder():
    environ = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2", "MALLOC_MMAP_MAX_": ""}
    assert allocator_setting("keep", environ, GLIBC).in_effect == "keep"


@pytest.mark.parametrize("library", ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"])
def test_another_allocator_is_named(library):
    environ = {"LD_PRELOAD": f"/usr/lib/other.so:/usr/lib/{library}"}
    setting = allocator_setting("keep", environ, GLIBC)
    assert setting.in_effect == "own"
    assert library.partition(".")[0] in setting.note


def test_another_c_library_is_said():
    setting = allocator_setting("keep", {}, "")
    assert (setting.in_effect, setting.variables) == ("system", {})
    assert "keep needs glibc" in setting.note


def test_freed_memory_is_not_given_back():
    """A block that is freed leaves the process as large as it was; by default it shrinks."""
    code = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "libc.malloc.argtypes = libc.free.argtypes = None\n"
        "def resident():\n"
        "    return int(open('/proc/self/statm').read().split()[1])\n"
        "before = resident()\n"
        "block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64 << 20)))\n"
        "ctypes.memset(block, 1, 64 << 20)\n"
        "libc.free(block)\n"
        "print(resident() - before)\n"
    )
    pages = {}
    for choice in ("keep", "system"):
        setting = allocator_setting(choice, {})
        if choice == "keep" and setting.in_effect != "keep":
            pytest.skip("no glibc here")
        environ = {name: value for name, value in os.environ.items() if name not in KEEP}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environ, **setting.variables},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        pages[choice] = int(done.stdout) * os.sysconf("SC_PAGE_SIZE")
    assert pages["keep"] > 60 << 20
    assert pages["system"] < 4 << 20
