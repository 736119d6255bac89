"""Short papermill runs of every runbook, the way a person starts them: from the top of the repository, on the
command line.

A runbook gets those of SHORT's parameters that it has. `smoke` is short by itself and runs as it is, but for
its folder and fewer steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNBOOKS = sorted((ROOT/"nbs/runbooks").glob("*.ipynb"))
SHORT = {"config": "train_showcase", "steps": 30}
MINUTES = 6
pytestmark = [pytest.mark.runbook, pytest.mark.parametrize("path", RUNBOOKS, ids=lambda p: p.stem)]


def parameters(path: Path) -> set[str]:
    "Names in the runbook's parameters cell."
    from papermill import inspect_notebook
    return set(inspect_notebook(str(path)))


def papermill(path: Path, out: Path, **params) -> tuple[int, dict, str]:
    "Exit code, executed notebook, what papermill printed."
    cmd = [sys.executable, "-m", "papermill", "--no-progress-bar", str(path.relative_to(ROOT)), str(out)]
    for k, v in params.items(): cmd += ["-p", k, str(v)]
    done = subprocess.run(cmd, cwd=ROOT, capture_output=True, text=True, timeout=60*MINUTES)
    return (
        done.returncode, json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"cells": []},
        done.stdout + done.stderr,
    )


def errors(nb: dict) -> str:
    "Every error in a notebook's outputs."
    return "\n".join(
        f"{o['ename']}: {o['evalue']}" for c in nb["cells"] for o in c.get("outputs", []) if o["output_type"] == "error"
    )


def test_a_short_run_succeeds(path, tmp_path):
    short = {"steps": 100} if path.stem == "smoke" else SHORT      # enough for a verdict that is not red
    params = {k: v for k, v in {**short, "out_dir": tmp_path/"run"}.items() if k in parameters(path)}
    code, nb, said = papermill(path, tmp_path/"out.ipynb", **params)
    assert code == 0, f"{errors(nb)}\n{said[-3000:]}"
    assert not errors(nb) and (tmp_path/"out.ipynb").stat().st_size < 1_500_000
    ran = [c for c in nb["cells"] if c["cell_type"] == "code" and c["execution_count"]]
    assert any(c["outputs"] for c in ran)
    shown = [o["data"] for c in ran for o in c["outputs"] if "data" in o]
    assert all("image/png" in d for d in shown if "".join(d.get("text/plain", "")).startswith("<Figure")), (
        "a figure came out as text: %matplotlib inline"
    )
    if path.stem in ("smoke", "prod_50k"):
        assert any("image/png" in d for d in shown), "the curves are a picture in the notebook"


def test_an_unknown_parameter_is_refused_with_the_nearest(path, tmp_path):
    known = sorted(parameters(path))
    assert known, "a runbook has a cell tagged `parameters`"
    name = max(known, key=len)
    code, nb, said = papermill(path, tmp_path/"out.ipynb", **{name[:-1] + "zz": 1})
    assert code != 0 and name in errors(nb) and name[:-1] + "zz" in errors(nb), f"{errors(nb)}\n{said[-3000:]}"


def test_a_config_that_is_not_there_fails_and_says_so(path, tmp_path):
    if "config" not in parameters(path): pytest.skip("this runbook takes no config")
    params = {"config": "train_showcas"} | ({"out_dir": tmp_path/"run"} if "out_dir" in parameters(path) else {})
    code, nb, said = papermill(path, tmp_path/"out.ipynb", **params)
    assert code != 0 and "train_showcase" in json.dumps(nb["cells"]), f"{errors(nb)}\n{said[-3000:]}"
    assert errors(nb)
