"""A program: compiles the kernels of GPUs, as codecs launch them, for devices that need not be there.

Prints a line a kernel and device: the kernel, the device, and whether its code fuses products with sums or flushes denormals.
"""

import itertools
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from raysim.codecs.groups import layout_of
from raysim.codecs.kernels.triton import linear, packing, rotated, rows, select, uniform
from raysim.codecs.quantize import Coding, Levels
from raysim.codecs.rotated import Form

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
compiled = set()
ERROR = ValueError("never raised")


def compile_only(kernel, programs, *arguments, **constants):
    """Stand for `launch`: compile for every capability that was asked for, and run nothing."""
    types = [TYPES[x.dtype] if isinstance(x, torch.Tensor) else "i32" for x in arguments]
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    for capability in map(int, sys.argv[1:]):
        key = (kernel.__name__, tuple(types), tuple(sorted(constants.items())), capability)
        if key in compiled:
            continue
        compiled.add(key)
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        code = built.asm["ptx"]
        words = {instruction for line in code.splitlines() for instruction in line.split()[:2]}
        fused = any(word.startswith("fma.rn.f") for word in words)
        flushed = any(".ftz" in word for word in words)
        print(kernel.__name__, capability, f"fused={fused} flushed={flushed} shared_bytes={built.metadata.shared}")


for module in (linear, packing, rotated, rows, select, uniform):
    module.launch = compile_only  # type: ignore[attr-defined]

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.zeros(4, 6000, dtype=dtype)
    for kept in (10, 1000):
        select.select_rows(x, kept, ERROR)
        select.select_rows(x[:, :300].contiguous(), 10, ERROR)
    for bits in (1, 3, 8):
        for per, key in (("tensor", None), ("channel", 5)):
            layout = layout_of(tuple(x.shape), per, 0)
            for levels in (Levels(bits, 3, 0, 2**bits - 1), Levels(bits, 3, 1, 2**bits - 1)):
                coding = Coding(layout, levels, lambda: ERROR)
                uniform.dequantize(*uniform.quantize(x, coding, key), coding, dtype, "cpu")
x, memory = torch.zeros(4, 6000), torch.zeros(4, 6000)
for short in (x, x[:, :300].contiguous()):
    for clear in (False, True):
        select.add_and_select(short, torch.zeros_like(short), 10, clear, ERROR)
for per in ("tensor", "row", "channel"):
    layout = layout_of((40, 60, 10), per, 0)
    flat, held = torch.zeros(24_000), torch.zeros(24_000)
    coding = Coding(layout, Levels(4, 15, 0, 15), lambda: ERROR)
    uniform.quantize(flat, coding, None, memory=held, residual=torch.zeros(24_000))
for width in (*range(1, 9), 11, 20, 32):
    packed = packing.pack(torch.zeros(1000, dtype=torch.int64), width)
    packing.pack(torch.zeros(1000, dtype=torch.uint8), min(8, width))
    packing.unpack(packed, 1000, width)
places, values = torch.arange(100), torch.zeros(100)
packing.set_bits(places, 5000)
for width in (None, 0, 3, 12):
    marked = packing.set_bits(places, 5000, width)
    packing.positions_of(marked, 5000, 100, 5000, marked, width)
for dtype in (torch.float32, torch.float16):
    packing.expand_bitmap(marked, values.to(dtype), 5000)
    packing.scatter(places, values.to(dtype), 5000)
for tile in (2, 32, 4096):
    linear.turn(torch.zeros(10_000), tile, 1.0, 1.0, 10_000)
for dtype, bits, block in itertools.product((torch.float32, torch.bfloat16), (3, 4, 8), (24, 64, 576)):
    coding = Coding(layout_of((4, 6000), "block", block), Levels(bits, 3, 0, 2**bits - 1), lambda: ERROR)
    uniform.dequantize(*uniform.quantize(torch.zeros(4, 6000, dtype=dtype), coding, None), coding, dtype, "cpu")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for form in (Form(100, 576, 7, 4), Form(100, 300, 0, 3)):
        center, x = torch.zeros(form.width), torch.zeros(form.rows, form.width, dtype=dtype)
        rotated.decode_rows(*rotated.encode_rows(x, center, form, ERROR), center, form, dtype, ERROR)
