"""Compiled programs that a long run leaves behind, let go before they use up the process's memory maps.

XLA keeps each program that it compiled for a CPU in memory maps of its own, and Linux gives a process 65,530 of them
(`vm.max_map_count`). Past that every compilation fails: "LLVM compilation error: Cannot allocate memory".
"""

import gc
from pathlib import Path

import jax

MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def release_programs(share: float = 0.5) -> bool:
    """Forgets all compiled programs if the process uses `share` of the memory maps it may have.

    What is needed again compiles again, or comes out of JAX's persistent cache. Nothing happens where the system does
    not tell, as outside of Linux.

    Returns:
        Whether they were forgotten.
    """
    try:
        with MAPS.open("rb") as lines:
            used = sum(1 for _ in lines)
        most = int(MOST_MAPS.read_text(encoding="ascii"))
    except OSError:
        return False
    if used < share * most:
        return False
    jax.clear_caches()
    gc.collect()
    return True
