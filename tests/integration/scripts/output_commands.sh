# Commands that write below the folder $1, and what they print.
set -u
cd "$1" || exit 1
mkdir -p a/b
printf 'three\none\ntwo\n' > lines
cp lines a/; cp -p lines a/b/kept; cp -r a copied; mv a/lines a/moved; cp lines hard
sort -o lines lines; sed -i s/one/1/ lines; cat lines >> a/moved; tee a/tee < lines | wc -l
dd if=/dev/zero of=zeros bs=1000 count=3 2>/dev/null; truncate -s 10 zeros; touch empty
tar cf all.tar a && tar tf all.tar | sort; mkdir x && tar xf all.tar -C x && diff -r a x/a && echo same
head -c 20 lines > short; grep -r two . --include=lines | sort; find . -name 'm*' -type f | sort
{ echo begin; cat lines; echo end; } > braces; wc -c < braces; (echo sub; echo shell) > subshell
gzip -k lines && gunzip -c lines.gz | cmp - lines && rm lines.gz all.tar
rm -r copied; rmdir a; rm a/tee; du -a --apparent-size x/a | cut -f2 | sort; ls -1 a
git init -q repo && cd repo && echo f > f && git add f && git -c user.name=a -c user.email=b commit -qm m
git status --short; git log --format=%s; cd .. && rm -rf repo
for n in 1 2 3; do echo $n > new.$n && mv new.$n current; done; cat current
