"""A server of FineWeb-Edu as the tests need it: Parquet with its columns, made now; a Hugging Face Hub small
enough for `datasets`; and faults on request.

    with serve(files={"sample/10BT/000_00000.parquet": bytes}) as s:
        s.url("sample/10BT/000_00000.parquet")      # the file itself, by Range requests
        s.endpoint                                  # for HF_ENDPOINT: the repository HuggingFaceFW/fineweb-edu
        with these files
        s.faults[:] = [503, 503, "stall", "drop", "early"]      # one for each coming request of a file
        s.always = 503                              # or for all of them"""
import http.server
import io
import json
import re
import threading
import time
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("text", pa.string()), ("id", pa.string()), ("dump", pa.string()), ("url", pa.string()),
        ("file_path", pa.string()), ("language", pa.string()), ("language_score", pa.float64()),
        ("token_count", pa.int64()), ("score", pa.float64()), ("int_score", pa.int64()),
    ]
)
REPO = "HuggingFaceFW/fineweb-edu"
SHA = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
# FineWeb-Edu
"""


def text_of(i: int) -> str: return f"Document {i}. " + "Some words about a subject. " * (1 + i % 7)


def rows(first: int, n: int, text=text_of) -> pa.Table:
    "n rows with FineWeb's columns."
    k = range(first, first + n)
    return pa.Table.from_pydict(
        dict(
            text=[text(i) for i in k], id=[f"<urn:uuid:{i:08d}>" for i in k], dump=["CC-MAIN-2013-20"] * n,
            url=[f"http://example.invalid/{i}" for i in k], file_path=["s3://commoncrawl"] * n, language=["en"] * n,
            language_score=[0.93] * n, token_count=[len(text(i)) // 4 for i in k], score=[3.1] * n, int_score=[3] * n,
        ),
        SCHEMA,
    )


def parquet(table: pa.Table, group: int = 1000) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=group)
    return out.getvalue()


def fineweb(sizes=(30, 40, 50), group: int = 16, folder: str = "sample/10BT", text=text_of) -> dict[str, bytes]:
    "Files of a subset; document i of file k has number 1000·k + i."
    return {f"{folder}/{k:03d}_00000.parquet": parquet(rows(1000 * k, n, text), group) for k, n in enumerate(sizes)}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *a): pass

    def answer(self, body: bytes, code=200, **headers):
        self.send_response(code)
        for k, v in ({"Content-Type": "application/json", "X-Repo-Commit": SHA} | headers).items():
            self.send_header(k.replace("_", "-"), v)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD": self.wfile.write(body)

    def missing(self): self.answer(b"{}", 404, X_Error_Code="EntryNotFound")

    def handle_request(self):
        s, path, query = self.server.state, unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not s.hub_up and (path.startswith("/api/") or "README" in path): return self.answer(b"", 503)
        if m := re.fullmatch(rf"/api/datasets/{REPO}(/revision/.+)?", path):
            return self.answer(
                json.dumps(
                    dict(
                        _id="1", id=REPO, sha=SHA, private=False, gated=False, disabled=False, tags=[], downloads=0,
                        likes=0, siblings=[dict(rfilename=f) for f in s.files], lastModified="2026-01-01T00:00:00.000Z",
                        createdAt="2026-01-01T00:00:00.000Z",
                    )
                ).encode()
            )
        if m := re.fullmatch(rf"/api/datasets/{REPO}/paths-info/[^/]+", path):
            return self.answer(json.dumps([e for p in self.paths(body) for e in s.entry(p)]).encode())
        if m := re.fullmatch(rf"/api/datasets/{REPO}/tree/[^/]+/?(.*)", path):
            return self.tree(m[1], "recursive" in query and query["recursive"][0].lower() in ("1", "true"))
        if m := re.fullmatch(rf"/datasets/{REPO}/resolve/[^/]+/(.+)", path):
            if m[1] == "README.md": return self.answer(CARD.encode(), ETag='"card"')
            if m[1] not in s.files: return self.missing()
            # as the Hub does: the bytes lie elsewhere
            return self.answer(b"", 302, Location=f"http://localhost:{self.server.server_port}/cdn/{m[1]}")
        if m := re.fullmatch(r"/cdn/(.+)", path): return self.file(m[1])
        s.unknown.append((self.command, self.path))
        self.missing()

    do_GET = do_HEAD = do_POST = handle_request

    def paths(self, body: bytes) -> list[str]:
        try: p = json.loads(body)["paths"]
        except ValueError: p = parse_qs(body.decode()).get("paths", [])
        return [p] if isinstance(p, str) else p

    def tree(self, under: str, recursive: bool):
        s = self.server.state
        seen = {}
        for f in s.files:
            if under and not f.startswith(under + "/"): continue
            rest = f[len(under) + 1 if under else 0:].split("/")
            for n in range(1, len(rest) + 1) if recursive else (1,):
                p = "/".join(([under] if under else []) + rest[:n])
                seen[p] = s.entry(p)[0]
        return self.answer(json.dumps(list(seen.values())).encode()) if seen else self.missing()

    def file(self, name: str):
        s = self.server.state
        data = s.files.get(name)
        if self.command == "HEAD": return self.answer(b"") if data is not None else self.missing()
        with s.lock: fault = s.always if s.always is not None else s.faults.pop(0) if s.faults else None
        asked = self.headers.get("Range", "")
        s.log.append((name, asked, fault, self.headers.get("Authorization")))
        if data is None: return self.missing()
        if isinstance(fault, int): return self.answer(b"", fault)
        if fault == "limit": return self.answer(b"", 429, RateLimit='"resolvers";r=0;t=1', **{"Retry-After": "0"})
        if fault == "stall":
            time.sleep(s.stall)
            return
        m = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
        if not m: return self.answer(data)
        n = len(data)
        a, b = (n - min(n, int(m[2])), n - 1) if not m[1] else (int(m[1]), min(n - 1, int(m[2] or n - 1)))
        body = data[a:b + 1]
        if s.slow: time.sleep(s.slow)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {a}-{b}/{n}")
        self.send_header("ETag", f'"{len(data)}"')
        if fault != "early": self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "garbage": body = bytes(len(body))
        try: self.wfile.write(body[:len(body) * 2 // 3] if fault in ("drop", "early") else body)
        except OSError: pass


class State:
    def __init__(self, files):
        self.files = files
        self.faults = []
        self.always = None
        self.log = []
        self.unknown = []
        self.stall = 1.0
        self.slow = 0.0
        self.hub_up = True
        self.lock = threading.Lock()

    def entry(self, p: str) -> list[dict]:
        if p in self.files: return [dict(type="file", oid="0" * 40, size=len(self.files[p]), path=p)]
        return (
            [dict(type="directory", oid="0" * 40, size=0, path=p)]
            if any(f.startswith(p + "/") for f in self.files)
            else []
        )


class Served(State):
    def url(self, name: str) -> str: return f"{self.endpoint}/cdn/{name}"

    @property
    def urls(self) -> str: return ",".join(map(self.url, self.files))


@contextmanager
def serve(files=None):
    "A running server; see the top."
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.state = s = Served(fineweb() if files is None else files)
    s.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=.05), daemon=True).start()
    try:
        yield s
    finally:
        server.shutdown()
        server.server_close()
