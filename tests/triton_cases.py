"""Inputs of the GPU tests of the Triton backend: a small pool of kernel shapes, because each new one compiles some
25 kernels, and everything else drawn freely."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import torch
from nsa_nb.kernels import backend as tb
from nsa_nb.geometry import Geometry
from nsa_nb.selection import selections_agree
from truth64 import INPUTS, allowed, truth, valid

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# relative norm: SPEC's for the first two; fp16 has 3 bits more than bf16
TOL = {F32: 1e-5, BF16: 1e-2, F16: 2e-3}
UNIT = {F32: 2.0**-22, BF16: 2.0**-9, F16: 2.0**-12}    # one rounding; fp32's are a few, of sums in different orders
ALGORITHMS = ("v1", "v2", "v3", "v3_skip")
OUTPUTS = ("o", "o_cmp", "o_sel", "o_win")


@dataclass(frozen=True)
class Shape:
    "What kernels are compiled for."
    name: str
    dtype: torch.dtype
    G: int
    h: int
    Dk: int
    Dv: int
    l: int
    d: int
    l_sel: int
    n_sel: int
    B: int = 1
    gates: torch.dtype | None = None       # None: as dtype
    aligned: tuple = ()                    # plain, packed: S and w are multiples of 16, else never


# The slowest to compile come first.
POOL = (Shape("widest", BF16, 2, 3, 256, 256, 32, 16, 32, 6, aligned=("plain",)),
        Shape("wide", BF16, 1, 2, 192, 128, 64, 32, 64, 8, aligned=("packed",)),
        Shape("fp32 h6", F32, 1, 6, 32, 32, 16, 8, 32, 8),
        Shape("fp32", F32, 2, 2, 16, 16, 8, 4, 16, 5, B=2, aligned=("plain",)),
        Shape("h4", BF16, 2, 4, 128, 128, 32, 16, 64, 16, aligned=("packed",)),
        Shape("h7", F16, 1, 7, 80, 96, 48, 16, 96, 5),
        Shape("h16", BF16, 1, 16, 64, 64, 32, 16, 128, 12, gates=F32, aligned=("packed",)),
        Shape("paper", BF16, 2, 6, 64, 64, 32, 16, 64, 16, aligned=("plain",)),
        Shape("h5", F16, 1, 5, 64, 128, 16, 16, 32, 64, B=2),
        Shape("h2", F16, 2, 2, 64, 64, 32, 16, 64, 7),
        Shape("h3", F16, 2, 3, 40, 24, 8, 4, 16, 33, aligned=("plain",)),
        Shape("h12", BF16, 2, 12, 16, 16, 8, 8, 48, 12, gates=F32),
        Shape("h1", BF16, 3, 1, 32, 32, 16, 8, 16, 4, B=2, aligned=("plain",)))
SHAPES = {s.name: s for s in POOL}
EACH = 9                                     # configurations of a shape, packed and not: 13 · 2 · 9 = 234


@dataclass(frozen=True)
class Config:
    shape: Shape
    S: int
    w: int
    n_init: int
    n_local: int
    cu: tuple | None
    strided: bool = False     # keys and values are slices of one tensor, as a layer's projections are
    spare: bool = False       # packed: compressed blocks of no document at the end
    loud: float = 1.0         # factor of q
    seed: int = 0

    @property
    def geo(self):
        s = self.shape
        return Geometry(s.l, s.d, s.l_sel, s.n_sel, self.w, self.n_init, self.n_local)

    @property
    def B(self): return 1 if self.cu else self.shape.B

    @property
    def longest(self):
        "What a caller who knows the documents may say."
        return max(b - a for a, b in zip(self.cu, self.cu[1:])) if self.cu and self.seed % 2 else None

    @property
    def N(self):
        cu = self.cu or (0, self.S)
        return self.geo.num_cmp(self.S) if self.spare else sum(self.geo.num_cmp(b - a) for a, b in zip(cu, cu[1:]))


def drawn(shape: Shape, packed: bool, i: int) -> Config:
    """The i-th configuration of a shape. Triton compiles again for a whole number that is 1 or a multiple of 16:
    whether S and w are is fixed for a shape,
    packed or not, as is B; the first configuration of most is a very short one."""
    at = POOL.index(shape)
    r = random.Random(f"{shape.name} {packed} {i}")
    aligned = ("packed" if packed else "plain") in shape.aligned
    most = min(1500, int((2**24 / shape.h) ** 0.5), int((2**25 / (shape.h * shape.G * shape.B)) ** 0.5))
    n_init, n_local = (1, 1) if at % 4 == 3 else (1 + packed, r.choice([2, 3])) if shape.n_sel > 4 else (1, 2)
    w = (
        r.choice([16, 64, 512])
        if aligned
        else 1
        if shape.name == "fp32" and i % 3 == 0
        else r.choice([2, 17, 33, 100, 511, 1000, 2000])
    )
    flags = dict(
        strided=r.random() < 0.5, spare=packed and r.random() < 0.5, loud=r.choice([0.3, 1, 1, 1, 4]),
        seed=r.randrange(2**31),
    )
    if i == 0 and at % 3 == 1: S = r.choice([1, 2, shape.l - 1, shape.l, shape.l + 1])
    else:
        for _ in range(200):
            S = r.randint(2, most) if r.random() < 0.7 else r.randint(2, min(most, 2 * shape.l_sel))
            S = max(16, S // 16 * 16) if aligned else S + (S % 16 == 0)
            N = (S - shape.l) // shape.d + 1
            if N > 1 and N % 16: break
    cu = None
    if packed:
        cuts = (
            [r.choice([0, 1, shape.l - 1, shape.l, shape.l + 1, shape.l_sel, S // 3]) for _ in range(r.randint(0, 4))]
            if r.random() < 0.7
            else []
        )
        ends = []
        at_ = 0
        for c in cuts:
            if at_ + c < S:
                at_ += c
                ends.append(at_)
        ends += [r.randint(0, S) for _ in range(r.randint(1, 4))]
        cu = (0, *sorted(ends), S)
    return Config(shape, S, w, n_init, n_local, cu, **flags)


def make(c: Config, device="cuda"):
    "The eight inputs and the cotangent: numbers that the dtype holds."
    s = c.shape
    gen = torch.Generator().manual_seed(c.seed)
    r = lambda *n: torch.randn(*n, generator=gen)
    def keys(n, width, at):
        if c.strided: return r(c.B, n, 2, s.G, width).to(device, s.dtype)[:, :, at % 2]
        return r(c.B, n, s.G, width).to(device, s.dtype)
    q = (c.loud * r(c.B, c.S, s.G * s.h, s.Dk)).to(device, s.dtype)
    kv = [keys(n, width, i) for i, (n, width) in enumerate([(c.N, s.Dk), (c.N, s.Dv)] + [(c.S, s.Dk), (c.S, s.Dv)] * 2)]
    gates = r(c.B, c.S, s.G * s.h, 3).sigmoid().to(device, s.gates or s.dtype)
    return [q, *kv, gates], r(c.B, c.S, s.G * s.h, s.Dv).to(device, s.dtype)


def run(inputs, do, c: Config, algorithm: str, dos=None):
    "Outputs, indices and gradients of the kernels, by name."
    leaves = [x.detach().requires_grad_() for x in inputs]
    cu = None if c.cu is None else torch.tensor(c.cu, dtype=torch.int32, device=do.device)
    scale = c.shape.Dk ** -0.5
    *outs, indices = tb.triton_attention(*leaves, c.geo, scale, cu, algorithm, c.longest)
    got = {name: x.detach() for name, x in zip(OUTPUTS, outs)} | dict(indices=indices)
    if do is None and dos is None: return got
    roots = [(x, y) for x, y in zip(outs, (do, *(dos or (None,) * 3))) if y is not None]
    grads = torch.autograd.grad([x for x, _ in roots], leaves, [y for _, y in roots])
    for name, x, g in zip(INPUTS, leaves, grads): assert g.dtype == x.dtype and g.shape == x.shape, name
    return got | dict(zip(INPUTS, grads))


def check_selection(indices, t, c: Config):
    """bool [B,S,G]: where the choice is float64's own; wherever it is not, both choices must lie within rounding
    of each other."""
    g = c.geo
    cu = c.cu and list(c.cu)
    ok = valid(indices, l_sel=g.l_sel, n_sel=g.n_sel, n_init=g.n_init, n_local=g.n_local, cu=cu)
    assert ok.all(), (
        f"{(~ok).sum().item()} of {ok.numel()} selections are no selections, first {indices[~ok][0].tolist()}"
    )
    bound = 2.0**-20 * c.shape.h * (g.l // g.d) * (g.l_sel // g.d)              # 1_attention/050_selection says why
    ok = selections_agree(indices, t["indices"], t["scores"], bound)
    assert ok.all(), (
        f"{(~ok).sum().item()} of {ok.numel()} selections differ by more than rounding, first "
        f"{indices[~ok][0].tolist()} against {t['indices'][~ok][0].tolist()}"
    )
    return (indices == t["indices"]).all(-1)


def hold(got, t, inputs, do, c: Config, names=None, what=""):
    "Every named tensor within its tolerance of the truth; the largest share of a tolerance that was used."
    worst = 0.0
    bad = []
    tol = TOL[c.shape.dtype]
    for name in names or OUTPUTS + INPUTS:
        x = got[name].double()
        y = t[name]
        if not x.numel(): continue
        limit = allowed(t, name, inputs, do, c.shape.Dk ** -0.5, tol, UNIT[c.shape.dtype])
        err = float((x - y).norm())
        if not err <= limit:
            bad.append(f"{what} {name}: |got - want| {err:.3g}, allowed {limit:.3g}, |want| {float(y.norm()):.3g}")
        worst = max(worst, err / limit if limit else 0.0)
    assert not bad, "\n".join(bad)
    return worst


def compare(c: Config, device="cuda", algorithms=ALGORITHMS, change=None) -> dict:
    """Every algorithm against float64 that is given the kernels' selection, so that every row is compared, also
    where a score within rounding of another fell the
    other way; that it may have is checked apart. Returns what was counted."""
    inputs, do = make(c, device)
    if change: change(inputs)
    got = {a: run(inputs, do, c, a) for a in algorithms}
    indices = got[algorithms[0]]["indices"]
    s = c.shape
    sizes = dict(l=s.l, d=s.d, l_sel=s.l_sel, n_sel=s.n_sel, w=c.w, n_init=c.n_init, n_local=c.n_local)
    t = truth(inputs, do, **sizes, cu=c.cu and list(c.cu), indices=indices)
    same = check_selection(indices, t, c)
    worst = {}
    for a, x in got.items():
        assert torch.equal(x["indices"], indices), a
        worst[a] = hold(x, t, inputs, do, c, what=a)
    return dict(rows=same.numel(), same=int(same.sum()), worst=worst)


def record(record_property, what: dict) -> None:
    record_property("selection", json.dumps(what))
