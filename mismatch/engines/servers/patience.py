"""Questions that are asked before any pool is at work, and again where the server was busy."""

from __future__ import annotations

import time

from mismatch.engines.servers.http import Client, Unavailable
from mismatch.engines.servers.member import LONGEST_REST_S, rest_s

ATTEMPTS = 4


class PatientClient(Client):
    """Asks up to ``ATTEMPTS`` times, with pauses as a pool makes them.

    A busy moment must not read as something that the server cannot do. Where nobody is there, or
    the time of a whole request has passed, it is not asked again: the address may be wrong.
    """

    def plain(self) -> Client:
        """The same server, asked once: who asks it decides when to ask again."""
        return Client(self.address, self.timeout_s, self._key)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> bytes:
        for failures in range(1, ATTEMPTS):
            try:
                return super()._ask(method, path, body, timeout_s)
            except Unavailable as error:
                if error.slow or error.absent:
                    raise
                time.sleep(min(LONGEST_REST_S, rest_s(failures, error.retry_after_s)))
        return super()._ask(method, path, body, timeout_s)
