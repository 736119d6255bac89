"""A layer that is not plain is called, whatever kernel or compiled product would read its weights: kind of layer ×
which layer × backend × eager or compiled.

The reference calls the modules by hand, in float64, and takes its attention from the oracle: nothing that the
package computes stands in it. Two kinds cannot be made in
float64 and have references of their own: a quantised layer is called in fp32 (its weights are whole numbers,
and what it computes is what it is), and a layer wrapped by DDP or
FSDP must do what the same layer does without.

Tolerance: 1e-5 relative in fp32, as for the layer itself (test_attention_module), 2e-2 for bf16 autocast on a
card. `cuda` marks what a card alone can show."""

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from zygote import search_path

from nsa_nb.attention import NSAAttention
from nsa_nb.dense import DenseAttention
from nsa_nb.loss import LOGITS
from nsa_nb.model import TinyLM
from nsa_nb.fallbacks import fallbacks
from nsa_nb.training.step_kind import pick_step
from nsa_nb.training.stepper import Stepper
from oracle import F64, rel_err

torch.set_num_threads(1)
cuda = pytest.mark.cuda
# kernels want wider heads; the interpreter wants few of all
CARD = torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET")
HEADS = dict(n_heads=4, n_kv_groups=2, d_k=16, d_v=16) if CARD else dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
SIZES = dict(l=8, d=4, l_sel=8, n_sel=5, w=12) if CARD else dict(l=2, d=2, l_sel=2, n_sel=3, w=3)
DIM = 12
S = 40 if CARD else 7      # on a card every block is selected: bf16 can't choose another
BORDERS = [0, 3, S]


# ---------------------------------------------------------------- kinds of layers

class Wrapped(nn.Module):
    "An adapter around a layer: it has no weight of its own, and its base is frozen."
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, base.in_features) / 3)
        self.b = nn.Parameter(torch.randn(base.out_features, 3) / 3)

    def forward(self, x): return self.base(x) + x @ self.a.t() @ self.b.t()


class Adapted(nn.Linear):
    "An adapter as peft writes them: a linear layer with another forward."
    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.load_state_dict(base.state_dict())
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, base.in_features) / 3)
        self.b = nn.Parameter(torch.randn(base.out_features, 3) / 3)

    def forward(self, x): return super().forward(x) + x @ self.a.t() @ self.b.t()


class Other(nn.Module):
    "Any module around any module."

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args): return 0.5 * self.inner(*args)


class Scaled(torch.Tensor):
    "A kind of tensor that acts in functions of PyTorch, as a quantised or sharded weight does: F.linear is doubled."
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.linear: return super().__torch_function__(func, types, args, kwargs or {})
        return 2 * F.linear(
            *(a.as_subclass(torch.Tensor) if isinstance(a, Scaled) else a for a in args), **(kwargs or {})
        )


def biased(m):
    new = nn.Linear(m.in_features, m.out_features)
    new.weight = m.weight
    return new


def scale_output(m, args, out): return 1.5 * out + 0.1
def scale_input(m, args): return 0.7 * args[0], *args[1:]
def scale_gradient(m, gi, go): return tuple(g if g is None else 3 * g for g in gi)


def forward_hook(m):
    m.register_forward_hook(scale_output)
    return m


def pre_hook(m):
    m.register_forward_pre_hook(scale_input)
    return m


def backward_hook(m):
    m.register_full_backward_hook(scale_gradient)
    return m


def tripled(m, x): return 3 * F.linear(x, m.weight, m.bias)


def forward_replaced(m):
    m.forward = partial(tripled, m)
    return m


def old_weight_norm(m):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(m)


def subclass_weight(m):
    m.weight = nn.Parameter(m.weight.detach().as_subclass(Scaled))
    return m


def for_all_modules(m):
    "A hook for the calls of all modules, which acts on this one."
    GLOBAL.append(register_module_forward_hook(lambda other, args, out: 1.5 * out if other is m else None))
    return m


GLOBAL = []
LINEAR = {
    "bias": biased, "adapter around": Wrapped, "adapter within": Adapted, "another module": Other,
    "forward hook": forward_hook, "pre-hook": pre_hook, "backward hook": backward_hook, "hook for all": for_all_modules,
    "forward replaced": forward_replaced, "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal, "old weight norm": old_weight_norm,
    "weight of a subclass": subclass_weight,
}
MODULE = {k: LINEAR[k] for k in ("another module", "forward hook", "pre-hook", "hook for all")}
PLAIN = {"bias"}       # weights and bias are read, and nothing is counted


@pytest.fixture(autouse=True)
def clean():
    yield
    while GLOBAL: GLOBAL.pop().remove()
    torch.compiler.reset()


def change(model, paths, kind):
    "The layers of these paths become ones of this kind."
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, (LINEAR | WRAPPED | QUANTISED)[kind](model.get_submodule(path)))
    return model


def build(kind=None, paths=(), dtype=torch.float32, cls=NSAAttention, **more):
    "The same numbers at each call."
    torch.manual_seed(0)
    sizes = SIZES | more if cls is NSAAttention else {}
    m = cls(DIM, **HEADS, **sizes)
    with torch.no_grad():
        for p in m.parameters(): p.copy_(torch.randn_like(p) / max(1, p.shape[-1]) ** 0.5)
    return change(m, paths, kind).to(dtype)


def data(B=1, S=S, dim=DIM): return torch.randn(B, S, dim, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- the layer by hand

def by_hand(a, x, borders=None):
    "Every module is called, in turn, with float64; RoPE and the attention are the oracle's. borders: of documents."
    H, G, D = HEADS["n_heads"], HEADS["n_kv_groups"], HEADS["d_k"]
    cut = borders or [0, x.shape[1]]
    parts = []
    gates = a.gate(x) if a.gate is not None else None
    q, k, v = (m(x).double() for m in (a.q_proj, a.k_proj, a.v_proj))
    for i, j in zip(cut, cut[1:]):
        n = j - i
        turn = lambda t, at: oracle.rope(t, at)[None]
        pairs = k.shape[-1] // (G * D)
        ks, vs = (t[0, i:j].reshape(n, pairs, G, D).unbind(1) for t in (k, v))
        turned = [turn(t, list(range(n))) for t in ks]
        parts.append([turn(q[0, i:j].reshape(n, H, D), list(range(n))), turned, [t[None] for t in vs]])
    cat = lambda ts: torch.cat(ts, 1)
    Q = cat([p[0] for p in parts])
    K, V = ([cat([p[at][b] for p in parts]) for b in range(pairs)] for at in (1, 2))
    if gates is None:       # dense
        out = []
        for i, j in zip(cut, cut[1:]):
            rep = lambda t: t[0, i:j].repeat_interleave(H // G, 1)
            s = torch.einsum("thd,uhd->htu", Q[0, i:j], rep(K[0])) / D ** 0.5
            seen = torch.ones(j - i, j - i, dtype=torch.bool).tril()
            out.append(torch.einsum("htu,uhd->thd", s.masked_fill(~seen, -torch.inf).softmax(-1), rep(V[0])))
        return a.o_proj(torch.cat(out)[None].flatten(2).to(x.dtype))
    compress = lambda phi, t: cat([phi(t[:, i:j]) for i, j in zip(cut, cut[1:])])
    kc, vc = compress(a.phi_k, K[0]), compress(a.phi_v, V[0])
    o = oracle.attention(Q, kc, vc, K[1], V[1], K[2], V[2], gates.double(), **SIZES, cu_seqlens=borders).o
    return a.o_proj(o.flatten(2).to(x.dtype))


def grads(f, m, x):
    "Output, the gradient of x, and those of all parameters that learn, by name."
    x = x.clone().requires_grad_()
    y = f(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    (y * dy).sum().backward()
    whole = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g
    out = {
        n.replace("module.", "").replace("_orig_mod.", ""): None if p.grad is None else whole(p.grad).clone()
        for n, p in m.named_parameters()
        if p.requires_grad
    }
    m.zero_grad()
    return dict(y=y.detach(), x=x.grad) | out


def misses(got, want, tol=1e-5):
    "Names of what differs; every gradient that the reference has must be there."
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    found = {}
    for n, w in want.items():
        if w is None: continue
        g = torch.zeros_like(w) if got[n] is None else got[n].cpu()
        e = rel_err(g, w) if w.norm() > 1e-9 else float(g.norm())
        if not e <= tol: found[n] = e
    return found


def truth(kind, paths, cls=NSAAttention, borders=None, **more):
    plain = kind in WRAPPED      # a wrapper changes nothing
    m = build(None if plain else kind, () if plain else paths, F64, cls, **more)
    out = grads(lambda x: by_hand(m, x, borders), m, data().double())
    while GLOBAL: GLOBAL.pop().remove()
    return out


def counted(f):
    before = dict(fallbacks.counts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = f()
    return out, {k: n - before[k] for k, n in fallbacks.counts.items() if n != before[k]}


# ---------------------------------------------------------------- wrappers of a group of one process

@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def sharded(m):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    return fully_shard(m, mesh=init_device_mesh("cpu", (1,)))


def quantised(m):
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization import default_dynamic_qconfig
    m.qconfig = default_dynamic_qconfig
    return Linear.from_float(m)


WRAPPED = {"DDP": lambda m: nn.parallel.DistributedDataParallel(m), "FSDP": sharded}
QUANTISED = {"quantised": quantised}

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate.proj")
CELLS = [(kind, (path,), {}) for kind in LINEAR for path in PROJECTIONS]
CELLS += [(kind, ("gate",), {}) for kind in MODULE]
CELLS += [(kind, (path,), dict(phi="avg")) for kind in MODULE for path in ("phi_k", "phi_v")]
ALL = ("q_proj", "v_proj", "gate.proj")
names = lambda cell: f"{cell[0]}, {'+'.join(cell[1])}"


# ---------------------------------------------------------------- eager

@pytest.mark.parametrize("cell", CELLS, ids=names)
def test_every_kind_in_every_place(cell):
    kind, paths, more = cell
    want = truth(kind, paths, **more)
    for backend in ("reference", "torch"):
        m = build(kind, paths, backend=backend, **more)
        got, n = counted(lambda: grads(m, m, data()))
        assert misses(got, want) == {} and n == {}, backend       # no fast path was left
        while GLOBAL: GLOBAL.pop().remove()


@pytest.mark.parametrize("kind", LINEAR)
def test_every_kind_in_the_dense_twin(kind):
    for borders in (None, BORDERS):
        paths = PROJECTIONS[:4]
        want = truth(kind, paths, DenseAttention, borders)
        m = build(kind, paths, cls=DenseAttention)
        cu = borders and torch.tensor(borders, dtype=torch.int32)
        assert misses(grads(lambda x: m(x, cu), m, data()), want) == {}
        while GLOBAL: GLOBAL.pop().remove()


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_layers(kind, group):
    for cls, paths in ((NSAAttention, PROJECTIONS), (DenseAttention, PROJECTIONS[:4])):
        m = build(kind, paths, cls=cls)
        assert misses(grads(m, m, data()), truth(kind, paths, cls)) == {}


def test_quantised_layers():
    """Their weights are packed, no attribute holds them as a tensor, and there is no gradient. The output layer
    rounds its input to 8 bits, so that a last bit of fp32 may move
    one of its inputs by a step: 5e-3."""
    x = data()
    for cls, paths in ((NSAAttention, PROJECTIONS), (DenseAttention, PROJECTIONS[:4])):
        m = build("quantised", paths, cls=cls)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for got in (m(x), torch.compile(m, backend="eager")(x)): assert rel_err(got, by_hand(m, x)) < 5e-3
        assert m.audit(S, torch.float32)["backend"] in ("torch", "dense")


# ---------------------------------------------------------------- compiled

TRACED = [(kind, ALL) for kind in LINEAR] + [
    ("forward hook", ("gate",)), ("another module", ("gate",)), ("forward hook", ("phi_k",)),
]


@pytest.mark.parametrize("kind,paths", TRACED, ids=[f"{k}, {'+'.join(p)}" for k, p in TRACED])
def test_every_kind_compiled(kind, paths):
    """One graph, where PyTorch can trace the layer itself: its own calls of hooks in the backward, and subclasses
    of tensors, break graphs."""
    whole = kind not in ("backward hook", "old weight norm", "weight of a subclass")
    m = build(kind, paths, backend="torch")
    # which costs twice the time
    f = torch.compile(m, fullgraph=whole, backend="aot_eager" if kind in ("bias", "forward hook") else "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert misses(grads(f, m, data()), truth(kind, paths)) == {}


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_layers_compiled(kind, group):
    m = build(kind, ALL, backend="torch")
    assert misses(grads(torch.compile(m, backend="aot_eager"), m, data()), truth(kind, ALL)) == {}


def test_plain_layers_stay_one_product():
    "With and without biases: the graph has two matrix products, one for all projections and one for the output."
    for kind in (None, "bias"):
        seen = []

        def backend(graph, example):
            seen.append([n.target for n in graph.graph.nodes if n.target in (F.linear, torch._C._nn.linear)])
            return graph.forward

        m = build(kind, () if kind is None else PROJECTIONS[:4], backend="torch")
        with torch.no_grad(): torch.compile(m, fullgraph=True, backend=backend)(data())
        assert len(seen) == 1 and len(seen[0]) == 2, seen
        torch.compiler.reset()


# ---------------------------------------------------------------- decoding

@pytest.mark.parametrize("path", ["q_proj", "v_proj", "gate", "phi_k", "o_proj"])
def test_decoding_calls_what_a_forward_calls(path):
    m = build("forward hook", (path,), backend="torch")
    x = data()
    with torch.no_grad():
        want = m(x)
        for chunk in (1, 3):
            cache = m.new_cache()
            assert rel_err(torch.cat([m(x[:, i:i + chunk], cache=cache) for i in range(0, S, chunk)], 1), want) < 1e-5


# ---------------------------------------------------------------- the model

LM = dict(vocab=20, dim=DIM, n_layers=2, **HEADS, **SIZES, backend="torch")


def language_model(kind=None, paths=(), dtype=torch.float32, **more):
    torch.manual_seed(0)
    return change(TinyLM(**LM | more), paths, kind).to(dtype)


def loss_by_hand(m, ids, y): return F.cross_entropy(m(ids).flatten(0, 1).double(), y.flatten(), reduction="sum")


MODEL_CELLS = [(kind, ("head",)) for kind in LINEAR] + [
    ("forward hook", ("norm",)), ("another module", ("norm",)), ("another module", ("blocks.0.norm_attn",)),
    ("adapter around", ("blocks.0.ffn.w13",)), ("forward hook", ("embed",)), ("forward hook", ("blocks.1.ffn",)),
    ("adapter within", ("blocks.1.attn.q_proj", "head")),
]


@pytest.mark.parametrize("chunks", [False, True], ids=["few logits", "many logits"])
@pytest.mark.parametrize("kind,paths", MODEL_CELLS, ids=[f"{k}, {'+'.join(p)}" for k, p in MODEL_CELLS])
def test_the_loss_is_that_of_the_logits(kind, paths, chunks, monkeypatch):
    """`nll` against the cross-entropy of what `model(ids)` gives, which calls the head; in float64, so that a
    hook's effect can't hide in rounding (1e-9)."""
    if chunks: monkeypatch.setattr("nsa_nb.loss.LOGITS", 50)
    ids = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(3))
    y = ids.roll(-1, 1)
    m = language_model(kind, paths, F64)
    def both(f):
        m.zero_grad()
        loss = f()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in m.parameters() if p.grad is not None)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for a, b in zip(both(lambda: m.nll(ids, y)), both(lambda: loss_by_hand(m, ids, y)), strict=True):
            assert rel_err(a, b) < 1e-9


@pytest.mark.parametrize("kind", ["bias", "adapter around", "forward hook"])
def test_a_head_in_a_compiled_step(kind):
    "The stepper's tail: more logits than are held at once, and fewer; a head without `out_features`."
    ids = torch.randint(0, 20, (2, 9))
    y = ids.roll(-1, 1)
    m = language_model(kind, ("head",))
    with torch.no_grad(): want = loss_by_hand(m, ids, y)
    for most in (LOGITS, 50):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr("nsa_nb.loss.LOGITS", most)
            patch.setattr("nsa_nb.training.stepper.LOGITS", most)
            s = Stepper(
                m, torch.optim.SGD(m.parameters(), 0.1), "compile", seq_len=9, packed=False, compiler="aot_eager"
            )
            with torch.no_grad(): assert rel_err(s.tail(m.norm, m.head, m.hidden(ids), y), want) < 1e-5


# ---------------------------------------------------------------- said and counted

def test_a_called_layer_is_counted_once_and_named():
    "Where a fused product was wanted and only there; twice called is still once; another layer is another."
    class Unheard(Wrapped): pass
    x = torch.randint(0, 20, (1, 6))
    m = language_model()
    before = fallbacks.counts["fused_layers"]
    m.head = Unheard(m.head)
    with pytest.warns(
        UserWarning, match="the model's head is called and has no part in a fused product: it is a .*Unheard"
    ):
        for _ in range(3): m.nll(x, x)
    assert fallbacks.counts["fused_layers"] == before + 1
    assert counted(lambda: language_model().nll(x, x))[1] == {}
    assert counted(lambda: language_model("adapter around", ("head",)).nll(x, x))[1] == dict(fused_layers=1)


def test_compiled_steps_count_what_they_call_once():
    m = language_model("adapter within", ("blocks.0.attn.q_proj", "blocks.1.attn.q_proj", "head"))
    make = lambda: Stepper(
        m, torch.optim.SGD(m.parameters(), 0.1), "compile", seq_len=9, packed=False, compiler="aot_eager"
    )
    s, n = counted(make)
    assert n == dict(fused_layers=3) and s.uncounted == [] and counted(make)[1] == {}


def test_a_graph_is_not_recorded_around_hooks(monkeypatch):
    from nsa_nb.schema import RunConfig
    cfg = RunConfig(model=dict(dim=DIM, n_layers=1, attention="dense", **HEADS), runtime=dict(step="graph"))
    monkeypatch.setattr(
        "nsa_nb.dense.DenseAttention.audit", lambda *a, **kw: dict(fallbacks={}, backend="triton", documents="-")
    )
    card = torch.device("cuda")
    m = language_model(attention="dense")
    assert pick_step(cfg, m, card, "fp32") == ("graph", None)
    m.blocks[0].ffn.register_forward_hook(lambda *a: None)
    how, reason = pick_step(cfg, m, card, "fp32")
    assert how == "compile" and "blocks.0.ffn once" in reason


def test_a_layer_of_another_width_is_named():
    m = build(backend="torch")
    m.k_proj = nn.Linear(DIM, 40)
    with pytest.raises(ValueError, match=f"k_proj gives 40 features, this geometry needs {6 * HEADS['d_k']}"): m(data())
    with pytest.raises(Exception, match="k_proj gives 40 features"):
        torch.compile(m, fullgraph=True, backend="eager")(data())


# ---------------------------------------------------------------- Triton, in its interpreter

# path → kind, of the layers of one NSAAttention; options; how many layers are called
MIXED = {
    "biases": ({p: "bias" for p in PROJECTIONS[:3]}, {}, 0),
    "projections": (
        dict(
            zip(
                ("q_proj", "k_proj", "v_proj", "gate.proj"),
                ("adapter around", "pre-hook", "weight norm", "adapter within"),
            )
        ),
        {},
        4,
    ),
    "gate and phi": (dict(gate="forward hook", phi_k="forward hook"), {}, 2),
    "phi of another kind": (dict(phi_v="another module"), dict(phi="conv", cmp_rope="before"), 1),
}


def mixed(name, dtype=torch.float32, **more):
    kinds, options, _ = MIXED[name]
    m = build(**options, **more)
    for path, kind in kinds.items(): change(m, (path,), kind)
    return m.to(dtype)


def mixed_truth(name):
    m = mixed(name, F64)
    return grads(lambda x: by_hand(m, x), m, data().double())


def kernels_table(device="cpu", compilers=("aot_eager",), compiled=("projections",)) -> list[str]:
    "What is wrong with layers of MIXED on Triton kernels."
    wrong = []
    x = data().to(device)
    cu = torch.tensor(BORDERS, dtype=torch.int32, device=device)
    for name, (_, _, calls) in MIXED.items():
        want = mixed_truth(name)
        m = mixed(name, backend="triton").to(device)
        (got, _), n = counted(lambda: (grads(m, m, x), m(x[:, :2])))
        if found := misses(got, want): wrong.append(f"{name}: {found}")
        if n.get("fused_layers", 0) != calls or n.get("selection_triton", 0): wrong.append(f"{name}: counted {n}")
        for compiler in compilers if name in compiled else ():
            found = misses(grads(torch.compile(m, fullgraph=True, backend=compiler), m, x), want)
            if found: wrong.append(f"{name}, {compiler}: {found}")
            torch.compiler.reset()
    m = mixed("gate and phi", backend="triton").to(device)       # packed documents
    with torch.no_grad(): packed, want = m(x, cu), by_hand(mixed("gate and phi", F64), data().double(), BORDERS)
    if rel_err(packed.cpu(), want) > 1e-5: wrong.append("packed documents")
    said = m.audit(S, torch.float32)["fallbacks"].get("fused_layers")
    if said != "gate is called: it has hooks; phi_k is called: it has hooks": wrong.append(f"audit: {said}")
    return wrong


def test_every_kind_on_triton():
    pytest.importorskip("triton")
    here = Path(__file__).parent
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=search_path(here.parent, here))
    done = subprocess.run(
        [sys.executable, "-c", "import json, test_module_paths as t; print(json.dumps(t.kernels_table()))"],
        capture_output=True, text=True, env=env,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


# ---------------------------------------------------------------- on a card

@cuda
def test_every_kind_on_the_card():
    "fp32: the kernels' products are not TF32. Compiled by inductor too, and every layer of MIXED."
    assert kernels_table("cuda", ("aot_eager", "inductor"), tuple(MIXED)) == []


@cuda
@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("cls", [NSAAttention, DenseAttention])
def test_every_linear_kind_on_the_card(cls, kind):
    paths = PROJECTIONS if cls is NSAAttention else PROJECTIONS[:4]
    want = truth(kind, paths, cls)
    m = build(kind, paths, cls=cls).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert misses(grads(m, m, data().cuda()), want, 1e-4) == {}      # cuDNN's and cuBLAS' own order of sums in fp32
        with torch.autocast("cuda", torch.bfloat16): y = m(data().cuda())
    assert rel_err(y.cpu(), want["y"]) < 2e-2


@cuda
@pytest.mark.parametrize("kind", ["forward hook", "adapter within"])
def test_generation_with_hooks_and_adapters_on_the_card(kind):
    """Hooks act at every step, also where steps would be replayed as a graph; greedy tokens are those of whole
    forwards in fp32."""
    seen = []
    m = language_model(kind, ("blocks.0.attn.q_proj", "head"), backend="auto").cuda().eval()
    if kind == "forward hook": m.blocks[1].attn.v_proj.register_forward_hook(lambda *a: seen.append(1))
    ids = torch.randint(0, 20, (1, 9), device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = m.generate(ids, 12)
        for t in range(9, 21):
            with torch.no_grad(): logits = m(out[:, :t])[0, -1]
            assert logits[out[0, t]] >= logits.max() - 1e-4
    assert kind != "forward hook" or len(seen) == 12 + 12


@cuda
def test_an_adapted_model_trains_in_a_graph():
    """Compiled and captured steps give the losses of eager ones; plain and adapted layers; fp32 differs by the
    order of sums only."""
    from nsa_nb.data.base import Batch
    from nsa_nb.training.inputs import StepInput
    from nsa_nb.training.optim import build_optimizer
    notes = []
    def losses(how):
        m = language_model(
            "adapter within", ("blocks.0.attn.q_proj", "blocks.1.attn.v_proj", "head"), backend="auto"
        ).cuda()
        optimizer = build_optimizer(m, lr=1e-2)      # of the parameters that learn; capturable on a GPU
        s = Stepper(m, optimizer, how, seq_len=9, packed=False, note=notes.append)
        for i in range(4):
            ids = torch.randint(0, 20, (2, 10), generator=torch.Generator().manual_seed(i))
            batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, 2)
            s.step(StepInput(i, [batch], 18, 2), 1e-2)
        assert s.how == how, notes
        return torch.tensor([n[0] for _, n in s.reports.ready(True)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = losses("eager")
        for how in ("compile", "graph"): torch.testing.assert_close(losses(how), base, rtol=0, atol=1e-3)
