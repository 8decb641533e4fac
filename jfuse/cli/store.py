"""`jfuse encode` fills a chunk store; `jfuse inspect` says what one holds."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jfuse.cli.command import DEFAULT_STORE, Command, ModelCommand, make_table
from jfuse.report import as_megabytes

if TYPE_CHECKING:
    from jfuse.cli.passages import Piece
    from jfuse.models.decoder import Model
    from jfuse.store import ChunkInfo, ChunkStore


@dataclass(frozen=True, kw_only=True)
class Encode(ModelCommand):
    """Encodes passages, each alone, into a chunk store. Those that it holds already are skipped."""

    example = "jfuse encode passages.jsonl notes/ --store runs/store"

    passages: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH...", help_behavior_hint="(required)")
    ]
    """JSON Lines with a field `text` (and `id`, `title`), .txt and .md files, or folders of these."""
    store: str = DEFAULT_STORE
    """Folder of the chunk store."""
    chunk_tokens: int = 512
    """Longer passages are cut into even parts of at most this many tokens."""
    max_bytes: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: no cap)")] = None
    """What the store may take; the least recently used chunks give way."""

    def run(self) -> int:
        """Encodes what is missing and checks that all of it is there in the end."""
        from jfuse.cli.passages import cut, read_files
        from jfuse.store import ChunkStore, StoreError

        passages = read_files(self.passages)
        model = self.load()
        pieces = list(cut(passages, needed_tokenizer(model), self.chunk_tokens))
        store = ChunkStore.open(self.store, model, max_bytes=self.max_bytes)
        known = set(store.ids())
        ids = encode_missing(model, store, pieces)
        if gone := sum(id not in store for id in ids):
            raise StoreError(f"{store.url} did not keep {gone} of {len(ids)} chunks; free space or raise --max-bytes.")
        rows = [
            {"id": id, "source": piece.source, "passage": piece.passage, "part": piece.part}
            | {"tokens": len(piece.tokens), "was_stored": id in known}
            for id, piece in zip(ids, pieces, strict=True)
        ]
        fresh = len(set(ids) - known)
        value = {"store": store.url, "model": self.model, "encoded": fresh, "skipped": len(set(ids)) - fresh}
        value |= {"num_bytes": store.num_bytes, "chunks": rows}
        line = f"{fresh} chunks encoded, {value['skipped']} were there already; "
        self.show(value, f"{line}{store.url} takes {as_megabytes(store.num_bytes)}.")
        return 0


@dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Says what a chunk store, or one of its chunks, holds and which model it belongs to."""

    example = "jfuse inspect runs/store 3fa2"

    store: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="STORE")] = DEFAULT_STORE
    """Folder of the chunk store."""
    chunk: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="CHUNK")] = None
    """A chunk's id, or the start of it; all chunks by default."""

    def run(self) -> int:
        """Reads headers only."""
        store = open_existing(self.store)
        if self.chunk is not None:
            (id,) = find_ids(store, [self.chunk])
            value = describe(store.inspect(id))
            rows = [(name, part) for name, part in value.items() if name != "fingerprint"]
            self.show(value, make_table(("chunk", ""), rows + list(value["fingerprint"].items())))
            return 0
        chunks = [store.inspect(id) for id in store.ids()]
        usage = store.usage()
        owners = Counter(info.fingerprint for info in chunks)
        value = {"store": store.url, **usage._asdict(), "chunks": [describe(info) for info in chunks]}
        value["fingerprints"] = {owner.digest: dataclasses.asdict(owner) for owner in owners}
        title = f"{store.url}: {usage.num_chunks} chunks, {as_megabytes(usage.num_bytes)}"
        caption = f"{usage.num_quarantined} damaged chunks are in quarantine." if usage.num_quarantined else None
        summaries = [
            (owner.digest[:12], owner.weights_id[:12], owner.kv_dtype, owner.anchor_rule, count)
            for owner, count in owners.items()
        ]
        rows = [
            (info.id[:12], info.fingerprint.digest[:12], info.shape.tokens, info.shape.layers, info.num_bytes)
            for info in chunks
        ]
        self.show(
            value,
            make_table(("fingerprint", "weights", "dtype", "anchors", "chunks"), summaries, title),
            make_table(("chunk", "fingerprint", "tokens", "layers", "bytes"), rows, caption=caption),
        )
        return 0


def encode_missing(model: "Model", store: "ChunkStore", pieces: "list[Piece]") -> list[str]:
    """Ids of all pieces; what the store lacks is encoded and put, behind a progress bar."""
    from tqdm.auto import tqdm

    from jfuse.chunks import encode_chunk

    ids = []
    for piece in tqdm(pieces, desc="encoding", unit="chunk", disable=None):
        found = store.lookup(piece.tokens)
        ids.append(found.id if found.hit else store.put(encode_chunk(model, piece.tokens)))
    return ids


def open_existing(url: str, model: "Model | None" = None) -> "ChunkStore":
    """Opens a store that is there already; opening would make an empty folder of a mistyped one.

    Raises:
        StoreError: no such folder.
    """
    from jfuse.store import ChunkStore, StoreError

    if not Path(url.removeprefix("file://")).expanduser().is_dir():
        raise StoreError(f"There is no store at {url}; fill one with `jfuse encode PATH --store {url}`.")
    return ChunkStore.open(url, model)


def find_ids(store: "ChunkStore", starts: tuple[str, ...] | list[str]) -> list[str]:
    """The ids that begin so, one for each.

    Raises:
        LookupError: none begins so, or several do.
    """
    ids, found = store.ids(), []
    for start in starts:
        matches = [id for id in ids if id.startswith(start)]
        if len(matches) != 1:
            how = f"{len(matches)} chunks begin" if matches else "no chunk of this model begins"
            if store.fingerprint is None:
                how = how.replace(" of this model", "")
            raise LookupError(f"{how} with {start!r}; `jfuse inspect {store.url}` lists the {len(ids)} that there are.")
        found.append(matches[0])
    return found


def describe(info: "ChunkInfo") -> dict[str, Any]:
    """What a chunk says of itself, as plain values."""
    sizes = {"num_bytes": info.num_bytes, "anchor_ratio": info.anchor_ratio, **info.shape._asdict()}
    return {"id": info.id, **sizes, "fingerprint": dataclasses.asdict(info.fingerprint)}


def needed_tokenizer(model: "Model"):
    """The model's tokenizer.

    Raises:
        ValueError: it has none.
    """
    if model.tokenizer is None:
        raise ValueError("This model has no tokenizer, so it cannot read text; add tokenizer.json to its folder.")
    return model.tokenizer
