"""Compiles for GPUs that are not there: what the kernels of a jitted function need of a Hopper or an Ampere card.

In goes a function with the shapes of its arguments, out come registers, spills, shared memory and tensor-core
instructions of every kernel that XLA makes of it. The compiler is the one that would run beside the card, with its
ptxas, so what fails here fails there. It needs the CUDA plugin of jax and two compiler wheels, which `make kernels`
keeps in a folder of their own, and neither a GPU nor a driver.
"""

import importlib.util
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jfuse.pallas.choice import Device, pretended


@dataclass(frozen=True)
class Gpu:
    """The figures of a card that decide what fits on it."""

    kind: str  # as jax names the device
    capability: tuple[int, int]
    cores: int
    core_shared_memory: int
    block_shared_memory: int
    l2: int
    bandwidth: float  # bytes per second, data sheet
    flops: float  # dense bfloat16 on the tensor cores, per second, data sheet
    registers: int = 65_536  # per core, and per block
    core_threads: int = 2048
    core_blocks: int = 32


GPUS = {
    "sm_90a": Gpu("NVIDIA H200", (9, 0), 132, 233_472, 232_448, 50 << 20, 4.8e12, 989e12),
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167_936, 166_912, 40 << 20, 2.039e12, 312e12),
}

_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {gpu.cores} fpus_per_core: 128 clock_rate_ghz: 1.5
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {gpu.core_threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: {gpu.registers} registers_per_block_limit: {gpu.registers}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.block_shared_memory}
  shared_memory_per_core: {gpu.core_shared_memory}
  l2_cache_size: {gpu.l2} memory_bandwidth: {bandwidth} device_memory_size: 80000000000
}}
platform_name: "CUDA" device_description_str: "{gpu.kind}"
runtime_version {{ major: 13 minor: 0 }} dnn_version_info {{ major: 9 minor: 12 }}
"""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled function.

    Attributes:
        spill_bytes: spill stores and loads of one thread; 0 in a kernel worth running.
        shared_memory: bytes of a block, static and dynamic.
        tensor_core: instructions in the PTX that run on the tensor cores, by name.
        copies: instructions in the PTX that copy to shared memory asynchronously: by TMA, or per thread.
    """

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    threads: int
    shared_memory: int
    tensor_core: dict[str, int]
    copies: dict[str, int]

    def occupancy(self, gpu: Gpu) -> int:
        """Blocks of this kernel that one core of the card holds at a time."""
        warps = -(-self.threads // 32)
        registers = warps * _round_up(32 * self.registers, 256)  # allotted to a warp in units of 256
        shared = _round_up(self.shared_memory, 128) + 1024  # of which the driver keeps 1 KiB a block
        return min(
            gpu.registers // registers,
            gpu.core_shared_memory // shared,
            gpu.core_threads // self.threads,
            gpu.core_blocks,
        )


@dataclass(frozen=True)
class Executable:
    """What a function became: its kernels in the order of their names, and the bytes of its temporaries."""

    kernels: tuple[Kernel, ...]
    temporary_bytes: int

    def kernel(self, name: str) -> Kernel:
        """The one kernel whose name holds `name`."""
        found = [kernel for kernel in self.kernels if name in kernel.name]
        if len(found) != 1:
            raise KeyError(f"{len(found)} kernels are named like {name!r}; there are {[k.name for k in self.kernels]}.")
        return found[0]


def available() -> bool:
    """Whether the plugin and the compilers are installed where this process looks for modules."""
    plugins = importlib.util.find_spec("jax_plugins")
    found = plugins is not None and importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    return found and _toolkit() is not None


def compile_for(architecture: str, function: Callable[..., Any], *arguments: Any) -> Executable:
    """Compiles `function` for a card of `GPUS`, as `jax.jit` would there; ops of jfuse take the kernels for that card.

    Args:
        function: plain or already jitted; bind static arguments with `functools.partial` before.
        arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
        RuntimeError: the compilers are not installed.
        jax.errors.JaxRuntimeError: it does not compile, for one because a block needs more shared memory than there is.
    """
    toolkit = _toolkit()
    if toolkit is None or not available():
        raise RuntimeError("The CUDA plugin or its compilers are not installed; run this through `make kernels`.")
    gpu = GPUS[architecture]
    mesh, replicated = _device(gpu)
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), arguments)
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_TO=str(folder)))
        stack.enter_context(
            _environment(MOSAIC_GPU_DUMP_PTX="1", PATH=f"{toolkit}/bin{os.pathsep}{os.environ['PATH']}")
        )
        # From jax 0.11 on, the lowering of a Triton kernel asks the mesh which GPU it is for.
        abstract = jax.__version_info__ >= (0, 11)
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if abstract else nullcontext())
        stack.enter_context(pretended(Device(gpu.kind, gpu.capability)))
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile(
            compiler_options={
                "xla_gpu_cuda_data_dir": str(toolkit),
                "xla_dump_to": str(folder),
                "xla_dump_emitter_re": ".*",  # without it there is no PTX among the dumps
                "xla_gpu_autotune_level": 0,  # there is no card to time candidates on; compiling them all takes minutes
            }
        )
        launches = _launches(folder)
        kernels = [k for path in folder.glob("*.ptx") for k in _kernels(path, toolkit, architecture, launches)]
        return Executable(
            tuple(sorted(kernels, key=lambda kernel: kernel.name)), compiled.memory_analysis().temp_size_in_bytes
        )


def _device(gpu: Gpu) -> tuple[Any, jax.sharding.NamedSharding]:
    major, minor = gpu.capability
    target = _TARGET.format(gpu=gpu, major=major, minor=minor, bandwidth=int(gpu.bandwidth))
    with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
        topology = topologies.get_topology_desc("", "cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    return mesh, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _toolkit() -> Path | None:
    """The folder of ptxas and libdevice: from the wheels nvidia-cuda-nvcc and nvidia-nvvm, or a CUDA installation."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) / "cu13" for root in (spec.submodule_search_locations or ())] if spec else []
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME",) if name in os.environ]
    return next((root for root in roots if (root / "bin" / "ptxas").exists()), None)


def _launches(folder: Path) -> dict[str, tuple[int, int]]:
    """Threads and bytes of shared memory with which XLA launches each kernel."""
    pattern = re.compile(r"(\S+) grid: \[.*?\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+) bytes")
    texts = [path.read_text() for path in folder.glob("*thunk_sequence.txt")]
    found = [match for text in texts for match in pattern.findall(text)]
    return {name: (math.prod(map(int, threads)), int(shared)) for name, *threads, shared in found}


def _kernels(path: Path, toolkit: Path, architecture: str, launches: dict[str, tuple[int, int]]) -> list[Kernel]:
    """The kernels of one PTX file, with what ptxas says of them."""
    source = path.read_text()
    if ".entry" not in source:
        return []
    command = [toolkit / "bin" / "ptxas", "-v", f"-arch={architecture}", path, "-o", os.devnull]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    bodies = dict(zip(*[iter(re.split(r"\.entry\s+(\w+)", source)[1:])] * 2, strict=True))
    return [_kernel(name, body, log, launches, path) for name, body in bodies.items()]


def _kernel(name: str, body: str, log: str, launches: dict[str, tuple[int, int]], path: Path) -> Kernel:
    account = re.search(
        rf"entry function '{name}'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers[^\n]*",
        log,
        re.DOTALL,
    )
    if account is None:
        raise ValueError(f"ptxas reports nothing on kernel {name}:\n{log}")
    stack, stores, loads, registers = map(int, account.groups())
    static = re.search(r"(\d+) bytes smem", account.group())
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)(?:, (\d+))?(?:, (\d+))?", body)
    shape = math.prod(int(n) for n in threads.groups() if n) if threads else 1
    threads, dynamic = launches.get(name, (shape, _mosaic_shared_memory(path)))
    return Kernel(
        name=name,
        registers=registers,
        spill_bytes=stores + loads,
        stack_bytes=stack,
        threads=threads,
        shared_memory=dynamic + (int(static.group(1)) if static else 0),
        tensor_core=_count(body, {"wgmma": r"wgmma\.mma_async", "mma": r"\bmma\.sync"}),
        copies=_count(body, {"tma": r"cp\.async\.bulk\.tensor", "cp_async": r"cp\.async\.c[ag]"}),
    )


def _mosaic_shared_memory(path: Path) -> int:
    """Bytes of shared memory of a Mosaic kernel, which XLA launches without knowing them: from its first MLIR dump."""
    log = path.with_suffix(".mlir-passes.log")
    if not log.exists():
        return 0
    with log.open() as lines:
        found = (re.search(r"dynamic_shared_memory_size %c(\d+)", line) for line in lines)
        return next((int(match.group(1)) for match in found if match), 0)


def _count(body: str, patterns: dict[str, str]) -> dict[str, int]:
    counts = {name: len(re.findall(pattern, body)) for name, pattern in patterns.items()}
    return {name: count for name, count in counts.items() if count}


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class _environment:
    """Environment variables that the compilers read while they run, put back afterwards."""

    def __init__(self, **variables: str):
        self._new = variables

    def __enter__(self):
        self._old = {name: os.environ.get(name) for name in self._new}
        os.environ.update(self._new)

    def __exit__(self, *_):
        for name, value in self._old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
