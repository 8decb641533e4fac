"""What all subcommands share: `--json`, `--debug`, the model's options, and how results and progress are shown."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from jfuse.models.decoder import Model

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_STORE = "runs/store"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand: its fields are its options, its docstring is its help, `run` does the job."""

    example: ClassVar[str] = ""

    json: bool = False
    """Print JSON, and nothing else, on stdout."""
    debug: bool = False
    """Show the traceback of an error."""

    @classmethod
    def summary(cls) -> str:
        """The docstring as one paragraph."""
        return " ".join((cls.__doc__ or "").split())

    def run(self) -> int:
        """Does the job and returns the exit code."""
        raise NotImplementedError

    def require(self, least: int, *names: str) -> None:
        """Refuses options below `least`.

        Raises:
            ValueError: names the option and its range.
        """
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; use an integer >= {least}.")

    def show(self, value: Any, *tables: Any) -> None:
        """Prints `value` as JSON, or the tables and lines for people."""
        if self.json:
            print(json.dumps(value, indent=1, allow_nan=False))
            return
        from rich.console import Console

        # Text comes from models and files: no markup. What is piped is cut to no width that nobody chose.
        console = Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else 160)
        for table in tables:
            console.print(table)


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """A subcommand that loads a model."""

    model: str = DEFAULT_MODEL
    """An alias (jfuse models lists them), a folder, a .gguf file, or a Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and caches; auto is float32 on a CPU, bfloat16 on an accelerator."""
    longest_request: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(optional)")] = None
    """Positions of the longest request, which chooses the factors of a longrope model."""

    def load(self) -> "Model":
        """Loads the model."""
        from jfuse.models.resolve import load_model

        with working(f"Loading {self.model} ..."):
            return load_model(self.model, dtype=self.dtype, longest_request=self.longest_request)


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, caption: str | None = None
) -> "Table":
    """A table for people. Columns of numbers are set to the right."""
    from rich import box
    from rich.table import Table

    cells = [[str(cell) for cell in row] for row in rows]
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        numbers = all(row[index][:1].isdigit() or row[index][:1] in "-." for row in cells) and bool(cells)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


@contextlib.contextmanager
def working(message: str) -> Iterator[None]:
    """Shows on stderr, if that is a terminal, that something takes its time."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield
