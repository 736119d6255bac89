"""Opening, running and saving a notebook in JupyterLab leaves no difference: outputs that change from run to run are
rounded or not stored. Long, since every notebook runs in a kernel of its own: `pytest --slow tests/test_outputs.py`."""

import copy
import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbdev.clean import clean_jupyter

from test_repo import NOTEBOOKS, ROOT, is_runbook

ROOM_NOTEBOOKS = [p for p in NOTEBOOKS if not is_runbook(p)]
NEEDS_MORE = re.compile(r"^#\s*\|\s*(notest|cuda|slow|multigpu)\b", re.M)      # than a CPU and a minute


def joined(outputs: list) -> list:
    "Pieces of one stream that follow each other as one, as JupyterLab joins them: where they are cut is chance."
    found = []
    for out in outputs:
        is_more = found and out.output_type == found[-1].output_type == "stream" and out.name == found[-1].name
        if is_more: found[-1].text += out.text
        else: found.append(copy.deepcopy(out))
    return found


def saved(nb, path):
    "The notebook as Jupyter saves it under the hook of `make hooks`."
    nb = copy.deepcopy(nb)
    clean_jupyter(str(path), dict(type="notebook", content=nb))
    for cell in nb.cells:
        if cell.cell_type == "code": cell.outputs = joined(cell.outputs)
    return nb


@pytest.mark.slow
@pytest.mark.parametrize("path", ROOM_NOTEBOOKS, ids=lambda p: p.relative_to(ROOT/"nbs").as_posix())
def test_running_leaves_no_difference(path):
    stored = nbformat.read(path, as_version=4)
    ran = copy.deepcopy(stored)
    ran.cells = [c for c in ran.cells if c.cell_type == "code" and not NEEDS_MORE.search(c.source)]
    client = NotebookClient(ran, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    before = {c.id: c.outputs for c in saved(stored, path).cells if c.cell_type == "code"}
    after = {c.id: c.outputs for c in saved(ran, path).cells}
    changed = {id: (before[id], outputs) for id, outputs in after.items() if before[id] != outputs}
    assert not changed, f"{len(changed)} cells: {changed}"
