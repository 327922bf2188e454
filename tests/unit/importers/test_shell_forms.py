"""Ways of writing one command in a shell script: each is read as the same command, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import ImportSettings
from mindspeed_rl.importers.shell import list_unknown, read_script

OPTIONS = "--model m --reward_funcs a b --beta 0.01"
COMMAND = f"swift rlhf {OPTIONS}"
N = "NPROC_PER_NODE=8"
FILES = {"env.sh": "BETA=0.01\n", "given.sh": "B=$1\n", "keeps.sh": "C=$1\n"}


def _with_beta(text: str) -> str:
    return COMMAND.replace("0.01", text)


SAME = {
    "source": f"export {N}\nsource ./env.sh\n{_with_beta('$BETA')}",
    "source with arguments": f"export {N}\n. ./given.sh 0.01\n{_with_beta('$B')}",
    "source without arguments keeps the script's": f"set -- 0.01\n. ./keeps.sh\n{N} {_with_beta('$C')}",
    "arguments are as before after a sourced file": f"set -- 0.01\n. ./given.sh 2\n{N} {_with_beta('$1')}",
    "slice of an array": f'A=(x y {OPTIONS})\n{N} swift rlhf "${{A[@]:2}}"',
    "slice with a length": f'A=(x {OPTIONS} y)\n{N} swift rlhf "${{A[@]:1:7}}"',
    "slice of the arguments": f'set -- x {OPTIONS}\n{N} swift rlhf "${{@:2}}"',
    "change of each item": f'A=({OPTIONS.replace("m ", "mx ")})\n{N} swift rlhf "${{A[@]/mx/m}}"',
    "array that may be empty": f'A=({OPTIONS})\nE=()\n{N} swift rlhf "${{A[@]}}" ${{E[@]+"${{E[@]}}"}}',
    "length of an array": f"A=(1 2 3 4 5 6 7 8)\nNPROC_PER_NODE=${{#A[@]}} {COMMAND}",
    "array that grows": f'declare -a A\nfor w in {OPTIONS}; do A+=("$w"); done\n{N} swift rlhf "${{A[@]}}"',
    "array that is read between commas": f'IFS=, read -ra A <<< "x,0.01"\n{N} {_with_beta("${A[1]}")}',
    "variables that are read between colons": f"IFS=: read A B <<< 'x:0.01'\n{N} {_with_beta('$B')}",
    "first number of seq": f"for n in $(seq 8 8 16); do\nNPROC_PER_NODE=$n {COMMAND}\ndone",
    "last number of seq": f"NPROC_PER_NODE=$(seq 8 8) {COMMAND}",
    "range in braces": f"for n in {{8..16..8}}; do\nNPROC_PER_NODE=$n {COMMAND}\ndone",
    "list in braces": f"for n in {{8,16}}; do\nNPROC_PER_NODE=$n {COMMAND}\ndone",
    "associative array": f"declare -A O=([beta]=0.01)\n{N} {_with_beta('${O[beta]}')}",
    "here-document of a shell": f"bash <<EOF\n{N} {COMMAND}\nEOF",
    "quoted here-document": f"bash <<'EOF'\n{N} {COMMAND}\nEOF",
    "here-document of ssh": f"ssh host <<EOF\n{N} {COMMAND}\nEOF",
    "another here-document before": f"python - <<EOF\nimport os\nEOF\n{N} {COMMAND}",
    "bash -lc": f"bash -lc '{N} {COMMAND}'",
    "env and sh -c": f"env {N} sh -c '{COMMAND}'",
    "env": f"env -u OTHER {N} {COMMAND}",
    "docker run": f"docker run --rm -e {N} image bash -c '{COMMAND}'",
    "docker run with equals": f"docker run --rm --env={N} image bash -c '{COMMAND}'",
    "docker exec": f"docker exec -e {N} box {COMMAND}",
    "podman": f"podman exec --env {N} box bash -c '{COMMAND}'",
    "mpirun": f"mpirun -np 1 -x {N} {COMMAND}",
    "srun": f"srun --nodes 1 --export=ALL,{N} {COMMAND}",
    "kubectl": f"kubectl exec pod -- bash -c '{N} {COMMAND}'",
    "screen": f"screen -dmS name bash -c '{N} {COMMAND}'",
    "nohup setsid env": f"nohup setsid env {N} {COMMAND} > log 2>&1 &",
    "ssh": f"ssh -p 22 root@host '{N} {COMMAND}'",
    "time": f"time {N} {COMMAND}",
    "time -p": f"time -p {N} {COMMAND}",
    "exec": f"export {N}\nexec {COMMAND}",
    "let": f"let K=7; let K++\nNPROC_PER_NODE=$K {COMMAND}",
    "arithmetic step": f"K=4; ((K+=4))\nNPROC_PER_NODE=$K {COMMAND}",
    "printf -v": f'printf -v B "%s" 0.01\n{N} {_with_beta("$B")}',
    "backticks": f"B=`echo 0.01`\n{N} {_with_beta('$B')}",
    "nested substitution": f"B=$(echo $(echo 0.01))\n{N} {_with_beta('$B')}",
    "set --": f'set -- {OPTIONS}\n{N} swift rlhf "$@"',
    "shift": f"set -- x {OPTIONS}\nshift\n{N} swift rlhf $*",
    "indirection": f"X=B; B=0.01\n{N} {_with_beta('${!X}')}",
    "default that is assigned": f": ${{B:=0.01}}\n{N} {_with_beta('$B')}",
    "case in one line": f"case x in x) B=0.01;; *) B=2;; esac\n{N} {_with_beta('$B')}",
    "case of a variable in one line": f"M=y; case $M in x) B=2 ;; y|z) B=0.01 ;; esac\n{N} {_with_beta('$B')}",
    "case with in on a line of its own": f"case x\nin\n(x) B=0.01;;\nesac\n{N} {_with_beta('$B')}",
    "and": f"cd folder && {N} {COMMAND}",
    "or": f"{N} {COMMAND} || exit 1",
    "subshell": f"(export {N}; {COMMAND})",
    "group": f"{{ export {N}; {COMMAND}; }} 2>&1 | tee log",
    "trap": f"trap 'kill 0' EXIT\n{N} {COMMAND}",
    "function with an array of its own": f'f() {{\nlocal a=("$@")\n{N} swift rlhf "${{a[@]}}"\n}}\nf {OPTIONS}',
    "comment at the end": f"{N} {COMMAND} # --beta 5",
    "quotes": f"{N} {COMMAND.replace('--model m', chr(39) + '--model' + chr(39) + ' $' + chr(39) + 'm' + chr(39))}",
}


@pytest.mark.parametrize("form", SAME)
def test_a_form_is_the_same_command(form: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    found = [command for command in read_script(SAME[form], {}, tmp_path) if "swift" in command.words]
    assert len(found) == 1
    words = found[0].words
    assert words[words.index("swift") :] == tuple(COMMAND.split())
    assert found[0].environment["NPROC_PER_NODE"] == "8"
    assert not found[0].uncertain


@pytest.mark.parametrize(
    "text",
    [
        f"B=$(awk 'BEGIN{{print 0.01}}')\n{_with_beta('$B')}",
        f"if [ -f /absent/x ]; then B=1; else B=2; fi\n{_with_beta('$B')}",
        f"for b in $(ls runs); do\n{_with_beta('$b')}\ndone",
    ],
)
def test_what_only_a_machine_knows_is_marked_and_asked_for(text: str) -> None:
    (command,) = [item for item in read_script(text, {}) if "swift" in item.words]
    assert list_unknown(command.words[-1])


@pytest.mark.parametrize("text", [f'{COMMAND} "', "case x y) A=1;; esac", "case x in x) A=1", "case"])
def test_half_a_construct_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        read_script(text, {})


#: ways of running the script next to this one with two options, one of which has no word without a hyphen
CALLS = {
    "bash": "bash other.sh {}",
    "its own folder": 'bash "$(dirname "$0")/other.sh" {}',
    "its own folder by an expansion": "bash ${{BASH_SOURCE[0]%/*}}/other.sh {}",
    "a variable for its own folder": 'H="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"\nexec bash "${{H}}/other.sh" {}',
    "exec": "exec ./other.sh {}",
    "an array": 'A=({})\nexec bash other.sh "${{A[@]}}" "$@"',
    "arguments": 'set -- {}\nbash other.sh "$@"',
    "options of the shell": "bash -euo pipefail other.sh {}",
    "env": "/usr/bin/env bash other.sh {}",
    "nohup": "nohup bash other.sh {} > log 2>&1 &",
    "timeout": "timeout 60 sudo -E bash other.sh {}",
    "condition": "if ! bash other.sh {}; then exit 1; fi",
    "folder": "cd sub && bash ../other.sh {}",
    "pushd": "pushd sub > /dev/null\nsh ../other.sh {}",
    "another folder": "bash sub/up.sh {}",
    "source": "source ./other.sh {}",
    "source from another folder": ". sub/sourced.sh {}",
    "text of bash -c": "bash -c 'bash other.sh \"$@\"' _ {}",
    "nohup and bash -c": "nohup bash -c 'bash other.sh {}' &",
}


@pytest.mark.parametrize("way", CALLS)
def test_a_script_that_another_one_calls_gets_its_variables_and_words(way: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "other.sh").write_text('#!/bin/bash\npython3 -m trainer --steps ${STEPS:-1} "$@"\n')
    (tmp_path / "sub" / "up.sh").write_text('exec bash "$(dirname "$0")/../other.sh" "$@"\n')
    (tmp_path / "sub" / "sourced.sh").write_text('. "$(dirname "${BASH_SOURCE[0]}")/../other.sh" "$@"\n')
    text = "export STEPS=5\n" + CALLS[way].format("--flag --size 8")
    (found,) = [command for command in read_script(text, {}, tmp_path) if "trainer" in command.words]
    assert [word for word in found.words if word] == ["python3", "-m", "trainer", "--steps", "5", "--flag", "--size", "8"]


def test_a_loop_over_a_called_script_has_all_commands_of_its_first_run(tmp_path: Path) -> None:
    (tmp_path / "other.sh").write_text('echo "starts"\nfor k in 3 4; do\npython3 -m trainer $1 $k\ndone\npython3 -m after $1\n')
    found = read_script("for n in 1 2; do\nbash other.sh $n\ndone", {}, tmp_path)
    assert [command.words[2:] for command in found if command.words[0] == "python3"] == [("trainer", "1", "3"), ("after", "1")]


def test_a_called_script_is_found_from_the_root_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "examples" / "deep").mkdir(parents=True)
    (tmp_path / "examples" / "other.sh").write_text("python3 -m trainer --a $A\n")
    (found,) = read_script("A=1 bash examples/other.sh", {}, tmp_path / "examples" / "deep")
    assert found.words[-2:] == ("--a", "1")


SWIFT = "swift sft --model m --dataset d.jsonl --train_type full --max_steps 4 --max_length 512"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("bash absent.sh --x 1", "line 1 calls absent.sh, which is not here"),
        ('exec "$(dirname "$0")/absent.sh"', r"line 1 calls ./absent.sh, which is not here"),
        ("source absent.sh", "line 1 sources absent.sh, which is not here, and what it sets is part of the run"),
        ("bash $ROOT/absent.sh", "by the value of ROOT, which is not in the script; say it with --set ROOT=VALUE"),
    ],
)
def test_a_script_that_is_not_here_is_asked_for_by_name(line: str, sentence: str, tmp_path: Path) -> None:
    settings = ImportSettings(devices=1, folder=tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        import_command(PROJECTS["swift"], line, settings)


def test_a_sourced_file_that_is_not_here_is_never_skipped(tmp_path: Path) -> None:
    settings = ImportSettings(devices=1, folder=tmp_path)
    with pytest.raises(ConfigError, match="line 1 sources own_env.sh, which is not here"):
        import_command(PROJECTS["swift"], f"source own_env.sh\n{SWIFT}", settings)
    # what prepares a machine is none of the run's, and what is called beside the training is named
    prepared = import_command(PROJECTS["swift"], f"source /usr/local/Ascend/set_env.sh\nbash fetch.sh\n{SWIFT}", settings)
    assert prepared.translated["line 2"] == "line 2 calls fetch.sh, which is not here: its commands are not read"


@pytest.mark.parametrize(
    "text",
    [
        "for n in {1..%s}; do :; done" % ("9" * 5000),
        "N=$(seq %s)" % ("9" * 5000),
        "N=$(printf '%d' inf)",
        "N=$(printf '%999999999999d' 1)",
        "N=$(printf '%.999999999f' 1)",
    ],
)
def test_endless_numbers_and_formats_are_texts(text: str) -> None:
    (command,) = [item for item in read_script(f"{text}\n{COMMAND}", {}) if "swift" in item.words]
    assert command.words[command.words.index("swift") :] == tuple(COMMAND.split())


@pytest.mark.parametrize(
    "line",
    [
        "sed -i 's/m/n/' given.yaml",
        "echo 'learning_rate: 7e-5' >> given.yaml",
        "yq -i '.learning_rate = 3e-5' ./given.yaml",
        "cp other.yaml given.yaml",
        "envsubst < template.yaml > given.yaml",
        "cat > given.yaml <<EOF\nlearning_rate: 7e-5\nEOF",
        "python - <<EOF\nimport yaml\nyaml.safe_dump({}, open('given.yaml', 'w'))\nEOF",
        "{ echo 'learning_rate: 7e-5'; } > given.yaml",
        "(echo 'learning_rate: 7e-5') > given.yaml",
        "for rate in 1 2; do echo $rate; done > given.yaml",
        "f() { date; }; f > given.yaml",
        "write >| given.yaml",
        "write 1> given.yaml",
        "write &> given.yaml",
        "write >& given.yaml",
        "write | tee given.yaml",
        "write | sudo tee -a given.yaml",
        "wget -q -O given.yaml https://host/given.yaml",
        "curl https://host/given.yaml -o given.yaml",
        "python make.py --output_file given.yaml",
        "python make.py --out=given.yaml",
        "rm given.yaml",
        "> given.yaml",
        "echo a >> $PWD/given.yaml",
        "mv given.yaml other.yaml",
        "mkdir -p sub; cd sub; echo a > ../given.yaml; cd ..",
        "(cd sub; echo a > ../given.yaml)",
        "mkdir sub; cd sub; echo a > given.yaml",
    ],
)
def test_a_file_of_options_that_the_script_changes_is_never_read_as_it_was(line: str, tmp_path: Path) -> None:
    (tmp_path / "given.yaml").write_text("model_name_or_path: m\n")
    settings = ImportSettings(devices=8, folder=tmp_path, variables={"PWD": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"changes (\.\./)?given.yaml before the command reads it"):
        import_command(PROJECTS["trl"], f"{line}\ntrl sft --config given.yaml --dataset_name d", settings)


def test_the_first_run_of_a_loop_has_all_commands_of_a_line() -> None:
    functions = "f() { train a $1; train b $1; }; for i in 1 2; do f $i; done; train c"
    for script in ("for i in 1 2; do echo $i; train a $i; train b $i; done; train c", functions):
        commands = [command.words for command in read_script(script) if command.words[0] == "train"]
        assert commands == [("train", "a", "1"), ("train", "b", "1"), ("train", "c")]


@pytest.mark.parametrize("options", ["--config_path own --config_name mine", "--config_name=mine.yaml --config_path=own"])
def test_a_file_that_a_program_finds_by_two_options_is_compared_too(options: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("a: 1\n")
    command = f"cd own\necho 'a: 2' > mine.yaml\ncd ..\npython examples/start_sft_pipeline.py {options}"
    with pytest.raises(ConfigError, match=r"line 2 changes \S*own/mine.yaml before the command reads it"):
        import_command(PROJECTS["roll"], command, ImportSettings(devices=8, folder=tmp_path))


def test_files_of_other_programs_than_the_training_may_change(tmp_path: Path) -> None:
    for name in ("rows.json", "prepare.yaml"):
        (tmp_path / name).write_text('{"a": 1}\n')
    script = "echo '{}' > rows.json\necho 'b: 1' > prepare.yaml\npython prepare.py rows.json --config prepare.yaml\n"
    settings = ImportSettings(devices=8, folder=tmp_path, accepted=frozenset(["trained_tokens"]))
    training = "trl sft --dataset_name d --model_name_or_path m --learning_rate 3e-5"
    assert import_command(PROJECTS["trl"], script + training, settings).tree["actor_config"]["lr"] == 3e-5


def test_a_file_of_options_that_the_script_writes_as_it_is_here_is_read(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nlearning_rate: 3.0e-05\n"
    (tmp_path / "given.yaml").write_text(text)
    script = f"cat > given.yaml <<EOF\n{text}EOF\ntrl sft --config given.yaml --dataset_name d > given.log"
    settings = ImportSettings(devices=8, folder=tmp_path, accepted=frozenset(["trained_tokens"]))
    assert import_command(PROJECTS["trl"], script, settings).tree["actor_config"]["lr"] == 3e-5


@pytest.mark.parametrize(
    ("project", "command"),
    [
        ("trl", "trl sft --dataset_name d --model_name_or_path "),
        ("roll", "python examples/start_sft_pipeline.py --config_path own --config_name "),
        ("areal", "python mine.py --config own.yaml name="),
        ("easyr1", "python3 -m verl.trainer.main worker.actor.model.model_path="),
        ("swift", "swift sft --dataset d.jsonl --model "),
    ],
)
def test_a_script_with_two_trainings_is_imported_for_neither(project: str, command: str, tmp_path: Path) -> None:
    settings = ImportSettings(devices=8, folder=tmp_path)
    for script in (f"{command}a\n{command}b", f"[ -f more ] && {command}a"):
        with pytest.raises(ConfigError, match="several trainings, or one that may not run"):
            import_command(PROJECTS[project], script, settings)
