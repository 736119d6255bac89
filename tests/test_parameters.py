"""A runbook does what its cells say: parameters are what the parameters cell declares, however they are given and
whatever else is in memory; relative folders begin at one place.

The cells of the runbooks are run in this process by an IPython shell (as nbconvert and Jupyter do), and what
papermill would inject is made by papermill. At the end real kernels, started as JupyterLab and papermill start
them."""

import ast
import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import nbformat
import pytest
import yaml
from execnb.shell import CaptureShell
from papermill.inspection import _infer_parameters
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from nsa_nb.config import load_config
from nsa_nb.errors import UsageError
from nsa_nb.runbook import RunPlan, plan_run, top_folder

ROOT = Path(__file__).resolve().parents[1]
BOOKS = {p.stem: p for p in sorted((ROOT/"nbs/runbooks").glob("*.ipynb"))}

# another value than the default for every parameter of every runbook, as Python
OTHER = dict(
    config="train_showcase", out_dir="artifacts/another", resume="auto", fresh=True, steps=12, dataset="synthetic",
    local_path="text.jsonl", tokenizer="byte", seq_len=64, batch_size=3, accumulate_grad_batches=2, lr=1e-3,
    save_every=5, eval_every=6, device="cpu", precision="fp32", gradient_checkpointing=True, seed=7, processes=2,
    long_tokens=512,
)
OTHER_HERE = {("smoke", "config"): "m7c_125m_1xa100_production", ("validate_gpu", "seed"): 3}


@cache
def book(name: str): return load_notebook_node(str(BOOKS[name]))
def code(nb, i: int) -> str: return [c for c in nb.cells if c.cell_type == "code"][i].source
def declared(nb) -> dict:
    "Names and defaults of the parameters cell, read by this test."
    return {
        n.targets[0].id: ast.literal_eval(n.value)
        for n in ast.parse(code(nb, 0)).body
        if isinstance(n, ast.Assign) and n.targets[0].id != "_declared"
    }


def edited(nb, **values) -> str:
    "The source of the parameters cell with other values written into it."
    text = code(nb, 0)
    for name, value in values.items():
        text, n = re.subn(rf"(?m)^{name} = [^#\n]*", f"{name} = {value!r}  ", text)
        assert n == 1, name
    return text
def injected(nb, **values) -> list[str]:
    """The sources of the code cells up to the first that papermill runs after its own. It changes the notebook
    that it is given: a copy."""
    cells = [c for c in parameterize_notebook(deepcopy(nb), values).cells if c.cell_type == "code"]
    assert cells[1].metadata.tags == ["injected-parameters"]
    return [c.source for c in cells[:3]]

CASES = [(b, p) for b in BOOKS for p in declared(book(b))]


@pytest.fixture(scope="module")
def shell(): return CaptureShell()


@pytest.fixture
def lab(monkeypatch, shell):
    """Run cells in one kernel's memory, as JupyterLab does from the runbook's own folder; gives what the last one
    left: a plan, or parameters."""
    monkeypatch.chdir(ROOT/"nbs/runbooks")
    def run(*sources):
        for name in ("plan", "params"): shell.user_ns.pop(name, None)
        for source in sources:
            shell.run(source)
            if shell.exc: raise shell.exc
        return shell.user_ns.get("plan", shell.user_ns.get("params"))
    return run


def run_of(plan) -> dict:
    "What a plan trains, in all that can differ."
    if not isinstance(plan, RunPlan): return plan
    return plan.cfg.flat() | dict(options=plan.options, resume=plan.resume, fresh=plan.fresh, processes=plan.processes)


def called(name: str, **values):
    "The same by calling the function."
    values = declared(book(name)) | values
    if name == "validate_gpu": return values
    return run_of(plan_run(**values, **(dict(fresh=True) if name == "smoke" else {})))


# --- one run, three ways

@pytest.mark.parametrize("name,parameter", CASES, ids=["-".join(c) for c in CASES])
def test_edited_injected_and_called_are_the_same_run(lab, name, parameter):
    nb = book(name)
    value = OTHER_HERE.get((name, parameter), OTHER[parameter])
    assert value != declared(nb)[parameter]
    more = dict(dataset="local") if parameter == "local_path" and name == "smoke" else {}
    if parameter == "processes": more = dict(accumulate_grad_batches=2)
    want = called(name, **{parameter: value}, **more)
    assert run_of(lab(edited(nb, **{parameter: value}, **more), code(nb, 1))) == want
    assert run_of(lab(*injected(nb, **{parameter: value}, **more))) == want
    assert run_of(lab(code(nb, 0), code(nb, 1))) == called(name) != want      # and the defaults are another


@pytest.mark.parametrize("name,parameter", CASES, ids=["-".join(c) for c in CASES])
def test_none_in_each_way(lab, name, parameter):
    "None, and the text that papermill -r or a YAML file gives for it."
    nb = book(name)
    want = called(name, **{parameter: None})
    for text in (None, "None", ""):
        assert run_of(lab(edited(nb, **{parameter: text}), code(nb, 1))) == want
        assert run_of(lab(*injected(nb, **{parameter: text}))) == want


def test_the_data_set_goes_by_the_configuration_in_use(lab):
    "The example: train_showcase written into prod_50k's cell keeps its own text."
    nb = book("prod_50k")
    for more, dataset in (
        ({}, "fineweb_edu"), (dict(config="train_showcase"), "stdlib"), (dict(dataset="stdlib"), "stdlib"),
        (dict(local_path="text.jsonl"), "local"), (dict(config="train_showcase", dataset="synthetic"), "synthetic"),
        (dict(config=str(ROOT / "nsa_nb/configs/train_showcase.yaml")), "stdlib"),
    ):
        for plan in (
            lab(edited(nb, **more), code(nb, 1)), lab(*injected(nb, **more)) if more else plan_run(**declared(nb)),
            plan_run(**declared(nb) | more),
        ):
            assert plan.cfg.data.dataset == dataset, (more, plan.cfg.data.dataset)


@pytest.mark.parametrize("name", ["smoke", "prod_50k"])
def test_the_options_of_train_are_the_configuration_of_the_notebook(name):
    "What the process resolves from its options is what preflight and report were given."
    from nsa_nb.options import config_overrides
    from nsa_nb.train import train_parser
    for parameter in declared(book(name)):
        more = (
            dict(dataset="local")
            if parameter == "local_path"
            else dict(accumulate_grad_batches=2)
            if parameter == "processes"
            else {}
        )
        plan = plan_run(
            **declared(book(name)) | {parameter: OTHER_HERE.get((name, parameter), OTHER[parameter])} | more
        )
        ns = train_parser().parse_args(plan.options)
        assert load_config(ns.config, config_overrides(ns)).flat() == plan.cfg.flat() and (ns.resume, ns.fresh) == (
            plan.resume,
            plan.fresh,
        ), parameter


@pytest.mark.parametrize("name", BOOKS)
def test_papermill_lists_every_parameter_with_its_explanation(name):
    nb = book(name)
    found = {p.name: p for p in _infer_parameters(nb)}
    assert found.keys() == declared(nb).keys() and all(p.help for p in found.values())


# --- what is no parameter

SCRATCH = [
    "w, l, d = 8, 8, 4", "n = 3", "steps = 3; lr = 1.0; config = 'nowhere'; seed = 99; device = 'tpu'",
    "from nsa_nb.schema import *\nimport os, sys\ndim = 8",
]


@pytest.mark.parametrize("scratch", SCRATCH)
@pytest.mark.parametrize("name", BOOKS)
def test_all_cells_again_after_a_scratch_cell(lab, name, scratch):
    nb = book(name)
    first = run_of(lab(code(nb, 0), code(nb, 1)))
    assert run_of(lab(scratch, code(nb, 0), code(nb, 1))) == first      # Run All
    assert run_of(lab(scratch, code(nb, 1))) == first                   # the second cell alone
    assert run_of(lab(code(nb, 0), scratch, code(nb, 1))) == first      # singly, with one between


def test_cells_singly_and_out_of_order(lab):
    nb = book("smoke")
    assert lab(*injected(nb, steps=30)).cfg.train.steps == 30
    # again: nothing has been declared since
    assert lab(code(nb, 1)).cfg.train.steps == 30
    # the parameters cell anew: what was injected before is gone
    assert lab(edited(nb, steps=40), code(nb, 1)).cfg.train.steps == 40
    # an executed notebook, its cells run singly
    assert lab("# Parameters\nsteps = 50", code(nb, 1)).cfg.train.steps == 50
    assert lab("# Parameters\nprint(1)\nsteps = 60", code(nb, 1)).cfg.train.steps == 50      # looks like it and is none
    assert lab("steps = 70", "x = 1", code(nb, 1)).cfg.train.steps == 50


def test_without_the_parameters_cell_it_says_so(lab, monkeypatch):
    from nsa_nb import runbook
    monkeypatch.setattr(runbook._Declared, "values", None)
    with pytest.raises(UsageError, match="the parameters cell has not been run"): lab(code(book("smoke"), 1))


@pytest.mark.parametrize("name", BOOKS)
def test_a_name_that_nothing_reads_is_refused(lab, name):
    "Injected, or added to the cell."
    nb = book(name)
    near = max(declared(book(name)), key=len)
    with pytest.raises(UsageError, match=f"unknown papermill parameter '{near}z': did you mean '{near}'"):
        lab(*injected(nb, **{near + "z": 1}))
    with pytest.raises(UsageError, match="unknown parameter 'n'"): lab("n = 3\n" + code(nb, 0), code(nb, 1))


@pytest.mark.parametrize(
    "source,says",
    [
        ("import torch\nsteps = torch.ones(2)", "parameter steps is a Tensor"),
        ("steps = [1]", "parameter steps is a list"), ("def steps(): pass\nsteps = steps", "is a function"),
    ],
)
def test_values_that_are_none(lab, source, says):
    with pytest.raises(UsageError, match=says): lab(source + "\nfrom nsa_nb.runbook import declare\ndeclare()")


@pytest.mark.parametrize(
    "lines,expected",
    [
        ("steps: int = 5", 5), ("a = 5\nsteps = a + 1", 6), ("steps = _x = 7", 7), ("steps, lr = 8, 1e-3", 8),
        ("%timeit -n1 -r1 1\nsteps = 9", 9), ("if True:\n    steps = 10", 10),
    ],
)
def test_any_assignment_of_the_cell_counts(lab, lines, expected):
    params = lab(
        lines + "\nfrom nsa_nb.runbook import declare\ndeclare()",
        "from nsa_nb.runbook import parameters\nparams = parameters()",
    )
    assert params["steps"] == expected and "_x" not in params


# --- where relative folders begin

@pytest.fixture
def checkout(tmp_path) -> Path:
    top = (tmp_path/"checkout").resolve()
    (top / "nbs/runbooks").mkdir(parents=True)
    (top / "settings.ini").touch()
    return top


def test_one_folder_whoever_starts(lab, checkout, monkeypatch):
    """papermill at the top, papermill --cwd, JupyterLab in the notebook's folder: one out_dir, the first and the
    last thing that is printed."""
    nb = book("smoke")
    outs = set()
    for start in (checkout, checkout/"nbs", checkout/"nbs/runbooks"):
        monkeypatch.chdir(start)
        plan = lab(code(nb, 0), code(nb, 1))
        outs.add(plan.out_dir)
        # files, checkpoints, text: all begin there
        assert Path.cwd() == checkout and plan.cfg.train.out_dir == "artifacts/smoke"
    assert outs == {checkout/"artifacts/smoke"}
    for name in ("smoke", "prod_50k"):
        cells = [c.source for c in book(name).cells if c.cell_type == "code"]
        assert 'print(f"out_dir {plan.out_dir}")' in cells[1] and 'print(f"out_dir {plan.out_dir}")' in cells[-1]


@pytest.mark.parametrize("mark", ["settings.ini", ".git"])
def test_the_top_is_the_nearest(tmp_path, mark, monkeypatch):
    top = tmp_path.resolve()/"a"
    inner = tmp_path.resolve()/"a/b/c/d"
    inner.mkdir(parents=True)
    (top / mark).touch()
    assert top_folder(inner) == top
    (top / "b/c").joinpath(".git").mkdir()
    assert top_folder(inner) == top / "b/c" and top_folder(top / "b") == top
    (top / mark).unlink()
    assert top_folder(top / "b") in (top / "b", top_folder(tmp_path))
    # a home folder under version control is no project
    monkeypatch.setenv("HOME", str(top))
    (top / mark).touch()
    assert top_folder(top / "b") != top


def test_outputs_of_runs_are_ignored_wherever_they_land_and_results_are_kept():
    if not (ROOT/".git").exists(): pytest.skip("not a checkout")
    ignored = lambda p: subprocess.run(["git", "check-ignore", "-q", p], cwd=ROOT).returncode == 0
    assert all(
        map(
            ignored,
            (
                "artifacts/smoke/x", "nbs/runbooks/artifacts/smoke/training.csv", "nbs/runbooks/runs/a", "runs/a",
                "nbs/artifacts/a", "nbs/runbooks/smoke.out.ipynb",
            ),
        )
    )
    assert not any(
        map(
            ignored,
            (
                "nbs/results/new.csv", "nbs/results/prod_h200_2026-11-28/training.csv", "nbs/runbooks/smoke.ipynb",
                "nsa_nb/artifacts.py", "nbs/0_base/020_artifacts.ipynb",
            ),
        )
    )
    kept = subprocess.run(
        ["git", "ls-files", "-ci", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert kept == "", f"tracked and ignored: {kept}"


# --- real kernels

@pytest.mark.runbook
def test_a_kernel_started_as_jupyterlab_does(tmp_path):
    "In the notebook's folder: all cells, a scratch cell, all cells again; one cell edited and not saved."
    from nbclient import NotebookClient
    nb = book("smoke")
    client = NotebookClient(
        deepcopy(nb), timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "nbs/runbooks")}}
    )

    def run(*sources) -> str:
        for source in sources: client.execute_cell(nbformat.v4.new_code_cell(source), 0)
        cell = client.execute_cell(
            nbformat.v4.new_code_cell("print(plan.cfg.train.steps, plan.cfg.nsa.w, plan.out_dir)"), 0
        )
        return "".join(o.text for o in cell.outputs).strip()
    client.nb.cells = [nbformat.v4.new_code_cell("")]
    with client.setup_kernel():
        first = run(code(book("smoke"), 0), code(book("smoke"), 1))
        assert first == f"400 64 {ROOT/'artifacts/smoke'}"
        assert run("w, l, d = 8, 8, 4\nn = 3\nsteps = 5", code(book("smoke"), 0), code(book("smoke"), 1)) == first
        assert run(edited(book("smoke"), steps=12), "steps = 9", code(book("smoke"), 1)) == first.replace("400", "12")
    assert not (ROOT/"nbs/runbooks/artifacts").exists()


@pytest.mark.parametrize(
    "given,fresh", [("no", False), ("0", False), ("False", False), (None, False), ("yes", True), (1, True)]
)
def test_fresh_is_read_as_a_config_reads_it(given, fresh):
    "Text that papermill injects: a run is moved aside where that is meant, and only there."
    plan = plan_run(config="train_showcase", fresh=given)
    assert plan.fresh is fresh and ("--fresh" in plan.options) is fresh


@pytest.mark.parametrize("name,value", [("fresh", "perhaps"), ("processes", 0), ("processes", 2.5), ("processes", "x")])
def test_a_parameter_that_is_no_field_is_checked_too(name, value):
    with pytest.raises(UsageError, match=f"{name}="): plan_run(config="train_showcase", **{name: value})


def papermill(nb_path: Path, out: Path, *more) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "--no-progress-bar", str(nb_path), str(out), *map(str, more)], cwd=ROOT,
        capture_output=True, text=True, timeout=360,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return "".join(
        o.get("text", "") if isinstance(o.get("text"), str) else "".join(o.get("text", []))
        for c in json.loads(out.read_text())["cells"]
        for o in c.get("outputs", [])
    )


@pytest.mark.runbook
@pytest.mark.parametrize(
    "name,values",
    [("prod_50k", dict(config="train_showcase", steps=30)), ("smoke", dict(steps=100, seed=3, seq_len=64))],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_edited_cell_under_papermill(tmp_path, name, values):
    "The whole run, and its config.yaml is the function's; test_runbooks does the same with -p, and runs validate_gpu."
    nb = deepcopy(book(name))
    values = values | dict(out_dir=str(tmp_path/"run"))
    next(c for c in nb.cells if c.cell_type == "code").source = edited(nb, **values)
    nbformat.write(nb, tmp_path/"edited.ipynb")
    said = papermill(tmp_path/"edited.ipynb", tmp_path/"out.ipynb")
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text()) == yaml.safe_load(
        yaml.safe_dump(plan_run(**declared(book(name)) | values).cfg.model_dump())
    )
    lines = [x for x in said.splitlines() if x.startswith("out_dir ")]
    assert lines == [f"out_dir {tmp_path/'run'}"] * 2 and os.path.isabs(lines[0].split()[1])
