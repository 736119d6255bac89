"The checks must be able to fail: each on a small repository with one fault."
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ci import docs, nbdev_tests, readme, run_runbook

ROOT = Path(__file__).resolve().parents[1]


def book(*cells):
    "A notebook; text is a Markdown cell, a dict a code cell."
    made = [{"cell_type": "markdown", "metadata": {}, "source": c} if isinstance(c, str) else
            {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None} | c for c in cells]
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def put(path, nb):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nb if isinstance(nb, str) else json.dumps(nb))


# ---- README

def test_readme_from_an_index(tmp_path):
    put(tmp_path / "nbs/06_config.ipynb", book())
    put(tmp_path / "LICENSE", "x")
    put(tmp_path / "nbs/images/a.png", "x")
    put(
        tmp_path / "nbs/index.ipynb",
        book(
            "# Name\n\n> Purpose. See [config](06_config.ipynb#files), [licence](../LICENSE), "
            "[paper](https://arxiv.org/abs/2502.11089),\n"
            "[above](#name) and ![map](images/a.png). Not `[x](y.ipynb)`.\n\n```sh\ncat [x](y)\n```",
            {"source": "#| hide\nimport os"},
            {
                "source": ["#| eval: false\n", "1 + 1"],
                "outputs": [{"output_type": "execute_result", "data": {"text/plain": ["2"]}}],
            },
        ),
    )
    text = readme.render(tmp_path)
    assert "[config](nbs/06_config.ipynb#files), [licence](LICENSE), [paper](https://arxiv.org/abs/2502.11089)" in text
    assert "[above](#name) and ![map](nbs/images/a.png)" in text and "`[x](y.ipynb)`" in text and "cat [x](y)" in text
    assert text.endswith("```python\n1 + 1\n```\n\n```text\n2\n```\n") and "import os" not in text


def test_readme_refuses_a_dead_link_and_a_picture_output(tmp_path):
    put(tmp_path/"nbs/index.ipynb", book("# A\n\n[x](07_none.ipynb)"))
    with pytest.raises(SystemExit, match="07_none.ipynb"): readme.render(tmp_path)
    put(
        tmp_path / "nbs/index.ipynb",
        book({"source": "plot()", "outputs": [{"output_type": "display_data", "data": {"image/png": "aaaa"}}]}),
    )
    with pytest.raises(SystemExit, match="nbs/images"): readme.render(tmp_path)


# ---- documentation

def test_dead_links_are_found(tmp_path):
    url = "https://example.org/nsa"
    put(tmp_path/"runbooks/smoke.ipynb", book("[up](../index.ipynb) [gone](smoke2.ipynb)"))
    put(tmp_path/"00_errors.ipynb", book("# Errors"))
    put(
        tmp_path / "index.ipynb",
        book(
            "[a](00_errors.ipynb) [b](errors.html#usageerror) [c](https://else.where/x) [d](#here) "
            "`[code](none.ipynb)`\n\n"
            "```\n[code](none.ipynb)\n```\n<a href='runbooks/smoke.ipynb'>e</a> <img "
            "src=\"images/none.png\">\n\n[ref]: none.md\n"
            f"[f]({url}/errors.html#x) [g]({url}/nothing.html#x) [h]({url}) [j]({url}/blob/main/LICENSE#L2) "
            f"[k]({url}/blob/main/NONE)",
            {
                "source": "show_doc(f)",
                "outputs": [{"output_type": "display_data", "data": {"text/markdown": ["[i](gone.html)"]}}],
            },
        ),
    )
    assert docs.dead_links(tmp_path, url, f"{url}/blob/main/", ROOT) == [
        "index.ipynb: images/none.png", "index.ipynb: none.md", f"index.ipynb: {url}/nothing.html#x",
        f"index.ipynb: {url}/blob/main/NONE", "index.ipynb: gone.html", "runbooks/smoke.ipynb: smoke2.ipynb",
    ]


def test_sidebar_entries_and_notebooks_match(tmp_path):
    for n in ("index", "00_errors", "10_geometry", "runbooks/smoke"): put(tmp_path/f"{n}.ipynb", book())
    quarto = {
        "website": {
            "sidebar": {
                "contents": [
                    "index.ipynb", {"section": "A", "contents": ["0*.ipynb", "9*.ipynb"]},
                    {"section": "B", "contents": ["*s/*.ipynb"]},
                ]
            }
        }
    }
    assert docs.sidebar_faults(quarto, tmp_path) == [
        "_quarto.yml: '9*.ipynb' matches no notebook",
        "_quarto.yml: no entry for 10_geometry.ipynb",
    ]


# ---- notebooks as tests

def test_skipped_cells_are_counted(tmp_path):
    put(
        tmp_path / "00_a.ipynb",
        book(
            "#| cuda in prose", {"source": "#| cuda\nx"}, {"source": "#|cuda\n#| slow\ny"}, {"source": "#| export\nz"},
            {"source": "#| multigpu\nw"},
        ),
    )
    put(tmp_path / "runbooks/.notest", "")
    put(tmp_path / "runbooks/r.ipynb", book({"source": "#| cuda\nx"}))
    assert nbdev_tests.skipped_cells(tmp_path) == {"cuda": 2, "multigpu": 1}
    assert nbdev_tests.skipped_cells(tmp_path, ("cuda",)) == {"slow": 1, "multigpu": 1}


def test_result_and_failure_of_a_runbook():
    stream = lambda t: {"output_type": "stream", "text": [t]}
    nb = book(
        {"source": "a", "outputs": [stream("step 1\n")]},
        {"source": "b", "outputs": [stream("\x1b[32mloss 1.5\x1b[0m\n")]}, {"source": "c"},
    )
    assert run_runbook.result(nb) == "loss 1.5"
    nb["cells"][0]["metadata"]["tags"] = ["result"]
    assert run_runbook.result(nb) == "step 1"
    nb["cells"][1]["outputs"].append(
        {"output_type": "error", "ename": "RunError", "evalue": "loss is not finite", "traceback": []}
    )
    assert run_runbook.failure(nb) == "RunError: loss is not finite"


# ---- clean and export

def test_clean_check_sees_a_change(tmp_path):
    "A clone of this repository whose package was edited by hand, and one whose notebook has an execution count."
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("no git here")
    repo = tmp_path/"repo"
    git = lambda *a: subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid", *a], cwd=repo, check=True, capture_output=True
    )
    subprocess.run(["git", "clone", "-q", str(ROOT), str(repo)], check=True)
    for n in ("check_clean.py",): put(repo/"tests/ci"/n, (ROOT/"tests/ci"/n).read_text())
    (repo/"nsa_nb/errors.py").open("a").write("x = 1\n")
    nb = json.loads((repo/"nbs/0_base/020_artifacts.ipynb").read_text())
    next(c for c in nb["cells"] if c["cell_type"] == "code")["execution_count"] = 7
    (repo/"nbs/0_base/020_artifacts.ipynb").write_text(json.dumps(nb, indent=1) + "\n")
    run = lambda: subprocess.run([sys.executable, "tests/ci/check_clean.py"], cwd=repo, capture_output=True, text=True)
    uncommitted = run()
    assert (
        "not committed" in uncommitted.stdout
        and "nsa_nb/errors.py" in uncommitted.stdout
        and uncommitted.returncode == 0
    ), uncommitted
    git("add", "-A")
    git("commit", "-qm", "faults")
    done = run()
    assert (
        done.returncode == 1
        and "changed: nsa_nb/errors.py" in done.stdout
        and "changed: nbs/0_base/020_artifacts.ipynb" in done.stdout
    ), done
