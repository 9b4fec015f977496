"""Correctness of decode at many heads, then the attention call at 8 x 32k, then encode and a Gemma-4-shaped model."""
import sys, time
from dataclasses import replace
from unittest import mock
import torch
sys.path.insert(0, ".")
T0 = time.time()
from tests.support.kernel_cases import Case, make_inputs, oracle, run_decode, relative_rms, codec_rotations
import tq_kernels.decode.plan as P, tq_kernels.decode.launch as L
from tq_kernels.codec.launch import encode as kenc, dequantize as kdeq
from tq_hf.codec.reference import encode as renc, dequantize as rdeq
from tq_hf.config import TurboQuantConfig
from tq_kernels.types import PackedBlocks
from examples.measure.speed import benchmark as bm
D = torch.device("cuda", 0)
print(torch.cuda.get_device_name(D))
bad = n = 0
for d in (512, 384, 320, 256, 192, 96, 80):
    for p in ("4bit_nc", "k8v4", "3bit_nc", "2bit_nc"):
        try:
            cfg = TurboQuantConfig.from_preset(p); lay = cfg.layout(d, d); g = torch.Generator().manual_seed(0)
            k, v = (torch.randn(1, 2, 256, d, generator=g).half() for _ in range(2)); k += 2 * torch.randn(1, 2, 1, d, generator=g).half()
            a = PackedBlocks.allocate(lay, 1, 2, 2, D); b = PackedBlocks.allocate(lay, 1, 2, 2, torch.device("cpu"))
            rot = codec_rotations(cfg, lay, D); kenc(k.to(D), v.to(D), a, 0, rot); renc(cfg, k, v, b, 0)
            differ = max((x.cpu() != y).float().mean().item() for (m, x), y in zip(a.tensors().items(), b.tensors().values()) if m.endswith("words"))
            o = [torch.empty(1, 2, 256, d, device=D) for _ in range(2)]; r = [torch.empty(1, 2, 256, d) for _ in range(2)]
            kdeq(a, 0, 2, o[0], o[1], rot); rdeq(cfg, a.map(torch.Tensor.cpu), r[0], r[1])
            err = max(((x.cpu() - y).norm() / y.norm()).item() for x, y in zip(o, r)); n += 1
            if differ > 0.02 or not err < 1e-5: bad += 1; print("BAD codec", d, p, f"words {differ:.1e} dequantize {err:.1e}")
        except Exception as e: bad += 1; print("BAD codec", d, p, type(e).__name__, str(e)[:150])
        for G, S in ((1, 1), (6, 1), (8, 1), (16, 1), (8, 4)) if d in (512, 256, 96) else ((7, 1),):
            try:
                i = make_inputs(Case(B=2, Hkv=2, Hq=2 * G, S=S, Dk=d, Dv=d, preset=p, balanced=True), D); n += 1
                e = relative_rms(run_decode(i), oracle(i))
                if not e < 1e-3: bad += 1; print("BAD decode", d, p, G, S, f"{e:.1e}")
            except Exception as e: bad += 1; print("BAD decode", d, p, G, S, type(e).__name__, str(e)[:150])
print(f"{n} checks, {bad} bad, {time.time() - T0:.0f} s", flush=True)
read = bm.read_gigabytes_per_second(D); print(f"reads {read:.0f} GB/s")
def time_call(p, heads, over=None):
    hq, hkv, d = heads; cfg = TurboQuantConfig.from_preset(p); lay = cfg.layout(d); nb = cfg.num_blocks(32768); dense = 32768 - nb * 128
    old = P._split_config; P.plan_decode.cache_clear(); L.steps_of.cache_clear()
    with mock.patch.object(P, "_split_config", lambda *a: replace(old(*a), **(over or {}))):
        packed = bm.random_blocks(lay, 8, hkv, nb, D); call, _ = bm.prepared(cfg, packed, dense - bm.SINKS, hq, torch.bfloat16); call()
        us = bm.microseconds(bm.captured(call), 10)
    gb = 8 * hkv * (nb * lay.block_bytes + dense * 4 * d) / 1e9
    return us, gb / read * 1e6 / us
for heads in ((32,8,128),(16,8,256),(32,4,512),(32,2,512),(16,4,320),(32,8,192),(32,8,96),(32,8,80),(48,8,128),(28,4,128),(64,4,128)):
    if time.time() - T0 > 170: print("out of time"); break
    base = min(bm.sdpa(8, 32768, heads, D, 10).values(), default=float("nan"))
    print(heads, f"sdpa {base:.0f} us |", " | ".join("{} {:.0f} us {:.0%}".format(p, *time_call(p, heads)) for p in ("4bit_nc", "k8v4", "3bit_nc", "2bit_nc")), flush=True)
for over in ({"programs_per_multiprocessor": 3}, {"programs_per_multiprocessor": 1, "stages": 3}, {"key_chunks": 4, "value_chunks": 4}):
    try: print("(32,4,512) 4bit_nc", over, "{:.0f} us {:.0%}".format(*time_call("4bit_nc", (32, 4, 512), over)))
    except Exception as e: print(over, type(e).__name__, str(e)[:100])
for over in ({"key_chunks": 4, "value_chunks": 4}, {"key_chunks": 1, "value_chunks": 1}):
    for h in ((32, 8, 192) if over["key_chunks"] == 4 else (32, 8, 96),):
        try: print(h, "4bit_nc as before", "{:.0f} us {:.0%}".format(*time_call("4bit_nc", h, over)))
        except Exception as e: print(over, type(e).__name__, str(e)[:100])
for d, h in ((128, 8), (256, 4), (512, 2)):
    cfg = TurboQuantConfig.from_preset("4bit_nc"); packed = PackedBlocks.allocate(cfg.layout(d), 1, h, 256, D)
    k, v = (torch.randn(1, h, 32768, d, device=D, dtype=torch.bfloat16) for _ in range(2)); rot = codec_rotations(cfg, cfg.layout(d), D)
    e = bm.microseconds(lambda: kenc(k, v, packed, 0, rot), 10); q = bm.microseconds(lambda: kdeq(packed, 0, 256, k, v, rot), 10)
    print(f"32k tokens of {h} heads of {d}: encode {e:.0f} us, dequantize {q:.0f} us")
print(f"{time.time() - T0:.0f} s")
