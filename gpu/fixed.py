"""Attention calls of three launches (now), two and one. PYTHONPATH=.:kernels python gpu/fixed.py [--dry]"""
from __future__ import annotations
import argparse, functools, os, statistics, sys, time
from dataclasses import replace
import torch, triton
from tq_kernels.common.device import target
from tq_kernels.decode import short
from tq_kernels.decode.launch import DecodeLaunch, device_int, REDUCE
from tq_kernels.decode.plan import plan_decode
from tq_kernels.types import AttentionOptions

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def ceil_lines(n): return -(-n // 32)


class Variant:
    """kind: one (one launch), two (short split + reduce), own (decode_split with own rotation + reduce)."""
    def __init__(self, kind, splits=None, warps=None, columns=None, slots=None, first_pdl=False, most=None):
        self.kind, self.splits, self.warps, self.columns, self.slots = kind, splits, warps, columns, slots
        self.first_pdl, self.most = first_pdl, most

    def __str__(self):
        return self.kind + "".join(f" {n}{v}" for n, v in (("s", self.splits), ("w", self.warps), ("c", self.columns), ("m", self.slots)) if v)

    def prepare(self, launch: DecodeLaunch, query, counts, mask, options, out):
        device = query.device
        on = target(device)
        B, Hq, S, Dk = query.shape
        packed = launch.packed
        sinks, sink_values, residual, residual_values = launch.tensors[4:8]
        Hkv, capacity = packed.key_words.shape[1:3]
        Dv = residual_values.shape[3]
        mask_rows = 0 if mask is None else min(mask.shape[2], 2)
        plan = plan_decode(B, Hq, Hkv, S, Dk, Dv, *launch.bits, capacity, sinks.shape[2] + residual.shape[2],
                           options.causal, mask_rows, *options.flags, on)
        rows = Hq // Hkv * S
        cfg = plan.config
        resident = on.multiprocessors * cfg.programs_per_multiprocessor
        splits = min(self.splits or 10**6, max(1, resident // plan.streams))
        if self.most:
            splits = min(splits, max(1, self.most))
        dkp, dvp = plan.split_constants[2:4]
        dm = max(Dv, dvp)
        block_dm = plan.split_constants[9 + 5]
        slots = (plan.workers + plan.streams * (1 + plan.dense_splits)) if self.kind == "own" else 2 * plan.streams * splits
        lse = 1
        partial = lse + ceil_lines(slots * plan.tile_rows)
        size = 32 * (partial + ceil_lines(slots * plan.tile_rows * dm))
        fill = torch.nan if INTERPRET else 0.0
        scratch = torch.full((size,), fill, device=device)
        counters = torch.zeros(max(plan.streams, 4), dtype=torch.int32, device=device)
        (sink_b, sink_h), (residual_b, residual_h) = ((p.stride(0) // Dk, p.stride(1) // Dk) for p in (sinks, residual))
        ms = (0, 0, 0) if mask is None else (mask.stride(0), 0 if mask_rows == 1 else mask.stride(2), mask.stride(3))
        m = scratch if mask is None else mask.view(torch.uint8)
        aux = scratch if options.s_aux is None else options.s_aux
        nb, nr, ns = counts
        krot, vrot, kcs, vcs = launch.tensors[8:]
        kw, vw, sc, km = launch.tensors[:4]
        warps = self.warps or cfg.warps
        pdl = {"launch_pdl": True} if on.dependent_launch else {}
        limit = {"maxnreg": cfg.registers} if cfg.registers else {}
        fl = options.log2_factors
        head = (rows, S, Hkv, *query.stride()[:3], *packed.block_strides, sink_b, sink_h, residual_b, residual_h, residual.shape[2], *ms)
        flag = on.dependent_launch
        merge_rows = triton.next_power_of_2(plan.tile_rows)
        dot = max(8, merge_rows) if on.asm else max(16, merge_rows)
        mslots = self.slots or max(1, min(16, 4096 // (merge_rows * block_dm)))
        red = plan.reduce_constants
        # reduce slots for the longest stream
        bs = min(triton.next_power_of_2(splits), 16384 // triton.next_power_of_2(dvp))
        rc = (*red[:5], bs, *red[6:]) if self.kind == "two" else red
        rw = plan.reduce_warps
        if self.kind == "two":
            rw = 2 if rc[7] == 1 and bs * block_dm <= 4096 else (8 if block_dm > 128 else 4)
        self.plan, self.n = plan, splits

        def tensors(extra):
            return (scratch, counters, query, krot, kcs, kw, vw, sc, km, nb, sinks, sink_values, residual, residual_values, nr, ns, m, *extra)

        def call():
            if self.kind == "own":
                short.decode_split_own[(plan.workers, 1, 1)](
                    *tensors(()), *head, *fl, plan.row_tiles, plan.streams, plan.tile_rows, lse, partial, plan.dense_splits,
                    *plan.split_constants, num_warps=warps, num_stages=cfg.stages, **limit)
                from tq_kernels.decode.reduce import reduce_splits
                reduce_splits[plan.reduce_grid](
                    scratch, nb, nr, ns, vrot, vcs, aux, out, rows, S, Hkv, plan.row_tiles, plan.streams, plan.tile_rows,
                    plan.workers, lse, partial, plan.dense_splits, *out.stride()[:3], *red, num_warps=plan.reduce_warps, **pdl)
                return out
            one = self.kind == "one"
            short.decode_short[(plan.streams * splits, 1, 1)](
                *tensors((vrot, vcs, aux, out)), *head, *fl, plan.row_tiles, plan.streams, splits, plan.tile_rows, lse, partial,
                *out.stride()[:3], *plan.split_constants[:-1], one, merge_rows, mslots, self.columns or min(64, block_dm), dot,
                red[-2], flag and not one, num_warps=warps, num_stages=cfg.stages, **limit)
            if not one:
                short.reduce_short[plan.reduce_grid](
                    scratch, nb, nr, ns, vrot, vcs, aux, out, rows, S, Hkv, plan.row_tiles, plan.streams, splits, plan.tile_rows,
                    lse, partial, *out.stride()[:3], *rc, num_warps=rw, **pdl)
            return out
        self.keep = (scratch, counters)
        return call


def old(launch, query, counts, mask, options, out):
    allocate = functools.cache(functools.partial(torch.empty, device=query.device))
    return lambda: launch(query, *counts, mask, options, allocate=allocate, out=out)


def graph_of(call):
    call(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def random_blocks(layout, batch, heads, blocks, device):
    from tq_kernels.types import PackedBlocks
    packed = PackedBlocks.allocate(layout, batch, heads, blocks, device)
    for words in (packed.key_words, packed.value_words):
        words.random_(-(2**31), 2**31 - 1)
    scales = torch.rand(*packed.scales.shape, 2, device=device).mul_(0.1).add_(0.05).half()
    packed.scales.copy_(scales.view(torch.int32).squeeze(-1))
    packed.key_means.normal_(std=0.1)
    return packed


def cell(preset, batch, length, device, packed=None, rows=None):
    """A launch of (32, 8, 128) bf16 over what a cache of `length` tokens holds."""
    from tq_hf.config import TurboQuantConfig
    from tq_hf.ops.triton.blocks import rotations
    config = TurboQuantConfig.from_preset(preset)
    layout = config.layout(128)
    blocks = config.num_blocks(length)
    dense = length - blocks * 128 - 4
    packed = packed or random_blocks(layout, batch, 8, blocks, device)
    make = lambda n: tuple(torch.randn(batch, 8, n, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    launch = DecodeLaunch(packed, make(4), make(256), rotations(config, layout, device, torch.float16))
    query = torch.randn(batch, 32, 1, 128, device=device, dtype=torch.bfloat16)
    out = torch.empty(batch, 1, 32, 128, device=device, dtype=torch.bfloat16)
    rows = dense if rows is None else rows
    counts = [device_int(n, device) for n in (packed.key_words.shape[2], rows, 4)]
    return launch, query, counts, None, AttentionOptions(128**-0.5), out


def errors(device, variants):
    """Relative RMS against fp64, 2 x 2k tokens, fp16 blocks of random states; the same call 20 times."""
    from tq_hf.codec.reference import dequantize, encode
    from tq_hf.config import TurboQuantConfig
    from tq_kernels.types import PackedBlocks
    for preset in ("4bit_nc", "3bit_nc", "2bit_nc"):
        config = TurboQuantConfig.from_preset(preset)
        line = []
        for blocks, rows in ((16, 200), (1, 130), (0, 70)):
            packed = PackedBlocks.allocate(config.layout(128), 2, 8, max(blocks, 1), device)
            states = [torch.randn(2, 8, 128 * max(blocks, 1), 128, device=device) for _ in range(2)]
            encode(config, *states, packed, 0)
            parts = cell(preset, 2, 4096, device, packed, rows)
            launch, query, counts, mask, options, out = parts
            counts[0] = device_int(blocks, device)
            middle = [torch.empty(2, 8, 128 * max(blocks, 1), 128, device=device) for _ in range(2)]
            dequantize(config, packed, *middle)
            full = [torch.cat([s.double(), m[:, :, : 128 * blocks].double(),
                               ring.double().roll(-(blocks * 128 % 256), 2)[:, :, :rows]], 2).repeat_interleave(4, 1)
                    for s, m, ring in zip(launch.tensors[4:6], middle, launch.tensors[6:8])]
            w = torch.softmax(query.double() @ full[0].transpose(-1, -2) * 128**-0.5, -1)
            want = (w @ full[1]).transpose(1, 2)
            for name, v in variants:
                call = old(*parts) if v is None else v.prepare(*parts)
                out.fill_(float("nan"))
                worst, same = 0.0, True
                for i in range(20):
                    call()
                    if i == 0:
                        one = out.clone()
                        worst = ((out.double() - want).norm() / want.norm()).item()
                    same = same and torch.allclose(one, out, atol=1e-2, rtol=1e-2)
                torch.cuda.synchronize()
                bad = "" if worst < 4e-3 and same and (v is None or not v.keep[1].any()) else " BAD"
                line.append(f"{name}{bad} {worst:.1e}")
        print(preset, " | ".join(line), flush=True)


@triton.jit
def nothing(x):
    pass


def timeline(call, device, flush):
    """Median start and end of each kernel of a replay, us after the first start."""
    from torch.profiler import ProfilerActivity, profile
    graph = graph_of(call)
    graph.replay(); torch.cuda.synchronize()
    runs = []
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(12):
            flush.zero_(); graph.replay(); torch.cuda.synchronize()
    events = sorted((e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    run = []
    for e in events:
        if any(n in e.name for n in ("decode_", "rotate_", "reduce_", "append")):
            run.append((e.name.split("(")[0][:18], e.time_range.start, e.time_range.end))
        elif run:
            runs.append(run); run = []
    if run:
        runs.append(run)
    n = len(runs[-1])
    runs = [r for r in runs if len(r) == n]
    return "  ".join(
        f"{runs[-1][k][0]} {statistics.median(r[k][1] - r[0][1] for r in runs):.1f}-{statistics.median(r[k][2] - r[0][1] for r in runs):.1f}"
        for k in range(n))


def attention(device):
    from triton.testing import do_bench
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
    base = [("old", None), ("own", Variant("own")), ("two", Variant("two"))]
    ones = [("one", Variant("one")), ("one s32", Variant("one", splits=32)), ("one s16", Variant("one", splits=16)),
            ("one c128", Variant("one", columns=128)), ("one m4", Variant("one", slots=4)),
            ("one w4", Variant("one", warps=4, columns=128)), ("two s32", Variant("two", splits=32))]
    few = base + [("one", Variant("one"))]
    start = time.time()
    errors(device, few)
    print(f"errors took {time.time() - start:.0f} s", flush=True)
    us = lambda f: do_bench(f, warmup=3, rep=25, return_mode="median") * 1e3
    empty = graph_of(lambda: nothing[(1,)](flush))
    print(f"empty kernel {us(empty.replay):.1f}", flush=True)
    cells = [("4bit_nc", 1, n, base + ones) for n in (512, 2048, 8192, 32768)]
    cells += [("4bit_nc", 1, 131072, few), ("4bit_nc", 8, 2048, few), ("4bit_nc", 8, 32768, base), ("4bit_nc", 64, 16384, base),
              ("3bit_nc", 1, 2048, few), ("2bit_nc", 8, 32768, base)]
    for preset, batch, length, variants in cells:
        try:
            parts = cell(preset, batch, length, device)
            graphs = [graph_of(old(*parts) if v is None else v.prepare(*parts)) for _, v in variants]
            times = [[] for _ in variants]
            for _ in range(3):
                for k, g in enumerate(graphs):
                    times[k].append(us(g.replay))
            print(f"{preset} {batch} x {length}: " + " | ".join(f"{n} {statistics.median(t):.1f}" for (n, _), t in zip(variants, times)), flush=True)
            if batch == 1 and length in (2048, 32768) and preset == "4bit_nc":
                for name, v in few:
                    print("   ", name, timeline(old(*parts) if v is None else v.prepare(*parts), device, flush), flush=True)
            del graphs, parts
            torch.cuda.empty_cache()
        except Exception as error:
            print(f"{preset} {batch} x {length}: {type(error).__name__} {str(error)[:300]}", flush=True)


def first_tokens(device):
    import cProfile, pstats, io
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    from tq_hf import TurboQuantCache
    layers = 8
    config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=128, max_position_embeddings=65536)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        plain = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    def run(kind, ids):
        plain.config._attn_implementation = "sdpa" if kind == "dynamic" else "turboquant"
        cache = DynamicCache(config=config) if kind == "dynamic" else TurboQuantCache(config, max_cache_len=4096 if kind == "preallocated" else None)
        return plain(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax()
    with torch.no_grad():
        for n in (64, 128, 256, 512, 1024, 2048):
            ids = torch.randint(0, 32000, (1, n), device=device)
            times = {k: [] for k in ("dynamic", "growing", "preallocated")}
            for i in range(13):
                for k in times:
                    torch.cuda.synchronize(); t = time.perf_counter()
                    run(k, ids).item()
                    if i > 2:
                        times[k].append(time.perf_counter() - t)
            m = {k: 1e3 * statistics.median(v) for k, v in times.items()}
            print(f"first token {n}: " + " ".join(f"{k} {v:.2f} ms" for k, v in m.items()) +
                  f"; ratio {m['growing'] / m['dynamic']:.2f} {m['preallocated'] / m['dynamic']:.2f}; more a layer {1e3 * (m['growing'] - m['dynamic']) / layers:.0f} us", flush=True)


def host(device, layers=32):
    import cProfile, io, pstats
    from types import SimpleNamespace
    from transformers import LlamaConfig
    from tq_hf import TurboQuantCache
    from tq_hf.attention import turboquant_attention
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=layers)
    config._attn_implementation = "turboquant"
    module = SimpleNamespace(config=config, is_causal=True, num_key_value_groups=4)
    query = torch.randn(1, 32, 1, 128, device=device, dtype=torch.bfloat16)
    prompt, row = (torch.randn(1, 8, n, 128, device=device, dtype=torch.bfloat16) for n in (1030, 1))
    for room in (None, 2048):
        cache = TurboQuantCache(config, max_cache_len=room)
        def step(query, row):
            for layer in range(layers):
                turboquant_attention(module, query, *cache.update(row, row, layer), None)
        times = []
        with torch.no_grad():
            step(query.expand(-1, -1, 1030, -1), prompt)
            for _ in range(80):
                torch.cuda.synchronize(); t = time.perf_counter(); step(query, row); times.append(time.perf_counter() - t)
            profile = cProfile.Profile()
            for _ in range(10):
                torch.cuda.synchronize(); profile.enable(); step(query, row); profile.disable()
        print(f"host a layer {'growing' if room is None else 'preallocated'}: {1e6 * statistics.median(times) / layers:.1f} us (best tenth {1e6 * sorted(times)[8] / layers:.1f})")
        text = io.StringIO(); pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(12)
        for l in text.getvalue().splitlines()[7:21]:
            if l.strip():
                print("   ", l.replace(os.getcwd(), "")[:110])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="attention,first,host")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    print(torch.cuda.get_device_name(0), torch.__version__, triton.__version__)
    torch.manual_seed(0)
    start = time.time()
    for name, part in (("attention", attention), ("host", host), ("first", first_tokens)):
        if name in arguments.only:
            try:
                part(device)
            except Exception as error:
                import traceback
                traceback.print_exc()
            print(f"--- {name}: {time.time() - start:.0f} s since the start", flush=True)


if __name__ == "__main__":
    main()
