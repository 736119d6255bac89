"""What only a GPU can show. When it last ran, on which card and with which versions, stands in tests/gpu_runs.md.

The truth is the reference backend in float64 on the same card; that itself is held to the oracle on a CPU by
the other files."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from zygote import search_path

from nsa_nb.attention import NSAAttention, nsa_attention
from nsa_nb.compress import Compressor
from nsa_nb.model import TinyLM
from nsa_nb.training.snapshot import HostBuffers

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).resolve().parents[1]
# relative norm; float32 and bfloat16 are SPEC's, float64 is rounding of sums of up to 3,000 terms
TOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BLOCKS = {
    "small": dict(l=8, d=4, l_sel=8, n_sel=4, w=12), "showcase": dict(l=16, d=8, l_sel=32, n_sel=8, w=64),
    "paper": dict(l=32, d=16, l_sel=64, n_sel=16, w=512),
}


def make(S, sizes, H, G, D, dtype, lengths=None, seed=0):
    "The eight inputs on the GPU, drawn in float64."
    gen = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, dtype=torch.float64, generator=gen)
    phi = Compressor("avg", sizes["l"], sizes["d"], G, D)
    q, kc, ks, kw, vc, vs, vw = r(1, S, H, D), *(r(1, S, G, D) for _ in range(6))
    xs = (q, phi(kc, lengths), phi(vc, lengths), ks, vs, kw, vw, r(1, S, H, 3).sigmoid())
    return [x.to("cuda", dtype).detach().requires_grad_() for x in xs]


def run(backend, xs, sizes, cu):
    o, aux = nsa_attention(*xs, **sizes, backend=backend, cu_seqlens=cu, return_aux=True)
    do = torch.randn(o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(o)
    return [o, *torch.autograd.grad((o * do).sum(), xs)], aux["indices"]


@pytest.mark.parametrize("dtype", TOL, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    "S,blocks,H,G,cu",
    [
        (1, "small", 4, 2, None), (150, "small", 12, 2, None), (700, "showcase", 8, 2, None),
        (1500, "showcase", 6, 6, None), (700, "paper", 12, 2, None), (200, "small", 4, 2, [0, 1, 32, 33, 200]),
        (900, "showcase", 8, 4, [0, 15, 16, 500, 900]),
    ],
)
def test_torch_backend_equals_the_reference(S, blocks, H, G, cu, dtype):
    sizes = BLOCKS[blocks]
    lengths = cu and [b - a for a, b in zip(cu, cu[1:])]
    lo = make(S, sizes, H, G, 16, dtype, lengths)
    hi = [x.detach().double().requires_grad_() for x in lo]
    cu = cu and torch.tensor(cu, dtype=torch.int32, device="cuda")
    (a, ia), (b, ib) = run("torch", lo, sizes, cu), run("reference", hi, sizes, cu)
    assert torch.equal(ia, ib)
    for name, x, y in zip(("o", "dq", "dk_cmp", "dv_cmp", "dk_sel", "dv_sel", "dk_win", "dv_win", "dgates"), a, b):
        err = ((x.double() - y).norm() / y.norm().clamp_min(1e-30)).item() if y.norm() > 0 else x.double().norm().item()
        assert err <= TOL[dtype], (name, err)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("phi", ["avg", "conv", "mlp"])
def test_the_past_keeps_its_bits(phi, dtype):
    torch.manual_seed(0)
    layer = NSAAttention(64, 8, 2, 16, 16, **BLOCKS["showcase"], phi=phi).to("cuda", dtype)
    x = torch.randn(1, 1400, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        base = layer(x)
        for t in (1, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1030, 1399):
            y = x.clone()
            y[:, t:] = 20 * torch.randn_like(y[:, t:])
            assert torch.equal(base[:, :t], layer(y)[:, :t]), t


@pytest.mark.parametrize("dtype,tol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("phi", ["avg", "conv", "mlp"])
def test_decoding_equals_prefill(phi, dtype, tol):
    torch.manual_seed(0)
    layer = NSAAttention(64, 8, 2, 16, 16, **BLOCKS["showcase"], phi=phi).to("cuda", dtype)
    x = torch.randn(2, 200, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        whole = layer(x)
        for chunk in (1, 7, 64):
            cache = layer.new_cache()
            got = torch.cat([layer(x[:, i:i + chunk], cache=cache) for i in range(0, 200, chunk)], 1)
            assert (got.double() - whole.double()).norm() / whole.double().norm() <= tol


def test_autocast_keeps_fp32_weights_and_a_finite_loss():
    torch.manual_seed(0)
    m = TinyLM(dim=64, n_layers=2, grad_checkpointing=True).cuda()
    ids = torch.randint(0, 256, (2, 300), device="cuda")
    with torch.autocast("cuda", torch.bfloat16): logits = m(ids)
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())
    loss.backward()
    assert loss.isfinite() and all(
        p.dtype == torch.float32 and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in m.parameters()
    )


def train(out, *args):
    cmd = [
        sys.executable, "-m", "nsa_nb.train", "--config", "train_showcase", "--device", "cuda", "--precision", "bf16",
        "--eval-every", "20", "--log-every", "5", "--save-every", "10", "--sample-tokens", "16", "--deterministic",
        "--out-dir", str(out), *args,
    ]
    done = subprocess.run(
        cmd, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": search_path()}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_a_run_in_bf16_and_an_exact_resume_with_deterministic(tmp_path):
    train(tmp_path/"a", "--steps", "40")
    train(tmp_path/"b", "--steps", "40")
    for p in sorted((tmp_path/"b"/"checkpoints").glob("step_000000[34]0")):     # as if killed after step 29
        subprocess.run(["rm", "-r", str(p)], check=True)
    train(tmp_path/"b", "--steps", "40", "--resume", "auto")
    m = json.loads((tmp_path/"a"/"metrics.json").read_text())
    assert m["status"] == "done" and m["dtype"] == "bf16" and m["loss_last"] < m["loss_first"]
    sums = lambda d: {
        k: v["sha256"]
        for k, v in json.loads((d / "checkpoints" / "step_00000040" / "manifest.json").read_text())["files"].items()
    }
    a, b = sums(tmp_path/"a"), sums(tmp_path/"b")
    for f in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"): assert a[f] == b[f], f
    beat = [json.loads(l) for l in (tmp_path/"a"/"heartbeat_rank0.jsonl").read_text().splitlines()]
    beat = [r for r in beat if r["msg"] == "progress"]
    assert all(isinstance(r["gpu_mem_alloc"], int) and r["gpu_mem_alloc"] > 0 for r in beat)


@pytest.mark.parametrize("room", [True, False])
def test_a_copy_is_of_the_moment_it_was_asked_for(monkeypatch, room):
    """While the copies are on their way later work writes over the tensors. With room on the card that work need
    not wait for the way to the host, which is a thread's of its own: it is done first."""
    if not room: monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    live = {
        str(i): torch.full((1 << 26,), float(i), device="cuda", dtype=torch.float32 if i % 2 else torch.bfloat16)
        for i in range(8)
    }
    live["few"], buffers, ends, writer = torch.arange(3, device="cuda"), HostBuffers(), [], ThreadPoolExecutor(1)
    def end():
        e = torch.cuda.Event(enable_timing=True)
        e.record()
        ends.append(e)

    def bring(wait):
        wait()
        end()

    for again in range(3):
        copies, wait = buffers.copy(live)
        bringing = writer.submit(bring, wait)
        for t in live.values(): t.add_(1)
        new = [torch.full_like(t, -1) for t in live.values()]  # memory of the first copies, were it free too early
        end()
        bringing.result()
        torch.cuda.synchronize()
        for i in range(8): assert copies[str(i)].eq(i + again).all()
        assert copies["few"].tolist() == [again, again + 1, again + 2] and len(new) == 9
    if room: assert ends[-2].elapsed_time(ends[-1]) > 10      # 1.5 GiB at less than 60 GB/s take 27 ms
