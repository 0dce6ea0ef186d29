"""The command line: words -> one library call -> exit code.

Owns the process: exit codes, what may be said on stderr, what a broken pipe means. Every rule about what is allowed
lives in the library; a BlockdraftError is printed in one line and exits 2, anything else is our fault and keeps its
traceback. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from blockdraft import __version__
from blockdraft.cli import commands
from blockdraft.cli.bench import bench
from blockdraft.cli.convert import convert
from blockdraft.cli.generate import generate
from blockdraft.cli.launch import SETTINGS as LAUNCH_SETTINGS
from blockdraft.cli.launch import launch
from blockdraft.cli.serve import serve
from blockdraft.cli.verify import verify
from blockdraft.errors import BlockdraftError

app = typer.Typer(
    name="blockdraft",
    help="Block drafters for speculative decoding: several tokens per step, the target's own text.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(generate)
app.command()(serve)
app.command()(verify)
app.command()(bench)
app.command()(commands.train)
app.command()(commands.corpus)
app.command()(commands.inspect)
app.command()(convert)
app.command(context_settings=LAUNCH_SETTINGS)(launch)
app.command()(commands.pull)

# typer does not export the base of everything it says about a wrong command line; its child it does.
UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Entry point of the `blockdraft` command."""
    _prepare_process()
    gc.disable()  # until the pair is loaded: nothing made on the way is garbage, and looking for it costs a tenth
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="blockdraft", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "blockdraft"
        raise SystemExit(_refused(f"{error.format_message().rstrip('.')}; see {command} --help")) from None
    except BlockdraftError as error:
        raise SystemExit(_refused(str(error))) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        raise SystemExit(141) from None
    except SystemExit:  # typer's answer to a closed pipe, and to nothing else in this mode
        raise SystemExit(141) from None
    finally:
        gc.enable()
    raise SystemExit(code or 0)


def _prepare_process() -> None:
    """Leave stderr to our own lines, and let no character that a terminal lacks end the program."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it names every number format it casts from
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _refused(message: str) -> int:
    print(f"blockdraft: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_version(value: bool) -> None:
    if value:
        print(f"blockdraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass
