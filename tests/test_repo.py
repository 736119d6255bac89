"The rules that keep notebooks, package and pages readable and in step."
import ast
import base64
import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ci import readme
from zygote import search_path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = [p for p in sorted((ROOT/"nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]
PACKAGE = ROOT/"nsa_nb"
MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in ("__init__.py", "_modidx.py")] + [
    PACKAGE / "__init__.py"
]
ROOMS = (
    "0_base", "1_attention", "2_kernels", "3_model", "4_data", "5_monitoring", "6_training", "7_bench", "8_tools",
    "9_notes",
)
PACKAGES = {
    "2_kernels": "kernels", "4_data": "data", "5_monitoring": "monitoring", "6_training": "training",
    "7_bench": "bench",
}
AT_THE_ROOT = {"train"}      # torchrun starts it by this name
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(ROOT/"nbs").as_posix())
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: module_name(p))

INI = configparser.ConfigParser(delimiters=["="])
INI.read(ROOT/"settings.ini", encoding="utf-8")
# distribution → the name it is imported by, where they differ
IMPORT_NAME = {"pyyaml": "yaml"}
RUNTIME = {IMPORT_NAME.get(n, n) for n in re.findall(r"(?:^|\s)([A-Za-z][\w-]*)", INI["DEFAULT"]["requirements"])}


def cells(path: Path) -> list[dict]: return json.loads(path.read_text(encoding="utf-8"))["cells"]
def source(cell: dict) -> str: return "".join(cell["source"])
def exported(path: Path) -> list[str]:
    "Sources of the exported cells, without their directives."
    found = [
        source(c)
        for c in cells(path)
        if c["cell_type"] == "code" and re.search(r"^#\s*\|\s*exports?\b", source(c), re.M)
    ]
    return [re.sub(r"^#\s*\|.*\n?", "", s, flags=re.M) for s in found]
# results: runbooks that have run
def is_runbook(path: Path) -> bool: return path.parent.name in ("runbooks", "results")
def module_name(path: Path) -> str:
    "kernels.jit for nsa_nb/kernels/jit.py."
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
def room_and_number(path: Path) -> tuple[str, int] | None:
    "The room and number of the notebook that a module is exported from; None where it is no notebook's."
    m = re.search(r"File to edit: (?:\.\./)+nbs/(\w+)/(\d+)_\w+\.ipynb", path.read_text(encoding="utf-8"))
    return (m[1], int(m[2])) if m else None


def package_imports(tree: ast.AST, package: str = "") -> set[str]:
    "Modules of this package that a module imports, anywhere in it; `package` is the one it stands in, e.g. kernels."
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("nsa_nb.") for a in node.names if a.name.startswith("nsa_nb.")}
        if not isinstance(node, ast.ImportFrom): continue
        inside = [package] if node.level == 1 and package else []
        module = node.module or ""
        if node.level: parts = [*inside, *filter(None, module.split("."))]
        elif module.partition(".")[0] == "nsa_nb": parts = module.split(".")[1:]
        else: continue
        name = ".".join(parts)
        is_module = PACKAGE.joinpath(*parts).with_suffix(".py").exists() if parts else False
        found |= {name} if is_module else {f"{name}.{a.name}".lstrip(".") for a in node.names}
    return found - {"__version__"}


def test_readme_is_the_index():
    readme_file = ROOT/"README.md"
    assert readme_file.read_text(encoding="utf-8") == readme.render(ROOT), "run: python tests/ci/readme.py"


def test_the_readme_names_every_command():
    from nsa_nb.verbs import DATA_COMMANDS, VERBS
    text = (ROOT/"README.md").read_text(encoding="utf-8")
    for command in [*(f"nsa {v}" for v in VERBS), *(f"nsa data {c}" for c in DATA_COMMANDS)]:
        assert command in text, f"nbs/index.ipynb does not name {command!r}"


@pytest.mark.parametrize("line,found", [
    ("from .op import f", {"op"}), ("from . import op", {"op"}), ("from nsa_nb.op import f", {"op"}),
    ("from nsa_nb import op", {"op"}), ("import nsa_nb.op as o", {"op"}), ("def f():\n    from .op import g", {"op"}),
    ("from .kernels.jit import f", {"kernels.jit"}), ("from .kernels import jit", {"kernels.jit"}),
    ("import nsa_nb.kernels.jit", {"kernels.jit"}), ("import torch.op", set())])
def test_every_way_to_import_is_seen(line, found): assert package_imports(ast.parse(line)) == found


@pytest.mark.parametrize("line,found", [
    ("from .jit import f", {"kernels.jit"}), ("from ..op import f", {"op"}), ("from . import jit", {"kernels.jit"}),
    ("from ..data.text import f", {"data.text"})])
def test_imports_inside_a_package_are_seen(line, found): assert package_imports(ast.parse(line), "kernels") == found


@each_module
def test_a_module_imports_only_what_stands_before_it(path):
    "By room, then by number; so no room imports a later room."
    mine = room_and_number(path)
    package = module_name(path).rpartition(".")[0]
    assert mine is not None, "not exported from a numbered notebook"
    for other in package_imports(ast.parse(path.read_text(encoding="utf-8")), package):
        file = PACKAGE.joinpath(*other.split(".")).with_suffix(".py")
        assert file.exists(), f"imports {other}, which is no module"
        assert room_and_number(file) < mine, f"{module_name(path)} {mine} imports {other} {room_and_number(file)}"


@each_module
def test_a_room_exports_to_its_package(path):
    room = room_and_number(path)[0]
    package = module_name(path).rpartition(".")[0]
    assert room in ROOMS
    wanted = "" if module_name(path) in AT_THE_ROOT else PACKAGES.get(room, "")
    assert package == wanted, f"{module_name(path)} of {room}: default_exp begins with {wanted!r}"


@each_module
def test_a_module_imports_without_extras(path):
    "What stands at its top is the standard library, the runtime requirements or this package."
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
        for top in {n.split(".")[0] for n in names}:
            assert top in sys.stdlib_module_names | RUNTIME | {"nsa_nb"}, (
                f"{top}: import it inside the function that needs it"
            )
        assert not (isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)), "no star imports"


def test_the_rooms():
    "Every notebook stands in a room; numbers have three digits, gaps of ten, and are used once in a room."
    others = {"runbooks", "results", "tutorials"}
    folders = {p.relative_to(ROOT/"nbs").parts[0] for p in NOTEBOOKS if p != ROOT/"nbs"/"index.ipynb"}
    assert set(ROOMS) <= folders <= set(ROOMS) | others
    for room in ROOMS:
        numbers = [p.name[:4] for p in NOTEBOOKS if p.parent == ROOT/"nbs"/room]
        assert all(re.fullmatch(r"\d\d0_", n) for n in numbers) and len(set(numbers)) == len(numbers), (room, numbers)


@each_notebook
def test_notebook_has_title_and_purpose(path):
    first = source(cells(path)[0])
    assert re.match(r"# \S.*\n+> \S", first), "the first cell is '# Title', then '> one line'"
    code = "\n".join(source(c) for c in cells(path) if c["cell_type"] == "code")
    if path.parent.name in ROOMS and exported(path):
        assert re.search(r"^#\s*\|\s*default_exp \w+", code, re.M)
    meta = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    assert meta.get("kernelspec", {}).get("name") == "python3"


@each_notebook
def test_notebook_is_small_enough_to_read(path):
    assert path.stat().st_size < 1_500_000
    assert len(cells(path)) <= 66, "about 60 cells; split it"
    sizes = [s.rstrip("\n").count("\n") + 1 for s in exported(path)]
    assert sum(sizes) <= 400, "400 exported lines; split it"
    # a class may be longer, a Triton kernel too; a function that does not fit on a screen may not
    for s in exported(path):
        for f in [n for n in ast.walk(ast.parse(s)) if isinstance(n, ast.FunctionDef) and not n.decorator_list]:
            assert f.end_lineno - f.lineno < 50, f"{f.name} has {f.end_lineno - f.lineno + 1} lines"


def test_width_statements_and_names():
    "120 columns, one statement a line, no unused or unknown name, as ruff.toml says; in notebooks too."
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "."], cwd=ROOT, capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@each_module
def test_exported_lines_are_narrow(path):
    "What nbdev writes itself (the title, the list of names and the place in the notebook) aside."
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# %%") and "auto" not in line)
    wide = [
        f"{i}: {line}"
        for i, line in enumerate(lines, 1)
        if i > start and len(line) > 120 and not line.startswith("# %%")
    ]
    assert not wide, "\n".join(wide)


def test_git_is_told_how_to_merge_notebooks():
    "`make hooks` writes both files as they are committed: it leaves a clone clean."
    assert (ROOT/".gitattributes").read_text() == "*.ipynb merge=nbdev-merge\n"
    assert "driver = nbdev_merge %O %A %B %P" in (ROOT/".gitconfig").read_text()


def test_a_test_that_hangs_ends_with_every_threads_stack(tmp_path):
    (tmp_path/"pytest.ini").write_text("[pytest]\n" + "timeout_method = signal\ntimeout = 1\n")
    (tmp_path/"test_hang.py").write_text(
        "import threading, time\n"
        "def waits_too(): time.sleep(60)\n"
        "def test_hangs():\n"
        "    threading.Thread(target=waits_too, daemon=True, name='the other').start()\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_hang.py"], cwd=tmp_path,
        capture_output=True, text=True, timeout=50,
    )
    assert done.returncode == 1
    for words in ("Timeout", "the other", "waits_too"): assert words in done.stdout + done.stderr
    ini = configparser.ConfigParser()
    ini.read(ROOT/"pytest.ini")
    assert ini["pytest"]["timeout_method"] == "signal" and 300 <= int(ini["pytest"]["timeout"]) <= 900


@each_notebook
def test_pictures_are_small(path):
    for c in cells(path):
        for out in c.get("outputs", []):
            for kind, data in out.get("data", {}).items():
                if kind.startswith("image/"):
                    data = "".join(data)
                    size = len(base64.b64decode(data)) if kind == "image/png" else len(data)
                    assert size < 100_000, f"a picture of {size:,} bytes"


@each_notebook
def test_figures_are_pictures(path):
    for c in cells(path):
        for out in c.get("outputs", []):
            said = "".join(out.get("text") or "") or "".join(out.get("data", {}).get("text/plain", ""))
            if said.startswith("<Figure"):
                assert "image/png" in out.get("data", {}), (
                    f"a figure stored as text: put %matplotlib inline in a cell before {source(c)[:80]!r}"
                )


def test_picture_files_are_small():
    for p in (ROOT/"nbs").rglob("*.png"): assert p.stat().st_size < 100_000, p


def is_import(node: ast.stmt) -> bool:
    "An import, or a `try` around imports that falls back when a module is missing."
    if isinstance(node, ast.Try):
        return all(map(is_import, node.body)) and all(
            isinstance(h.type, ast.Name) and h.type.id == "ImportError" for h in node.handlers
        )
    return isinstance(node, (ast.Import, ast.ImportFrom))


@each_notebook
def test_import_cells_only_import(path):
    "Docs builds execute every cell with an import: what else stands there would run too."
    if is_runbook(path): return
    for c in cells(path):
        if c["cell_type"] != "code" or source(c).lstrip().startswith("%"): continue
        try: tree = ast.parse(source(c))
        except SyntaxError: continue   # shell lines and magics
        kinds = {is_import(n) for n in tree.body}
        assert kinds != {True, False}, f"imports and other code in one cell: {source(c)[:80]!r}"
        assert not (True in kinds and re.search(r"^#\s*\|\s*(cuda|multigpu)\b", source(c), re.M)), (
            "no import in a GPU cell"
        )
        assert "_all_" not in source(c).replace("__all__", "") or "_all_ =" not in source(c), "no _all_"


MACHINE = re.compile(r"(?<![\w./~$}…])/(?:work|root|home|tmp|farm|opt|Users|mnt|var/folders)/[\w.]")


def places(text: str) -> list[str]: return MACHINE.findall(text)


@each_notebook
def test_no_path_of_a_machine_in_a_notebook(path):
    for c in cells(path):
        said = source(c) + "".join(
            "".join(o.get("text") or "")
            + "".join("".join(v) for k, v in o.get("data", {}).items() if k.startswith("text/"))
            + "".join(o.get("traceback") or "")
            for o in c.get("outputs", [])
        )
        assert not places(said), f"{places(said)} in {source(c)[:80]!r}"


def test_no_path_of_a_machine_elsewhere():
    files = [
        p
        for pattern in ("*", ".ci/*", "nsa_nb/**/*", "nbs/*.yml", "nbs/*.css", "tests/ci/*")
        for p in ROOT.glob(pattern)
    ]
    for p in files:
        if (
            p.suffix in (".py", ".md", ".yaml", ".yml", ".ini", ".txt", ".css", "")
            and p.is_file()
            and p.name not in ("LICENSE", ".git")
        ):
            assert not places(p.read_text(encoding="utf-8", errors="replace")), p


def test_constraints_cover_what_the_package_names():
    "Every requirement of the package and of `dev` has one exact version in constraints.txt, so that CI is repeatable."
    pins = dict(re.findall(r"^([A-Za-z][\w.-]*)==(\S+)$", (ROOT/"constraints.txt").read_text(), re.M))
    named = re.findall(r"(?:^|\s)([A-Za-z][\w-]*)", INI["DEFAULT"]["requirements"])
    setup = (ROOT/"setup.py").read_text()
    family = re.search(r"nbdev = (\[.*?\])", setup)[1]
    dev = re.search(r'dev = nbdev \+ """(.*?)"""', setup, re.S)[1]
    named += re.findall(r"(?:^|\s|\")([A-Za-z][\w-]*)", f"{family} {dev}")
    missing = {n.lower() for n in named} - {p.lower() for p in pins}
    assert not missing, missing


def test_processes_keep_the_search_path_of_the_environment(monkeypatch):
    "Where packages lie on PYTHONPATH, a process without it imports nothing."
    monkeypatch.setenv("PYTHONPATH", "packages")
    assert search_path() == f"{ROOT}{os.pathsep}packages"
    monkeypatch.delenv("PYTHONPATH")
    assert search_path("a", "b") == f"a{os.pathsep}b"
    for p in (ROOT / "tests").glob("test_*.py"):
        assert not re.search(r"""PYTHONPATH["']?[:=] ?str\(""", p.read_text(encoding="utf-8")), (
            f"{p.name}: PYTHONPATH: search_path()"
        )
