"""`mismatch serve`: the runs of a folder as pages on this machine."""

from __future__ import annotations

from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.flags import REQUIRED, Flags, Option
from mismatch.specs import OUTPUT, Range

FLAGS = (
    Option("folder", Path, "", "Folder that holds run directories.", REQUIRED, argument=True),
    Option("metric", str, OUTPUT, "Drawn over the runs.", default="k3_kl"),
    Option("host", str, OUTPUT, "Address to listen on.", default="127.0.0.1"),
    Option("port", int, OUTPUT, "0: any free one.", default=8765, range=Range(0, 65535)),
)


@with_flags(FLAGS)
def serve(flags: Flags) -> int:
    """Show the runs of a folder: verdicts, history, reports, two or more side by side.

    A page on this machine, until Ctrl-C; nothing is written, and nothing of it leaves the machine.
    """
    from mismatch.cli import session
    from mismatch.pipeline.saved_runs import history
    from mismatch.reports.run_server import Server, Site, is_loopback

    history(flags["folder"], flags["metric"])  # what is wrong is said before anything listens
    server = Server(Site(flags["folder"], flags["metric"]), flags["host"], flags["port"])
    if not is_loopback(flags["host"]):
        session.say(
            f"warning: everybody who reaches {flags['host']} can read every report in "
            f"{flags['folder']}; there is no password"
        )
    try:
        session.say(f"{flags['folder']} at {server.url} (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        session.say("stopped")
    finally:
        server.server_close()
    return 0
