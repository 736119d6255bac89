"""Process the documentation the way nbdev does before Quarto renders it, and check what comes out.   python
tests/ci/docs.py

Errors: a local link or picture that leads nowhere, a link to a page of this site that is not made, a sidebar
entry of
_quarto.yml that matches nothing, a notebook that no entry matches, an nbs/nbdev.yml that is not what
settings.ini says."""

import json
import os
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import unquote

import yaml

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|(?:href|src)=[\"']([^\"']+)[\"']|^\s*\[[^\]^]+\]:\s*(\S+)", re.M
)
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|`+[^`]*?`+", re.M | re.S)


def prose(path: Path) -> str:
    "The text of a processed page that a reader sees as Markdown: prose, and outputs that are Markdown or HTML."
    if path.suffix != ".ipynb": return path.read_text(encoding="utf-8")
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown": parts.append("".join(cell["source"]))
        for out in cell.get("outputs", []):
            parts += ["".join(v) for k, v in out.get("data", {}).items() if k in ("text/markdown", "text/html")]
    return "\n\n".join(parts)


def links(text: str) -> list[str]:
    "Targets of links and pictures, those in code left out."
    return [next(g for g in m if g) for m in LINK.findall(CODE.sub("", text))]


def page_name(path: Path) -> str:
    "The HTML page that a source becomes: its number goes (00_errors.ipynb → errors.html)."
    return re.sub(r"^\d+[a-zA-Z0-9]*_", "", path.name.lower()).rsplit(".", 1)[0] + ".html"


def dead_links(site: Path, url: str, source: str, root: Path) -> list[str]:
    """Links in the processed pages below `site` that lead nowhere. `url` is where the site will stand; what begins
    with `source`
    is a file of the repository at `root`, which nbdev links for each documented name."""
    pages = [p for p in sorted(site.rglob("*")) if p.suffix in (".ipynb", ".md", ".qmd")]
    html = {(p.parent/page_name(p)).relative_to(site).as_posix() for p in pages}
    dead = []
    for page in pages:
        for target in links(prose(page)):
            path = unquote(target.split("#")[0].split("?")[0])
            if not path: continue                                    # an anchor on the same page
            if target.startswith(source):
                if not (root/path.removeprefix(source)).exists(): dead.append(f"{page.relative_to(site)}: {target}")
                continue
            if target.startswith(url): where = path.removeprefix(url).lstrip("/") or "index.html"
            elif re.match(r"([a-z][a-z0-9+.-]*:|//)", target, re.I): continue  # another site
            else:
                where = os.path.normpath(
                    os.path.join(page.parent.relative_to(site), path.lstrip("/") if path[0] == "/" else path)
                )
            if where not in html and not (site/where).exists(): dead.append(f"{page.relative_to(site)}: {target}")
    return dead


def sidebar_faults(quarto: dict, nbs: Path) -> list[str]:
    "Sidebar entries that match no file, and notebooks that no entry matches."
    def entries(contents):
        for c in contents:
            if isinstance(c, str): yield c
            else: yield from entries(c.get("contents", []))
    patterns = list(entries(quarto["website"]["sidebar"]["contents"]))
    books = [p.relative_to(nbs).as_posix() for p in sorted(nbs.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]
    match = lambda b, p: b.count("/") == p.count("/") and fnmatch(b, p)   # Quarto's * stays in its folder
    return ([f"_quarto.yml: {p!r} matches no notebook" for p in patterns if not any(match(b, p) for b in books)]
            + [f"_quarto.yml: no entry for {b}" for b in books if not any(match(b, p) for p in patterns)])


def process(root: Path = ROOT) -> Path:
    "Run nbdev's processing (it executes exported cells and imports); returns the folder it wrote."
    os.chdir(root)
    from nbdev.serve import proc_nbs
    return Path(proc_nbs(n_workers=2, force=True))


def check(root: Path = ROOT) -> list[str]:
    "All faults, one a line."
    os.chdir(root)
    from nbdev.config import get_config
    from nbdev.quarto import refresh_quarto_yml
    cfg = get_config()
    nbs = root/"nbs"
    before = (nbs/"nbdev.yml").read_text() if (nbs/"nbdev.yml").exists() else ""
    refresh_quarto_yml()
    faults = (
        []
        if (nbs / "nbdev.yml").read_text() == before
        else ["nbs/nbdev.yml: not what settings.ini says; it has been rewritten, commit it"]
    )
    quarto = yaml.safe_load((nbs/"_quarto.yml").read_text(encoding="utf-8"))
    faults += [f"_quarto.yml: {f} is not there" for f in quarto.get("metadata-files", []) if not (nbs/f).exists()]
    if (css := quarto["format"]["html"].get("css")) and not (nbs / css).exists():
        faults.append(f"_quarto.yml: {css} is not there")
    faults += sidebar_faults(quarto, nbs)
    faults += [
        f"dead link in {d}"
        for d in dead_links(process(root), cfg.doc_host + cfg.doc_baseurl, f"{cfg.git_url}/blob/{cfg.branch}/", root)
    ]
    return faults


def main() -> int:
    print("== documentation", flush=True)
    faults = check()
    for f in faults: print(f"  {f}")
    print(f"  {len(faults)} faults" if faults else "  no dead links")
    return bool(faults)


if __name__ == "__main__": sys.exit(main())
