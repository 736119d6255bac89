"""README.md from nbs/index.ipynb, without Quarto.   python tests/ci/readme.py [--check]

Prose goes over as it is, code as fenced blocks, text output below its code. Links are relative to nbs/ in the
notebook and to the
top of the repository in the README; one that leads nowhere is an error."""

import json
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()[^)\s]+|(?<=href=\")[^\"]+|(?<=src=\")[^\"]+")
FENCED = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", re.M | re.S)
HIDDEN = re.compile(r"^#\s*\|\s*(hide|export|exports|default_exp|echo:\s*false)\b", re.M)


def relink(text: str, root: Path) -> str:
    "Links of prose that stands in nbs/, for a file at the top."
    def fix(m):
        target = m[0]
        if re.match(r"([a-z][a-z0-9+.-]*:|#|/)", target, re.I): return target
        path, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join("nbs", path))
        if not (root/path).exists(): raise SystemExit(f"nbs/index.ipynb: the link {target!r} leads nowhere ({path})")
        return path + hash_ + anchor
    parts = FENCED.split(text)   # odd parts are code
    return "".join(p if i % 2 else LINK.sub(fix, p) for i, p in enumerate(parts))


def output_text(out: dict) -> str:
    "An output as Markdown."
    data = out.get("data", {})
    if "text/markdown" in data: return "".join(data["text/markdown"])
    if any(k.startswith("image/") for k in data):
        raise SystemExit(
            "nbs/index.ipynb: the README cannot hold a picture made by a cell; save it in nbs/images and link it"
        )
    text = "".join(out.get("text") or data.get("text/plain") or "").rstrip("\n")
    return f"```text\n{text}\n```" if text else ""


def render(root: Path = ROOT) -> str:
    "The README's text; empty where there is no index yet."
    index = root/"nbs"/"index.ipynb"
    if not index.exists(): return ""
    blocks = []
    for cell in json.loads(index.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).strip("\n")
        if cell["cell_type"] == "markdown": blocks.append(relink(source, root))
        elif cell["cell_type"] == "code" and not HIDDEN.search(source):
            code = re.sub(r"^#\s*\|.*\n?", "", source, flags=re.M).strip("\n")
            blocks += [f"```python\n{code}\n```" if code else "", *(output_text(o) for o in cell["outputs"])]
    head = "<!-- Made from nbs/index.ipynb by tests/ci/readme.py. Edit the notebook. -->"
    return "\n\n".join([head, *(b for b in blocks if b)]) + "\n"


def main() -> int:
    text = render()
    path = ROOT/"README.md"
    if (path.read_text(encoding="utf-8") if path.exists() else "") == text: return 0
    if "--check" in sys.argv[1:]:
        print("README.md is not what nbs/index.ipynb says: run python tests/ci/readme.py and commit it")
        return 1
    path.write_text(text, encoding="utf-8")
    print("README.md written")
    return 0


if __name__ == "__main__": sys.exit(main())
