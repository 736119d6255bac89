"""State that does not belong: caches, places, borders, scratch, replayed steps and files of another layer, model,
batch, dtype or text. Each is refused by name and leaves everything as it was."""

import copy
import pickle

import pytest
import torch
from zygote import in_the_interpreter

from nsa_nb.attention import nsa_attention
from nsa_nb.cache import NSACache, StaticNSACache
from nsa_nb.dense import DenseCache
from nsa_nb.errors import UsageError
from nsa_nb.geometry import Geometry
from nsa_nb.model import LlamaBlockNSA, TinyLM, build_model, load_model
from nsa_nb.kernels.packing import check_borders
from nsa_nb.kernels.packing import compressed_borders
from nsa_nb.cache import Replay
from nsa_nb.schema import RunConfig

torch.set_num_threads(1)
SIZES = dict(dim=16, n_layers=3, n_heads=4, n_kv_groups=2, d_k=8, d_v=6, l=4, d=2, l_sel=8, n_sel=4, w=5)
REMEDY = r"model\.new_caches\(\)"


def model(**more):
    torch.manual_seed(0)
    return TinyLM(31, **SIZES | more).eval()


def layer(**more): return model(n_layers=1, **more).attentions()[0]


M = model()
IDS = torch.randint(0, 31, (2, 20), generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))


def filled(m=M, ids=IDS[:, :9], n=None):
    "Caches that have seen some tokens."
    caches = m.new_caches()
    with torch.no_grad(): m(ids if n is None else ids[:, :n], caches=caches)
    return caches


def refused(words, call):
    with pytest.raises(UsageError, match=words) as e: call()
    return str(e.value)


# ---------------------------------------------------------------- the caches of a model

@pytest.mark.parametrize(
    "caches,words",
    [
        (lambda: [], "caches holds 0, the model has 3 layers"),
        (lambda: filled()[:2], "caches holds 2, the model has 3 layers"),
        (lambda: filled() + filled(), "caches holds 6, the model has 3"),
        (lambda: filled()[0], "caches is a NSACache: give a list"),
        (lambda: [filled()[0]] * 3, r"caches\[0\] and caches\[1\] are one object"),
        (lambda: M.new_caches()[:2] + [None], r"caches\[2\]: a NoneType is no cache"),
        (lambda: filled()[::-1], r"caches\[0\]: the cache belongs to another layer, of the same sizes"),
        (lambda: filled(model()), r"caches\[0\]: the cache belongs to another layer"),
        (lambda: [*filled()[:1], *filled(n=5)[1:]], r"caches\[1\] holds 5 tokens, caches\[0\] 9"),
        (
            lambda: filled(model(attention="dense")),
            r"caches\[0\]: a cache of dense attention was given to a layer of "
            r"NSA attention",
        ),
        (lambda: [NSACache(Geometry(4, 2, 8, 4, 6)) for _ in range(3)], r"w=6 \(the layer has 5\)"),
        *[
            (
                lambda field=field, value=value: filled(model(**{field: value})),
                rf"{field}=\S+ \(the layer "
                rf"has",
            )
            for field, value in dict(
                l=8, d=4, l_sel=12, n_sel=5, w=6, n_init=2, n_local=1, phi="conv", cmp_rope="none", shared_kv=True,
                d_k=10, d_v=8, rope_scale=2.0, rope_base=500.0,
            ).items()
        ],
        (lambda: filled(model(n_kv_groups=4)), r"G=4 \(the layer has 2\)"),
    ],
)
def test_caches_that_do_not_belong_to_the_model(caches, words):
    given = caches()
    lengths = [getattr(c, "length", None) for c in given] if isinstance(given, list) else []
    message = refused(words, lambda: M(IDS[:, 9:10], caches=given))
    assert "model.new_caches()" in message
    # nothing was taken in
    assert lengths == ([getattr(c, "length", None) for c in given] if isinstance(given, list) else [])


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_next_tokens_of_another_kind(attention):
    "Batch, dtype: also a batch of one, which would be spread over the rows without a word."
    m = model(attention=attention)
    caches = filled(m)
    for rows in (IDS[:1, 9:10], IDS.repeat(2, 1)[:, 9:10]):
        refused(f"holds 2 sequences, got {len(rows)}.*{REMEDY}", lambda: m(rows, caches=caches))
    m.double()
    refused(f"of dtype torch.float32, got torch.float64.*{REMEDY}", lambda: m(IDS[:, 9:10], caches=caches))
    m.float()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            refused("of dtype torch.float32, got torch.bfloat16", lambda: m(IDS[:, 9:10], caches=caches))
        # a refusal leaves the caches whole
        assert torch.allclose(m(IDS[:, 9:], caches=caches), m(IDS)[:, 9:], atol=1e-5)
    refused(
        "cu_seqlens and caches can't be used together", lambda: m(IDS, torch.tensor([0, 20, 40]), caches=m.new_caches())
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: (layer(), layer()), lambda: (layer(attention="dense"), layer(attention="dense")),
        lambda: (LlamaBlockNSA(16, 4, 2, 8, 6, 4, 2, 8, 4, 5), LlamaBlockNSA(16, 4, 2, 8, 6, 4, 2, 8, 4, 5)),
    ],
    ids=["nsa", "dense", "block"],
)
def test_one_cache_for_two_layers(make):
    "In a loop of one's own, without a TinyLM; made by new_cache or by hand."
    a, b = make()
    cache = getattr(a, "attn", a).new_cache()
    a(X[:, :3], cache=cache)
    refused("belongs to another layer", lambda: b(X[:, :3], cache=cache))
    hand = type(cache)(*([cache.geo] if isinstance(cache, NSACache) else []))
    a(X[:, :3], cache=hand)
    refused("belongs to another layer", lambda: b(X[:, :3], cache=hand))


def test_copies_go_on():
    "Copied models and copied or pickled caches belong together as before: text that forks, a model moved elsewhere."
    with torch.no_grad():
        want = M(IDS)[:, 9:]
        for m, caches in (
            (copy.deepcopy(M), filled()), (M, copy.deepcopy(filled())), (M, pickle.loads(pickle.dumps(filled()))),
            (copy.deepcopy(M), filled(copy.deepcopy(M))),
        ):
            assert torch.allclose(m(IDS[:, 9:], caches=caches), want, atol=1e-5)


def test_checks_cost_nothing_that_decoding_notices():
    "Counted, not timed: a step looks at a few sizes and reads no tensor's values."
    from torch.utils._python_dispatch import TorchDispatchMode
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default), func
            return func(*args, **(kwargs or {}))
    from nsa_nb.cache import check_caches
    caches = filled()
    layers = [a.made_for for a in M.attentions()]
    with Reads(): check_caches(caches, layers)
    cache = StaticNSACache.from_cache(caches[0], 20)
    with Reads(): cache.check_step(*[torch.zeros(2, 1, 2, w) for w in (8, 6)] * 3)


# ---------------------------------------------------------------- static caches

def test_static_caches():
    a = M.attentions()[0]
    growing = a.new_cache()
    a(X[:, :9], cache=growing)
    fixed = StaticNSACache.from_cache(growing, 12)
    refused("belongs to another layer", lambda: M.attentions()[1](X[:, :1], cache=fixed))
    refused("2 new tokens: a static cache takes one a step; prefill a growing cache", lambda: a(X[:, :2], cache=fixed))
    refused("max_len=8 must be at least the cache's length 9", lambda: StaticNSACache.from_cache(growing, 8))
    refused(
        "takes an NSACache that a prefill left, got a DenseCache", lambda: StaticNSACache.from_cache(DenseCache(), 8)
    )
    refused(
        r"w=6 \(the layer has 5\)", lambda: a(X[:, :1], cache=StaticNSACache(Geometry(4, 2, 8, 4, 6), 2, 9, 2, 8, 6))
    )
    refused(
        r"G=1 \(the layer has 2\), d_k=4 \(the layer has 8\)",
        lambda: a(X[:, :1], cache=StaticNSACache(a.geo, 2, 9, 1, 4, 6)),
    )
    new = [torch.zeros(2, 1, 2, w) for w in (8, 6)] * 3
    compress = lambda k, v, at: (k.mean(1, keepdim=True), v.mean(1, keepdim=True))
    for bad, words in (
        ([x[:1] for x in new], "holds 2 sequences, got 1"),
        ([x.double() for x in new], "of dtype torch.float32, got torch.float64"),
        ([x[..., :5] for x in new], "of widths"), ([x.repeat(1, 2, 1, 1) for x in new], "2 new tokens"),
    ):
        refused(words, lambda: fixed.append(*bad, compress))
    fixed.tokens = 12
    # the tensors' own way stays: too much is lost, nothing is overwritten
    fixed.append(*new, compress)
    with pytest.raises(UsageError, match="has room for max_len=12 tokens"): fixed.take_room()


def test_decode_step_wants_a_prompt_and_fitting_caches():
    refused("these caches are empty", lambda: M.decode_step(M.new_caches(), 20))
    refused("caches holds 1, the model has 3", lambda: M.decode_step(filled()[:1], 20))


IN_THE_INTERPRETER = """
import torch; torch.set_num_threads(1)
import test_states as t
t.check_decode_kernels()
"""


def check_decode_kernels(device="cpu"):
    """What the decode kernels are given is looked at first: they would read past the end. Layers of other sizes
    may share scratch."""
    from nsa_nb.kernels.decode import decode_append, decode_attention
    scratch = {}
    geos = Geometry(4, 2, 8, 4, 5), Geometry(4, 2, 8, 3, 5), Geometry(4, 2, 4, 3, 5)
    caches = [StaticNSACache(g, 2, 40, 2, 8, 6, device=device, scratch=scratch) for g in geos]
    new = [torch.randn(2, 1, 2, w, device=device) for w in (8, 6)] * 3
    q = torch.randn(2, 1, 4, 8, device=device)
    gates = torch.rand(2, 1, 4, 3, device=device)
    for bad in ([x[:1] for x in new], [x.double() for x in new], [x[..., :5] for x in new]):
        with pytest.raises(UsageError, match="the cache holds"): decode_append(caches[0], *bad)
    for n in range(9):
        for c in caches: decode_append(c, *new)
    alone = []
    for g in geos:
        c = StaticNSACache(g, 2, 40, 2, 8, 6, device=device)
        for n in range(9): decode_append(c, *new)
        alone.append(decode_attention(q, c, gates))
    for c, want in zip(caches, alone): assert torch.equal(decode_attention(q, c, gates), want)
    for bad in (q[:1], q.double(), q[..., :4]):
        with pytest.raises(UsageError, match="decode_attention: q is"): decode_attention(bad, caches[0], gates)
    with pytest.raises(UsageError, match="3 heads and 2 key/value groups"):
        decode_attention(q[:, :, :3], caches[0], gates)
    with pytest.raises(UsageError, match="gates are"): decode_attention(q, caches[0], gates[:1])


def test_decode_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    in_the_interpreter(IN_THE_INTERPRETER)


@pytest.mark.cuda
def test_decode_kernels_on_a_card(): check_decode_kernels("cuda")


@pytest.mark.cuda
def test_a_captured_step_refuses_other_batches_and_too_many_tokens():
    "The checks of a replayed step stand on the host, before the graph."
    m = model(d_k=16, d_v=16).cuda()
    ids = IDS.cuda()
    caches = m.new_caches()
    with torch.no_grad():
        m(ids[:, :9], caches=caches)
        step = m.decode_step(caches, 20)
        assert isinstance(step, Replay)
        for t in range(9, 14): got = step(ids[:, t:t + 1])
        assert torch.allclose(got[:, -1], m(ids[:, :14])[:, -1], atol=1e-3)
        for bad in (ids[:1, 14:15], ids[:, 14:16], ids[:, 14:15].int()):
            refused("takes one kind of input", lambda: step(bad))
        for t in range(14, 20): step(ids[:, t:t + 1])
        refused("room for 11", lambda: step(ids[:, :1]))


@pytest.mark.cuda
def test_a_cache_on_another_device():
    m = model()
    caches = filled(m)
    refused("of device cpu, got cuda:0", lambda: m.cuda()(IDS[:, 9:10].cuda(), caches=caches))
    refused("ids are on cpu, the model on cuda:0", lambda: m(IDS))


# ---------------------------------------------------------------- places and borders

CU = torch.tensor([0, 7, 20], dtype=torch.int32)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("place,words", [
    (lambda a, other: a.place(1, 19, None, X.device), "rows of 19 tokens, x has 20"),
    (lambda a, other: a.place(1, 1, None, X.device), "rows of 1 tokens, x has 20"),
    (lambda a, other: a.place(1, 20, torch.tensor([0, 8, 20]), X.device), r"borders \[0, 8, 20\], cu_seqlens is "
                                                                          r"\[0, 7, 20\]"),
    (lambda a, other: a.place(1, 20, torch.tensor([0, 7, 8, 20]), X.device), "place is of 3 documents, cu_seqlens "
                                                                             "of 2"),
    (lambda a, other: a.place(1, 20, None, X.device), "place is of one document a row, cu_seqlens of 2"),
    (lambda a, other: other.place(1, 20, CU, X.device), "place was made with"),
    (lambda a, other: (1, 2, 3), "place is a tuple"),
])
def test_a_place_of_other_rows(attention, place, words):
    block = model(n_layers=1, attention=attention).blocks[0]
    other = layer(attention=attention, rope_scale=2.0)
    refused(words, lambda: block(X[:1], CU, None, None, place(block.attn, other)))


def test_a_place_of_another_geometry_or_batch():
    a = layer()
    for other in (layer(d=4, l=8), layer(d_k=10), layer(rope_base=500.0), layer(attention="dense")):
        refused("place was made with", lambda: a(X[:1], place=other.place(1, 20, None, X.device)))
    refused("need batch size 1, got 2", lambda: a(X, place=a.place(1, 20, CU, X.device)))
    right = a.place(1, 20, CU, X.device)
    for given in (None, CU, CU.long(), right.cu): assert torch.equal(a(X[:1], given, place=right), a(X[:1], CU))


def test_borders_of_compressed_blocks():
    geo = Geometry(4, 2, 8, 4, 5)
    S = 20
    N = int(compressed_borders(CU, geo)[-1])
    tensors = [
        torch.randn(1, n, h, w)
        for n, h, w in ((S, 4, 8), (N, 2, 8), (N, 2, 6), (S, 2, 8), (S, 2, 6), (S, 2, 8), (S, 2, 6), (S, 4, 3))
    ]

    def call(cu_cmp, cu=CU): return nsa_attention(*tensors, **vars(geo), cu_seqlens=cu, cu_cmp=cu_cmp)
    assert torch.equal(call(compressed_borders(CU, geo)), call(None))
    for bad, words in (
        (compressed_borders(CU, Geometry(8, 2, 8, 4, 5)), "another geometry than cu_seqlens"),
        (compressed_borders(torch.tensor([0, 9, 20]), geo), r"is of other borders"),
        (compressed_borders(CU, geo).long(), "must be int32"), (compressed_borders(CU, geo)[:-1], "must be int32 .3."),
        ([0, 2, 7], "must be int32"),
    ):
        refused(words, lambda: call(bad))
    refused("cu_cmp without cu_seqlens", lambda: call(compressed_borders(CU, geo), None))
    refused("batch size 1", lambda: check_borders(CU, 2, 20, 20))


# ---------------------------------------------------------------- replay, files

def test_a_replayed_step_takes_one_kind_of_input():
    "Also on a CPU, where nothing is captured: the same program must not go right here and wrong there."
    step = Replay(lambda x: x + 1, most=3)
    step(torch.zeros(2, 1))
    for bad in (
        torch.zeros(1, 1), torch.zeros(2, 2), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, device="meta"),
    ):
        refused("takes one kind of input", lambda: step(bad))
    step(torch.zeros(2, 1)), step(torch.zeros(2, 1))
    refused("4 calls, but there is room for 3", lambda: step(torch.zeros(2, 1)))


def test_weights_that_are_not_of_their_configuration(tmp_path):
    "A model.pt whose parts were put together by hand."
    cfg = RunConfig(model=dict(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8))
    weights = build_model(cfg, 31).state_dict()
    def load(state, cfg=cfg):
        torch.save(dict(state_dict=state, cfg=cfg.model_dump()), tmp_path/"model.pt")
        return load_model(tmp_path/"model.pt")
    assert torch.equal(load(weights)[0].head.weight, weights["head.weight"])
    wider = RunConfig(model=dict(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=16, d_v=8))
    refused("don't fit its own configuration .*q_proj.weight", lambda: load(weights, wider))
    refused(
        "don't fit its own configuration .*norm.weight",
        lambda: load({k: v for k, v in weights.items() if k != "norm.weight"}),
    )
    refused("no 'embed.weight'", lambda: load({}))
