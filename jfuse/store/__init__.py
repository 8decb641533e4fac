"""Chunk stores: memory or a folder behind one interface, content-addressed, bounded, verified on reading."""

from jfuse.store.chunk_store import ChunkStore
from jfuse.store.results import ChunkId, ChunkInfo, ChunkMiss, Lookup, Verification
from jfuse.store.tier import StoreError, Usage

__all__ = ["ChunkId", "ChunkInfo", "ChunkMiss", "ChunkStore", "Lookup", "StoreError", "Usage", "Verification"]
