"""Scripts are read as text: variables, arrays, conditions and functions are followed, and nothing is executed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.shell import (
    list_unknown,
    read_flags,
    read_script,
    read_variable,
    request_variables,
)

#: each prints its arguments, one in brackets; what bash makes of them is what is expected
SCRIPTS = {
    "defaults": 'A=${A:-1}; B=${B:-"x y"}; C=${UNSET-}; show $A "$B" $B "$C" ${A:+set}',
    "quotes": """show 'a $b' "c\\"d" e\\ f $'g\\th' "it's" --x='["q","r"]'""",
    "arrays": 'L=(a "b c" $((1+1))); L+=(--d e=f); show "${L[@]}" ${#L[@]} "${L[1]}" "${L[*]}"',
    "arithmetic": "N=4; M=3; show $((N * M + 2**3 / 2 - 7 % 4)) $(( (N + 1) * 2 )) $(((N+M))) $((N > M ? 1 : 0))",
    "cuts": "P=/data/run/model.bin; show ${P##*/} ${P%/*} ${P%.bin}.txt ${P/run/walk} ${P//a/b} ${P:1:4} ${P^^} ${#P}",
    "continued": "show --a 1 \\\n  --b 2 \\\n  # a comment\n",
    "conditions": 'N=2; if [ "$N" -gt 1 ] && [[ "$N" != 3 && $N == [12] ]]; then X=many; elif [ $N = 1 ]; then X=one; '
    "else X=0; fi; show $X",
    "negation": 'if [[ ! -n "" ]]; then show empty; fi; [ -z "a" ] || show full',
    "case": 'case "v2.5" in v1*) show one ;; v2*|v3*) show two ;; *) show other ;; esac',
    "loop": 'R=""; for I in 1 2 "3 4"; do R="$R<$I>"; done; show "$R"',
    "function": 'run() { local X=$1; shift; show "$X" "$@" $#; }; run a "b c" d',
    "append": 'ARGS="--a 1"; ARGS+=" --b 2"; ARGS="$ARGS --c"; show $ARGS',
    "document": "cat > /dev/null <<EOF\nshow not this $(( 1\nEOF\nshow this",
    "substitution": 'show "$(basename /a/b.sh .sh)" $(dirname /a/b/c) "$(echo x y)"',
    "redirection": "show a 2>&1 >/dev/null b; show c",
    "indirect": "NAME=OTHER; OTHER=5; show ${!NAME}",
    "prefix": "A=1 show a",
    "group": "{ X=1; show $X; }; ( X=2; show $X )",
    "quoted default": 'show ${X:-a b} "${X:-a b}" ${X:-"c d"}',
    "hash in word": "show a#b  # c\nshow --x=#3",
    "let": "let N=4*2; let N+=1 M=N; ((K=N*2)); ((K++)); show $N $M $K",
    "printf": 'N=$(printf "%d" 8); printf -v M "%02d-%s" 3 x; show $N $M $(printf "%.2f" 1.5) "$(printf "%s " a b)"',
    "comment between": "show a `# a comment` b $( # another\n) c",
    "document of a variable": 'read -r -d "" ARGS <<EOF\n--a 1\n--b "${X:-2}" \\\n--c\nEOF\nshow $ARGS',
    "quoted document": "read -r -d '' ARGS <<'EOF'\n--a $X\nEOF\nshow $ARGS",
    "here-string": 'read N M <<< "8 9 10"; read K <<< 7; show $N "$M" $K',
    "lines": 'mapfile -t ARGS <<EOF\n--a 1\n--b\nEOF\nshow "${ARGS[@]}" ${#ARGS[@]}',
    "read array": 'read -r -a ARGS <<< "a b c"; show "${ARGS[1]}" ${#ARGS[@]}',
    "arguments": 'set -- --a "1 2"; show "$@" $# "$2"; shift; show "$@"',
    "map": 'declare -A C=([n]=8 [m]="a b"); C[k]=3; show ${C[n]} "${C[m]}" ${C[k]} ${#C[@]}',
    "calculator": 'N=$(echo "2*512+1" | bc); M=$(bc <<< "3*4"); show $N $M',
    "text of a document": 'T=$(cat <<EOF\na "b" $((1+1))\nEOF\n); show "$T"',
    "eval": 'CMD="show a"; eval "$CMD" b; eval "N=3; show \\$N"',
    "quotes of a document": 'read -r -d \'\' T <<EOF\nsay "hi" it\'s \\$HOME\nEOF\nshow "$T"',
    "arrays without items": 'E=(); show a "${E[@]}" "${E[@]:1}" "$@" b"${E[@]}"; show "${E[*]}" "$*"; show ${E[@]}',
    "all as one word": 'set -- a "b c"; show "$*" "${*}" "${@}"; A=(x "y z"); show "${A[*]}"',
    "defaults of arrays": 'E=(); A=(x y); show "${E[@]:-none}" "${A[@]:-none}" "${@:-args}" ${A[@]:+set} "${E[@]:+set}"',
    "replaced patterns": "P=/a/b.c/d; show ${P/[a-c]/_} ${P//[^\\/]/x} ${P/#\\/a/Z} ${P/%d/Z} ${P/*./Y} ${P/#d/no} ${P//./_}",
    "put before each item": 'A=(a b); P=x#y%; show "${A[@]/#/--k=}" "${A[@]/%/.py}" ${P/#} ${P/\\#/z} ${P/y\\%/z} ${P//#/z}',
    "last items": 'A=(a b c d); N=2; show ${A[@]: -2} ${A[@]::1} ${A[@]:N-1:N}; set -- p q r; show ${@: -1} ${@:2:1}',
    "words between commas": 'IFS=,; X=a,b,,c; A=(p "q,r"); show $X "$X" ${A[*]} "${A[*]}" "${A[@]}"; Y=${A[*]}; show "$Y"',
    "words between commas and blanks": "IFS=' ,'; X=' a , b  c,'; show $X; unset IFS; show $X; IFS=$'\\n'; X='a b'; show $X",
    "words of brackets": 'A=(1 2 3); D=$(IFS=,; echo "${A[*]}"); show $D "${A[*]}"; set -- a b; IFS=-; show "$*"',
    "towards zero": "show $((-7 / 2)) $((-7 % 3)) $((7 / -2)) $((7 % -3)) $((-(7 / 2)))",
    "numbers with a base": "X=08; show $((10#$X+1)) $((10#007)) $((2#101))",
    "braces": 'X=v; show {1,2}x pre{a,b}post {1..3} {3..1} {01..03} a{b,{c,d}}e "{a,b}" {a:1} {a} ${X}{1,2} \\{a,b}',
    "braces of arrays": 'A=(d/{a,b}.json {x,"y z"}); show "${A[@]}"; R=""; for F in p{1,2} q; do R+=$F; done; show $R',
    "home": 'HOME=/h; A=~/x; show ~/y ~ "~/z" a~ --k=~/w $A',
    "items by number": 'A=(); for I in 0 1 2; do A[$I]=v$I; done; A[1]+=w; A[-1]=last; show "${A[@]}" ${!A[@]}',
    "removed item": "A=(a b c); unset 'A[-1]'; show ${A[@]}; declare -A M=([k]=1 [l]=2); unset 'M[k]'; show ${#M[@]}",
    "removed in brackets": "A=(a b); M=(c)\n( unset 'A[1]' 'M[0]'; show ${A[@]} ${#M[@]} ); show ${A[@]} $M",
    "names of a function": 'X=out; Y=out; f() { local X=$X-in Y; Y=in; Z=in; show $X $Y; }; f; show $X $Y $Z',
    "whole numbers": "declare -i N=3; N+=4; N=N*2; show $N",
    "return": 'f() { [ -n "$1" ] && return 0; show ran; return; show no; }; f x; f ""; f; show end',
    "return of a status": "f() { return 1; }; g() { return 0; }; if f; then show no; elif g; then show yes; fi",
    "exit": "show a; exit 0; show no",
    "exit of brackets": "( exit 0; show no ); show a; f() { exit; }; f; show no",
    "break and continue": 'R=""; for I in a b c d e; do [ $I = b ] && continue; [ $I = d ] && break; R+=$I; done; show $R',
    "break of two loops": 'R=""; for I in 1 2; do for J in a b; do [ $J = b ] && break 2; R+=$I$J; done; R+=.; done; show $R',
    "continue of two": 'R=""; for I in 1 2; do for J in a b; do [ $J = b ] && continue 2; R+=$I$J; done; R+=.; done; show $R',
    "letters in braces": "show {a..c} x{C..A}",
    "echo with escapes": 'show "$(echo -e "a\\tb")" "$(echo -n x)" "$(echo a -e)"',
    "arguments of a function": 'set -- p q r; f() { show "${1:-one}" "${2-two}" "$#" "$3"; }; f a; f; show $3',
    "group of a document": "{ show a; } <<EOF\nb\nEOF\nshow c",
}


def run_bash(script: str, tmp_path: Path) -> list[tuple[str, ...]]:
    """What bash passes to `show`: the function is a command that writes its arguments into a file."""
    log = tmp_path / "log"
    prefix = f'show() {{ for a in "$@"; do printf "%s\\0" "$a" >> {log}; done; printf "\\1\\0" >> {log}; }}\n'
    environment = {"PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", prefix + script], check=True, env=environment, capture_output=True, timeout=patient(20))
    words = log.read_text().split("\0")[:-1]
    commands: list[tuple[str, ...]] = []
    current: list[str] = []
    for word in words:
        if word == "\1":
            commands.append(tuple(current))
            current = []
        else:
            current.append(word)
    return commands


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash to compare with")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_that_bash_passes(name: str, tmp_path: Path) -> None:
    read = [command.words[1:] for command in read_script(SCRIPTS[name]) if command.words[0] == "show"]
    assert read == run_bash(SCRIPTS[name], tmp_path)


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    script = f"touch {target}\nX=$(touch {target})\n`touch {target}`\nshow $X $(echo $(touch {target})) <(touch {target})"
    read_script(script)
    assert not target.exists()


def test_a_value_that_only_the_machine_knows_is_requested_by_name_and_line() -> None:
    (command,) = read_script("A=1\nDIR=$DATA_ROOT/x\ntrain --data $DIR --a $A")
    assert list_unknown(list(command.words)) == [("DATA_ROOT", 2)]
    error = request_variables(list_unknown(list(command.words)))
    assert str(error) == "line 2: the value of DATA_ROOT is not in the script; say it with --set DATA_ROOT=VALUE"
    (command,) = read_script('KIND=${KIND:-$(python3 -c "import x" && echo a || echo b)}\ntrain $KIND')
    assert list_unknown(list(command.words)) == [("KIND", 1)]
    (command,) = read_script("DIR=$DATA_ROOT/x\ntrain $DIR", {"DATA_ROOT": "/d"})
    assert command.words == ("train", "/d/x")


@pytest.mark.parametrize("change", ["/\\*/-", '//"*"/-', "//[[:digit:]]", "%'?'"])
def test_a_pattern_that_is_not_followed_is_requested(change: str) -> None:
    (command,) = read_script(f"X='a*1?'\ntrain ${{X{change}}}")
    assert list_unknown(list(command.words)) == [("X", 2)]


def test_a_placeholder_is_requested_as_a_value_that_is_not_there() -> None:
    values = 'A="your model ckpt path"\nB=your_data_path\nD="your tokenizer.model file path"\nC="Your task: answer"\n'
    script = f'{values}train --a $A --b $B --d $D --c "$C"'
    (command,) = read_script(script)
    assert [name for name, _ in list_unknown(list(command.words))] == ["A", "B", "D"]
    (known,) = read_script(script, {"A": "/m", "B": "/d", "D": "/t"})
    assert known.words == ("train", "--a", "/m", "--b", "/d", "--d", "/t", "--c", "Your task: answer")


def test_a_value_of_the_user_is_not_changed_by_the_script() -> None:
    (command,) = read_script("N=4\nexport N\ntrain $N", {"N": "8"})
    assert command.words == ("train", "8") and command.environment == {"N": "8"}


def test_what_an_unknown_condition_decides_is_unknown() -> None:
    (command,) = read_script("if [ -f x ]; then A=1; B=2; else A=3; B=2; fi\ntrain $A $B")
    assert command.words[2] == "2" and list_unknown(command.words[1])
    first, second = read_script("if nvidia-smi; then train a; else train b; fi")[1:]
    assert first.uncertain and second.uncertain


def test_what_is_requested_is_the_variable_of_the_condition() -> None:
    script = 'L=(a)\ncase "${DEVICE}" in\n  npu) L+=(b) ;;\nesac\nif [ "$MODE" = x ]; then Y=1; fi\ntrain ${L[@]} $Y'
    (command,) = read_script(script)
    assert [name for name, _ in list_unknown(list(command.words))] == ["DEVICE", "MODE"]
    (command,) = read_script(script, {"DEVICE": "npu", "MODE": "x"})
    assert command.words == ("train", "a", "b", "1")


def test_the_environment_of_a_command_is_what_is_exported_or_in_front_of_it() -> None:
    (command,) = read_script("export A=1 B=2\nC=3\nD=4 train")
    assert command.environment == {"A": "1", "B": "2", "D": "4"}
    assert read_variable(command.environment, "D") == "4" and read_variable(command.environment, "X", "d") == "d"
    (command,) = read_script("export P=$LIBS:/x\ntrain")
    with pytest.raises(ConfigError, match="--set LIBS=VALUE"):
        read_variable(command.environment, "P")


def test_a_sourced_file_is_followed_where_it_is_here(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL=(--layers 2\n  --width 8)\n")
    script = 'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    script += 'source "${DIR}/models/small.sh"\ntrain ${MODEL[@]}'
    assert read_script(script, folder=tmp_path)[-1].words == ("train", "--layers", "2", "--width", "8")
    assert list_unknown(list(read_script(script)[-1].words))


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("train 'a", "No closing quotation"),
        ('train "a\n', "No closing quotation"),
        ("train $(a", "is not closed"),
        ("if true; then train", "ends before elif or else or fi"),
        ("for x in a b; train; done", "'do' is missing"),
    ],
)
def test_a_script_that_has_no_end_is_one_sentence(script: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_script(script)
    assert sentence in str(caught.value)


def test_flags_are_read_as_argparse_reads_them() -> None:
    options, leading = read_flags(["rlhf", "--a-b", "1", "-0.5", "--c=2", "--d", "--a_b", "3"])
    assert options == {"a_b": ["3"], "c": ["2"], "d": []} and leading == ["rlhf"]


#: form -> a script that runs `train --n 8 --x "a b"` in another shell, or on another machine
INNER = {
    "bash -c": """bash -c 'train --n 8 --x "a b"'""",
    "login shell": """/bin/bash -lc "train --n 8 --x 'a b'" """,
    "exported": """export N=8\nbash -c 'train --n $N --x "$1"' _ "a b" """,
    "ssh": """ssh -p 22 user@node "cd /w && train --n 8 --x 'a b'" """,
    "document of ssh": "N=8\nssh node <<EOF\ntrain --n $N --x 'a b'\nEOF",
    "docker exec": """docker exec -it box bash -c "train --n 8 --x 'a b'" """,
    "docker run": """docker run --rm -v /a:/a image:1 /bin/sh -c "train --n 8 --x 'a b'" """,
    "document of docker": "docker exec -i box bash <<'EOF'\nN=8\ntrain --n $N --x 'a b'\nEOF",
    "srun": """srun --nodes 2 bash -c "train --n 8 --x 'a b'" """,
    "nested": """ssh node "docker exec box bash -c \\"train --n 8 --x 'a b'\\"" """,
    "written file": "cat > run.sh <<'EOF'\ntrain --n $1 --x 'a b'\nEOF\nchmod +x run.sh\nbash run.sh 8",
    "written in front": "cat <<'EOF' > run.sh\ntrain --n 8 --x 'a b'\nEOF\n./run.sh",
    "tee": "tee run.sh <<'EOF'\ntrain --n 8 --x 'a b'\nEOF\nsh run.sh",
    "shell of a document": "bash <<EOF\ntrain --n 8 --x 'a b'\nEOF",
}


@pytest.mark.parametrize("form", INNER)
def test_commands_that_another_shell_or_machine_runs_are_read(form: str) -> None:
    commands = [command.words for command in read_script(INNER[form], {}) if command.words[0] == "train"]
    assert commands == [("train", "--n", "8", "--x", "a b")]


def test_a_script_that_a_script_calls_is_read_and_has_exported_variables_alone(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("train --n $N --m ${M:-none} --x $1")
    (command,) = read_script("export N=8\nM=9\nbash run.sh y", {}, tmp_path)
    assert command.words == ("train", "--n", "8", "--m", "none", "--x", "y")


def test_a_machine_elsewhere_has_no_variables_of_the_script() -> None:
    (command,) = read_script("export N=8\nssh node 'train --n $N'")
    assert list_unknown(list(command.words)) == [("N", 1)]


def test_folder_and_variables_of_brackets_end_with_them() -> None:
    inner, outer = read_script("A=1\n(cd sub && A=2 && export B=3 && train --n $A)\ntrain --n $A")[-2:]
    assert (inner.words[-1], inner.directory, inner.environment) == ("2", "sub", {"B": "3"})
    assert (outer.words[-1], outer.directory, outer.environment) == ("1", "", {})
    (kept,) = read_script("{ cd sub; A=2; }\ntrain --n $A")[-1:]
    assert (kept.words[-1], kept.directory) == ("2", "sub")


def test_the_first_run_of_a_loop_is_read_and_says_so() -> None:
    script = "for m in a b c; do\n  train --m $m\ndone\nfor n in 1; do train --n $n; done"
    first, second = read_script(script)
    assert (first.words, second.words) == (("train", "--m", "a"), ("train", "--n", "1"))
    assert first.loop == "run 1 of 3 of the loop over m in line 1: m=a; --set m=VALUE imports another" and not second.loop
    (first, _) = read_script(script, {"m": "b"})
    assert (first.words, first.loop) == (("train", "--m", "b"), "")


def test_a_script_that_calls_itself_ends() -> None:
    assert len(read_script("cat > a.sh <<'EOF'\nbash a.sh\ntrain\nEOF\nbash a.sh")) < 100
    with pytest.raises(ConfigError, match="runs more than 64 others"):
        read_script("cat > a.sh <<'EOF'\nbash a.sh\nbash a.sh\nEOF\nbash a.sh")
