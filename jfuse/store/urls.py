"""From a store's URL to its tier: the one place that knows the schemes. Nothing here imports jax."""

from pathlib import Path

from jfuse.store.files import FileTier
from jfuse.store.memory import MemoryTier
from jfuse.store.tier import StoreError, Tier


def tier_at(url: str, max_bytes: int | None = None) -> Tier:
    """The tier at `memory://`, `file://PATH` or a plain path.

    Raises:
        StoreError: unknown scheme, no path, or a folder that cannot be used.
    """
    scheme, separator, path = url.partition("://")
    if not separator:
        scheme, path = "file", url
    if scheme == "memory":
        if path:
            raise StoreError(f"{url!r} names a memory store, and these have no names; use memory:// or file://PATH.")
        return MemoryTier(max_bytes)
    if scheme != "file":
        raise StoreError(f"no store for the scheme of {url!r}; use memory:// or file://PATH.")
    if not path or "\0" in path:
        raise StoreError(f"{url!r} names no folder; use file://PATH, for example file://cache.")
    return FileTier(Path(path).expanduser().absolute(), max_bytes)
