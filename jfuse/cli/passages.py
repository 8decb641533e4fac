"""Passages from files, cut into chunks of tokens: JSON Lines, plain text, or folders of both."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jfuse.evals.data import Passage, read_passages
from jfuse.evals.prompts import JOINT
from jfuse.models.tokenizer import Tokenizer

TEXT, LINES = (".txt", ".md"), (".jsonl",)


class Piece(NamedTuple):
    """A chunk's tokens and where they come from."""

    source: str
    passage: str  # its id; of a text file, the file's name
    part: int  # of a passage that is longer than a chunk
    tokens: Int[np.ndarray, " C"]


def read_files(paths: Sequence[Path]) -> list[tuple[Path, Passage]]:
    """All passages of files and folders, in the order given; inside a folder, by path.

    Raises:
        ValueError: nothing to read, an unknown kind of file, or a malformed line, by file and number.
        FileNotFoundError: a path that is not there.
    """
    if not paths:
        raise ValueError("No passages are named; give .jsonl, .txt or .md files, or a folder that holds some.")
    found = [(file, passage) for path in paths for file in _files(path) for passage in _passages(file)]
    if not found:
        raise ValueError(f"There is no text in {', '.join(map(str, paths))}; give files that hold passages.")
    return found


def cut(passages: Sequence[tuple[Path, Passage]], tokenizer: Tokenizer, chunk_tokens: int) -> Iterator[Piece]:
    """Chunks of at most `chunk_tokens` tokens, each passage cut evenly and closed by a blank line.

    Raises:
        ValueError: `chunk_tokens` is below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk-tokens is {chunk_tokens}; use an integer >= 1.")
    for file, passage in passages:
        tokens = tokenizer.encode(passage.content + JOINT)
        parts = math.ceil(len(tokens) / chunk_tokens)
        for part, piece in enumerate(np.array_split(tokens, parts)):
            yield Piece(str(file), passage.id, part, piece)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in (*TEXT, *LINES) and file.is_file())
        if not found:
            raise ValueError(f"{path} holds no .jsonl, .txt or .md file; name the folder that does.")
        return found
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}; give .jsonl, .txt or .md files, or a folder that holds some.")
    if path.suffix not in (*TEXT, *LINES):
        raise ValueError(f"{path} is of no known kind; give .jsonl, .txt or .md files, or a folder that holds some.")
    return [path]


def _passages(file: Path) -> list[Passage]:
    if file.suffix in LINES:
        return read_passages(file)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}); convert it.") from error
    return [Passage(file.name, "", text)] if text.strip() else []
