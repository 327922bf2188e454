"""Scripts whose commands are those that bash runs: bash itself runs them here, with a program that writes its words down."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.shell import list_unknown, read_script

#: program that writes its words and the variable RATE; a line for each call
RECORD = """#!/usr/bin/env bash
{ printf '%s' "RATE=$RATE"; for word; do printf '\\t%s' "$word"; done; printf '\\n'; } >> "$RECORDED"
"""

#: scripts, one a line
EQUAL = r"""
false; train $?
true; train $?
false; if [ $? -ne 0 ]; then train bad; else train good; fi
f() { return 3; }; f; train $?; f || train $?
X=$(false); train $?; (exit 4); train $?
A=(a b c d); unset 'A[1]'; train "${A[@]}" "${#A[@]}" "${!A[@]}" "${A[2]}" "${A[@]:1}" "${A[@]:1:1}"
A=(a b c d); unset 'A[1]'; A+=(e); train "${A[-1]}" "${!A[@]}"
A=(a b c d); unset A[0]; train "${A[@]}" "$A" "${A[1]}"; A=("${A[@]}"); train "${A[0]}" "${!A[@]}"
A=([2]=x [5]=y); train "${A[@]}" "${#A[@]}" "${!A[@]}" "${A[5]}"
A=(a b); A[5]=z; A[${#A[@]}]=q; train "${#A[@]}" "${A[@]}" "${!A[@]}"
A=(1 2); A[${#A[@]}]=3; A[-1]+=x; read 'A[0]' <<< 7; printf -v 'A[1]' %s 8; train "${A[@]}"
A=(--lr 1 --kl 2); for i in "${!A[@]}"; do [ "${A[$i]}" = --kl ] && unset "A[$i]" "A[$((i+1))]"; done; train "${A[@]}"
declare -A M=([a]="x y" ['b c']=z [d]=p\ q); M+=([e]=f); train "${M[a]}" "${M[b c]}" "${M[d]}" "${M[e]}" "${#M[@]}"
P=~/a:~/b:x~; export Q=y:~/c; Q+=:~; train $P $Q "~/d" ~/e:~/f --dir=~/g dir=~/h
set -a; X=1; RATE=2; set +a; Y=3; bash -c 'train ${X:-0} ${Y:-0}'
echo RATE=5 > e.sh; set -o allexport; source ./e.sh; set +o allexport; train
declare -x RATE=6; train; export -n RATE; train; export "RATE=a b"; train; N=RATE; export "$N"=9; train
export RATE=1; env -u RATE train a; (export RATE=2; train b); train c; unset RATE; train d
printf 'RATE=5\n# no\nX=6\n' > v; export $(grep -v '^#' v | xargs); train $X
f() { local -x RATE=5; train a; }; f; train b
f() { train $LR; }; LR=1; LR=2 f; train $LR; RATE=2 f; RATE=3 eval train x
f() { g() { train inner $1; }; g "$@"; }; f 3; g 4
f() ( X=5; train $X ); X=1; f; train $X
X=1; f() { local -n R=$1; R=2; }; f X; train $X; A=(a); g() { local -n L=$1; L+=(b); }; g A; train "${A[@]}"
X=" b "; train a$X"c" a${X}c $X$X "q"$X; X=" "; train a${X}b $X c$X; train a$(echo " b ")c $(echo) "$(echo)"
A=("" x "" y); train --o=${A[@]} ${A[@]} ""${A[@]} "${A[@]}"; A=(" p q " r); train a${A[@]}b; X=${A[@]}; train "$X"
IFS=,; X=",b,"; train a$X $X a${X}c; unset IFS; set -- "" "a b"; train x$@y x$*y "x$@y" "x$*y"
f() { echo "--a $1"; }; train $(f 3); f() { local x=$1; echo $((x*2)); }; train "$(f 4)"
f() { train a; }; unset -f f; f 2>/dev/null; train b
set x y; train $1 $2 $#; set -e -- z; train $@; for w; do train $w; break; done
set -- --lr 3 z; while [[ $# -gt 0 ]]; do case "$1" in --lr) L=$2; shift 2;; *) R+=($1); shift;; esac; done; train $L ${R[@]}
set -- --kl=2; while (( $# > 0 )); do case $1 in --kl=*) KL="${1#*=}";; esac; shift; done; train $KL
LR=1; while [ $# -gt 0 ]; do LR=$1; shift; done; while getopts "a:b" o; do LR=$OPTARG; done; train $LR
for ((i=0, j=5; i<j; i++, j--)); do A+=("x$i"); done; train "${A[@]}" $i $j
n=3; L=; while ((n > 0)); do L="$L $n"; ((n--)); done; train $L; m=; until [ "$m" = xxx ]; do m+=x; done; train $m
i=0; while true; do i=$((i+1)); if [ $i -lt 3 ]; then continue; fi; break; done; train $i
x=5; train $((x++)) $x $((++x)) $((x*=2)) $x $((x=4, x+1)) $[x*2] $((5 & 6)) $((1 | 8)) $((~0)) $((3 ^ 1)) $((16 >> 2))
x="1+2"; train $((x*2)) $((${x}*2)); : $((x+=5)); train $x; y=$((x++)); train $x $y; ((y<<=2)); train $y
case abc in a*) train 1;;& *c) train 2;; *) train 3;; esac; case abc in a*) train 4;& z) train 5;; *) train 6;; esac
case abc in "a*") train 1;; *) train 2;; esac; [ abc = "a*" ] && train 3; [[ abc == "a*" ]] || train 4
P="a*"; [[ abc == $P ]] && train 5; [[ abc == "$P" ]] || train 6
shopt -s nocasematch; case ABC in abc) train 1;; *) train 2;; esac; [[ A == a ]] && train 3
echo 5 > f; X=1; read X < f; train $X $(<f); mapfile -t A < <(printf 'a\nb\n'); train "${A[@]}"
source <(echo X=6); train $X; . /dev/stdin <<< X=7; train $X
X=1; echo 5 | X=2; train $X; f() { X=3; }; f | cat; train $X
echo "train a 'b c'" | bash; echo "--a 1" | xargs train x; printf 'q r' | bash -s >/dev/null; bash -s -- y <<< 'train $1'
bash -c 'train "$0" "$@"' a b c; tee r.sh <<< 'train "$0" $1' >/dev/null; bash r.sh z
if [ 1 = 1 ]; then exec train a; fi; train b
X=$(echo "2+3*4" | bc); train $X $(bc <<< "7/2") $(echo "-7/2" | bc) $(echo "3 > 2" | bc) $(expr 5 \* 3) $(expr 7 - 2)
N=q; A=q; B=y; D=q; if [[ ( $A == x || $B == y || $D == w ) && $N == z ]]; then train yes; else train no; fi
if [ \( a = b -o c = c -o f = g \) -a d = e ]; then train y; else train n; fi; [[ ! ( a == b || c == c ) ]] || train z
[[ ( a == a ) ]] && train 1; [[ ( a == b && c == c ) || ( d == d && ( e == e ) ) ]] && train 2; [ ")" = ")" ] && train 3
cd /tmp; train $(pwd) $PWD; cd ..; train $PWD
(cd /usr; train $PWD); train $PWD; cd /usr && cd bin; train "$PWD"
pushd /tmp >/dev/null; pushd /usr >/dev/null; train $PWD; popd >/dev/null; train $PWD; X=$(cd /usr && pwd); train $X $PWD
cd /; f() { cd /tmp; }; f; train $PWD; train $(cd ..; cd usr; pwd) $(cd /usr/bin/.. && pwd); cd /usr | cat; train $PWD
A=1; export A=2 RATE=$A; train $A; f() { local x=1 y=$x; train $x $y; }; x=9; f; A=3 RATE=$A train
A=0; A=1 RATE=$A train; A=1 B=$A RATE=$B$A train; RATE=a; RATE=${RATE}b RATE=${RATE}c train
case aB in [[:lower:]]*) train y;; *) train n;; esac
[[ 12 == [[:digit:]][[:digit:]] ]] && train d; [[ "a b" == *[[:space:]]* ]] && train s
printf -v X '%b' 'a\tb\0101\101'; train "$X"; train "$(printf '%q' ab)" $(printf '%c%c' abc d) $(printf '%u %i' 5 -3)
train $(printf '%d' 0x1f) $(printf '%d' 010) $(printf '%5.2f' 3.14159)
train $(printf '%.0e' 0.000001) $(printf '%x %o' 255 8) $(printf '%03d' 7)
X=$(printf '{\"a\": 1}'); train "$X" "$(printf 'x\\ny')" "$(printf '\x41\044')"
train "$(printf '%s=%d,' a 1 b 2)" "$(printf '100%%')"
printf -v X "a\n"; train "[$X]"; printf -v X '%s\n' a b; train "[$X]"
X=$(echo -e 'a\\nb\x41\e'); train "$X"; train "$(echo -e '\101\0101')"
train "$(echo -- a)" "$(echo a -- b)" "$(printf -- '--x=%s' 1)" "$(printf '%s ' a -- b)" "$(basename -- a/b)"
printf 'a' > f; printf 'b' >> f; train $(cat f); echo -n c > f; echo -n d >> f; train "$(cat f)"
echo a > f; > f; echo b >> f; train $(cat f)
echo a > f; rm f; echo b >> f; train $(cat f); { echo a; echo b; } > f; train $(cat f)
for i in 1 2; do echo $i; done > f; train $(cat f)
echo o > f; ( echo q ) > f; train $(cat f); echo r >| f; train $(cat f)
echo s 1> f; train $(cat f); echo t &> f; train $(cat f)
echo o > g; cat g > f; train $(cat f); cat g | tee h >/dev/null; train $(cat h)
echo o > h; echo x >> h; cat h > f; train $(cat f); seq 3 > f; train $(cat f)
f() { echo "no" >&2; echo 5; }; X=$(f 2>/dev/null); train $X
{ echo a >&2; echo b; } > f 2>/dev/null; train $(cat f)
readarray -t A <<< $'a\nb'; train "${A[@]}"; mapfile A <<< $'a\nb'; train "${A[@]}"; read -r X <<< 'a\b'; train "$X"
IFS=, read -r a b c <<< 'x,y z,w,v'; train "$a" "$b" "$c"
IFS=: read -ra A <<< 'x:y z:'; train "${A[@]}"
read -r a b <<< '  p  q r  '; train "$a" "$b"
IFS= read -r a <<< '  p q '; train "$a"; read -r <<< '  p q '; train "$REPLY"
IFS=$'\n' read -r -d '' -a A <<< $'a b\nc'; train "${A[@]}"
train $(basename -s .yaml a/conf.yaml) $(basename a.sh .sh) $(basename /)
train $(basename .sh .sh) $(dirname /data) $(dirname a) $(dirname a/b/) $(dirname /)
train {a..e..2} {e..a..2} {c..a}; declare -u X=abc; X+=d; train $X
declare -l Y=ABC; train $Y; A=(a b c); unset 'A[1]'; train "${A[1]-none}" "${A[1]:+s}"
X=1; { X=2; train $X; } & wait; train $X
X=1; X=3 & wait; train $X; true && X=4 & wait; train $X; ( set -a ); RATE=2; train; train {fd}>log 2> err
N=3; for i in $(seq 1 $N); do L=$i; done; train $L; x=$((1+1)) y=$((x+1)); train $x $y
exec > /dev/null; train a; bash -c 'exec train b'; train c
"""

#: scripts of several lines
LONGER = [
    "X=$(cat <<-E\n\tfoo\n\t\tbar\n\tE\n)\ntrain \"$X\"",
    "X=$(cat <<E\nfoo\n  E\nbar\nE\n)\ntrain \"$X\"",
    "cat > f <<E\nE\ntrain \"[$(cat f)]\"\ncat > f <<'E'\na\n\nE\necho b >> f\ntrain \"$(cat f)\"",
    "read -r -d '' X <<'E'\n a\nb \nE\ntrain \"$X\"\nIFS= read -r -d '' X <<'E'\n a\nb \nE\ntrain \"$X\"",
    "[ 1 = 1 ] &&\n [ 2 = 3 ] || train a\nif [[ 1 == 1 &&\n ( 2 == 3 ||\n 2 == 2 ) ]]; then train b; fi",
]
QUOTES = r"""train $'\x41\u4e2d\101' $'a\'b\\' $"x" 'a\
b' "c\
d" "${N:-'q r'}" ${N:-'q r'} "${N:-"q r"}"
"""

#: what only a machine decides, with what it is about at the end of a command
ASKED = [
    'srun bash -c "cd sub; train -m x --nodes $NOT_HERE"',
    "[ -f /absent ] || X=1; train ${X:-0}",
    "[ -f /absent ] || { X=1; Y=2; }; train $X",
    "[ -f /absent ] && X=1 || X=2; train $X",
    "X=$([ -f /absent ] && echo 1); train $X",
    "X=$(if grep -q word log; then echo 1; fi); train $X",
    "command -v absent > log && X=1; train ${X:-0}",
    "grep -q word log || X=1; train ${X:-0}",
    "which absent || X=1; train ${X:-0}",
    "X=1; read X; train $X",
    "X=1; read X < absent; train $X",
    "X=1; ((Y = (X++) + 1)); train $X",
    "xargs train < words",
    "train $((5 & 3 == 3))",
    'X=$(echo "2^10" | bc); train $X',
    'X=$(bc <<< "2^3"); train $X',
    'X=$(echo "10/4" | bc -l); train $X',
    'X=$(bc -l <<< "1/4"); train $X',
    'X=$(echo "scale=2; 1/4" | bc); train $X',
    'a=5; X=$(echo "a*2" | bc); train $X',
    'X=$(expr 5 \\| 3); train $X',
    'X=$(expr 5 \\& 3); train $X',
    "for i in {1..70}; do S=$i; done; train $S",
    "for i in $(seq 1 100); do L=$i; done; train $L",
    "[[ (a == b) || c == d ]] && X=1; train ${X:-0}",
    "shopt -s extglob; X=aaab; train ${X##+(a)}",
    "case a in [[:punct:]]) X=1;; *) X=2;; esac; train $X",
    "[ -d absent ] && cd /absent; train $PWD",
    'cd "$UNKNOWN"; train $PWD',
    "readarray -d , -t A <<< a,b,c; train ${A[@]}",
    "mapfile -t -n 2 A <<< a; train ${A[@]}",
    "mapfile -t -O 1 A <<< a; train ${!A[@]}",
    "mapfile -t A < absent; train ${#A[@]}",
    "cd /tmp; cd -; train $PWD",
    "read -d , X <<< a,b; train $X",
    "read -n 1 X <<< abc; train $X",
    "read X <<< 'a\\b'; train $X",
    "IFS=, read -r X Y <<< a,b,; train $Y",
    "echo a > f; program > f; train $(cat f)",
    "echo a > f; cat absent > f; train $(cat f)",
    "echo a > f; { program; } > f; train $(cat f)",
    "echo a > f; wget -O f https://host; train $(cat f)",
    "printf -v X '%q' 'a b'; train $X",
    "printf -v X '%.2f' 2.675; train $X",
    "train $((9223372036854775807 + 1))",
    "train $((1 << 64))",
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train").write_text(RECORD)
    (folder / "train").chmod(0o755)
    return folder


SCRIPTS = [*EQUAL.strip().splitlines(), *LONGER, QUOTES]


@pytest.mark.parametrize("script", SCRIPTS, ids=[str(index) for index in range(len(SCRIPTS))])
def test_commands_are_those_that_bash_runs(script: str, programs: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    path = f"{programs}:{os.environ['PATH']}"
    environment = {"PATH": path, "RECORDED": str(recorded), "HOME": "/home/me", "LANG": "C.UTF-8"}
    subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60
    )  # fmt: skip
    there = recorded.read_text()
    for file in tmp_path.iterdir():  # what the script has written is not here when it is read
        file.unlink()
    known = {"HOME": "/home/me", "PWD": str(tmp_path)}
    commands = [item for item in read_script(script, known, tmp_path) if "train" in item.words]
    here = [
        "\t".join([f"RATE={item.environment.get('RATE', '')}", *item.words[item.words.index("train") + 1 :]])
        for item in commands
    ]
    assert "".join(f"{line}\n" for line in here) == there


@pytest.mark.parametrize("script", ASKED)
def test_what_a_machine_decides_is_asked_for(script: str, tmp_path: Path) -> None:
    (command,) = [item for item in read_script(script, {}, tmp_path) if "train" in item.words]
    assert list_unknown(command.words[-1])


def test_a_folder_that_only_the_machine_knows_is_said_by_its_line() -> None:
    (command,) = [item for item in read_script("[ -d a ] &&\ncd /a\ntrain $PWD", {"PWD": "/b"}) if "train" in item.words]
    ((name, _),) = list_unknown(command.words[-1])
    known = {"PWD": "/b", name: "/a"}
    (command,) = [item for item in read_script("[ -d a ] &&\ncd /a\ntrain $PWD", known) if "train" in item.words]
    assert command.words == ("train", "/a")


def test_what_is_not_followed_is_an_error() -> None:
    with pytest.raises(ConfigError, match="names of these variables are not in the script"):
        read_script("export $(cat absent | xargs); train a")
    loops = "for i in {1..64}; do\n" * 3 + "x=$((x+1))\n" + "done\n" * 3
    with pytest.raises(ConfigError, match="more than 10,000 runs"):
        read_script(f"x=0\n{loops}train $x")
    with pytest.raises(ConfigError, match=r"pattern @\(...\) of a case is not read"):
        read_script("case a in @(a|b)) train a;; esac")
