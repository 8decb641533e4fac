"""The `jfuse` command: one subcommand per job, each a frozen dataclass whose fields are its options.

In: arguments. Out: a table for people, or with `--json` plain JSON and nothing else on stdout; an exit code that is 0
only on success. What goes wrong is one line on stderr that says what to do; `--debug` adds the traceback.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Union

import tyro

from jfuse.cli.ask import Answer, Generate
from jfuse.cli.command import Command
from jfuse.cli.demo import Demo
from jfuse.cli.evaluate import Eval
from jfuse.cli.listings import Models, Selectors
from jfuse.cli.model import Convert, Profile, Verify
from jfuse.cli.plan import Plan
from jfuse.cli.store import Encode, Inspect
from jfuse.cli.study import STUDIES, Studies

COMMANDS: dict[str, type[Command]] = {
    "demo": Demo,
    "encode": Encode,
    "answer": Answer,
    "generate": Generate,
    "profile": Profile,
    "plan": Plan,
    "study": Studies,
    "eval": Eval,
    "verify": Verify,
    "inspect": Inspect,
    "models": Models,
    "selectors": Selectors,
    "convert": Convert,
}

DESCRIPTION = """RAG KV-cache fusion in JAX: reuse the caches of retrieved passages, recompute what the question needs.

Start with: jfuse demo. Help for one subcommand: jfuse answer --help."""

FAILED, INTERRUPTED, CLOSED_PIPE = 1, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; wrong usage and `--help` leave through `SystemExit`."""
    command = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(f"warning: {one_line(message)}")
            return command.run()
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads our output, head for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:
        if command.debug:
            traceback.print_exc()
        elif isinstance(error, expected_errors()):
            _say(one_line(error))
        else:
            _say(f"unexpected {type(error).__name__}: {one_line(error)} (--debug shows where)")
        return FAILED


def parse(argv: list[str]) -> Command:
    """The subcommand that these arguments ask for.

    Raises:
        SystemExit: help was asked for (0), or the arguments are wrong (2).
    """
    if argv == ["--version"]:
        from importlib.metadata import version

        print(f"jfuse {version('jfuse')}")
        raise SystemExit(0)
    if argv and argv[0] == "study":
        return _chosen(STUDIES, argv[1:], "jfuse study", f"{Studies.summary()}\n\nExample: {Studies.example}")
    return _chosen(COMMANDS, argv, "jfuse", DESCRIPTION)


def _chosen(commands: Mapping[str, type[Command]], argv: list[str], prog: str, description: str) -> Command:
    """The subcommand that the first argument names; without such a name, their overview."""
    config = (tyro.conf.FlagCreatePairsOff,)
    if argv and argv[0] in commands:
        command = commands[argv[0]]
        text = f"{command.summary()}\n\nExample: {command.example}"
        return tyro.cli(command, args=argv[1:], prog=f"{prog} {argv[0]}", description=text, config=config)
    overview = Union[  # noqa: UP007 - built from a table
        tuple(
            Annotated[command, tyro.conf.subcommand(name, description=command.summary())]
            for name, command in commands.items()
        )
    ]
    return tyro.cli(overview, args=argv, prog=prog, description=description, config=config)  # type: ignore[arg-type]


def expected_errors() -> tuple[type[Exception], ...]:
    """What the library raises for input that it cannot use; the messages name the remedy."""
    from jfuse.store import StoreError

    given = (ValueError, TypeError, LookupError, FloatingPointError, NotImplementedError)
    return *given, OSError, ModuleNotFoundError, StoreError


def one_line(error: object) -> str:
    """An error's message without line breaks; of the operating system's errors, what and which file.

    Of a module that Python does not find, which one; jfuse's own such errors name the package, and no module.
    """
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.lower()}; check the path."
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"module {error.name} is not installed; install jfuse again with all it needs: pip install jfuse."
    return " ".join(str(error).split()) or type(error).__name__


def _say(line: str) -> None:
    print(f"jfuse: {line}", file=sys.stderr)
