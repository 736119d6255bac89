"""Inputs, tolerances and the comparison that the attention tests share. The truth comes from oracle.py alone."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from nsa_nb.attention import nsa_attention
from oracle import F64, INPUTS, Result, attention_and_grads, n_blocks, selection_disagreements

F32, BF16 = torch.float32, torch.bfloat16
BACKENDS = ("reference", "torch")
BRANCHES = ("cmp", "sel", "win")

# Relative error in the 2-norm, got against the float64 oracle on exactly the same numbers.
# float64: u = 2^-53. A logit of Dk products of total size L is off by at most (Dk + 2) u L, about 2e-12 for the largest
# here
#   (q times 50: Dk 8, L near 1400), and enters a softmax weight twice; the sums over keys add less. 1e-10 leaves a
# factor 25.
# float32: the project's bound; what was measured is 3e-6 for q times 50 and under 1e-6 elsewhere.
# bfloat16: the project's bound; rounding the result alone costs up to 2^-9 = 2e-3, and that is what was measured.
TOL = {F64: 1e-10, F32: 1e-5, BF16: 1e-2}
UNIT = {F64: 2.0 ** -53, F32: 2.0 ** -24, BF16: 2.0 ** -24}  # bf16 inputs are exact, the arithmetic is float32


@dataclass(frozen=True)
class Case:
    "One input of nsa_attention: sizes, and `change`, which edits the random inputs in place."
    name: str
    S: int
    B: int = 1
    H: int = 4
    G: int = 2
    Dk: int = 8
    Dv: int = 8
    geo: tuple = (("l", 4), ("d", 2), ("l_sel", 8), ("n_sel", 4), ("w", 5))
    cu: tuple | None = None
    change: object = None
    degenerate: bool = False      # exact gradients vanish by cancellation: see `bound`
    seed: int = 0
    extra: tuple = ()             # more keyword arguments, e.g. scale

    @property
    def kw(self):
        cu = {} if self.cu is None else {"cu_seqlens": torch.tensor(self.cu, dtype=torch.int32)}
        return dict(self.geo) | cu | dict(self.extra)

    @property
    def N(self):
        l, d = dict(self.geo)["l"], dict(self.geo)["d"]
        borders = self.cu or (0, self.S)
        return sum(n_blocks(b - a, l, d) for a, b in zip(borders, borders[1:]))


def geo(l, d, l_sel, n_sel, w, **more):
    return tuple((dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=w) | more).items())


def make_inputs(case):
    """The eight inputs and the cotangent, float64 tensors whose values bfloat16 holds exactly, so that each dtype
    sees the same numbers."""
    gen = torch.Generator().manual_seed(1000 + case.seed)
    r = lambda *s: torch.randn(*s, generator=gen, dtype=F32)
    B = case.B
    S = case.S
    H = case.H
    G = case.G
    N = case.N
    Dk = case.Dk
    Dv = case.Dv
    x = dict(q=r(B, S, H, Dk), k_cmp=r(B, N, G, Dk), v_cmp=r(B, N, G, Dv), k_sel=r(B, S, G, Dk), v_sel=r(B, S, G, Dv),
             k_win=r(B, S, G, Dk), v_win=r(B, S, G, Dv), gates=r(B, S, H, 3).sigmoid())
    if case.change:
        case.change(x)
    return [x[name].to(BF16).to(F64) for name in INPUTS], r(B, S, H, Dv).to(BF16).to(F64)


def one_hot_gates(x, branch):
    x["gates"] = torch.zeros_like(x["gates"])
    x["gates"][..., branch] = 1


@dataclass
class Truth:
    inputs: list
    do: torch.Tensor
    res: Result
    grads: dict
    natural: dict = field(default_factory=dict)


def _rms_row(x):
    return math.sqrt(float(x.square().sum(-1).mean())) if x.numel() else 0.0


def naturals(inputs, do, scale):
    """The size each gradient would have if nothing cancelled: Frobenius norm of the branch's cotangent g_b * do
    times the rms
    length of the other factors. A result is allowed a few roundings of this size, however small the exact value is.
    """
    x = dict(zip(INPUTS, inputs))
    nat = dict(q=0.0)
    for b, name in enumerate(BRANCHES):
        gdo = float((x["gates"][..., b: b + 1] * do).norm())
        rv = _rms_row(x[f"v_{name}"])
        nat["q"] += scale * gdo * rv * _rms_row(x[f"k_{name}"])
        nat[f"k_{name}"] = scale * gdo * rv * _rms_row(x["q"])
        nat[f"v_{name}"] = gdo
    rv = max(_rms_row(x[f"v_{name}"]) for name in BRANCHES)
    rows = math.sqrt(do[..., 0].numel())
    return nat | dict(
        gates=float(do.norm()) * rv, o=float(x["gates"].norm()) * rv, o_cmp=rows * rv, o_sel=rows * rv, o_win=rows * rv
    )


def truth_of(inputs, do, **kw):
    res, grads = attention_and_grads(inputs, do, **kw)
    scale = kw.get("scale") or 1 / math.sqrt(inputs[0].shape[-1])
    return Truth(inputs, do, res, grads, naturals(inputs, do, abs(scale)))


@functools.lru_cache(maxsize=None)
def truth(case):
    return truth_of(*make_inputs(case), **case.kw)


def bound(dtype, want, natural, degenerate=False):
    """Largest ||got - want||: TOL ||want||, but a few roundings (4 u) of the natural size are always allowed.

    A degenerate case (one key: the exact dq is 0, by cancellation of dp - o.do) in bfloat16 may use an o
    rounded to bfloat16:
    u = 2^-9 of the natural size.
    """
    u = 2.0 ** -9 if degenerate and dtype is BF16 else UNIT[dtype]
    return max(TOL[dtype] * float(want.norm()), 4 * u * natural)


def compare(got, want, dtype, t: Truth, degenerate=False):
    "Every tensor of want within `bound` of got; a list of what is not."
    bad = []
    for name in want:
        g = got[name].detach().to(F64)
        w = want[name].detach()
        if g.shape != w.shape:
            bad.append(f"{name}: shape {tuple(g.shape)}, wanted {tuple(w.shape)}")
            continue
        if not torch.isfinite(g).all():
            bad.append(f"{name}: not finite")
            continue
        err = float((g - w).norm())
        allowed = bound(dtype, w, t.natural[name], degenerate)
        if err > allowed:
            bad.append(
                f"{name}: |got - want| = {err:.3g}, |want| = {float(w.norm()):.3g}, relative "
                f"{err / max(float(w.norm()), 1e-300):.3g}, "
                f"allowed {allowed:.3g}"
            )
    return bad


def run(inputs, do, dtype, backend, **kw):
    "The package's outputs and gradients, by name, and its indices."
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    o, aux = nsa_attention(*leaves, **kw, backend=backend, return_aux=True)
    assert o.dtype == dtype, (o.dtype, dtype)
    grads = torch.autograd.grad(o, leaves, do.to(dtype), allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)]
    for name, x, g in zip(INPUTS, leaves, grads):
        assert g.dtype == dtype and g.shape == x.shape, (name, g.dtype, g.shape)
    return dict(zip(INPUTS, grads)) | dict(o=o, o_cmp=aux["o_cmp"], o_sel=aux["o_sel"], o_win=aux["o_win"]), aux[
        "indices"
    ]


def check(t: Truth, dtype, backend, degenerate=False, **kw):
    "Run the package and compare selection, every branch, the output and every gradient with the oracle."
    got, indices = run(t.inputs, t.do, dtype, backend, **kw)
    sel_kw = dict(l_sel=kw["l_sel"], n_sel=kw["n_sel"], n_init=kw.get("n_init", 1), n_local=kw.get("n_local", 2))
    bad = selection_disagreements(t.res, indices, cu_seqlens=kw.get("cu_seqlens"), **sel_kw)
    assert not bad, "\n".join(bad[:5])
    if not torch.equal(indices, t.res.indices):  # a near tie went the other way: the truth for that selection
        res, grads = attention_and_grads(t.inputs, t.do, indices=indices, **kw)
        t = Truth(t.inputs, t.do, res, grads, t.natural)
    want = t.grads | dict(o=t.res.o, o_cmp=t.res.o_cmp, o_sel=t.res.o_sel, o_win=t.res.o_win)
    bad = compare(got, want, dtype, t, degenerate)
    assert not bad, "\n".join(bad)
    return got, want
