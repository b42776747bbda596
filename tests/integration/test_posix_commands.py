"""Programs in a mount, by library or kernel: output and exit code as in the plain tree."""

import itertools
import os
import shutil
import subprocess

import pytest
from support.mounts import WAYS, Twins, twins_by

COMMANDS = """
cat data/a/t.txt
cat data/nope
cat data/a
cat data/a/t.txt/
cat data/a/t.txt/x
cat < data/a/t.txt
cat data//a/./t.txt data/a/../a/t.txt ../$(basename $PWD)/data/a/t.txt
cat "$PWD/data/a/t.txt"
cd data && cat a/t.txt ../data/a/t.txt && pwd && ls
cd data/a && cd .. && pwd && cat ./a/t.txt && cd ../.. && basename "$PWD/data"
cd data/a/b && bash -c 'pwd; ls; cd ..; ls; cat t.txt'
cd data/a/t.txt
cd data/nope
cd data && env -i PATH=/usr/bin:/bin cat a/t.txt
cp data/a/t.txt - && cat ./- && rm ./-
cp -r data copy && diff -r data copy && rm -r copy
cp -a data copy && stat -c '%n %s %a %Y' copy/a/t.txt && rm -r copy
ls data
ls -R data
ls -la data/a
ls -lR --time-style=full-iso data
ls -d data data/a
ls data/nope
ls -i data | wc -l
stat -c '%n %s %a %h %F %Y %b %B' data data/a data/a/t.txt data/hollow data/empty
stat data/nope
find data | sort
find data -type f -size +50k | sort
find data -name '*.txt' -exec cat {} + | sort
find data -printf '%y %s %m %n %p %T@\\n' | sort
find data -newer data/a/t.txt -type f | sort
find "$PWD/data" -maxdepth 1 | sort
grep -r hello data
grep -rn 1999 data | sort
grep -c . data/text.txt
grep nothing data/a/t.txt
grep x data/nope
grep -l hello data/a/*
echo data/*/*
tar c --sort=name --mtime=@0 data | md5sum
tar c -C data --sort=name . | tar t
tar cf - data | tar xf - -O data/a/t.txt
tar c data/a/t.txt | tar tv
du -a data | sort
du -s data
head -c 7 data/text.txt
tail -n 3 data/text.txt
tail -c 100 data/a/b/big.bin | md5sum
wc data/text.txt data/empty
md5sum data/a/b/x.bin data/a/b/big.bin data/odd/*
sha256sum data/a/b/big.bin
sort -r data/text.txt | head -3
cmp data/a/b/x.bin data/a/b/big.bin
diff data/a/t.txt data/text.txt | head -5
od -A d -t x1 -j 1000 -N 64 data/a/b/big.bin
dd if=data/a/b/big.bin bs=1000 skip=7 count=3 status=none | md5sum
cut -c1-2 data/text.txt | tail -1
awk '{n += $1} END {print n}' data/text.txt
sed -n 17p data/text.txt
tr -d 0 < data/text.txt | md5sum
xargs -n 100 < data/text.txt | tail -1
split -n 2/3 data/text.txt | tail -1
tac data/text.txt | head -1
nl data/a/t.txt
base64 data/a/t.txt
gzip -c data/text.txt | gunzip | md5sum
comm -12 data/a/t.txt data/a/t.txt
join data/a/t.txt data/a/t.txt
paste data/a/t.txt data/a/t.txt
fold -w 3 data/a/t.txt
uniq data/text.txt | wc -l
file -b data/a/t.txt || true
readlink -f data/a/../a/t.txt
realpath data/a data/a/t.txt
realpath --relative-to=data data/a/b
test -f data/a/t.txt && test -d data/a && test -r data/a/t.txt && ! test -e data/nope
test -x data/run.sh && ! test -x data/a/t.txt
test data/a/b/x.bin -nt data/a/t.txt; echo $?
data/run.sh one two | sed 's|/proc/self/fd/[0-9]*|data/run.sh|'
bash data/run.sh one | sed 's|.*run.sh|run.sh|'
. data/lib.sh && greet
while read -r line; do echo "<$line>"; done < data/a/t.txt
exec 3< data/a/t.txt; read -r -u 3 word; echo "$word"; cat <&3
(head -c 3; cat) < data/a/t.txt
cat data/a/t.txt | cat - data/a/t.txt
mapfile -t lines < data/text.txt; echo "${#lines[@]}"
source <(cat data/lib.sh); greet
git --no-pager diff --no-index --stat data/a/t.txt data/text.txt
python3 -c 'print(open("data/a/t.txt").read())'
python3 -c 'import os; print(sorted((at, *map(sorted, x)) for at, *x in os.walk("data")))'
python3 data/script.py
perl -ne 'print if /1999$/' data/text.txt
perl -e 'print -s "data/text.txt"; opendir D, "data/a"; print join(",", sort readdir D)'
""".strip().splitlines()

REFUSED = """
echo x > data/new
echo x >> data/a/t.txt
touch data/a/t.txt
mkdir data/new
rmdir data/hollow
rm -f data/a/t.txt
mv data/a/t.txt data/a/u.txt
ln data/a/t.txt data/a/u.txt
ln -s t.txt data/a/u.txt
chmod 600 data/a/t.txt
truncate -s 0 data/a/t.txt
cp data/a/t.txt data/a/u.txt
mktemp data/a/XXXXXX
python3 -c 'open("data/a/t.txt", "r+")'
python3 -c 'import os; os.replace("data/a/t.txt", "data/text.txt")'
python3 -c 'import tempfile; tempfile.NamedTemporaryFile(dir="data/a")'
sed -i s/h/j/ data/a/t.txt
""".strip().splitlines()

TOOLS = (
    """
cat|cat -A|cat -n|head|head -n 3|head -c 100|tail|tail -n 3|tail -c 100|wc|wc -l|wc -c
md5sum|sha1sum|sha256sum|cksum|sum|b2sum|base64|base32|od|od -c|nl|tac|rev|sort|sort -r|sort -n
uniq -c|cut -c1-3|fold -w 20|expand|fmt|grep -c 1|grep -n 7|grep -l hello|grep -r 11|ls|ls -la|ls -d
stat -c %s:%a:%Y:%F|file -b --mime|du -b|find|strings|xxd|sed -n 3p|awk '{print NF}'|gzip -c -n
bzip2 -c|xz -c|tar cf - --sort=name|cmp data/text.txt|diff -q data/text.txt|python3 -m base64 -e
readlink -f|realpath|test -f|test -d|test -s
""".strip()
    .replace("\n", "|")
    .split("|")
)

needs_glibc = pytest.mark.skipif(
    not os.confstr("CS_GNU_LIBC_VERSION"), reason="no glibc here: the library is for it"
)
pytestmark = needs_glibc


def fill(data):
    data.mkdir(parents=True)
    (data / "a" / "b").mkdir(parents=True)
    (data / "hollow").mkdir()
    (data / "odd").mkdir()
    (data / "a" / "t.txt").write_text("hello\nworld\n")
    (data / "a" / "b" / "x.bin").write_bytes(bytes(range(256)) * 418)
    (data / "a" / "b" / "big.bin").write_bytes(bytes(range(251)) * 1300)
    (data / "text.txt").write_text("".join(f"{i}\n" for i in range(20000)))
    (data / "empty").touch()
    (data / "odd" / "a b\n\u00e9").write_text("odd")
    (data / "odd" / ".hidden").write_text("hidden")
    (data / "run.sh").write_text('#!/bin/sh\necho "$0 $*"\n')
    (data / "run.sh").chmod(0o755)
    (data / "lib.sh").write_text("greet() { echo greetings; }\n")
    (data / "script.py").write_text("import sys, os\nprint(os.path.basename(sys.argv[0]))\n")
    for i, path in enumerate(sorted(data.rglob("*"))):
        os.utime(path, ns=(10**18 + i * 10**9 + 5, 10**18 + i * 10**9 + 5))


@pytest.fixture(scope="module", params=WAYS)
def twins(tmp_path_factory, request):
    top = tmp_path_factory.mktemp(f"twins-{request.param}")
    with twins_by(request.param, top, lambda made: fill(made.plain / "data")) as found:
        yield found


def differences(twins, lines):
    for line in lines:
        plain = twins.shell(line, is_mounted=False)
        mounted = twins.shell(line, is_mounted=True)
        if plain != mounted:
            yield f"{line}: {str(plain)[:300]} in the tree, {str(mounted)[:300]} in the mount"


def test_commands_say_the_same_as_in_the_plain_tree(twins):
    assert list(differences(twins, COMMANDS)) == []


def test_the_mount_is_read_only(twins):
    for line in REFUSED:
        code, _, complaint = twins.shell(line, is_mounted=True)
        assert code != 0, line
        assert b"Read-only file system" in complaint, (line, complaint)
    assert list(differences(twins, ["cat data/a/t.txt; find data | sort"])) == []


def test_nothing_of_a_mount_is_left(twins):
    before = sorted(twins.top.rglob("*"))
    twins.shell("cat data/text.txt > /dev/null; cd data; exec 5< a/t.txt", is_mounted=True)
    assert sorted(twins.top.rglob("*")) == before


def test_git_status_and_log_in_a_mounted_repository(tmp_path):
    if shutil.which("git") is None:
        pytest.fail("git is needed")
    twins = Twins(tmp_path)
    data = twins.plain / "data"
    fill(data)
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*"]
    for words in (["init", "-q"], ["add", "a", "text.txt"], [*author, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", data, *author, *words], check=True, capture_output=True)
    (data / "a" / "t.txt").write_text("changed\n")
    twins.make_pack()
    safe = "git --no-optional-locks -c safe.directory='*' -c user.name=a -c user.email=a@b"
    lines = [
        f"{safe} -C data status",
        f"cd data/a && {safe} status --short",
        f"{safe} -C data log --stat",
        f"{safe} -C data diff",
        f"{safe} -C data ls-files",
        f"{safe} -C data show HEAD:text.txt | md5sum",
        f"cd data && {safe} grep -n 1999",
        f"{safe} -C data fsck",
        f"{safe} clone -q data clone && ls clone && rm -rf clone",
    ]
    assert list(differences(twins, lines)) == []


def test_programs_can_be_left_out(twins):
    if twins.by_kernel:  # all see that mount
        return
    line = "cat data/a/t.txt; head -n 1 data/a/t.txt"
    for programs, seen in (
        ({"only": ["cat"]}, b"hello\nworld\n"),
        ({"never": ["cat"]}, b"hello\n"),
    ):
        environ = {**os.environ, **twins.variables(**programs)}
        done = twins.run(["bash", "-c", line], is_mounted=True, env=environ)
        assert done.stdout == seen


@pytest.mark.campaign("e2e")
def test_500_commands(twins):
    files = [
        "a/t.txt",
        "a/b/x.bin",
        "a/b/big.bin",
        "text.txt",
        "empty",
        "run.sh",
        "a",
        "nope",
        "hollow",
    ]
    have = [tool for tool in TOOLS if shutil.which(tool.split()[0])]
    lines = [
        f'{tool} data/{file} | sort; echo "${{PIPESTATUS[0]}}"'
        for tool, file in itertools.product(have, files)
        # Where a folder ends differs among file systems, and tac asks.
        if not (tool == "tac" and file in ("a", "hollow"))
    ]
    assert len(lines) >= 500 or len(have) < len(TOOLS)
    assert list(differences(twins, lines)) == []
