"""`jfuse answer` asks one question over stored passages; `jfuse generate` continues a plain prompt."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jfuse.cli.command import DEFAULT_STORE, ModelCommand, make_table
from jfuse.cli.selector import SelectorCommand
from jfuse.cli.store import find_ids, needed_tokenizer, open_existing

if TYPE_CHECKING:
    from jfuse.models.decoder import Model
    from jfuse.report import Report
    from jfuse.store import ChunkStore

INSTRUCTION = "Answer the question based on the given passages."


@dataclass(frozen=True, kw_only=True)
class Answer(SelectorCommand, ModelCommand):
    """Answers one question over passages, which are read in the order in which they are named."""

    example = 'jfuse answer "Which river flows through Cairo?" --passages notes/ --selector qcfuse --ratio 0.3 --report'

    question: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="QUESTION")]
    """What to ask."""
    store: str = DEFAULT_STORE
    """Folder of the chunk store."""
    chunks: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: the only one)")] = ()
    """Ids of stored chunks, or their first digits, in the order in which they are read."""
    passages: Annotated[tuple[Path, ...], tyro.conf.arg(help_behavior_hint="(optional)")] = ()
    """Instead of --chunks: files or folders, as for encode. What the store lacks is encoded."""
    chunk_tokens: int = 512
    """With --passages: the size of chunks, as for encode."""
    selector: str = "qcfuse"
    """How the positions to recompute are chosen; jfuse selectors lists the names. Settings: relaxkv:window=32."""
    ratio: Annotated[float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="(default: the selector's)")] = (
        None
    )
    """Share of the context that is recomputed, from 0 (reuse) to 1 (full prefill)."""
    instruction: str = INSTRUCTION
    """Stands before the passages."""
    max_new_tokens: int = 64
    """Length of the answer at most."""
    report: bool = False
    """Show what was reused, recomputed and read, and how long it took."""

    def run(self) -> int:
        """Serves the request."""
        from jfuse.chat import chat_request
        from jfuse.config import FusionConfig
        from jfuse.pipeline import answer, encode_prefix

        config = FusionConfig(ratio=self.ratio)
        self.check_selectors([self.selector])
        self.require(1, "max_new_tokens")
        if self.chunks and self.passages:
            raise ValueError("Both --chunks and --passages are given; name the passages in one way.")
        model = self.load()
        selector = self.choose(model, [self.selector])[self.selector]
        prefix, question = chat_request(needed_tokenizer(model), self.question, self.instruction)
        store, ids, chunks = self.open(model)
        cached = encode_prefix(model, prefix) if len(prefix) else None
        out = answer(
            model, store, chunks, question, selector, config, prefix=cached, max_new_tokens=self.max_new_tokens
        )
        text = (out.text or "").strip()
        value = {"question": self.question, "answer": text, "tokens": out.tokens.tolist(), "chunks": ids}
        self.show(value | {"report": out.report.as_dict()}, text, *([report_table(out.report)] if self.report else []))
        return 0

    def open(self, model: "Model") -> "tuple[ChunkStore, list[str], list[Any]]":
        """The store, the ids of the chunks to read, and the chunks as `answer` takes them.

        Passages go on as tokens: `answer` encodes those that the store lacks, and its report says so.

        Raises:
            StoreError: no store, or none of this model's chunks in it.
            ValueError: several chunks, of which none is named: a store keeps them by content, in no order.
        """
        from jfuse.cli.passages import cut, read_files
        from jfuse.store import ChunkStore, StoreError

        if self.passages:
            pieces = list(cut(read_files(self.passages), needed_tokenizer(model), self.chunk_tokens))
            store = ChunkStore.open(self.store, model)
            chunks = [piece.tokens for piece in pieces]
            return store, [store.lookup(tokens).id for tokens in chunks], chunks
        store = open_existing(self.store, model)
        ids = find_ids(store, self.chunks) if self.chunks else store.ids()
        if not ids:
            raise StoreError(
                f"{store.url} holds no chunk of this model; encode some with "
                f"`jfuse encode PATH --store {self.store} --model {self.model}`."
            )
        if len(ids) > 1 and not self.chunks:
            raise ValueError(
                f"{store.url} holds {len(ids)} chunks in no order; name those to read, in the order to read them, with "
                "--passages PATH, the files that were encoded, or --chunks ID."
            )
        return store, ids, ids


@dataclass(frozen=True, kw_only=True)
class Generate(ModelCommand):
    """Continues a plain prompt by full prefill, without passages or store."""

    example = 'jfuse generate "Name three rivers." --max-new-tokens 40'

    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """What the model is to answer."""
    raw: bool = False
    """Leave out the chat template."""
    max_new_tokens: int = 64
    """Length of the continuation at most."""

    def run(self) -> int:
        """Prints the text as it comes; with --json at the end."""
        from jfuse.cli.prompt import make_prompt, no_context
        from jfuse.generate import stream

        self.require(1, "max_new_tokens")
        model = self.load()
        tokenizer = needed_tokenizer(model)
        prompt = make_prompt(tokenizer, self.prompt, raw=self.raw)
        started, tokens, ttft = time.perf_counter(), [], 0.0

        def arriving():
            nonlocal ttft
            for token in stream(model, no_context(model), prompt, max_new_tokens=self.max_new_tokens):
                ttft = ttft or time.perf_counter() - started
                tokens.append(token)
                yield token

        text = ""
        for piece in tokenizer.stream(arriving()):
            text += piece
            if not self.json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        seconds = time.perf_counter() - started
        value = {"prompt": self.prompt, "num_prompt": len(prompt), "text": text, "tokens": tokens}
        self.show(value | {"ttft": ttft or seconds, "seconds": seconds}, "")
        return 0


def report_table(report: "Report") -> Any:
    """A request's account for people."""
    return make_table(("report", ""), report.lines)
