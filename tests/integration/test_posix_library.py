"""What the preloaded library shows to programs: its hooks, in all their names, and nothing else."""

import os
import re
import subprocess

import pytest

from paceline.native import posix_library

pytestmark = pytest.mark.skipif(
    not os.confstr("CS_GNU_LIBC_VERSION"), reason="no glibc here: the library is for it"
)

# By which CPython, coreutils and manylinux wheels reach files (nm -D), old and fortified names too.
NAMES = frozenset(
    re.findall(
        r"\w+",
        """
open open64 openat openat64 creat creat64 __open_2 __open64_2 __openat_2 __openat64_2
close read readv pread pread64 preadv preadv64 preadv2 preadv64v2 __read_chk __pread_chk
lseek lseek64 stat stat64 lstat lstat64 fstat fstat64 fstatat fstatat64 statx
__xstat __xstat64 __lxstat __lxstat64 __fxstat __fxstat64 __fxstatat __fxstatat64
access faccessat euidaccess eaccess readlink readlinkat __readlink_chk realpath __realpath_chk
opendir fdopendir readdir readdir64 readdir_r rewinddir seekdir telldir closedir dirfd
scandir scandir64 nftw nftw64 getdents64 glob glob64 fopen fopen64 freopen freopen64 fdopen
dup dup2 dup3 fcntl fcntl64 ioctl
mmap mmap64 sendfile sendfile64 splice copy_file_range posix_fadvise posix_fadvise64 flock isatty
chdir fchdir getcwd execve execv execvp execvpe execl execlp execle posix_spawn posix_spawnp
mkdir unlink unlinkat rename renameat renameat2 rmdir symlink link truncate chmod utimensat mkstemp
statfs statfs64 statvfs statvfs64 fstatfs fstatvfs getxattr lgetxattr listxattr llistxattr
close_range closefrom poll __poll_chk ppoll __ppoll_chk sendmsg lockf lockf64 vfork fexecve
pathconf fpathconf mkfifoat futimesat fsetxattr fremovexattr
""",
    )
)


@pytest.fixture(scope="module")
def symbols():
    text = subprocess.check_output(["nm", "-D", posix_library()], text=True)
    return re.findall(r"^(?:[0-9a-f]+)? +([A-Za-z]) (\S+)$", text, re.MULTILINE)


def test_every_name_is_hooked(symbols):
    defined = {name for kind, name in symbols if kind in "TW"}
    assert not [name for name in NAMES if name not in defined]


def test_nothing_of_c_plus_plus_is_seen(symbols):
    assert not [name for kind, name in symbols if kind not in "Uw" and name.startswith("_Z")]


def test_it_needs_the_c_library_only():
    needed = subprocess.check_output(["readelf", "-d", posix_library()], text=True)
    libraries = re.findall(r"NEEDED.*\[(.*)\]", needed)
    assert not [name for name in libraries if not name.startswith(("libc.", "ld-linux", "libm."))]
