"""Compiles every kernel for Hopper, with the default's tiles and without a GPU: what the interpreter accepts and the
compiler does not. Run by test_kernels_compile.py in a process of its own, which prints each kernel's name.

Sizes of 1 become constants of the compiler, so each operator is compiled for one and for several rows.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

MADE: list[torch.Tensor] = []
"""Tensors that a kernel may write."""

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Hopper:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


class Compiles:
    """In place of ``wrap_triton(kernel)``: compiles for the arguments and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def compile_only(*arguments: Any, **constants: Any) -> None:
            self.kernel.warmup(*arguments, grid=grid, **constants)
            self.check_writes(arguments, constants)
            print(self.kernel.fn.__name__)

        return compile_only

    def check_writes(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """What Torch takes for written is what an operator made for it, once: of the rest Inductor makes copies."""
        given = dict(zip(self.kernel.arg_names, arguments, strict=False))
        settings = {name: value for name, value in constants.items() if name in self.kernel.arg_names}
        kernel, constant = kernel_side_table.add_kernel(self.kernel), kernel_side_table.add_constant_args(settings)
        written = [id(given[name]) for name in get_mutated_tensors(kernel, constant, given, {})]
        assert 0 < len(set(written)) == len(written), self.kernel.fn.__name__
        assert set(written) <= {id(x) for x in MADE}, self.kernel.fn.__name__


def remember(make: Any) -> Any:
    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        MADE.append(make(*arguments, **options))
        return MADE[-1]

    return made


def operator(name: str) -> Any:
    module: Any = importlib.import_module(f"dagserve.kernels.{name}.triton")
    module.wrap_triton = Compiles
    return module


def compile_all(n: int) -> None:
    """For ``n`` rows, tokens, or beams."""
    x = torch.randn(n, 896).to(BF16)
    norm, quantize = operator("rms_norm"), operator("quantize")
    norm.rms_norm(x, x[0], 1e-6)
    norm.add_rms_norm(x, x, x[0], 1e-6)
    quantize.quantize(x)
    quantize.rms_norm_quantize(x, x[0], 1e-6)
    quantize.add_rms_norm_quantize(x, x, x[0], 1e-6)
    operator("silu_mul_quantize").silu_mul_quantize(torch.randn(n, 9728).to(BF16))

    rope, attention, shared = (operator(name) for name in ("rope", "attention", "shared_prefix_attention"))
    for size in (64, 128):
        heads, angles = torch.randn(n, 18, size).to(BF16), torch.randn(n, size)
        q, k, v = heads[:, :14], heads[:, 14:16], heads[:, 16:]
        cache = torch.zeros(2, 5, 2, size, dtype=BF16).unbind()
        MADE.extend(cache)
        for weight in (None, torch.ones(size, dtype=BF16)):
            rope.qk_norm_rope(q, k, weight, weight, angles, angles, 1e-6)
            rope.qk_norm_rope_write(q, k, v, weight, weight, angles, angles, 1e-6, *cache, torch.arange(n))
        cu_seqlens = torch.tensor([0, 0, n], dtype=torch.int32)
        for prefix in (False, True):
            attention._packed_gqa(q, k, v, cu_seqlens, prefix, False, 64, 64, 1, 4, 2)
            attention._packed_gqa(q, k, v, cu_seqlens, prefix, False, 32, 32, 0, 4, 3)
        keys, own = torch.zeros(1, 7, 2, size, dtype=BF16), torch.zeros(1, n, 4, 2, size, dtype=BF16)
        count = torch.ones(1, dtype=torch.int64)
        for splits in (1, 2):
            tiles = (False, 32, 64, splits, 4, 2)
            shared._shared_prefix_attention(q[None].contiguous(), keys, keys, count, own, own, count, *tiles)

    logits = torch.randn(n, 5000).to(BF16)
    head, beam = operator("lm_head"), operator("beam")
    for allowed in (None, torch.ones(5000, dtype=torch.bool), torch.ones(n, 5000, dtype=torch.bool)):
        head.candidates(logits, allowed, 2 * n)
    beam.merge(torch.zeros(1, n), torch.zeros(1, n, 2 * n), torch.zeros(1, n, 2 * n, dtype=torch.int64), 2 * n)
    beam.reorder(torch.zeros(2, 1, n, 512, dtype=BF16), torch.zeros(1, n, dtype=torch.int64), count, 4)

    values, weight = torch.randn(n, 896).to(E4M3), torch.randn(1152, 896).to(E4M3)
    for bias in (None, torch.ones(1152, dtype=BF16)):
        operator("fp8_linear").fp8_linear(values, torch.ones(n, 1), weight, torch.ones(1152), bias, BF16)


if __name__ == "__main__":
    driver.set_active(Hopper())
    torch.Tensor.new_empty = remember(torch.Tensor.new_empty)  # type: ignore[method-assign]
    compile_all(int(sys.argv[1]))
