"The command line as people meet it: what is run how, misspelt options, names that launchers take, paths of every kind."
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as launcher
from test_train import zygote  # noqa: F401
from zygote import search_path

import nsa_nb
from nsa_nb import generate
from nsa_nb.artifacts import user_path
from nsa_nb.cli import run, usage, version_line
from nsa_nb.config import load_config
from nsa_nb.errors import UsageError
from nsa_nb.options import config_overrides
from nsa_nb.schema import FIELDS, RunConfig
from nsa_nb.section import PATHS
from nsa_nb.train import train
from nsa_nb.verbs import DATA_COMMANDS, VERBS, train_parser

EVERY = [*([v] for v in VERBS if v != "data"), *(["data", c] for c in DATA_COMMANDS), ["bench", "tune"]]
EVERY.remove(["completion"])      # it has no options
each_verb = pytest.mark.parametrize("verb", EVERY, ids=" ".join)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w.-])")


def said(capsys, *words) -> str:
    "What a verb prints of itself."
    with pytest.raises(SystemExit): run([*words, "--help"])
    return capsys.readouterr().out


def options_in(text: str) -> list[str]:
    "The options that a help text names; the lines about sections hold examples."
    return sorted(set(OPTION.findall(text.split("each option of a section")[0])))


def refusal(*words) -> str:
    with pytest.raises(UsageError) as e: run(list(words))
    return str(e.value)


# ---- what is run how

PACKAGE = Path(nsa_nb.__file__).parent
MODULES = sorted(".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py")
                 if not p.stem.startswith("__"))
RUN = {"cli", "train"}
FORKS = """
import json, os, runpy, sys
def one(module, word):
    r, w = os.pipe()
    if os.fork() == 0:
        os.dup2(w, 1); os.dup2(w, 2)
        sys.argv, sys.orig_argv = ["-m", word], ["python", "-m", module, word]
        if module != "nsa_nb": sys.modules.pop(module, None)
        try: runpy._run_module_as_main(module); code = 0
        except SystemExit as e: code = e.code or 0
        sys.stdout.flush(); sys.stderr.flush(); os._exit(code)
    os.close(w)
    with open(r) as f: text = f.read()
    return os.waitstatus_to_exitcode(os.wait()[1]), text
first, then = json.loads(sys.argv[1])
found = {m: one(m, word) for m, word in first.items()}
import nsa_nb.cli, nsa_nb.train
print(json.dumps(found | {m: one(m, word) for m, word in then.items()}))
"""

@pytest.fixture(scope="module")
def as_modules():
    "module → exit code and output of `python -m MODULE WORD`, each a fork of one process: imports cost seconds."
    first = {f"nsa_nb.{m}": "--bad" for m in MODULES if m not in RUN}
    then = {"nsa_nb": "trian", "nsa_nb.cli": "trian", "nsa_nb.train": "--stepz"}      # forked after the imports
    done = subprocess.run([sys.executable, "-c", FORKS, json.dumps([first, then])],
                          env=os.environ | {"PYTHONPATH": search_path()}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_module_runs_a_verb_or_is_refused(as_modules):
    for module in MODULES:
        code, text = as_modules[f"nsa_nb.{module}"]
        assert code == 2 and text.startswith("error: ") and "Traceback" not in text, (module, code, text)
        if module in RUN: continue
        assert text.startswith(f"error: python -m nsa_nb.{module} does nothing")
        assert "python -m nsa_nb" in text.split("does nothing")[1]
    for module, word in (("nsa_nb", "unknown verb 'trian'"), ("nsa_nb.cli", "unknown verb 'trian'"),
                         ("nsa_nb.train", "unknown option '--stepz'")):
        assert as_modules[module][0] == 2 and f"error: {word}: did you mean" in as_modules[module][1]


def test_the_refusals_name_commands_that_are_there(as_modules):
    command = re.compile("the command is nsa ([a-z ]+?) --bad")
    named = {m: found[1] for m, (_, text) in as_modules.items() if (found := command.search(text))}
    wanted = (
        "preflight", "monitoring.report", "bench.kernels", "bench.command", "audit", "config", "bench.tune",
        "bootstrap", "data_smoke",
    )
    assert {f"nsa_nb.{m}" for m in wanted} <= named.keys()
    for command in named.values():
        verb, *sub = command.split()
        known = dict(data=DATA_COMMANDS, bench=("kernels", "tune"))
        assert verb in VERBS and (not sub or sub[0] in known[verb]), command


def test_modules_with_a_main_guard_are_those_that_run():
    source = {m: PACKAGE.joinpath(*m.split(".")).with_suffix(".py").read_text() for m in MODULES}
    assert {m for m, text in source.items() if 'if __name__ == "__main__"' in text} == RUN


def test_run_as_a_module_from_outside():
    "Once without forks: the package sees what Python was told before the module is found."
    done = subprocess.run([sys.executable, "-um", "nsa_nb.monitoring.report", "--dir", "x"],
                          env=os.environ | {"PYTHONPATH": search_path()}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "the command is nsa report --dir x" in done.stderr


def test_help_and_version(capsys):
    for words in (["--version"], ["-V"], ["version"]):
        assert run(words) == 0 and capsys.readouterr().out == version_line() + "\n"
    assert version_line().startswith(f"nsa_nb {nsa_nb.__version__}, torch ")
    for words, code in ((["help"], 0), (["--help"], 0), (["-h"], 0), ([], 2)):
        assert run(words) == code and capsys.readouterr().out == usage() + "\n"
    for verb in EVERY:
        if verb == ["bench", "tune"]: continue
        with pytest.raises(SystemExit) as e: run(["help", *verb])
        assert not e.value.code and capsys.readouterr().out == said(capsys, *verb)
    assert "did you mean 'train'" in refusal("help", "trian") and "did you mean '--version'" in refusal("--verson")
    assert "nsa train --config …" in refusal("--config", "x", "train")
    assert "nsa data smoke --batches …" in refusal("data", "--batches", "3", "smoke")
    assert run(["data"]) == 2 and run(["data", "help"]) == 0


# ---- options

@each_verb
def test_a_misspelt_option_is_told_first(verb, capsys):
    "Each option of each verb, a letter less, doubled or strange, alone or among other faults; what is proposed exists."
    known = options_in(said(capsys, *verb))
    near = 0
    assert len(known) > 1
    for i, option in enumerate(known):
        typo = (option[:-1], option[:3] + option[2:], option[:4] + "z" + option[4:])[i % 3]
        if typo in (*known, "--"): continue
        text = refusal(*verb, *([typo], [typo, "x"], [f"{typo}=x"], ["stray", typo], [typo, "x", "stray"])[i % 5])
        assert f"unknown option {typo!r}" in text, (typo, text)
        proposed = re.search(r"did you mean '(--[\w.-]+)'", text)
        assert proposed is None or proposed[1] in known
        near += proposed is not None
    assert near > len(known) / 2


STRANGE = {"": "is empty", "~nobody-of-this-name/x": "no home folder of '~nobody-of-this-name'",
           "$NSA_NB_UNSET/x": "NSA_NB_UNSET is not set", "n" * 300: "300 bytes"}

@each_verb
def test_paths_of_options_go_through_one_function(verb, capsys):
    "Whatever path option a verb has: what can be no path is refused for that reason, before all else."
    known = options_in(said(capsys, *verb))
    needed = {"signal": ["save"], "config": ["show"], "bench": ["kernels"],
              "data bootstrap": ["--bytes", "1kB"]}.get(" ".join(verb), [])
    fields = {f"--{p.partition('.')[2].replace('_', '-')}" for p in PATHS}
    for option in {"--dir", "--model", "--out", "--config", "--resume", *fields} & set(known):
        for value, says in STRANGE.items():
            words = [*verb, *needed, *(["--out", "a.jsonl"] if verb[-1] == "bootstrap" and option != "--out" else []),
                     option, value]
            assert says in refusal(*words), words


def test_home_and_variables_in_every_layer(tmp_path, monkeypatch):
    "Command line, YAML, CONFIG, an include, Python and the fields by hand mean the same path."
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", f"{tmp_path}/s")
    monkeypatch.chdir(tmp_path)
    (tmp_path/"c.yaml").write_text("include: ~/base\ntrain: {out_dir: $SCRATCH/runs}\n")
    (tmp_path/"base.yaml").write_text("data: {cache_dir: ~/cache, tokenizer_path: '${SCRATCH}/tok'}\n")
    for cfg in (load_config("~/c.yaml", environ={}), load_config(None, environ={"CONFIG": "~/c.yaml"}),
                load_config("$HOME/c", environ={})):
        found = (cfg.train.out_dir, cfg.data.cache_dir, cfg.data.tokenizer_path)
        assert found == (f"{tmp_path}/s/runs", f"{tmp_path}/cache", f"{tmp_path}/s/tok")
    for path in PATHS:
        section, _, name = path.partition(".")
        acts_with = {
            "data.local_path": {"data.dataset": "local"},
            "data.tokenizer_path": {"data.tokenizer": "gpt2"},
        }.get(path, {})
        options = train_parser().parse_args([f"--{name.replace('_', '-')}", "~/x"])
        by_hand = RunConfig(**{section: {name: "~/x"}})
        for cfg in (load_config(None, config_overrides(options) | acts_with, {}),
                    load_config(None, {path: Path("~/x")} | acts_with, {}), by_hand):
            assert cfg.flat()[path] == f"{tmp_path}/x", path
    assert RunConfig(train=dict(out_dir="runs/~")).train.out_dir == "runs/~"      # relative, and as it is
    with pytest.raises(UsageError, match="train.out_dir='a.*x00b': holds a zero byte"):
        RunConfig(train=dict(out_dir="a\0b"))


def test_a_run_at_home(zygote, tmp_path):
    "Folder, text, checkpoint to go on from and every verb that looks at a run, by ~; no such folder appears."
    home = tmp_path / "home"
    home.mkdir()
    (home / "own.txt").write_text("some words of my own, again and again. " * 400)
    env = {"HOME": str(home)}
    small = ["--config", "train_showcase", "--dataset", "local", "--local-path", "~/own.txt", "--cache-dir", "~/cache",
             "--dim", 16, "--n-heads", 2, "--d-k", 8, "--d-v", 8, "--batch-size", 2, "--seq-len", 64,
             "--sample-tokens", 4, "--eval-batches", 1, "--steps", 2]
    code, text = zygote.run("train", *small, "--out-dir", "~/runs/a", cwd=tmp_path, env=env)
    assert code == 0, text
    code, text = zygote.run("train", *small, "--steps", 2, "--resume", "~/runs/a/checkpoints/latest", "--out-dir",
                            "~/runs/b", cwd=tmp_path, env=env)
    assert code == 0 and "resumed from" in text, text
    for words in (["report", "--dir", "~/runs/a"], ["generate", "--model", "~/runs/a", "--max-new-tokens", 2],
                  ["preflight", *small, "--resume", "~/runs/a/checkpoints/latest", "--out-dir", "~/runs/a"]):
        code, text = zygote.run(*words, cwd=tmp_path, env=env)
        assert code in (0, 3) and "Traceback" not in text, (words, text)
    code, text = zygote.run("signal", "--dir", "~/runs/a", "stop", cwd=tmp_path, env=env)
    assert code == 2 and f"no run is alive in {home}/runs/a" in text
    code, text = zygote.run("data", "audit", "--dir", "~/runs/a", cwd=tmp_path, env=env)
    assert code == 2 and f"{home}/runs/a" in text
    assert not list(tmp_path.rglob("~*")) and (home/"runs/b/model.pt").exists() and (home/"cache").is_dir()
    with pytest.raises(UsageError, match="--resume=''"):
        train(load_config(None, {"train.out_dir": str(tmp_path/"c")}, {}), resume="")


def test_no_other_way_for_a_home_folder():
    "Only readers that are given a path by hand fill in ~ themselves; what verbs give them went through `user_path`."
    own_way = re.compile(r"expanduser|Path\.home|expandvars")
    users = {p.stem for p in PACKAGE.rglob("*.py") if own_way.search(p.read_text())}
    looks_for_a_checkout = {"runbook"}      # the home folder never counts as one
    assert users <= {"artifacts", "text", "tokenizer", "token_cache", "source"} | looks_for_a_checkout
    assert user_path("a") == "a"


# ---- names that launchers take

def torchrun_leaves(option: list[str]) -> bool:
    "Whether torchrun's own parser passes these words on."
    for ours in (option, ["--seed", "1", *option, "--steps", "3"]):
        words = ["--standalone", "--nproc_per_node=2", "-m", "nsa_nb.train", *ours]
        try: seen = launcher.get_args_parser().parse_args(words)
        except SystemExit: return False
        if (seen.training_script, seen.training_script_args) != ("nsa_nb.train", ours): return False
    return True


def test_every_option_has_a_form_that_torchrun_leaves_alone(capsys):
    "The plain one, or the one with its section; first, last, with = and as two words."
    parser = train_parser()
    taken = set()
    plain = {o: a for a in parser._actions for o in a.option_strings if o.startswith("--")}
    longer = {}
    for form, option in parser.section_forms.items(): longer.setdefault(option, []).append(form)
    assert {a.dest for a in plain.values()} >= set(FIELDS)
    for option, action in plain.items():
        if option == "--help": continue
        leaves = {}
        for form in (option, *longer.get(option, [])):
            spelt = [[form]] if action.nargs == 0 else [[form, "7"], [form, "-1"], [f"{form}=7"]]
            leaves[form] = all(map(torchrun_leaves, spelt))
        assert any(leaves.values()), option
        assert all(good for form, good in leaves.items() if "." in form), option
        if not leaves[option]: taken.add(option)
    capsys.readouterr()
    if sys.version_info < (3, 12): assert "--l" in taken      # else this test shows nothing


def test_section_names_set_the_field():
    "Each field by its name with the section, hyphens and underscores; flags by both kinds of no."
    parser = train_parser()
    flags = {a.dest for a in parser._actions if a.nargs == 0}
    for field in FIELDS:
        section, _, name = field.partition(".")
        for spelt in (field, field.replace("_", "-")):
            word = f"--{spelt}" if field in flags and field != "runtime.gradient_checkpointing" else f"--{spelt}=7"
            assert set(config_overrides(parser.parse_args([word]))) == {field}
        if field not in flags: continue
        for no in (f"--no-{field}", f"--{section}.no-{name}"):
            assert config_overrides(parser.parse_args([no])) == {field: False}


CONTRADICTIONS = ("--nsa.l 16 --l 32", "--l 16 --nsa.l 16 --l 32", "--train.lr=1 --lr=2", "--shared-kv --no-shared-kv",
                  "--accum 2 --train.accumulate-grad-batches 3", "--no-gc --gradient-checkpointing",
                  "--checkpoint-every 5 --save-every 6", "--resume auto --resume-from none")

@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_contradictions(words): assert "contradict each other" in refusal("train", *words.split())


def test_the_same_value_twice_and_a_second_thought_are_no_contradictions():
    words = "--nsa.l 16 --l 16 --lr 1e-4 --train.lr 0.0001 --shared-kv --nsa.shared-kv --fresh --fresh"
    assert config_overrides(train_parser().parse_args(words.split())) == {"nsa.l": "16", "train.lr": "0.0001",
                                                                          "nsa.shared_kv": True}
    # what a script gives, and its user
    assert config_overrides(train_parser().parse_args("--lr 1 --lr 2".split())) == {"train.lr": "2"}


def test_words_that_begin_with_a_hyphen(capsys):
    def prompt(*words):
        seen = []
        kept = generate.generate_text
        generate.generate_text = lambda model, prompt, *a: seen.append(prompt) or "\x1b[2Jtext\x07"
        try: assert run(["generate", "--model", "m", *words]) == 0
        finally: generate.generate_text = kept
        return seen[0]
    for words in (["--prompt=-x"], ["--prompt", "--", "-x"], ["--prompt", "-x"]): assert prompt(*words) == "-x"
    assert prompt("--prompt", "--", "--model") == "--model"
    assert prompt("--prompt=") == "" and prompt("--prompt", "-- a b") == "-- a b"
    assert "--prompt: expected one argument" in refusal("generate", "--model", "m", "--prompt", "--raw")
    never = train_parser().parse_args(["--fa2-min-len-win", "-1", "--runtime.fa2_min_len_cmp", "-1"])
    cfg = load_config(None, config_overrides(never), {})
    assert (cfg.runtime.fa2_min_len_win, cfg.runtime.fa2_min_len_cmp) == (-1, -1)
    assert "train.lr=-0.0001" in refusal("config", "check", "--lr", "-1e-4")
    capsys.readouterr()
    prompt("--prompt", "a")
    assert capsys.readouterr().out == "\\x1b[2Jtext\\x07\n"
    prompt("--prompt", "a", "--raw")
    assert capsys.readouterr().out == "\x1b[2Jtext\x07\n"


@pytest.mark.parametrize("option", [["--top-k", "5"], ["--top-p", "0.5"]])
def test_sampling_options_want_a_temperature(option):
    assert f"{option[0]} would have no effect" in refusal("generate", "--model", "model.pt", *option)
