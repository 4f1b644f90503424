"""The command `mismatch`."""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, NoReturn

import typer

from mismatch import __version__
from mismatch.cli.check import check
from mismatch.cli.compare import compare
from mismatch.cli.corrections import corrections
from mismatch.cli.doctor import doctor
from mismatch.cli.fixes import fixes
from mismatch.cli.kernels import kernels
from mismatch.cli.metrics import metrics
from mismatch.cli.models import models
from mismatch.cli.report import report
from mismatch.cli.rollout import rollout
from mismatch.cli.score import score
from mismatch.errors import MismatchError

RESUME = "go on where it stopped: the same command with --resume"
RESUMABLE = ("check", "rollout")  # other verbs keep what is done by themselves, or start again

INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt

app = typer.Typer(
    name="mismatch",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Do the inference engine and the trainer give the same tokens the same probabilities? "
    "Measure it before the run: mismatch check --model MODEL",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mismatch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


app.command()(check)
app.command()(rollout)
app.command()(score)
app.command()(compare)
app.command()(corrections)
app.command()(fixes)
app.command()(kernels)
app.command()(report)
app.command()(doctor)
app.command()(metrics)
app.command()(models)


def main() -> NoReturn:
    """Exit codes: 0 healthy or warn, 1 critical or a failed check, 2 no verdict, or a crash."""
    # A TERM ends the tool as Ctrl-C does: through every `finally`, so that no worker is left.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(_bare_resume(sys.argv[1:]), standalone_mode=False)
    except MismatchError as error:
        _complain(error.message, error.fix)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit:  # typer's answer to an output that nobody reads (mismatch … | head)
        sys.exit(2)
    except OSError as error:
        _complain(str(error), "check the path, its permissions and the free disk space")
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's own usage errors have one
            _own_fault(error)
        _complain(error.format_message(), "mismatch COMMAND --help lists every option")
    if code == INTERRUPTED:
        resumable = any(one in RESUMABLE for one in sys.argv[1:2])
        fix = RESUME if resumable else "run the same command again"
        _complain("interrupted; every process that was started has been ended", fix)
    sys.exit(code if isinstance(code, int) else 0)


def _bare_resume(arguments: list[str]) -> list[str]:
    """``--resume`` may stand alone, which typer has no words for: the newest run is meant."""
    followed = zip(arguments, [*arguments[1:], "-"], strict=True)
    return [
        "--resume=newest" if one == "--resume" and after.startswith("-") else one
        for one, after in followed
    ]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _own_fault(error: Exception) -> NoReturn:
    """A bug of this tool. Python itself would exit with 1, which is the code of a verdict."""
    traceback.print_exception(error)
    _complain(
        f"unexpected {type(error).__name__}: this is a bug in mismatch; "
        "please report it with the traceback",
        "",
    )


def _complain(message: str, fix: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    if fix:
        print(f"  fix: {fix}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
