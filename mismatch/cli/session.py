"""What the commands have in common: console, run directory, last line and exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from mismatch.analysis.thresholds import Thresholds, load_thresholds
from mismatch.cli.flags import Flags
from mismatch.cli.options import AROUND_A_RUN, FEATURE_FLAGS, FIX_FLAGS
from mismatch.cli.output import say
from mismatch.cli.to_spec import SERVER_NAMES, extras, fix_fields, moved
from mismatch.doctor.fit import warnings_of
from mismatch.doctor.plan import IN_FLOAT32, Memory, cheaper, memory_of, plan
from mismatch.engines.servers.address import KEY_VARIABLE, parse_address, unprotected
from mismatch.errors import MismatchError
from mismatch.plugins import features, load
from mismatch.processes.launch import own_python
from mismatch.processes.stages import Room
from mismatch.reports.formatting import plain_lines
from mismatch.reports.plan import print_plan
from mismatch.run.directory import NEWEST, is_own, load_spec, require_known_prompts, require_new
from mismatch.run.directory import open_run as open_directory
from mismatch.run.hub import fetch
from mismatch.run.machine import require_shared_memory
from mismatch.run.provenance import redacted_command
from mismatch.run.resume import rescored, rollout_done
from mismatch.run.trust import require_trust
from mismatch.specs import CheckSpec, RolloutSpec, TrainSpec

# What a finished run may be asked for as well, by the flags' names.
FIX_NAMES = frozenset(option.name for option in FIX_FLAGS)
FEATURE_NAMES = frozenset(option.name for option in FEATURE_FLAGS)
BESIDE_RESUME = AROUND_A_RUN | FIX_NAMES | FEATURE_NAMES | SERVER_NAMES
OWN_NAME = re.compile(r"^\S+ (?=\d+/\d+ )")  # of a progress line: the stage says it
PLAIN_INTERVAL_S = 15.0  # between progress lines where lines cannot be rewritten


def stored_spec(flags: Flags) -> CheckSpec | None:
    """Return the spec of the run that ``--resume RUN`` names, where no other flag says what to run.

    Raises:
        MismatchError: code or interpreters of the run that nobody trusts, or flags that the run
            cannot follow.
    """
    resume, explicit = flags["resume"], flags.explicit
    if resume in (None, NEWEST) or explicit - BESIDE_RESUME:
        return None
    asked = spec = load_spec(Path(resume))
    if explicit & SERVER_NAMES:
        engine = moved(spec.rollout.engine, flags)
        spec = replace(spec, rollout=replace(spec.rollout, engine=engine))
        if "server" in explicit:  # said again
            asked = replace(spec, rollout=replace(spec.rollout, engine=replace(engine, servers=())))
    require_own(Path(resume), asked, bool(flags.get("trust_run")))
    fields = fix_fields(flags, spec.fixes)
    kept = set() if "fix" in explicit else FIX_NAMES - explicit
    changed = {name: fields[name] for name in fields.keys() - kept}
    return replace(spec, extras=extras(flags, spec.extras), **changed)


def needs_no_server(flags: Flags, spec: CheckSpec) -> bool:
    """Return whether ``--resume RUN`` has all that servers give, which may be gone by now."""
    engine = spec.rollout.engine
    if not engine.servers or spec.explain or flags["resume"] in (None, NEWEST):
        return False
    asked = Path(flags["resume"]), spec.rollout, own_python(engine)
    return rollout_done(*asked) and (not engine.prefill or rescored(*asked))


def require_own(run_dir: Path, spec: CheckSpec, trusted: bool) -> None:
    """Refuse code and prompts that a stored spec names and nobody here trusts."""
    require_trust(run_dir, spec, trusted or is_own(run_dir))
    if not trusted:
        require_known_prompts(run_dir, spec)


def trusted_code(run_dir: Path, train: TrainSpec, flags: Flags) -> bool:
    """Return whether code of a run's model may run: the caller decides, not the run's spec.

    Raises:
        MismatchError: the run was made with it, and nobody says so here.
    """
    if flags["trust_remote_code"]:
        return True
    own = TrainSpec(model=train.model, trust_remote_code=train.trust_remote_code)
    require_trust(run_dir, CheckSpec(train=own), flags["trust_run"] or is_own(run_dir))
    return train.trust_remote_code


def require_directory(flags: Flags) -> None:
    """Refuse an output directory that is in use, before anything is counted or started."""
    if flags["resume"] not in (None, NEWEST) and flags["out"] is not None:
        fault = "--resume RUN and --out DIR are two directories"
        raise MismatchError(fault, "drop --out: RUN is worked in")
    if flags["resume"] is None and flags["out"] is not None:
        require_new(flags["out"])


def open_run(verb: str, spec: CheckSpec, flags: Flags) -> Path:
    """Fetch models of the hub, and return the run directory; say so where it is an earlier one."""
    engine = spec.rollout.engine
    elsewhere = engine.servers or {"download_dir", "load_format"} & dict(engine.args).keys()
    sides = ([] if elsewhere else [engine]) + ([] if verb == "rollout" else [spec.train])
    for side in sides if flags["resume"] is None else ():  # a finished run needs none
        fetch(side.model, side.revision, say)
    model = flags["model"] or spec.rollout.engine.model
    run_dir, resumed = open_directory(verb, spec, model, flags["out"], flags["resume"])
    if resumed:
        say(f"resuming {run_dir}")
    elif flags["resume"] is not None:
        say(f"no unfinished run with these flags: starting {run_dir}")
    else:
        say(f"run directory: {run_dir}")
    return run_dir


def levels(flags: Flags) -> Thresholds | None:
    """Return the user's levels, if any."""
    return load_thresholds(flags["thresholds"]) if flags["thresholds"] else None


def narrator_of(flags: Flags, default: str) -> ConsoleNarrator:
    """Return who tells of the stages, on stderr with --format json, and name the default model."""
    telling = ConsoleNarrator(Console(stderr=flags.as_json))
    if not flags.explicit & {"model", "resume", "like"}:
        telling.note(f"no --model was given: the embedded {default} is taken")
    return telling


def narrator(silent: bool = False) -> ConsoleNarrator:
    return ConsoleNarrator(Console(quiet=silent))


class ConsoleNarrator:
    """One line a stage that is rewritten on a terminal; a line every 15 s anywhere else.

    Both say which stage it is, what its worker does, and for how long: a worker that loads weights
    for minutes says nothing itself. The line fits the terminal: of its parts the title is cut.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        """Print one line between stages."""
        self.console.print(plain_lines(text), highlight=False, markup=False)

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        start, latest, ended = time.monotonic(), "", threading.Event()

        def show(text: str) -> None:
            nonlocal latest
            latest = OWN_NAME.sub("", plain_lines(text))

        def line(width: int | None = None) -> str:
            return waiting_line(title, latest, time.monotonic() - start, width)

        def repeat() -> None:
            while not ended.wait(PLAIN_INTERVAL_S):
                self.console.print(f"  {line()}", highlight=False, markup=False, soft_wrap=True)

        if self.console.is_terminal:
            from rich.live import Live
            from rich.text import Text

            def rewritten() -> Text:
                return Text(line(self.console.width - 1), no_wrap=True)

            with Live(
                get_renderable=rewritten, console=self.console, transient=True, refresh_per_second=4
            ):
                yield show
        else:
            self.note(f"{title} …")
            thread = threading.Thread(target=repeat, daemon=True)
            thread.start()
            try:
                yield show
            finally:
                ended.set()
                thread.join()
        self.note(f"{title}: done in {time.monotonic() - start:.0f} s")


def waiting_line(title: str, doing: str, seconds: float, width: int | None = None) -> str:
    """Return what is shown while a stage runs; where it is too long the title is cut.

    >>> waiting_line("[2/5] score: FSDP2, 2 ranks", "4096/7200 tokens, eta 12 s", 83.2, 60)
    '[2/5] score: FSDP2, 2 r… · 1:23 · 4096/7200 tokens, eta 12 s'
    """
    rest = f" · {int(seconds) // 60}:{int(seconds) % 60:02d}{f' · {doing}' if doing else ''}"
    room = max(8, width - len(rest)) if width else len(title)
    head = title if len(title) <= room else f"{title[: room - 1].rstrip()}…"
    return f"{head}{rest}"[:width]


def dry_run(spec: CheckSpec, flags: Flags) -> int:
    """Print what would be run. Exit code 0 if it fits on this machine, or on ``--gpus``, else 2."""
    planned = plan(spec, gpus=flags["gpus"] or "")
    if flags.as_json:
        typer.echo(json.dumps(planned.to_dict(), indent=2), file=flags.output)
    else:
        shown = [load(feature.plan)(spec) for feature in features() if feature.plan]
        print_plan(planned, Console(), shown)
    if spec.fixes and not flags.as_json:
        from mismatch.experiments.fixes.context import context_of
        from mismatch.experiments.fixes.planning import plan_fixes

        for line in plan_fixes(spec, context_of(spec)).lines(spec):
            say(line)
    return 0 if planned.fits else 2


def room_for(spec: CheckSpec, force: bool) -> Room:
    """Say before anything starts what will probably not fit, and what would help.

    Returns:
        What is left out because it cannot fit, and why; nothing with ``force``.

    Raises:
        MismatchError: the engine or the trainer cannot fit, and ``force`` is not set.
    """
    if spec.explain:  # which makes the passes that --depth quick leaves out
        spec = replace(spec, quick=False, noise_floor=True)
    try:
        memory = memory_of(spec)
    except MismatchError:  # no config.json to go by; the stages themselves say what is wrong
        memory = Memory()
    lost = warnings_of(memory.refused(certain=True))
    if lost and not force:
        found = cheaper(spec, memory)
        fix = f"settings with which it fits: {found}; " if found else ""
        raise MismatchError("\n    ".join(lost), f"{fix}to start anyway: --force")
    for text in memory.warnings if memory.sides else memory.notes:
        say(f"memory warning: {text}")
    out = {} if force else memory.left_out()
    reason = out.pop(f"{spec.rollout.engine.engine}{IN_FLOAT32}", "")
    if not force:
        split = max(memory.float32_split, spec.rollout.engine.tensor_parallel_size)
        require_shared_memory(split, spec.nproc_per_node)
    layers = 0 if force else memory.float32_layers
    sizes = memory.float32_split, memory.float32_offload, layers
    return Room(out, *sizes, reason, memory.float32_few)


def warn_of_key(spec: RolloutSpec) -> None:
    """Say before it is sent that a key of servers can be read on its way."""
    open_ones = [url for url in map(parse_address, spec.engine.servers) if unprotected(url)]
    if open_ones and os.environ.get(KEY_VARIABLE):
        say(f"warning: {KEY_VARIABLE} goes to {', '.join(open_ones)} unencrypted: use https")


def command() -> str:
    """Return the command line, as it would be typed again; without secrets."""
    return shlex.join(["mismatch", *redacted_command(sys.argv[1:])])
